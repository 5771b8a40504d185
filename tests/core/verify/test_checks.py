"""Faults that are planted into the kernels, and what the checks of verify say of them."""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll, env
from moe_nvlink_plugin.exchange import checks as exchange_checks
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.memory.layout import WorkspaceLayout
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, checks
from moe_nvlink_plugin.verify.cases import RECIPES
from moe_nvlink_plugin.verify.checks import Check, Head, Rounds
from moe_nvlink_plugin.verify.plan import Geometry, plan, unsuited
from tests.support import ranks as processes
from tests.support.delays import replace_once, slow_reader

CPU = torch.device("cpu")
GEOMETRY = Geometry(
    ep_size=3, num_experts=9, top_k=4, hidden_size=384, max_tokens=12, timeout_s=60.0
)


def outcomes(check: Check) -> list[str]:
    """What is wrong on each rank; every rank has said the same."""
    told = run_ranks(GEOMETRY.ep_size, lambda group: check.run(group, CPU))
    assert all(one == told[0] for one in told)
    return told[0]


def named(name: str, **changes: Any) -> Rounds:
    """A check of the plan, with changes to its case."""
    (check,) = (check for check in plan(GEOMETRY, CPU, quick=False) if check.name == name)
    assert isinstance(check, Rounds)
    return dataclasses.replace(check, case=dataclasses.replace(check.case, **changes))


def test_the_whole_plan_holds() -> None:
    checks = plan(GEOMETRY, CPU, quick=False)
    assert len({check.name for check in checks}) == len(checks)
    wrong = {check.name: outcomes(check) for check in checks}
    assert all(not any(of_check) for of_check in wrong.values()), wrong


def of_near_codes(rank: int, _size: int) -> list[list[str]]:
    """The rounds of a process whose nvfp4 codes may be one away, as those of a GPU are."""
    group = dist.group.WORLD
    assert group is not None
    near = [check for check in plan(GEOMETRY, CPU, quick=False) if ", nvfp4" in check.name]
    with mock.patch.object(checks, "_is_near", lambda case, _device: case.recipe == "nvfp4"):
        return [check.run(as_group(group, 60.0), CPU) for check in near]


def test_processes_tell_each_other_quantised_rows(tmp_path: Path) -> None:
    """torch pickles no tensor of FP8."""
    told = processes.run_processes(GEOMETRY.ep_size, of_near_codes, tmp_path)
    assert len(told[0]) >= 2
    assert told == [[[""] * GEOMETRY.ep_size] * len(told[0])] * GEOMETRY.ep_size


@pytest.mark.parametrize("size", [1, 2])
def test_few_ranks(size: int) -> None:
    geometry = dataclasses.replace(GEOMETRY, ep_size=size)
    for check in plan(geometry, CPU, quick=True):
        told = run_ranks(size, functools.partial(check.run, device=CPU))
        assert told == [[""] * size] * size


def test_rows_of_one_element() -> None:
    """All terms of a logit may be 0 then: its sign is no fault."""
    geometry = dataclasses.replace(GEOMETRY, hidden_size=1)
    for check in plan(geometry, CPU, quick=True):
        assert outcomes(check) == [""] * GEOMETRY.ep_size


def test_every_recipe_is_in_the_plan() -> None:
    """And those that the rows do not suit are not."""
    found = {
        (check.case.recipe, check.case.small)
        for check in plan(GEOMETRY, CPU, quick=False)
        if isinstance(check, Rounds)
    }
    assert found == {(recipe, small) for recipe in (None, *RECIPES) for small in (False, True)}
    odd = dataclasses.replace(GEOMETRY, hidden_size=96)
    recipes = {
        check.case.recipe for check in plan(odd, CPU, quick=False) if isinstance(check, Rounds)
    }
    assert recipes == {None, *RECIPES} - {"fp8_block", "fp8_block_pow2"}
    blocks = ["recipe fp8_block", "recipe fp8_block_pow2", "combine fp8_block"]
    assert unsuited(odd) == [*blocks, "small dispatch of mxfp8", "small dispatch of nvfp4"]


def test_small_kernels_that_rows_do_not_suit_are_named() -> None:
    """Their rounds run the others."""
    odd = dataclasses.replace(GEOMETRY, hidden_size=385)
    out = unsuited(odd)
    assert "small combine" in out
    assert "small dispatch of unquantised rows" in out
    assert unsuited(GEOMETRY) == []


