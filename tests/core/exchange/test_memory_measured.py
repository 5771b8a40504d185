"""What a workspace says it takes against what the system has given, while ranks come and go.

CPU ranks: the blocks of each rank's files in /dev/shm. GPUs: what the stand-in driver has created.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig, HeadGroup, MoeAllToAll, StoreGroup, driver
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.jit import host as host_build
from moe_nvlink_plugin.memory import workspace as workspaces
from moe_nvlink_plugin.testing import ThreadGroup
from moe_nvlink_plugin.tools import cli
from moe_nvlink_plugin.transport import host, nvlink
from moe_nvlink_plugin.verify import cases
from tests.core.exchange.test_elastic import PAIR, at_stage, config_of
from tests.support import fake_cuda, kernel_texts, small_head
from tests.support.fake_cuda.transport import OnFakeDriver, install
from tests.support.ranks import run_processes

PLACES = 3
COMES = 2
SMALL = dataclasses.replace(PAIR, small=True, num_channels=2)
#: Times the capacity of the first layer: within the room of its regions, and beyond it.
GROWS = {"cpu": 3, "cuda": 2000}
OUTGROWS = {"cpu": 40, "cuda": 8000}


class Files:
    """Memory of CPU ranks: what this process has created, and what it has mapped."""

    transport = None

    def __init__(self, _rank: int) -> None:
        self._made: list[int] = []
        create = host._create_locked_file

        def keep() -> tuple[Path, int]:
            path, fd = create()
            self._made.append(os.dup(fd))  # the name and the rank's own descriptor go soon
            return path, fd

        setattr(host, "_create_locked_file", keep)  # noqa: B010 - to mypy it is no variable

    def created(self) -> dict[int, int]:
        """Inode -> bytes in memory of what this rank has created, mapped or not."""
        found = [os.fstat(fd) for fd in self._made]
        return {one.st_ino: one.st_blocks * 512 for one in found}

    def mapped(self) -> set[int]:
        """Inodes of all ranks' memory that this process has mapped."""
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return {int(line[4]) for line in lines if len(line) > 5 and "/moe_nvlink-" in line[5]}

    def own_bytes(self) -> int:
        """Bytes of what this rank has created and has still mapped."""
        mapped = self.mapped()
        return sum(size for inode, size in self.created().items() if inode in mapped)

    def names(self) -> list[str]:
        """What of this process could outlive it."""
        return [path.name for path in host._DIRECTORY.glob(f"moe_nvlink-*-{os.getpid()}-*")]


class DeviceMemory:
    """Memory of a GPU, as the stand-in driver counts it."""

    transport = OnFakeDriver.name

    def __init__(self, rank: int) -> None:
        install()
        self._gpu = rank

    def created(self) -> dict[int, int]:
        return {}

    def mapped(self) -> set[int]:
        return set()

    def own_bytes(self) -> int:
        nvlink.unmap_unused()
        with driver.on_device(self._gpu):
            free, total = driver.call("cuMemGetInfo")
        return int(total) - int(free)

    def names(self) -> list[str]:
        return [name for name in ("handles", "mappings") if fake_cuda.control().live()[name]]


class Look(NamedTuple):
    """One rank's memory at one time, in bytes.

    Attributes:
        said: what `workspace_bytes` says.
        measured: what this rank has created and not given up.
        everyones: what of all ranks' memory some process still has mapped; CPU ranks alone.
    """

    said: int
    measured: int
    everyones: int


class Life:
    """What one process does with its exchange, and what its memory is after each step."""

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self._kind = rank, kind
        self._memory = Files(rank) if kind == "cpu" else DeviceMemory(rank)
        self.transport = self._memory.transport
        self.layers: list[MoeAllToAll] = []
        self.looks: dict[str, Look] = {}
        self.logged: list[str] = []

    def group(self, name: str, places: Sequence[int]) -> StoreGroup:
        store = dist.distributed_c10d._get_default_store()
        return StoreGroup(store, name, list(places).index(self.rank), len(places))

    def config(self, places: Sequence[int], factor: int = 1) -> AllToAllConfig:
        plain = config_of(SMALL, self.rank, places)
        return dataclasses.replace(
            plain,
            max_tokens_per_rank=factor * plain.max_tokens_per_rank,
            transport=self.transport,
        )

    def look(self, step: str, said: int | None = None) -> None:
        """Measure after all processes have come to this step. Collective over all of them."""
        gc.collect()
        world = self.group(f"look: {step}", range(PLACES))
        told = world.all_gather_object((self._memory.created(), self._memory.mapped()))
        created = {inode: size for theirs, _mapped in told for inode, size in theirs.items()}
        held = {inode for _created, theirs in told for inode in theirs}
        if said is None:
            said = self.layers[0].workspace_bytes if self.layers else 0
        everyones = sum(created.get(inode, 0) for inode in held)
        self.looks[step] = Look(said, self._memory.own_bytes(), everyones)
        world.all_gather_object(None)

    def round(self, stage: int) -> None:
        """Use the memory."""
        inputs = at_stage(SMALL, stage, 0, self.layers[0].places)[1][self.rank]
        cases.run_round(self.layers[0], inputs)

    def names_left(self) -> list[str]:
        return self._memory.names()

    def configs(self, places: Sequence[int]) -> list[AllToAllConfig]:
        """Of the three layers."""
        factors = (1, GROWS[self._kind], OUTGROWS[self._kind])
        return [self.config(places, factor) for factor in factors]

    def close(self) -> None:
        for layer in self.layers:
            layer.close()
        self.layers = []


