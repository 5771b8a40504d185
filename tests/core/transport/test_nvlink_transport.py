"""GPU ranks' shared memory on the fake driver: grows in place, fails as one, leaks nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import gc
import itertools
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import StoreGroup, check_connected, driver
from moe_nvlink_plugin.errors import (
    DriverError,
    MoeNvlinkError,
    PeerError,
    TransportError,
    UnsupportedError,
)
from moe_nvlink_plugin.groups import Group, Placed, as_group
from moe_nvlink_plugin.plugins import registry
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.transport import Extent, nvlink, topology, vmm
from moe_nvlink_plugin.transport.nvlink import NvlinkMemory, NvlinkTransport
from tests.support.fake_cuda import control
from tests.support.fake_cuda.processes import Driven
from tests.support.fake_cuda.transport import FakeNvlinkTransport

CPU = torch.device("cpu")
MIB = 2**20


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def state() -> tuple[dict[str, int], int]:
    """What the driver has handed out, and how many descriptors are open."""
    gc.collect()
    nvlink.unmap_unused()
    return control().live(), num_open()


def world() -> Group:
    return as_group(dist.group.WORLD, 60)


def allocated(transport: NvlinkTransport, group: Group, size_bytes: int) -> NvlinkMemory:
    memory = transport.reserve(group, size_bytes, CPU)
    memory.extend([Extent(0, size_bytes)])
    return memory


def pretend_host(rank: int) -> None:
    """Ranks 0 and 1 on one host, 2 and 3 on the next, and so on."""
    topology.host_id = lambda: f"host {rank // 2}"
    os.environ["FAKE_CUDA_HOST"] = str(rank // 2)


def peers_bytes(memory: NvlinkMemory, size: int, offset: int) -> list[int]:
    """The byte at `offset` of every rank's workspace, as this rank sees it."""
    bases = (memory.base_ptr + rank * memory.rank_stride for rank in range(size))
    return [byte_at(memory._index, base + offset) for base in bases]


def byte_at(index: int, address: int) -> int:
    """Of device memory, as GPU `index` sees it."""
    byte = ctypes.c_uint8()
    with driver.on_device(index):
        driver.call("cuMemcpyDtoH", ctypes.addressof(byte), address, 1)
    return byte.value


# ---- what it is for


@pytest.mark.parametrize("kind", ["POSIX", "FABRIC"])
def test_three_ranks(kind: str, driven: Driven) -> None:
    """One host and descriptors; or, pretended, two hosts of one NVLink domain."""
    lives = driven(live, kind, ranks=3, kernels="", fabric=int(kind == "FABRIC"))
    # Descriptors become FABRIC handles when a rank of another host comes.
    ways = [["POSIX", kind, kind], ["POSIX", kind], [kind, kind]]
    tried = lives[0][-1]
    assert lives == [(kind, ways[rank], kind, tried) for rank in range(3)]
    wanted = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemRelease", "cuMemsetD8"}
    wanted |= {"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuCtxSynchronize"}
    assert wanted <= set(tried["extend"])
    assert {"cuMemAddressReserve", "cuMemGetAllocationGranularity"} <= set(tried["reserve"])


def live(rank: int, size: int, kind: str) -> tuple[Any, ...]:
    if kind == "FABRIC":
        pretend_host(rank)
    bodies = (growth_body, renewal_body, release_body, failing_body)
    found = tuple(body(rank, size) for body in bodies)
    gc.collect()  # gloo aborts a process that still has its group, in some cycle, when it ends
    return found


def growth_body(rank: int, size: int) -> str:
    """Everybody sees everybody, and growth moves nothing."""
    group, before = world(), state()
    memory = FakeNvlinkTransport().reserve(group, 16 * MIB, CPU)
    memory.extend([Extent(0, 5000), Extent(4 * MIB, 3 * MIB)])
    rows = memory.local(0, 5000)
    address = rows.data_ptr()
    assert not rows.any(), "not zeroed"
    rows.fill_(rank + 1)
    memory.local(4 * MIB, 3 * MIB)[-1] = rank + 11
    group.all_gather_object(None)
    assert peers_bytes(memory, size, 4999) == [1, 2, 3]
    assert peers_bytes(memory, size, 7 * MIB - 1) == [11, 12, 13]
    # Right behind the first extent, so that both are one range from now on.
    memory.extend([Extent(2 * MIB, 2 * MIB)])
    whole = memory.local(0, 8 * MIB)
    assert whole.data_ptr() == address == memory.base_ptr + rank * memory.rank_stride
    assert bool((whole[:5000] == rank + 1).all())
    assert not whole[2 * MIB : 4 * MIB].any()
    assert int(whole[7 * MIB - 1]) == rank + 11
    whole[3 * MIB] = rank + 21
    group.all_gather_object(None)
    assert peers_bytes(memory, size, 3 * MIB) == [21, 22, 23]
    group.all_gather_object(None)
    # No handle is left.
    assert control().live() == {**before[0], "mappings": 3 * size, "reservations": 1}
    assert num_open() == before[1]
    found = memory._sharing.name
    closing_body(memory, rows, whole)
    del memory, whole, rows
    assert state() == before
    return found


