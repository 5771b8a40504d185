"""Numbers that stand in the kernels' headers and in Python are the same numbers."""

from __future__ import annotations

import ctypes
import re

import pytest

from moe_nvlink_plugin import ExchangeStats, layout
from moe_nvlink_plugin.config import MAX_CALLER_PAYLOADS, MAX_RANKS, MAX_TOP_K
from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.jit import header, host, source
from moe_nvlink_plugin.jit.header import constants, structs


def test_limits() -> None:
    numbers = constants()
    assert numbers["kMaxRanks"] == MAX_RANKS
    assert numbers["kMaxTopK"] == MAX_TOP_K
    # Beside the caller's: expert ids and router weights.
    assert numbers["kMaxPayloads"] == MAX_CALLER_PAYLOADS + numbers["kFirstCallerPayload"]
    assert numbers["kRegionAlignment"] == layout.REGION_ALIGNMENT


def test_no_constant_is_overlooked() -> None:
    """However the formatter breaks its line."""
    text = source.read_kernel_file("include/moe_nvlink/config.h")
    assert len(constants()) == len(re.findall(r"^constexpr int k", text, re.MULTILINE)) > 10


@pytest.mark.parametrize("name", ["LocalControl", "ExchangeCounters"])
def test_reserved_bytes_hold_the_struct(name: str) -> None:
    assert ctypes.sizeof(structs()[name]) <= layout.STRUCT_BYTES


def test_counters_are_the_stats_in_this_order() -> None:
    names = [field[0] for field in structs()["ExchangeCounters"]._fields_]
    assert tuple(names) == ExchangeStats._fields


def test_control_regions_are_regions_of_the_layout() -> None:
    names = {str(field[0]) for field in structs()["ControlRegions"]._fields_}
    assert names == {
        "dispatch_cells",
        "combine_cells",
        "recv_counts",
        "send_counters",
        "local",
        "counters",
    }


def test_arguments_fit_a_kernel_launch() -> None:
    for name in ("DispatchArgs", "CombineArgs"):
        assert ctypes.sizeof(structs()[name]) <= 4096
    payloads = dict(field[:2] for field in structs()["DispatchArgs"]._fields_)["payloads"]
    assert ctypes.sizeof(payloads) == 16 * constants()["kMaxPayloads"]


def test_the_library_agrees_about_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that has come apart from the header is refused when the library is loaded."""
    library = host.load()
    library._check_sizes()
    wrong = {**structs(), "CombineArgs": structs()["DispatchArgs"]}
    monkeypatch.setattr(host, "structs", lambda: wrong)
    with pytest.raises(CompileError, match="CombineArgs has"):
        library._check_sizes()


def test_a_line_that_is_not_a_field_is_refused() -> None:
    with pytest.raises(ValueError, match="not one field"):
        header._field("  int32_t a, b;", {})