def lives(rank: int, _size: int, kind: str) -> tuple[dict[str, Look], list[str], list[str], int]:
    """Ranks 0 and 1 begin; rank 2 joins, leaves, and joins again; release, renewal, end."""
    life = Life(rank, kind)
    handler = logging.Handler()
    handler.emit = lambda record: life.logged.append(record.getMessage())  # type: ignore[method-assign]
    workspaces.logger.addHandler(handler)
    workspaces.logger.setLevel(logging.INFO)
    few, all_places = (0, 1), (0, 1, 2)
    for index, name in enumerate(("create", "grow", "outgrow")):
        if rank != COMES:
            config, group = life.configs(few)[index], life.group(name, few)
            first = life.layers[0] if life.layers else None
            life.layers.append(MoeAllToAll.create(config, group, share_with=first))
            life.round(0)
        life.look(name)
    enter(life, "join", all_places)
    life.look("join")
    life.layers[0].leave(COMES)
    if rank == COMES:
        life.close()
    life.look("leave")
    if rank != COMES:
        enter(life, "renew", few)
    life.look("renew")
    enter(life, "join again", all_places)
    life.layers[0].release()
    life.look("release")
    enter(life, "renew again", all_places)
    life.look("renew again")
    life.close()
    life.look("close")
    foretold = sum(MoeAllToAll.memory(life.config(all_places), kind).values())
    return life.looks, life.logged, life.names_left(), foretold


def enter(life: Life, name: str, places: Sequence[int]) -> None:
    """Join or renew, and a round."""
    group = life.group(name, places)
    if life.layers:
        life.layers[0].renew(group, places)
    else:
        life.layers = MoeAllToAll.join(life.configs(places), group)
    workspace = life.layers[0]._layer.workspace
    for extent in workspace.extents:
        workspace.memory.local(*extent)  # the host may touch it now, on the stand-in driver too
    life.round(1)


def half_grown(rank: int, size: int, kind: str) -> tuple[dict[str, Look], list[str]]:
    """A layer would outgrow the memory, which is there when rank 1 fails; then renewal, and end."""
    life, places = Life(rank, kind), range(size)
    small, _, large = life.configs(places)
    life.layers.append(MoeAllToAll.create(small, life.group("create", places)))
    life.look("create")
    workspace, group = life.layers[0]._layer.workspace, life.group("outgrow", places)

    def fail(*_: object) -> None:
        raise UnsupportedError("planted")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(workspace, "_connect_faults", fail)
        with pytest.raises(MoeNvlinkError, match="planted"):
            MoeAllToAll.create(large, group, share_with=life.layers[0])
    life.look("half grown")
    enter(life, "renew", places)
    life.look("renew")
    life.close()
    life.look("close")
    return life.looks, life.names_left()