def closing_body(memory: NvlinkMemory, rows: torch.Tensor, whole: torch.Tensor) -> None:
    """Mapped as long as one tensor lives, whatever has become of the object."""
    memory.close()
    with pytest.raises(TransportError, match="closed"):
        memory.local(0, 1)
    with pytest.raises(TransportError, match="closed"):
        memory.leak()
    with pytest.raises((TransportError, PeerError), match="closed"):
        memory.extend([Extent(8 * MIB, 1)])
    del whole
    gc.collect()
    assert bool((rows == rows[0]).all())
    assert control().live()["mappings"] > 0


def renewal_body(rank: int, size: int) -> list[str]:
    """Ranks 0 and 1, then all three, then 0 and 2, at the same addresses."""
    before, extents, ways = state(), [Extent(0, 5000), Extent(4 * MIB, MIB)], []
    memory: NvlinkMemory | None = None
    stages = ((0, 1), (0, 1, 2), (0, 2))
    groups = [dist.new_group(list(places)) for places in stages]
    addresses = set()
    for number, (places, group) in enumerate(zip(stages, groups, strict=True)):
        if rank in places:
            placed = Placed(as_group(group, 60), places, size)
            if memory is None:
                memory = FakeNvlinkTransport().reserve(placed, 16 * MIB, CPU)
            else:
                memory.renew(placed)
                with pytest.raises(TransportError, match="not mapped"):
                    memory.local(0, 5000)
            memory.extend(extents)
            rows = memory.local(0, 5000)
            addresses.add(rows.data_ptr())
            assert not rows.any(), "not zeroed"
            ways.append(memory._sharing.name)
        world().all_gather_object(None)
        if memory is not None:
            # At last also rank 1, which nobody has any more.
            memory.local(0, 5000).fill_(10 * number + rank + 1)
        world().all_gather_object(None)
        if memory is not None and rank in places:
            bases = [memory.base_ptr + place * memory.rank_stride for place in places]
            seen = [byte_at(memory._index, base + 4999) for base in bases]
            assert seen == [10 * number + place + 1 for place in places]
            assert control().live()["mappings"] == before[0]["mappings"] + 2 * len(places)
        world().all_gather_object(None)
    assert memory is not None
    assert len(addresses) == 1
    memory.close()
    del memory, rows
    assert state()[0] == before[0]  # the groups have sockets
    return ways


def release_body(rank: int, size: int) -> str:
    """Twice: unmapped and released, then created, shared and mapped at the same addresses."""
    group, before, extents = world(), state(), [Extent(0, 5000), Extent(4 * MIB, MIB)]
    memory = FakeNvlinkTransport().reserve(group, 16 * MIB, CPU)
    memory.extend(extents)
    rows = memory.local(0, 5000)
    address = rows.data_ptr()
    for number in range(2):
        rows.fill_(10 * number + rank + 1)
        group.all_gather_object(None)
        calls = control().calls()
        memory.release()
        mapped = len(extents) * size
        assert control().calls()["cuMemUnmap"] == calls.get("cuMemUnmap", 0) + mapped
        assert control().live() == {**before[0], "reservations": before[0]["reservations"] + 1}
        assert num_open() == before[1]
        memory.release()  # nothing is left to unmap
        assert control().calls()["cuMemUnmap"] == calls.get("cuMemUnmap", 0) + mapped
        with pytest.raises(TransportError, match="not mapped"):
            memory.local(0, 5000)
        group.all_gather_object(None)
        memory.renew(group)
        assert control().live()["mappings"] == before[0]["mappings"]
        memory.extend(extents)
        rows = memory.local(0, 5000)
        assert (rows.data_ptr(), bool(rows.any())) == (address, False)
        assert control().live()["mappings"] == before[0]["mappings"] + mapped
        assert control().live()["handles"] == before[0]["handles"]
        assert num_open() == before[1]
        rows.fill_(rank + 31)
        group.all_gather_object(None)
        assert peers_bytes(memory, size, 4999) == [31, 32, 33]
        group.all_gather_object(None)
    found = memory._sharing.name
    memory.close()
    del memory, rows
    assert state() == before
    return found


