"""Measure on one GPU what tests/support/ptx/costs.py assumes of it: latencies, fences, launches.

    python benchmarks/gpu_constants.py --output_file constants.json
    python benchmarks/gpu_constants.py --device rehearsal     # software GPU: times mean nothing

A row has median, least and 90th percentile, in cycles and in ns, and beside them what costs.py says
of an H200 where it has such a row. The kernels are gpu_constants.cu; none of them waits longer than
2 s. A measurement that fails leaves its error in its row.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.columns import print_headings
from benchmarks.common import Record, describe_gpu, describe_run
from moe_nvlink_plugin import driver
from moe_nvlink_plugin.jit import nvrtc
from tests.support.ptx import costs

SOURCE = Path(__file__).with_suffix(".cu")
#: As in SOURCE: what its waits leave when they give up. The other one stands there before a launch.
GAVE_UP, UNWRITTEN = -1, -2
#: Of what a fence waits for, and of the shape of most launches.
THREADS = 256
#: Where the SM's clock could not be measured.
ASSUMED_GHZ = costs.SM_GHZ["h200"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done; the defaults are a GPU's.

    Attributes:
        straight: instructions of code that is executed cold, 16 bytes each.
        noisy_ctas: that store while another one's fence is timed; 0: one on each other SM.
    """

    repeats: int = 64
    steps: int = 512
    l2_bytes: int = 2 << 20
    hbm_bytes: int = 256 << 20
    straight: int = 4096
    launches: int = 100
    wide_ctas: int = 396
    stay_ns: int = 10_000
    ahead_ns: int = 8_000_000
    spin_ns: int = 5_000_000
    noisy_ctas: int = 0
    stores: tuple[int, ...] = (1, 8, 32, 128)


SMALL = Sizes(3, 16, 16 << 10, 32 << 10, 16, 3, 5, 1000, 1000, 10_000, 2, (1, 8))


