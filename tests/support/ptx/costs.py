"""What things cost on an H200 and on a GB200: the one table that the clock reads.

Each row says where its two numbers come from. KNOWN are the kinds of origin: a number that this
project has measured, one that was measured by others and published, a data sheet's, an estimate of
this project's, and a number that was fitted to the published times of one-sided dispatch and
combine (benchmarks/ptx_clock.py --fit; --calibrate says what remains as error). **Nothing was
measured on a GB200, nor what crosses NVLink.**

Sources:
    h200        benchmarks/gpu_constants.py on one H200, 2026-11-26, medians:
                benchmarks/results/2026-11-26-h200-2-constants.json
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

KNOWN = ("measured", "published", "data sheet", "estimate", "fitted")
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


def _measured(
    name: str,
    unit: str,
    h200: float,
    gb200: float,
    meaning: str,
    *,
    said: str = "",
    source: str = "",
    known: str = "estimate",
) -> Cost:
    """Of an H200 measured; `said`: what is to be known of it; `source`, `known`: of GB200's."""
    sources = f"h200{', ' if said else ''}{said}" + (f"; GB200: {source}" if source else "")
    return Cost(name, unit, h200, gb200, ("measured", known), sources, meaning)


#: Of the SMs; turns cycles into ns. H200's is measured.
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
    _measured("shared_ns", "cycles", 23, 29, "load of shared memory", source="hopper"),
    _measured(
        "l1_ns", "cycles", 34, 40, "load, hit in L1", source="latency, b200", known="published"
    ),
    _measured(
        "l2_ns",
        "cycles",
        282.4,
        295,
        "load, hit in L2",
        said="volatile and relaxed loads alike; HBM 664",
        source="latency, b200",
        known="published",
    ),
    Cost(
        "remote_ns",
        "ns",
        2980,
        2980,
        ("estimate", "fitted"),
        "the fit; H200: as GB200",
        "load from a peer; store and acknowledgement: half of it one way",
    ),
    _measured(
        "fence_gpu_ns",
        "ns",
        138.4,
        200,
        "MEMBAR.GPU with nothing outstanding",
        said="220 to 423 behind local stores, 2235 while other SMs store",
        source="review",
    ),
    _measured(
        "fence_sys_ns",
        "ns",
        559.1,
        3600,
        "MEMBAR.SYS with nothing outstanding",
        said="559 to 678 behind local stores, 1771 to 2534 while other SMs store",
        source="the fit, which cannot tell it from ranks that begin late",
        known="fitted",
    ),
    _measured("acquire_ns", "ns", 3.3, 30, "CCTL.IVALL after a load", source="review"),
    _measured(
        "atomic_ns",
        "ns",
        263.0,
        180,
        "atomic, there and back",
        source="an L2 hit and the operation",
    ),
    _measured("atomic_gap_ns", "cycles", 1.45, 2, "between two atomics on one word"),
    _measured(
        "barrier_ns", "cycles", 28.7, 30, "bar.sync after the last warp came", said="256 threads"
    ),
    _measured("warp_barrier_ns", "cycles", 1.94, 10, "bar.warp.sync", said="of a converged warp"),
    _measured(
        "shuffle_ns",
        "cycles",
        26.0,
        24,
        "shfl, redux, vote: until the result is there",
        said="shfl; redux 44",
    ),
    _measured(
        "launch_ns",
        "ns",
        1728,
        1820,
        "one more kernel in a stream, its start and its end",
        said="from the last CTA's end to the first one's start; in a graph 608",
        source="the fit",
        known="fitted",
    ),
    _measured(
        "pdl_ns",
        "ns",
        480,
        500,
        "end of a kernel to griddepcontrol.wait of the next one returning",
        said="in a graph 352",
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
#: where the published benchmark adds something that is no cost of the machine. See expected().
EXPECTED = {"launch_ns": 1200.0, "remote_ns": 1150.0, "fence_sys_ns": 650.0}
FITTED = tuple(row.name for row in TABLE if "fitted" in row.known)


def expected(machine: str) -> dict[str, float]:
    """Return EXPECTED, less what is measured of the machine."""
    of = MACHINES.index(machine)
    measured = {row.name for row in TABLE if row.known[of] == "measured"}
    return {name: value for name, value in EXPECTED.items() if name not in measured}


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