def crowded_body(_rank: int, _size: int) -> None:
    """More ranks than a GPU has room for. Their agreement is planted: threads share no GPU."""
    first = ThreadGroup.ranks(1)[0]
    memory = allocated(FakeNvlinkTransport(), first, MIB)
    crowd = nvlink._Agreed(vmm.Sharing.POSIX, 2)
    with (
        mock.patch.object(nvlink, "_agree", return_value=crowd),
        pytest.raises(UnsupportedError, match="2 ranks would use GPU 0"),
    ):
        memory.renew(first)
    assert memory.local(0, MIB).numel() == MIB  # nothing has changed
    memory.close()


def many_body(_rank: int, _size: int) -> None:
    """Threads of one process as 20 ranks: nobody waits for somebody who waits for him."""
    before = state()

    def rank_main(group: ThreadGroup) -> list[int]:
        memory = allocated(FakeNvlinkTransport(), group, 100)
        memory.local(0, 100).fill_(group.rank)
        group.all_gather_object(None)
        seen = peers_bytes(memory, group.size, 99)
        group.all_gather_object(None)
        memory.close()
        return seen

    assert run_ranks(20, rank_main) == [list(range(20))] * 20
    assert state() == before


# ---- a rank that fails

#: Failing, these say nothing about what is being built; contexts are the caller's.
_NOT_TRIED = {"cuCtxGetCurrent", "cuCtxPopCurrent"}


def calls_of(body: Callable[[], object]) -> dict[str, int]:
    """How often each function is called; without what giving the result up takes."""
    control().fail()
    result = body()
    calls = control().calls()
    del result
    return {name: count for name, count in calls.items() if name not in _NOT_TRIED}


def failing_body(rank: int, size: int) -> dict[str, list[str]]:
    """Every driver call of `extend` and of `reserve` fails, the first and the last time it is made:
    everything is taken back, everywhere.
    """
    group, transport = world(), FakeNvlinkTransport()
    memory = transport.reserve(group, 64 * MIB, CPU)
    memory.extend([Extent(0, 2 * MIB)])
    memory.local(0, 2 * MIB).fill_(rank + 1)

    def more(at: int = 4) -> None:
        memory.extend([Extent(at * MIB, 3 * MIB), Extent((at + 6) * MIB, 1)])

    def another() -> object:
        return transport.reserve(group, 2 * MIB, CPU)

    extending, reserving = calls_of(lambda: more(32)), calls_of(another)
    reserving.pop("cuMemRelease", None)  # of the trial, whose result is known by then
    before, failing_rank = state(), itertools.cycle(range(size))
    for calls, body in ((extending, more), (reserving, another)):
        for name, count in sorted(calls.items()):
            for ordinal in {1, count}:
                fails_at(body, f"{name}:{ordinal}", next(failing_rank), group)
                after = (control().live(), num_open())
                assert after == before, f"{name}:{ordinal} left something behind"
                assert peers_bytes(memory, size, 2 * MIB - 1) == [1, 2, 3]
    with pytest.raises(TransportError, match="not mapped"):
        memory.local(4 * MIB, 1)
    more()
    assert not memory.local(4 * MIB, 3 * MIB).any()
    return {"extend": sorted(extending), "reserve": sorted(reserving)}


def fails_at(body: Callable[[], object], call: str, failing: int, group: Group) -> None:
    """On that rank its own error, on the others one that names it and the cause."""
    name = call.split(":")[0]
    control().fail(f"{call}:CUDA_ERROR_UNKNOWN" if group.rank == failing else "")
    kind: type[Exception] | None = None
    try:
        body()
    except MoeNvlinkError as error:
        kind, text = type(error), str(error)
    finally:
        control().fail()
    assert kind is not None, f"{call} did not raise"
    if kind is UnsupportedError:
        # What a trial is for: the ranks agree that it cannot be, and say where it failed.
        named = f"rank {failing} "
    elif group.rank == failing:
        assert kind in (DriverError, TransportError), f"{call}: {kind}: {text}"
        named = ""
    else:
        assert kind is PeerError, f"{call}: {kind}: {text}"
        named = f"rank {failing}: "
    assert named in text, f"{call}: {text}"
    assert f"{name}: CUDA_ERROR_UNKNOWN" in text, f"{call}: {text}"
    group.all_gather_object(None)