@pytest.fixture(params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Processes started meanwhile have the stand-in driver, if their memory is to be a GPU's."""
    if request.param == "cuda":
        request.getfixturevalue("gpu_compiler")  # skips where kernels cannot be compiled
        kernels = host_build.build(kernel_texts.host_source())
        library = fake_cuda.build(tmp_path)
        for name, value in fake_cuda.environment(library, kernels, most_ctas=2).items():
            monkeypatch.setenv(name, value)
    return str(request.param)


def test_what_is_said_is_what_is_there(kind: str, tmp_path: Path) -> None:
    """At every step, on every rank: also 0, where there is nothing."""
    outcomes = run_processes(PLACES, lives, tmp_path, kind)
    for rank, (looks, logged, names, foretold) in enumerate(outcomes):
        said = {step: look.said for step, look in looks.items()}
        assert {step: look.measured for step, look in looks.items()} == said
        if rank != COMES:
            assert said["create"] == foretold
            assert 0 < said["create"] < said["grow"] < said["outgrow"]
            assert_logged(logged, [said[step] for step in ("create", "grow", "outgrow")])
        else:
            assert said["create"] == said["leave"] == said["renew"] == 0
            assert_logged(logged, [said["join"], said["join"]])
        assert said["join"] == said["renew again"] == outcomes[0][0]["outgrow"].said
        assert said["release"] == said["close"] == 0
        assert names == []
        if kind == "cpu":
            check_everyones(looks, said["join"])


def test_after_a_growth_that_failed_half_way(kind: str, tmp_path: Path) -> None:
    for looks, names in run_processes(PLACES, half_grown, tmp_path, kind):
        said = {step: look.said for step, look in looks.items()}
        assert {step: look.measured for step, look in looks.items()} == said
        assert 0 == said["close"] < said["create"] == said["renew"] < said["half grown"]
        assert names == []


def assert_logged(logged: list[str], sizes: list[int]) -> None:
    found = [re.search(r"(?:allocates|grows to) a workspace of ([\d.]+) MiB", m) for m in logged]
    assert [match[1] for match in found if match] == [f"{size / 2**20:.1f}" for size in sizes]


def check_everyones(looks: dict[str, Look], full: int) -> None:
    """A rank that has left, or died, leaves its memory to the others until they renew."""
    everyones = {step: look.everyones for step, look in looks.items()}
    assert everyones["outgrow"] == everyones["renew"] == 2 * full
    assert everyones["join"] == everyones["leave"] == everyones["renew again"] == 3 * full
    assert everyones["release"] == everyones["close"] == 0


def heads(rank: int, size: int, kind: str) -> dict[str, Look]:
    """A shared LM head with all logits; its group is the whole world."""
    life, everyone = Life(rank, kind), range(size)
    config = small_head.config(size, rank, full_logits=True, transport=life.transport)
    head = HeadGroup.create(config, life.group("head", everyone))
    life.look("create", head.workspace_bytes)
    head.release()
    life.look("release", head.workspace_bytes)
    head.renew(life.group("head again", everyone))
    life.look("renew", head.workspace_bytes)
    head.close()
    life.look("close", head.workspace_bytes)
    return life.looks


def test_a_head_says_what_is_there(kind: str, tmp_path: Path) -> None:
    for looks in run_processes(PLACES, heads, tmp_path, kind):
        assert [look.said for look in looks.values()] == [look.measured for look in looks.values()]
        assert looks["create"].said == looks["renew"].said > 0
        assert looks["release"].said == looks["close"].said == 0


# What is foretold: MoeAllToAll.memory and `moe-nvlink doctor --memory`.

CONFIG = AllToAllConfig(
    ep_size=1, ep_rank=0, num_experts=8, top_k=2, hidden_size=256, max_tokens_per_rank=40
)
LAYER = "ep_size=64,max_tokens_per_rank=8192,hidden_size=7168,top_k=8"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"small_tokens": 8, "num_channels": 3},
        {"recipe": "mxfp8", "combine": "nvfp4", "scales_layout": "interleaved"},
        {"num_expert_counts": 8, "extra_payload_bytes": (6, 12)},
    ],
    ids=str,
)
def test_what_is_foretold_is_what_a_layer_takes(given: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **given)
    (group,) = ThreadGroup.ranks(1)
    foretold = MoeAllToAll.memory(config)
    with MoeAllToAll.create(config, group) as layer:
        assert sum(foretold.values()) == layer.workspace_bytes
    assert ("small batches" in foretold) == ("small_tokens" in given)
    assert ("experts' quantised output" in foretold) == ("combine" in given)
    assert ("counts per expert" in foretold) == ("num_expert_counts" in given)


def test_rows_are_what_takes_memory() -> None:
    ranks, tokens, hidden = 64, 8192, 7168
    config = dataclasses.replace(
        CONFIG, ep_size=ranks, num_experts=256, max_tokens_per_rank=tokens, hidden_size=hidden
    )
    foretold = MoeAllToAll.memory(config, "cuda")
    assert foretold["experts' output"] == ranks * tokens * hidden * 2
    quantised = MoeAllToAll.memory(dataclasses.replace(config, recipe="fp8_block"), "cuda")
    assert quantised["received rows"] < 0.6 * foretold["received rows"]
    with pytest.raises(ConfigError, match="unknown"):
        MoeAllToAll.memory(dataclasses.replace(config, recipe="none of ours"))


def test_the_command_says_what_takes_most_and_what_halves_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--memory", LAYER]) == 0
    total, *_parts, half, quantised = capsys.readouterr().out.splitlines()
    assert total.strip().startswith("14.1 GiB on each of 64 ranks")
    assert half.strip() == "7.1 GiB with max_tokens_per_rank=4096"
    assert float(quantised.split()[0]) < 11


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing stands beside a comma"),
        ("ep_size=8,top_k=8", "missing: max_tokens_per_rank, hidden_size"),
        (f"{LAYER},ranks=8", "not so: ranks"),
        (LAYER.replace("64", "-64"), "not so: ep_size"),
        (LAYER.replace("64", "640"), "ep_size=640"),
        (f"{LAYER},num_channels=64", "exceeds the limit"),
    ],
)
def test_what_is_no_layer_is_refused(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--memory", text]) == 1
    assert said in capsys.readouterr().err
