"""What things cost on an H200 and on a GB200: the one table that the clock reads.

Each row says where its two numbers come from. KNOWN are the kinds of origin: a number that was
measured by others and published, a data sheet's, an estimate of this project's, and a number that
was fitted to the published times of one-sided dispatch and combine (benchmarks/ptx_clock.py --fit;
--calibrate says what remains as error). **This project has measured none of them.**

Sources:
    latency     github.com/markdewing/AI_kernels, latency/README.md: pointer chasing in cycles,
                GH200 (as H200) and B200
    hopper      "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
                Microbenchmarking", arXiv 2402.13499 (the table of latencies, from memory)
    b200        "Nvidia's B200: Keeping the CUDA Juggernaut Rolling", Chips and Cheese: 39 cycles of
                L1 are 19.6 ns, L2 is about 150 ns
    nccl        github.com/NVIDIA/nccl, issue 1264: 371 to 377 GB/s of writes between two H100
    nvlink      Foley and Danskin, "Ultra-Performance Pascal GPU and NVLink Interconnect", IEEE
                Micro 2017: flits of 16 bytes, one of them the header (from memory); assumed to hold
                for NVLink 4 and 5
    sheet       NVIDIA's data sheets of H200 and GB200 NVL72
    review      estimates of a reading of the kernels' SASS; no GPU was there
    the fit     benchmarks/ptx_clock.py --fit: three numbers, from 12 published times of
                GB200, 8 ranks, 1, 4 and 16 tokens, dispatch and combine, with and without flags
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

KNOWN = ("published", "data sheet", "estimate", "fitted")
MACHINES = ("h200", "gb200")


class Cost(NamedTuple):
    """One row of the table.

    Attributes:
        unit: "cycles" (of an SM), "ns", "GB/s", "B/cycle", "bytes" or "": how numbers become what
            the clock takes, which is ns, bytes and bytes per ns.
        known: of H200's number and of GB200's: one of KNOWN.
    """

    name: str
    unit: str
    h200: float
    gb200: float
    known: tuple[str, str]
    source: str
    meaning: str


def _estimate(name: str, unit: str, value: float, source: str, meaning: str) -> Cost:
    return Cost(name, unit, value, value, ("estimate", "estimate"), source, meaning)


#: Of the SMs; turns cycles into ns.
SM_GHZ = {"h200": 1.98, "gb200": 1.965}

TABLE = (
    Cost("num_sms", "", 132, 148, ("data sheet",) * 2, "sheet", "streaming multiprocessors"),
    _estimate("threads_per_sm", "", 1024, "kernels of 64 registers", "resident at a time"),
    _estimate("issue_ns", "cycles", 2.0, "half of a dependent instruction's 4", "an instruction"),
    _estimate(
        "crowded_issue_ns",
        "cycles",
        0.125,
        "4 schedulers, half of the warps issue",
        "the same, for each warp of the SM",
    ),
    _estimate("slow_instructions", "", 20, "SASS of div.s32", "instructions of a division"),
    Cost(
        "shared_ns", "cycles", 29, 29, ("published", "estimate"), "hopper", "load of shared memory"
    ),
    Cost("l1_ns", "cycles", 40, 40, ("published",) * 2, "latency, b200", "load, hit in L1"),
    Cost("l2_ns", "cycles", 281, 295, ("published",) * 2, "latency, b200", "load, hit in L2"),
    Cost(
        "remote_ns",
        "ns",
        2980,
        2980,
        ("estimate", "fitted"),
        "the fit; H200: as GB200",
        "load from a peer; store and acknowledgement: half of it one way",
    ),
    _estimate("fence_gpu_ns", "ns", 200, "review", "MEMBAR.GPU with nothing outstanding"),
    Cost(
        "fence_sys_ns",
        "ns",
        3600,
        3600,
        ("estimate", "fitted"),
        "the fit, which cannot tell it from ranks that begin late; H200: as GB200",
        "MEMBAR.SYS with nothing outstanding",
    ),
    _estimate(
        "gpu_fence_waits_remote",
        "",
        1,
        "a later MEMBAR.SYS of another SM has its own stores only to wait for",
        "whether MEMBAR.GPU waits for acknowledgements of peers",
    ),
    _estimate("acquire_ns", "ns", 30, "review", "CCTL.IVALL after a load"),
    _estimate("atomic_ns", "ns", 180, "an L2 hit and the operation", "atomic, there and back"),
    _estimate("atomic_gap_ns", "cycles", 2, "", "between two atomics on one word"),
    _estimate("barrier_ns", "cycles", 30, "", "bar.sync after the last warp came"),
    _estimate("warp_barrier_ns", "cycles", 10, "", "bar.warp.sync"),
    _estimate("shuffle_ns", "cycles", 24, "", "shfl, redux, vote: until the result is there"),
    Cost(
        "launch_ns",
        "ns",
        1820,
        1820,
        ("estimate", "fitted"),
        "the fit; H200: as GB200",
        "one more kernel in a stream, its start and its end",
    ),
    _estimate(
        "pdl_ns", "ns", 500, "", "end of a kernel to griddepcontrol.wait of the next one returning"
    ),
    Cost(
        "link_bytes_per_ns",
        "GB/s",
        450 * 0.94,
        900 * 0.94,
        ("published", "estimate"),
        "sheet; nccl: 376 of 450 GB/s, of which headers leave 8/9; GB200: the same share",
        "one direction of all links, headers included",
    ),
    _estimate("header_bytes", "bytes", 16, "nvlink", "of a packet: up to 128 bytes, one line"),
    _estimate("granule_bytes", "bytes", 32, "a sector", "least payload of a packet"),
    _estimate("sm_bytes_per_ns", "B/cycle", 64, "", "stores of an SM, and as many loads"),
    _estimate("sm_lines_in_flight", "", 256, "8 TB/s x 438 ns / 148 SMs = 24 KB", "of 128 bytes"),
    _estimate(
        "thread_loads_in_flight",
        "",
        0,
        "SASS of our kernels and of FlashInfer's holds all loads of a row's parts",
        "wide loads for which a thread has registers; 0: any number",
    ),
)

_TO_NS = {"cycles": lambda ghz: 1 / ghz, "B/cycle": lambda ghz: ghz}


#: What a reader of the kernels' SASS expects instead of the fitted numbers: how low times could be,
#: where the published benchmark adds something that is no cost of the machine.
EXPECTED = {"launch_ns": 1200.0, "remote_ns": 1150.0, "fence_sys_ns": 650.0}
FITTED = tuple(row.name for row in TABLE if "fitted" in row.known)


def costs(machine: str, changes: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return what the clock takes: ns, bytes, bytes per ns.

    Args:
        machine: one of MACHINES.
        changes: name -> a number in the table's unit that replaces the table's.

    Raises:
        KeyError: a change of a row that the table lacks.
    """
    ghz = SM_GHZ[machine]
    changed = dict(changes or {})
    found = {}
    for row in TABLE:
        value = changed.pop(row.name, getattr(row, machine))
        found[row.name] = value * _TO_NS[row.unit](ghz) if row.unit in _TO_NS else float(value)
    if changed:
        raise KeyError(f"no such cost: {', '.join(changed)}; there are {', '.join(found)}")
    return found
