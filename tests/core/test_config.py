"""AllToAllConfig and the environment: what is refused, and how it is said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvlink_plugin import AllToAllConfig, env
from moe_nvlink_plugin.config import MAX_RANKS, MAX_TOP_K, local_expert_range
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError


def config(**values: Any) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "ep_size": 4,
        "ep_rank": 3,
        "num_experts": 16,
        "top_k": 2,
        "hidden_size": 64,
        "max_tokens_per_rank": 8,
    }
    return AllToAllConfig(**{**usual, **values})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ep_size", 0, "ep_size=0"),
        ("ep_size", MAX_RANKS + 1, str(MAX_RANKS)),
        ("ep_size", 2.0, "ep_size=2.0"),
        ("ep_rank", 4, "ep_rank=4 must be an integer from 0 to 3"),
        ("ep_rank", -1, "ep_rank=-1"),
        ("num_experts", 0, "num_experts=0"),
        ("num_experts", True, "num_experts=True"),
        ("top_k", 0, "top_k=0"),
        ("top_k", MAX_TOP_K + 1, f"from 1 to {MAX_TOP_K}"),
        ("hidden_size", 0, "hidden_size=0"),
        ("hidden_size", "64", "hidden_size='64'"),
        ("max_tokens_per_rank", 0, "max_tokens_per_rank=0"),
        ("max_tokens_per_rank", 2**24 + 1, "from 1 to 16777216"),
        ("ranks_may_leave", 1, "must be True or False"),
        ("num_channels", 0, "num_channels=0"),
        ("num_threads", 0, "num_threads=0"),
        ("extra_payload_bytes", (4, 0), "extra_payload_bytes=0"),
        ("dtype", torch.float64, "dtype=torch.float64 cannot be combined"),
        ("combine_dtypes", (torch.float64,), "combine_dtypes=torch.float64 cannot be combined"),
        ("timeout_s", 0, "timeout_s=0"),
        ("timeout_s", -3.0, "timeout_s=-3.0"),
        ("timeout_s", float("nan"), "timeout_s=nan"),
        ("timeout_s", float("inf"), "timeout_s=inf"),
        ("timeout_s", "5", "timeout_s='5'"),
        ("timeout_s", True, "timeout_s=True"),
        ("recipe", 5, "recipe=5 is a int; pass its name"),
        ("transport", ["host"], "transport=['host'] is a list; pass its name"),
        ("extra_payload_bytes", 4, "=4 must be a tuple; for one entry write (4,)"),
        ("combine_dtypes", torch.float32, "combine_dtypes=torch.float32 must be a tuple"),
        ("received_ids", "global ", "received_ids='global ' is none of global, elsewhere, local"),
        ("received_ids", -2, "no integer from -1 to 2147483647"),
        ("received_ids", 2**31, "received_ids=2147483648"),
        ("received_ids", True, "received_ids=True"),
        ("received_ids", None, "received_ids=None"),
        ("scales_layout", "rows", "scales_layout='rows' is none of linear, interleaved, column"),
    ],
)
def test_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{field: value})
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MoeNvlinkError)


def test_limits_themselves_are_allowed() -> None:
    config(ep_size=MAX_RANKS, ep_rank=MAX_RANKS - 1, top_k=MAX_TOP_K)
    config(max_tokens_per_rank=2**24)


def test_slots_are_numbered_in_int32() -> None:
    config(ep_size=128, max_tokens_per_rank=(2**31 - 1) // 128)
    with pytest.raises(ConfigError, match="max_tokens_per_rank=16777216 .* to 16777215"):
        config(ep_size=128, max_tokens_per_rank=2**24)


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "12.5")
    monkeypatch.setenv("MOE_NVLINK_HOST_THREADS", "3")
    assert (config().timeout_s, config().num_threads) == (12.5, 3)
    assert (config(timeout_s=1).timeout_s, config(num_threads=2).num_threads) == (1, 2)
    monkeypatch.delenv("MOE_NVLINK_TIMEOUT_S")
    monkeypatch.setenv("MOE_NVLINK_HOST_THREADS", "  ")
    assert (config().timeout_s, config().num_threads) == (300.0, 1)


SECONDS = "is no number of seconds above 0 and below 1e+06; set one, or unset it for"


@pytest.mark.parametrize("text", ["0", "-1", "many", "inf", "nan", "10000000"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MOE_NVLINK_TIMEOUT_S", f"{SECONDS} 300"),
        ("MOE_NVLINK_FIRST_TIMEOUT_S", f"{SECONDS} 1800"),
        ("MOE_NVLINK_HOST_THREADS", "is no integer from 1 to 1024; set one, or unset it for 1"),
        ("MOE_NVLINK_MAX_SMS", "is no integer from 1 to 1024; set one, or unset it for all"),
    ],
)
def test_bad_environment_is_named(
    name: str, words: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a value that only the field's upper limit forbids."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        config()
    assert str(caught.value).startswith(f"{name}='{text}' {words}")


def test_limits_of_the_environment_are_those_of_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"TIMEOUT_S": 999999, "HOST_THREADS": 1024, "MAX_SMS": 1024, "SMALL_TOKENS": 64}
    for name, limit in limits.items():
        monkeypatch.setenv(f"MOE_NVLINK_{name}", str(limit))
    config()


def test_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(ConfigError, match="MOE_NVLINK_CACHE_DIR='~no-such-user.*path in full"):
        env.cache_dir()


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_expert_ranges(num_experts: int, ep_size: int) -> None:
    """Contiguous, complete, larger ones first, sizes differ by one at most."""
    ranges = [local_expert_range(num_experts, ep_size, rank) for rank in range(ep_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_experts
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    sizes = [end - first for first, end in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(2, 2), (2, -1), (3, 8), (0, 0)])
def test_no_expert_range_of_no_rank(ep_size: int, ep_rank: int) -> None:
    """(3, 8) are arguments in the wrong order: rank 3 of 8 would own no expert."""
    with pytest.raises(ConfigError, match=f"ep_rank={ep_rank} is not from 0 to {ep_size - 1} "):
        local_expert_range(256, ep_size, ep_rank)