def test_a_rank_that_is_killed_in_the_middle(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 while it takes the others' descriptors: an error that names it, and soon."""
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "20")
    results = driven(killed_body, ranks=3, killed=(1,), kernels="")
    for rank in (0, 2):
        kind, message, seconds, left = results[rank]
        assert kind in ("TransportError", "PeerError")
        assert "rank 1 " in message or "rank(s) 1 " in message
        assert seconds < 15
        assert left["handles"] == left["mappings"] == 0


def killed_body(rank: int, size: int) -> tuple[str, str, float, dict[str, int]]:
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=3))  # it says soon, on every rank, who is missing
    group = StoreGroup(store, "killed", rank, size)
    memory = FakeNvlinkTransport().reserve(group, 4 * MIB, CPU)
    if rank == 1:
        control().fail("cuMemImportFromShareableHandle:1:KILL")
    start = time.monotonic()
    with pytest.raises((PeerError, TransportError)) as caught:
        memory.extend([Extent(0, 100)])
    seconds = time.monotonic() - start
    return type(caught.value).__name__, str(caught.value), seconds, control().live()


# ---- what is refused, and what the message says


def variables(**values: object) -> Any:
    return mock.patch.dict(os.environ, {name: str(value) for name, value in values.items()})


def refusals_body(_rank: int, _size: int) -> None:
    """Every rank says the same: names, cause, next step."""
    before = state()
    instead = ("allgather_reducescatter", "DeepEP")
    with variables(FAKE_CUDA_MIG=1):
        refused(("rank 0", "rank 1", "MIG", "nvidia-smi -mig 0", *instead))
    with variables(FAKE_CUDA_P2P=0):
        refused(("rank 0", "rank 1", "no peer-to-peer access", "nvidia-smi topo", *instead))
    with variables(FAKE_CUDA_ATOMICS=0):
        refused(("rank 0", "rank 1", "by PCIe, not by NVLink", *instead))
    one_process = (f"threads of one process (pid {os.getpid()})", "ranks 0 and 1", "set_device")
    with variables(FAKE_CUDA_SHARED_UUID=1):
        refused((*one_process, "on one stream", "a process of its own"))
        with variables(MOE_NVLINK_ALLOW_SHARED_GPU=1):
            refused(one_process)
    with variables(FAKE_CUDA_VMM=0):
        refused(("no virtual memory management", *instead))
    with variables(FAKE_CUDA_CAPABILITY="8.0"):
        refused(("compute capability 8.0", "9.0"))
    with hosts_apart():
        refused(("2 hosts", "no FABRIC", "rank 0", "rank 1", "IMEX", "--network host", *instead))
        with variables(FAKE_CUDA_FABRIC="broken"):
            refused(("FABRIC", "cuMemCreate: CUDA_ERROR_NOT_PERMITTED", "imex-channels"))
        with variables(FAKE_CUDA_FABRIC=1):
            memories = run_ranks(2, reserve)
            assert [memory._sharing for memory in memories] == [vmm.Sharing.FABRIC] * 2
            control().fail("cuMemImportFromShareableHandle:1:CUDA_ERROR_NOT_PERMITTED")
            refused(("cannot import the memory of rank", "one NVLink domain", "imex", *instead))
            control().fail()
            del memories
    with mock.patch.object(registry, "find_transport", return_value=FakeNvlinkTransport()):
        run_ranks(2, check_connected)  # `state` below: it leaves nothing
        with hosts_apart():
            refused(("2 hosts", "no FABRIC", *instead), check_connected)
    refused(
        ("was asked to map", "configurations differ"),
        lambda group: reserve(group).extend([Extent(0, 1 + group.rank)]),
    )
    refused(
        ("2 x 1152921504606846976 bytes", "cuMemAddressReserve: CUDA_ERROR_OUT_OF_MEMORY"),
        lambda group: FakeNvlinkTransport().reserve(group, 2**60, CPU),
    )
    assert state() == before


