"""What adapters share, used by an adapter for a framework that does not exist."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin.errors import MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.integration import common
from moe_nvlink_plugin.integration.common import names, refusals
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.experts_input import ExpertsInput
from moe_nvlink_plugin.integration.common.options import Options, Wording
from moe_nvlink_plugin.integration.common.pool import ExchangePool, bound_of_step
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.support.ranks import run_processes

WORDING = Wording("Toy", "--toy-backend moe_nvlink", "toy.yaml", "dispatch: bf16 in toy.yaml")
GEOMETRY = Geometry(4, 2, hidden_size=128, max_tokens_per_rank=3, dtype=torch.float32)
CPU = torch.device("cpu")


class ToyInput(ExpertsInput):
    """Experts that take FP8 rows with the given static scale, one per token without one."""

    def __init__(self, quant_dtype: Any, static_scale: torch.Tensor | None = None) -> None:
        self._quant_dtype, self._static_scale = quant_dtype, static_scale

    wording = WORDING
    block_shape = padded_to = None
    wants_powers_of_two = False

    @property
    def quant_dtype(self) -> Any:
        return self._quant_dtype

    @property
    def static_scale(self) -> torch.Tensor | None:
        return self._static_scale

    @property
    def per_token(self) -> bool:
        return self._static_scale is None

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        pytest.fail("our own kernel quantises")

    def laid_out(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scales


def ranks_of(group: Any) -> Ranks:
    return Ranks(group, group.rank, group.size, WORDING)


def pool_of(group: ThreadGroup, name: str = "", **options: Any) -> ExchangePool:
    return ExchangePool(ranks_of(group), CPU, Options(**options), name=name)


@pytest.mark.parametrize(
    ("most", "bound"),
    [
        (0, 8),
        (1, 8),
        (8, 8),
        (9, 16),
        (136, 136),
        (137, 144),
        (999, 1000),
        (1001, 1001),
        (None, 1001),
    ],
)
def test_the_bound_of_a_step(most: int | None, bound: int) -> None:
    """136 is a size of vLLM's CUDA graphs; 1001 is the capacity."""
    assert bound_of_step(most, 1001) == bound


def test_refusals_speak_the_frameworks_words() -> None:
    def body(group: ThreadGroup) -> str:
        experts = ToyInput(torch.float8_e4m3fn, torch.tensor(0.5 + group.rank))
        pool = pool_of(group)
        with pytest.raises(MoeNvlinkError) as caught:
            pool.agree_on_format("layer 0", experts, GEOMETRY)
        return str(caught.value)

    for told in run_ranks(2, body):
        assert told.startswith("--toy-backend moe_nvlink: the static activation scale of layer 0")
        assert "rank 0 has 0.5, rank 1 has 1.5" in told
        assert "Toy takes it from the experts of each rank" in told
        assert "let rows travel unquantised and Toy quantise those that arrived" in told
        assert "dispatch: bf16 in toy.yaml" in told


def test_it_names_no_framework() -> None:
    (folder,) = common.__path__
    sources = sorted(Path(folder).glob("*.py"))
    assert len(sources) > 5
    for path in sources:
        found = re.search("vllm|sglang|flashinfer", path.read_text("utf-8"), re.IGNORECASE)
        assert found is None, f"{path}: {found}"


def test_pools_of_one_worker_write_a_file_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_NVLINK_STATS_DIR", str(tmp_path))
    (group,) = ThreadGroup.ranks(1)
    for pool in [pool_of(group, name) for name in ("", "draft")]:
        pool.exchange(GEOMETRY)
        pool.close()
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.json", "draft-rank0.json"}


@pytest.mark.parametrize(
    ("version", "tried", "is_warned"),
    [
        ("0.32.1+cpu", ("0.32",), False),
        ("0.320", ("0.32",), True),
        ("0.5.23", ("0.5.23",), False),
        ("0.5.24", ("0.5.23",), True),
        ("0.5.23", (), True),
    ],
)
def test_versions_that_have_served_no_model(
    version: str, tried: tuple[str, ...], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names.warn_if_untried("Toy", version, "cpu", tried, ("1.0",))
    assert bool(caplog.records) == is_warned
    if is_warned:
        assert f"This is {version}" in caplog.text
        assert "sources of 1.0" in caplog.text


def test_refusals_are_one_list_with_the_ways_out() -> None:
    refusals.refuse([], "1.0", WORDING)
    with pytest.raises(UnsupportedError) as caught:
        refusals.refuse(["one: drop it.", "two: drop it."], "1.0", WORDING)
    assert str(caught.value).splitlines() == [
        "--toy-backend moe_nvlink cannot serve this configuration (Toy 1.0):",
        "  - one: drop it.",
        "  - two: drop it.",
        "Change what is listed, or drop the flag to let Toy use its own backend.",
    ]
    assert list(refusals.several_cpu_hosts("cuda", 2)) == []
    assert "--nnodes is 2" in "".join(refusals.several_cpu_hosts("cpu", 2))
    assert "device xpu" in "".join(refusals.device("xpu"))


# How ranks meet and gather before they exchange anything: as threads, and over gloo.


class CountingGroup:
    """A group of one rank, which counts its collectives."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.gathered: list[Any] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value]


class TellingGroup:
    """A rank's group that says when the rank begins a collective."""

    def __init__(self, group: ThreadGroup, begins: threading.Event) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._begins = group, begins

    def all_gather_object(self, value: Any) -> list[Any]:
        self._begins.set()
        return self._group.all_gather_object(value)


def test_the_first_to_arrive_waits_for_the_last() -> None:
    first_waits, last_has_come = threading.Event(), threading.Event()

    def body(group: ThreadGroup) -> bool:
        if group.rank == 1:
            assert first_waits.wait(60), "rank 0 does not meet anybody"
            last_has_come.set()
        ranks_of(TellingGroup(group, first_waits) if group.rank == 0 else group).meet()
        return last_has_come.is_set()

    assert run_ranks(2, body) == [True, True]


def test_ranks_meet_once() -> None:
    """A rank that is alone later returns at once: the others may be in another step by then."""
    group = CountingGroup()
    ranks = ranks_of(group)
    ranks.meet()
    ranks.meet()
    assert group.gathered == [None]


def test_a_meeting_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    group = CountingGroup()
    ranks = ranks_of(group)

    def fails(_value: Any) -> list[Any]:
        raise ConnectionError("rank 1 has gone")

    with monkeypatch.context() as patch:
        patch.setattr(group, "all_gather_object", fails)
        with pytest.raises(ConnectionError, match="rank 1 has gone"):
            ranks.meet()
    ranks.meet()
    assert group.gathered == [None]


def over_gloo(ep_rank: int, ep_size: int) -> list[Any]:
    ranks = Ranks(dist.group.WORLD, ep_rank, ep_size, WORDING)
    ranks.meet()
    if ep_rank == 0:
        ranks.meet()  # alone: would never return if it were collective
    return ranks.gather({"rank": ep_rank})


def test_process_groups(tmp_path: Path) -> None:
    assert run_processes(2, over_gloo, tmp_path) == [[{"rank": 0}, {"rank": 1}]] * 2