#: What is planted -> the check, the line of the kernels, what stands there instead, and what the
#: check must say.
FAULTS = {
    "a dropped row": (
        "large batches",
        "pack_cell(shared.epoch, count, tag)",
        "pack_cell(shared.epoch, count == 0 ? 0 : count - 1, tag)",
        r"round \d+: large batches: rank \d to rank \d: \d+ rows instead of \d+",
    ),
    "a row in a slice's last slot": (
        "large batches",
        "slot = target * geometry.max_tokens_per_rank + place;",
        "slot = target * geometry.max_tokens_per_rank + place;\n"
        "      if (place == geometry.max_tokens_per_rank - 1) row = row - 1;",
        r"round 0: large batches: rank \d to rank 2: ids: first difference",
    ),
    "rows in each other's slots": (
        "large batches",
        "static_cast<uint64_t>(row) * payload.row_bytes);\n      present = place + 1;",
        "static_cast<uint64_t>(row ^ 1) * payload.row_bytes);\n      present = place + 1;",
        r"rank \d to rank \d: payload \d: first difference at \[\d+, \d+\]",
    ),
    "a cell of the epoch before": (
        "large batches",
        "pack_cell(shared.epoch, count, tag)",
        "pack_cell(shared.epoch - 1, count, tag)",
        r"ExchangeTimeoutError: .*dispatch",
    ),
    "scales in each other's place": (
        "small batches, fp8_block",
        "put(scales + offset, vector);",
        "put(scales, vector);",
        r"rank \d to rank \d: payload 2: first difference",
    ),
    "slots that are not marked empty": (
        "small batches, local ids of 64 bits, extra payloads",
        "int word = filled + column",
        "int word = filled + 1 + column",
        r"rank \d to rank \d: ids of empty slots",
    ),
    "slots after the first piece that are not marked empty": (
        "few tokens, many empty slots",
        "if (filled >= end) continue;",
        "if (filled >= end || start >= 16384) continue;",
        r"rank \d to rank \d: ids of empty slots",
    ),
    "an id that is not here": (
        "small batches, local ids of 64 bits, extra payloads",
        "const bool keeps = received.keeps(args, id);",
        "const bool keeps = true;",
        r"rank \d to rank \d: ids: first difference",
    ),
    "scales in each other's rows": (
        "large batches, nvfp4, interleaved scales",
        "slot % 32 * 4 +",
        "(slot ^ 1) % 32 * 4 +",
        r"rank \d to rank \d: payload 2: first difference",
    ),
    "counts that are not cleared": (
        "small batches, counts per expert",
        "  store_relaxed_gpu(counter, 0);\n  return count;",
        "  return count;",
        r"round 2: .*: counts per expert on rank \d: first difference",
    ),
    "rows that travel back under another scale": (
        "large batches, fp8_tensor, fp8_tensor back",
        "return (x + x * 0.0f) * factor;",
        "return x + x * 0.0f;",
        r"combined on rank \d: first difference",
    ),
    "rows that are not added in place": (
        "large batches, ids elsewhere, padding, sums added to",
        "  const char* added = finish.added_to(target.output);\n",
        "  const char* added = finish.added_to(target.output);\n"
        "  if (added == target.output) added = nullptr;\n",
        r"round 1: .*combined on rank \d: first difference",
    ),
    "empty slots that the second CTA does not mark": (
        "large batches, 3 threads a rank",
        "for (int piece = shared.finisher; piece < num_pieces; piece += num_finishers(cta)) {\n"
        "    const int source = piece % geometry.ep_size;\n    const int filled",
        "for (int piece = shared.finisher == 1 ? num_pieces : shared.finisher;\n"
        "       piece < num_pieces; piece += num_finishers(cta)) {\n"
        "    const int source = piece % geometry.ep_size;\n    const int filled",
        r"rank \d to rank \d: ids of empty slots",
    ),
    "halves that are cut off": (
        "large batches, float16",
        "0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13",
        "0x38000000u) >> 13",
        r"combined on rank \d: first difference",
    ),
    "a sum that is not scaled": (
        "large batches, ids elsewhere, padding, sums added to",
        "sum *= finish.scale;",
        "sum *= 1.0f;",
        r"combined on rank \d: first difference",
    ),
}


#: One for each kind of kernel is in `make test`.
IN_EVERY_RUN = ("a dropped row", "a sum that is not scaled", "slots that are not marked empty")
EACH_FAULT = [
    fault if fault in IN_EVERY_RUN else pytest.param(fault, marks=pytest.mark.long)
    for fault in FAULTS
]


def plant(patch: pytest.MonkeyPatch, line: str, instead: str, family: Any = LAYER) -> None:
    """Into the kernels of CPU ranks."""
    text = replace_once(family.host_source(), line, instead)
    library = host.HostLibrary(host.build(text, (*host.FLAGS, "-O0")))
    patch.setattr(host, "load", lambda _text: library)


@pytest.mark.parametrize("fault", EACH_FAULT)
def test_a_fault_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, line, instead, said = FAULTS[fault]
    plant(monkeypatch, line, instead)
    timeout_s = 1.0 if "Timeout" in said else 60.0
    wrong = outcomes(named(name, timeout_s=timeout_s))
    assert any(re.search(said, message) for message in wrong), wrong