def one_gpu_body(rank: int, size: int) -> None:
    """Refused if not asked for; else each learns how many there are, and shares memory as ever."""
    before, group = state(), world()
    words = ("ranks 0 and 1 are both on GPU", "set_device", "MOE_NVLINK_ALLOW_SHARED_GPU=1")
    with pytest.raises(UnsupportedError) as caught:
        FakeNvlinkTransport().reserve(group, 100, CPU)
    assert all(word in str(caught.value) for word in words), caught.value
    with variables(MOE_NVLINK_ALLOW_SHARED_GPU=1):
        memory = allocated(FakeNvlinkTransport(), group, 100)
    assert memory.ranks_on_device == 2
    memory.local(0, 100).fill_(rank + 1)
    group.all_gather_object(None)
    assert peers_bytes(memory, size, 99) == [1, 2]
    group.all_gather_object(None)
    memory.close()
    del memory
    assert state() == before


def reserve(group: ThreadGroup) -> NvlinkMemory:
    return FakeNvlinkTransport().reserve(group, 100, CPU)


def hosts_apart() -> Any:
    names = map("host {}".format, itertools.count())
    return mock.patch.object(topology, "host_id", side_effect=names)


def refused(words: tuple[str, ...], body: Callable[..., Any] = reserve) -> None:
    for outcome in try_ranks(2, body):
        assert isinstance(outcome, UnsupportedError | TransportError), outcome
        for word in words:
            assert word in str(outcome), f"{word!r} is not in: {outcome}"


def facts(**values: Any) -> topology.Facts:
    usual = topology.Facts(
        host="host",
        host_name="box",
        index=0,
        name="GPU",
        uuid="u",
        capability=(9, 0),
        is_mig=False,
        posix=True,
        fabric_error="none here",
        fabric_trial=None,
        links={},
        process=("pid:[1]", 1),
        allow_shared_gpu=False,
    )
    return dataclasses.replace(usual, **values)


def test_ranks_with_different_gpus() -> None:
    ranks = [facts(uuid="a"), facts(uuid="b", capability=(10, 0), name="Other", index=1)]
    with pytest.raises(UnsupportedError, match="rank 1 runs on GPU 1 of box .Other.*10.0.*rank 0"):
        topology.decide(ranks)


def test_one_link_among_many_is_enough_to_refuse() -> None:
    """What rank 2 knows of its link to rank 1 is an error on all."""
    ranks = [facts(uuid=name) for name in "abc"]
    assert topology.decide(ranks) is vmm.Sharing.POSIX
    ranks[2] = facts(uuid="c", links={"a": topology.Link.NVLINK, "b": topology.Link.NONE})
    with pytest.raises(UnsupportedError, match="rank 2 .* reaches rank 1 "):
        topology.decide(ranks)


def test_who_shares_how() -> None:
    apart = [facts(uuid=name, host=name, fabric_trial=b"x") for name in "ab"]
    assert topology.decide(apart) is vmm.Sharing.FABRIC
    no_descriptors = [dataclasses.replace(one, host="a", posix=False) for one in apart]
    assert topology.decide(no_descriptors) is vmm.Sharing.FABRIC
    apart[0] = facts(uuid="a", host="a")
    with pytest.raises(UnsupportedError, match=r"box: ranks 0; box: ranks 1.*rank 0.*none here"):
        topology.decide(apart)
    # A shared GPU must be allowed by all; a single rank may be on anything.
    shared = [facts(allow_shared_gpu=True), facts(process=("pid:[1]", 2))]
    with pytest.raises(UnsupportedError, match="ranks 0 and 1 are both on GPU 0"):
        topology.decide(shared)
    assert topology.decide([facts(is_mig=True)]) is vmm.Sharing.POSIX


def test_who_shares_a_gpu() -> None:
    """Threads of one process never; processes may, two containers' first ones too."""
    first = facts(uuid="a", allow_shared_gpu=True)
    second = dataclasses.replace(first, process=("pid:[1]", 2))
    other_container = dataclasses.replace(first, process=("pid:[2]", 1))
    elsewhere = dataclasses.replace(first, uuid="b")
    ranks = [first, elsewhere, second, other_container]
    assert topology.decide(ranks) is vmm.Sharing.POSIX
    assert [topology.ranks_on_gpu(rank, ranks) for rank in range(4)] == [3, 1, 3, 3]
    sibling = dataclasses.replace(second, index=1)
    with pytest.raises(
        UnsupportedError, match=r"ranks 2 and 4 are threads of one process \(pid 2\) and both on"
    ):
        topology.decide([*ranks, sibling])


def test_without_a_driver() -> None:
    if driver.unavailable() is None:
        pytest.skip("there is a driver")
    gpu = torch.device("cuda")
    for outcome in try_ranks(2, lambda group: NvlinkTransport().reserve(group, 1, gpu)):
        assert isinstance(outcome, UnsupportedError)
        assert "no CUDA driver" in str(outcome)