class Given(ctypes.Structure):
    """What every kernel takes, as in SOURCE."""

    _fields_ = (
        ("out", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("n", ctypes.c_uint32),
        ("repeats", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("warmup", ctypes.c_uint32),
    )


def text(sizes: Sizes) -> str:
    """Return the translation unit."""
    return f"constexpr unsigned kStraight = {sizes.straight};\n{SOURCE.read_text()}"


class Gpu:
    """One GPU with the kernels, a stream of its own, and memory for what they leave."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.facts = sizes, driver.device(0)
        self._is_real = device == "cuda"
        code = nvrtc.load_or_compile(text(sizes), self.facts.architecture)
        self.out = torch.empty(1 << 18, dtype=torch.int64, device=device)
        self.memory = torch.zeros(32 << 20, dtype=torch.uint8, device=device)
        with driver.on_device(0):
            self._module = driver.call("cuModuleLoadData", code)
            flag = driver.api().CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = driver.call("cuStreamCreate", flag)

    @functools.cache  # noqa: B019 - one GPU a process
    def _function(self, name: str) -> Any:
        function = driver.call("cuModuleGetFunction", self._module, name.encode())
        driver.call("cuFuncLoad", function)
        return function

    def launch(
        self,
        name: str,
        ctas: int,
        threads: int,
        *,
        memory: int = 0,
        n: int = 0,
        repeats: int = 1,
        mode: int = 0,
        warmup: int = 0,
        offset: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch one kernel, whose `out` begins at word `offset`. Wait for nothing."""
        api, config = driver.api(), driver.api().CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream = self.stream
        if pdl:
            attribute, ids = api.CUlaunchAttribute(), api.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        out = self.out.data_ptr() + 8 * offset
        given = Given(out, memory or self.memory.data_ptr(), n, repeats, mode, warmup)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        address = ctypes.addressof(pointers)
        driver.call("cuLaunchKernelEx", config, self._function(name), address, 0)

    def prepare(self) -> None:
        """Make `out` unwritten and what kernels poll 0."""
        self.out.fill_(UNWRITTEN)
        self.memory[:4096].zero_()
        if self._is_real:
            torch.cuda.synchronize()

    def words(self, count: int, offset: int = 0) -> list[int]:
        """Return what kernels have left.

        Raises:
            RuntimeError: a kernel gave up, or left nothing.
        """
        driver.call("cuStreamSynchronize", self.stream)
        found: list[int] = self.out[offset : offset + count].tolist()
        if GAVE_UP in found:
            raise RuntimeError(f"a wait in the kernel gave up, word {found.index(GAVE_UP)}")
        if UNWRITTEN in found:
            raise RuntimeError(f"the kernel has not written word {found.index(UNWRITTEN)}")
        return found

    def sampled(self, kernel: str, *, ctas: int = 1, threads: int = 1, **given: Any) -> list[float]:
        """Run a kernel that leaves a sample for each repeat."""
        self.prepare()
        self.launch(kernel, ctas, threads, repeats=self.sizes.repeats, **given)
        return [float(word) for word in self.words(self.sizes.repeats)]

    def steps(self, kernel: str, *, n: int = 0, **given: Any) -> list[float]:
        """As sampled, of one step where a sample does n."""
        n = n or self.sizes.steps
        return [sample / n for sample in self.sampled(kernel, n=n, **given)]

    def chase(self, load: str, size: int, *, evicted: bool = False) -> list[float]:
        """Load along a ring of lines in random order, warm unless `evicted`."""
        lines = size // 128
        ring = torch.zeros((lines, 16), dtype=torch.int64, device=self.out.device)
        order = torch.randperm(lines, device=self.out.device)
        ring[order, 0] = ring.data_ptr() + 128 * order.roll(-1)
        if evicted:
            torch.ones_like(ring)
        first = ring.data_ptr() + 128 * int(order[0])
        return self.steps(f"chase_{load}", memory=first, warmup=0 if evicted else lines)

    def ping(self, kernel: str) -> list[float]:
        """Return halves of round trips between CTA 0's SM and several others."""
        found = []
        last = self.facts.num_sms
        for ctas in (2, 3, last // 2, last - 1, last):
            self.prepare()
            self.launch(kernel, ctas, 1, repeats=self.sizes.repeats)
            one, other, *trips = self.words(self.sizes.repeats + 2)
            if one != other or not self._is_real:
                found += [trip / 2 for trip in trips[len(trips) // 4 :]]
        return found

    def crowd(self, kernel: str) -> list[float]:
        """Return ns between two atomics on one word: a lane of 8 warps of each SM at once."""
        ctas, n = self.facts.num_sms, self.sizes.steps
        warps, found = ctas * THREADS // 32, []
        for _ in range(10 if self._is_real else 1):
            self.prepare()
            self.launch(kernel, ctas, THREADS, n=n)
            words = self.words(2 * warps)
            found.append((max(words[1::2]) - min(words[::2])) / (warps * n))
        return found

    def speed(self) -> list[float]:
        """Return GHz of the SM; the first repeats, in which clocks may rise, are left out."""
        self.prepare()
        self.launch("speed", 1, 1, n=self.sizes.spin_ns, repeats=20)
        words = self.words(40)
        return [ran / max(ns, 1) for ran, ns in zip(words[10::2], words[11::2], strict=True)]

    def straight(self) -> list[float]:
        """Return cycles that cold code costs, for each 128 bytes; other code runs before it."""
        found = []
        for _ in range(10 if self._is_real else 1):
            self.prepare()
            for name in ("straight_b", "straight_c", "straight_a"):
                self.launch(name, 1, 32, n=3)
            first, second = self.words(2)
            found.append((first - second) * 128 / (16 * self.sizes.straight))
        return found

    def stamps(self, ctas: int, *, pdl: bool, graph: bool) -> list[list[list[int]]]:
        """Launch kernels one after another; return [kernel][CTA][begun, free, ended].

        The host is ahead: a long kernel comes first, or one graph has all of them.
        """
        count, words = self.sizes.launches, 3 * ctas
        self._function("stamp")  # nothing is loaded during a capture
        self.prepare()
        if graph:
            relaxed = driver.api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            driver.call("cuStreamBeginCapture", self.stream, relaxed)
        else:
            last = self.out.numel() - 3
            self.launch("stamp", 1, THREADS, n=self.sizes.ahead_ns, offset=last)
        given = {"n": self.sizes.stay_ns, "mode": int(pdl)}
        try:
            for number in range(count):
                is_pdl = pdl and number > 0
                self.launch("stamp", ctas, THREADS, offset=words * number, pdl=is_pdl, **given)
        finally:  # during a capture no other row could be measured
            captured = driver.call("cuStreamEndCapture", self.stream) if graph else None
        if graph:
            self._replay(captured)
        found = torch.tensor(self.words(words * count)).view(count, ctas, 3)
        stamps: list[list[list[int]]] = found.tolist()
        return stamps

    def _replay(self, graph: Any) -> None:
        """Replay three times; what the last replay leaves is what stays."""
        if not self._is_real:
            from tests.support import fake_cuda

            fake_cuda.control().replay()
            return
        executable = driver.call("cuGraphInstantiate", graph, 0)
        for _ in range(3):
            driver.call("cuGraphLaunch", executable, self.stream)
        driver.call("cuStreamSynchronize", self.stream)
        driver.call("cuGraphExecDestroy", executable)

    def gaps(self, ctas: int, stamp: int, *, pdl: bool, graph: bool) -> list[float]:
        """Return ns from a kernel's last end to the next one's first stamp: 0 begun, 1 free."""
        found = self.stamps(ctas, pdl=pdl, graph=graph)
        ends = [max(cta[2] for cta in kernel) for kernel in found]
        starts = [min(cta[stamp] for cta in kernel) for kernel in found]
        return [float(start - end) for end, start in zip(ends, starts[1:], strict=False)]

    def spread(self, ctas: int) -> list[float]:
        """Return ns from the first CTA's start to the last one's."""
        found = self.stamps(ctas, pdl=False, graph=False)
        starts = [[cta[0] for cta in kernel] for kernel in found]
        return [float(max(times) - min(times)) for times in starts[1:]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row. `cost`: its name in costs.py, where that has it."""

    name: str
    unit: str
    cost: str | None
    take: Callable[[], Sequence[float]]


class Plan(list[Measurement]):
    """What is measured, in its order."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._sizes, self._last = gpu, gpu.sizes, gpu.facts.num_sms
        self._add("SM clock", "GHz", None, gpu.speed)
        self._add("cold code, more for each 128 bytes", "cycles", None, gpu.straight)
        tick = {"kernel": "tick", "n": 1 << 20}
        self._add("globaltimer, steps that are not 0", "ns", None, gpu.sampled, **tick)
        self._loads()
        self._fences()
        self._pairs()
        self._chains()
        self._launches()
        self._add("SM clock at the end", "GHz", None, gpu.speed)

    def _add(
        self, name: str, unit: str, cost: str | None, body: Callable[..., Any], **given: Any
    ) -> None:
        self.append(Measurement(name, unit, cost, functools.partial(body, **given)))

    def _loads(self) -> None:
        chase = functools.partial(self._add, unit="cycles", body=self._gpu.chase)
        chase("ld.weak, hit in L1", cost="l1_ns", load="weak", size=4096)
        for load in (
            *("weak", "volatile", "relaxed_gpu", "relaxed_sys", "acquire_gpu", "acquire_sys"),
        ):
            cost, size = "l2_ns" if load == "weak" else None, self._sizes.l2_bytes
            chase(f"ld.{load}, hit in L2", cost=cost, load=load, size=size)
        for load in ("weak", "relaxed_sys"):
            size = self._sizes.hbm_bytes
            chase(f"ld.{load}, HBM", cost=None, load=load, size=size, evicted=True)

    def _fences(self) -> None:
        for scope in ("gpu", "sys"):
            name, kernel = f"fence.{scope}", f"fence_{scope}"
            fence = functools.partial(
                self._add, unit="cycles", body=self._gpu.sampled, kernel=kernel
            )
            fence(f"{name}, nothing outstanding", cost=f"{kernel}_ns", n=0)
            row = {"kernel": f"op_{kernel}", "n": 16}
            self._add(f"{name}, 16 in a row", "cycles", None, self._gpu.steps, **row)
            for n in self._sizes.stores:
                after = f"{name} after {n} stores of 16 bytes"
                fence(f"{after} of a thread", cost=None, n=n)
                fence(f"{after} of each of {THREADS} threads", cost=None, n=n, threads=THREADS)
            ctas = 1 + (self._sizes.noisy_ctas or self._last - 1)
            for n in (0, 8):
                beside = f"{name} after {n} stores, other SMs store"
                fence(beside, cost=None, n=n, threads=THREADS, ctas=ctas)

    def _pairs(self) -> None:
        """What SMs do with one another: flags and atomics."""
        for kind in (
            *("relaxed_relaxed", "release_relaxed", "release_acquire", "release_relaxed_acquire"),
        ):
            store, _, load = kind.partition("_")
            name, kernel = f"st.{store}.sys to ld.{load}.sys, one way", f"ping_{kind}"
            self._add(name, "cycles", None, self._gpu.ping, kernel=kernel)
        for scope in ("gpu", "sys"):
            cost, gap = ("atomic_ns", "atomic_gap_ns") if scope == "gpu" else (None, None)
            atom, steps = f"atom.add.{scope}", self._gpu.steps
            self._add(atom, "cycles", cost, steps, kernel=f"atom_{scope}")
            name = f"red.add.{scope} and fence.{scope}"
            self._add(name, "cycles", None, steps, kernel=f"red_fence_{scope}")
            name = f"{atom} of all SMs on one word, gap"
            self._add(name, "ns", gap, self._gpu.crowd, kernel=f"crowd_{scope}")

    def _chains(self) -> None:
        known = {"shared": "shared_ns", "shfl": "shuffle_ns", "warp_barrier": "warp_barrier_ns"}
        chain = functools.partial(self._add, unit="cycles", body=self._gpu.steps)
        for op in ("nothing", "mad", "div32", "div64", "redux", *known, "clock", "globaltimer"):
            chain(f"{op}, in a row", cost=known.get(op), kernel=f"op_{op}", threads=32)
        name = f"bar.sync of {THREADS} threads"
        chain(name, cost="barrier_ns", kernel="op_barrier", threads=THREADS)

    def _launches(self) -> None:
        for ctas, graph in itertools.product((1, self._last), (False, True)):
            shape = f"{ctas} CTAs, {'graph' if graph else 'stream'}"
            in_costs = ctas > 1 and not graph
            gap = functools.partial(
                self._add, unit="ns", body=self._gpu.gaps, ctas=ctas, graph=graph
            )
            gap(
                f"end to start, {shape}", cost="launch_ns" if in_costs else None, stamp=0, pdl=False
            )
            # With PDL a start says nothing: it may come before the end of several kernels.
            name = f"end to the end of griddepcontrol.wait, {shape}"
            gap(name, cost="pdl_ns" if in_costs else None, stamp=1, pdl=True)
        wide = self._sizes.wide_ctas
        name = f"first to last start of {wide} CTAs"
        self._add(name, "ns", None, self._gpu.spread, ctas=wide)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return median, least and 90th percentile."""
    ordered = sorted(samples)
    ninety = ordered[int(0.9 * (len(ordered) - 1))]
    return {"median": statistics.median(ordered), "min": ordered[0], "p90": ninety}


def row_of(one: Measurement, ghz: float, *, has_time: bool) -> dict[str, Any]:
    """Measure one row; ghz: of the SMs."""
    row: dict[str, Any] = {"name": one.name, "cost": one.cost, "unit": one.unit}
    if not has_time:
        return row | {"error": "no time was left; give --limit_s more"}
    try:
        with driver.on_device(0):
            samples = one.take()
        measured = summary(samples)
    except Exception as error:  # the other rows are worth having
        return row | {"error": f"{type(error).__name__}: {error}"}
    row |= {"samples": len(samples), **measured}
    if one.unit != "GHz":
        ns = 1 / ghz if one.unit == "cycles" else 1.0
        row["ns"] = {name: value * ns for name, value in measured.items()}
        row["cycles"] = {name: value * ns * ghz for name, value in measured.items()}
    return row | ({"assumed_ns": costs.costs("h200")[one.cost]} if one.cost else {})


def acquires(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of what ld.acquire takes more than ld.relaxed, by their medians."""
    found = {"name": "ld.acquire, more than ld.relaxed", "cost": "acquire_ns", "unit": "ns"}
    named = {row["name"]: row.get("ns") for row in rows}
    more, less = named["ld.acquire_gpu, hit in L2"], named["ld.relaxed_gpu, hit in L2"]
    if not more or not less:
        return found | {"error": "one of both was not measured"}
    median = more["median"] - less["median"]
    assumed = costs.costs("h200")["acquire_ns"]
    return found | {"median": median, "ns": {"median": median}, "assumed_ns": assumed}


COLUMNS = ("what", "median", "min", "p90", "unit", "median in ns", "assumed of an H200, ns")


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    cells = [f"{row[name]:.4g}" if name in row else "" for name in COLUMNS[1:4]]
    ns = f"{row['ns']['median']:.4g}" if "ns" in row else ""
    assumed = f"{row['assumed_ns']:.4g}" if "assumed_ns" in row else row.get("error", "")
    print(f"| {' | '.join((row['name'], *cells, row['unit'], ns, assumed))} |", flush=True)


def measure(options: argparse.Namespace) -> int:
    """Measure all rows; write the file after each. Return 1 if a row has an error."""
    started = time.monotonic()
    is_real = options.device == "cuda"
    machine = describe_run() | (describe_gpu() if is_real else {})
    record = Record(options.output_file, {"machine": machine, "device": options.device})
    gpu = Gpu(Sizes() if is_real else SMALL, "cuda" if is_real else "cpu")
    rows: list[dict[str, Any]] = []
    print_headings(dict.fromkeys(COLUMNS, ""))
    for one in Plan(gpu):
        ghz = rows[0].get("median", ASSUMED_GHZ) if rows else ASSUMED_GHZ
        rows.append(row_of(one, ghz, has_time=time.monotonic() - started < options.limit_s))
        show(rows[-1])
        record.write({"rows": rows})
    rows.append(acquires(rows))
    show(rows[-1])
    seconds = round(time.monotonic() - started, 1)
    record.write({"seconds": seconds, "rows": rows}, complete=True)
    failed = sum("error" in row for row in rows)
    print(f"{len(rows)} rows, {failed} of them with an error, in {seconds} s", flush=True)
    return int(failed > 0)


def rehearse() -> int:
    """Run this program again in a process whose driver executes the kernels' PTX on the CPU."""
    from tests.support import fake_cuda
    from tests.support.fake_cuda import ptx

    with tempfile.TemporaryDirectory() as folder:
        prepared = ptx.prepare(Path(folder, "ptx"), [ptx.Unit(text(SMALL))])
        library = fake_cuda.build(Path(folder))
        variables = fake_cuda.environment(library, ptx=prepared, devices=1, sms=4)
        command = [sys.executable, *sys.argv]
        return subprocess.run(command, env=os.environ | variables, check=False).returncode


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", choices=["cuda", "rehearsal"])
    parser.add_argument("--limit_s", type=float, default=25.0, help="no row begins later")
    parser.add_argument("--output_file", type=Path, help="JSON file, written after every row")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.device == "rehearsal" and "FAKE_CUDA_PTX" not in os.environ:
        raise SystemExit(rehearse())
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        raise SystemExit
    raise SystemExit(measure(options))


if __name__ == "__main__":
    main()