def test_wide_ids_that_are_cut_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_checks, "ids_as_int32", lambda ids, _number: ids.to(torch.int32))
    wrong = outcomes(named("small batches, local ids of 64 bits, extra payloads"))
    assert any("rows instead of" in message for message in wrong), wrong


def test_rounds_that_fill_the_memory_are_compared_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else eight ranks would keep gigabytes until the check's end."""
    events: list[str] = []
    run_round, compare = cases.run_round, checks._compare

    def ran(exchange: MoeAllToAll, *given: Any, **named: Any) -> Any:
        if exchange.config.ep_rank == 0:
            events.append("ran")
        return run_round(exchange, *given, **named)

    def compared(drawn: Any, rank: int, *given: Any, **named: Any) -> None:
        if rank == 0:
            events.append("compared")
        compare(drawn, rank, *given, **named)

    monkeypatch.setattr(cases, "run_round", ran)
    monkeypatch.setattr(checks, "_compare", compared)
    monkeypatch.setattr(checks, "_KEPT_BYTES", 1)
    assert not any(outcomes(named("large batches")))
    assert events == ["ran", "compared"] * 6
    events.clear()
    assert not any(outcomes(named("large batches, 3 channels")))
    assert events == [*["ran"] * 3, *["compared"] * 3] * 3


def test_a_load_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", mock.Mock(side_effect=RuntimeError("planted")))
    assert outcomes(named("small batches, busy device")) == ["RuntimeError: planted"] * 3


def test_without_pdl_is_a_thread_s_own() -> None:
    """Ranks may be threads, which enter and leave the block in turns."""
    met = threading.Barrier(2, timeout=60)

    def rank_main(group: ThreadGroup) -> list[bool]:
        with env.without_pdl():
            met.wait()
            found = [env.pdl()]
            if group.rank:
                met.wait()
        if not group.rank:
            met.wait()
        return [*found, env.pdl()]

    assert run_ranks(2, rank_main) == [[False, True]] * 2
    assert env.pdl()


def test_scales_of_the_caller_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = MoeAllToAll.dispatch

    def turned(self: MoeAllToAll, *given: Any, scales: Any = None, **named: Any) -> Any:
        return dispatch(self, *given, scales=None if scales is None else scales.flip(0), **named)

    monkeypatch.setattr(MoeAllToAll, "dispatch", turned)
    wrong = outcomes(named("small batches, mxfp8"))
    assert any("round 1" in message and "payload 2" in message for message in wrong), wrong


WAIT = "  while (!has_reached(seen = load_acquire_sys(cell), epoch, most_ahead)) {"


AFTER_SMALL = "await_combine(args, lane, Cta::kWarpThreads, epoch, cta.block == 0, has_failed);"


@pytest.mark.parametrize(
    ("wait", "instead", "name", "slow_ms"),
    [
        (WAIT, "  while (false) {", "large and small in turn, late ranks", 0.0),
        (AFTER_SMALL, "", "large and small in turn, late ranks", 0.0),
        (WAIT, "  while (false) {", "large batches, one rank leaves", 200.0),
    ],
    ids=["P12", "P12 after a small combine", "P14"],
)
def test_a_wait_that_is_left_out_is_noticed(
    wait: str, instead: str, name: str, slow_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: a rank stores over what another one has yet to read. P14: its experts write over rows
    that the rank that leaves has yet to fetch, which is slow here.
    """
    monkeypatch.setattr(checks, "_LATEST_S", 0.1)
    text = replace_once(LAYER.host_source(), wait, instead)
    library = slow_reader(GEOMETRY.ep_size - 1, slow_ms, text)
    monkeypatch.setattr(host, "load", lambda _text: library)
    assert any(outcomes(named(name, timeout_s=5.0)))


def test_a_fault_of_the_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least ids of a shard are left out."""
    line, instead = "words + place * kMaxHeadSplits + split, word", "words + place, word + 1"
    plant(monkeypatch, line, instead, HEAD)
    (check, *_others) = (c for c in plan(GEOMETRY, CPU, quick=True) if isinstance(c, Head))
    said = r"shared LM head, up to 3 rows, call \d, rank \d: first difference"
    assert any(re.search(said, message) for message in outcomes(check))


@pytest.mark.parametrize(("kind", "said"), [("large", "ids"), ("small", "ExchangeTimeoutError")])
def test_channels_with_the_same_memory_are_found(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cells are apart: only rounds that are in flight together show it."""
    regions = WorkspaceLayout.channel_regions

    def shared(self: WorkspaceLayout, channel: int) -> dict[str, Any]:
        own, first = regions(self, channel), regions(self, 0)
        return own | {name: first[name] for name in self.sizes}

    monkeypatch.setattr(WorkspaceLayout, "channel_regions", shared)
    timeout_s = 60.0 if kind == "large" else 1.0
    wrong = outcomes(named(f"{kind} batches, 3 channels", timeout_s=timeout_s))
    assert any(said in message for message in wrong), wrong