def test_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = topology.host_id()
    assert here == topology.host_id()
    monkeypatch.setattr(os, "readlink", lambda path: "net:[1]")
    elsewhere = topology.host_id()
    assert elsewhere != here
    monkeypatch.setattr(os, "readlink", os.stat)  # a file that does not exist: OSError
    assert topology.host_id()


# ---- small things


def single_body(_rank: int, _size: int) -> None:
    """What needs a driver but no peer, in one process."""
    (group,) = ThreadGroup.ranks(1)
    before = state()
    for body in (out_of_memory_body, wrong_extents_body, copying_body, capturing_body):
        body(group)
        assert state() == before, body.__name__
    leaking_body(group)


def out_of_memory_body(group: ThreadGroup) -> None:
    """With the formula, the sizes, and the three ways to make it fit."""
    memory = FakeNvlinkTransport().reserve(group, 64 * MIB, CPU)
    memory.extend([Extent(0, 2 * MIB)])
    with pytest.raises(TransportError) as caught:
        memory.extend([Extent(2 * MIB, 8 * MIB), Extent(12 * MIB, 20 * MIB)])
    for word in (
        *(f"for {28 * MIB} more", f"{14 * MIB} of its {16 * MIB} bytes", "ep_size (1) x"),
        *("max_tokens_per_rank", "payload rows", "recipe or dtype", "num_channels"),
        "--gpu-memory-utilization",
    ):
        assert word in str(caught.value), word
    with pytest.raises(TransportError, match="not mapped"):
        memory.local(2 * MIB, 1)
    memory.extend([Extent(2 * MIB, 14 * MIB)])


def wrong_extents_body(group: ThreadGroup) -> None:
    memory = FakeNvlinkTransport().reserve(group, 5 * MIB, CPU)
    assert memory.rank_stride == 6 * MIB
    memory.extend([Extent(0, 1)])
    for extents, words in (
        ([Extent(4096, 1)], "multiple of 2097152"),
        ([Extent(0, 1)], "overlaps"),
        ([Extent(4 * MIB, 3 * MIB)], "after the 6291456 bytes"),
        ([], "no extents"),
    ):
        with pytest.raises(TransportError, match=words):
            memory.extend(extents)
    assert memory.local(100, 0).numel() == 0
    assert memory.local(0, 2 * MIB).untyped_storage().data_ptr() == memory.base_ptr


class CopyingTransport(FakeNvlinkTransport):
    def _view(self, device: torch.device) -> nvlink.View:
        inner = super()._view(device)
        return lambda owner, address, size: inner(owner, address, size).clone()


def copying_body(group: ThreadGroup) -> None:
    """torch.as_tensor copies, without a word, when it is asked for another device."""
    memory = allocated(CopyingTransport(), group, 10)
    with pytest.raises(TransportError, match="copy of GPU memory instead of a view"):
        memory.local(0, 10)


def capturing_body(group: ThreadGroup) -> None:
    """Collected while some thread captures: waiting for the GPU would break the capture."""
    before = state()
    memory = allocated(FakeNvlinkTransport(), group, 10)
    view = memory.local(0, 10)
    memory.close()
    control().fail()
    del memory, view
    gc.collect()
    assert not control().calls(), "the garbage collector called the driver"
    assert control().live()["mappings"] == 1
    # The next exchange that is made or closed may wait for the GPU, and does.
    allocated(FakeNvlinkTransport(), group, 10).close()
    gc.collect()
    nvlink.unmap_unused()
    assert state() == before


def leaking_body(group: ThreadGroup) -> None:
    memory = allocated(FakeNvlinkTransport(), group, 10)
    assert not memory.window._free.atexit, "the driver may be gone before Python ends"
    memory.local(0, 10).fill_(5)
    address = memory.base_ptr
    memory.leak()
    memory.close()
    del memory
    assert state()[0]["mappings"] == 1
    assert byte_at(0, address) == 5


@pytest.mark.parametrize(
    ("body", "num_ranks", "options"),
    [
        (crowded_body, 1, {"devices": 2}),
        (many_body, 1, {"devices": 20}),
        (refusals_body, 1, {}),
        (one_gpu_body, 2, {"shared_uuid": 1}),
        (single_body, 1, {"memory": 16 * MIB}),
    ],
)
def test_in_processes_of_their_own(
    body: Callable[..., None], num_ranks: int, options: dict[str, int], driven: Driven
) -> None:
    driven(body, ranks=num_ranks, kernels="", **options)
