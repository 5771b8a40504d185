"""The kernels of a shared LM head, all ranks of a group on ONE device, in ordinary memory.

On a GPU a launch is one grid with blockIdx.y = rank; on CPU threads, a rehearsal of that, every
rank is a thread. Launch shapes are what the product would choose for a rank's share of the SMs; the
matrix products between the kernels are torch's. One device shows neither NVLink ordering nor remote
latency nor bandwidth.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from moe_nvlink_plugin import HeadConfig, driver
from moe_nvlink_plugin.jit import host, nvrtc
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.lm_head import shapes
from moe_nvlink_plugin.lm_head.arguments import head_arguments
from moe_nvlink_plugin.lm_head.kernels import ARGMAX, GATHER, HEAD
from moe_nvlink_plugin.lm_head.sizes import head_layout
from tests.support import emulated, kernel_texts

RUN = (GATHER, ARGMAX)
#: kernel -> its shared memory
KERNELS = {"head_gather": "HeadShared", "head_argmax": "HeadArgmaxShared"}

_ENTRY = """
extern "C" __global__ void moe_nvlink_emulated_{kernel}(
    const __grid_constant__ moe_nvlink::EmulatedHead args) {{
  __shared__ moe_nvlink::{shared} shared;
  moe_nvlink::{kernel}_body<Config>(args.of[blockIdx.y], moe_nvlink::this_cta(), shared);
}}
"""


def device_source(element: int, count: int) -> str:
    """moe_nvlink_emulated_head_gather and _head_argmax for `count` ranks, for one element type."""
    text, entries = re.subn(
        r"^MOE_NVLINK_KERNEL\(.*\)\n",
        "",
        kernel_texts.head_source(element, pdl=False),
        flags=re.MULTILINE,
    )
    assert entries == len(kernel_texts.HEAD_KERNELS), f"{entries} entry points of the product"
    text += f"namespace moe_nvlink {{ struct EmulatedHead {{ HeadArgs of[{count}]; }}; }}\n"
    return text + "".join(_ENTRY.format(kernel=name, shared=of) for name, of in KERNELS.items())


_STAND_IN_ENTRY = """
extern "C" int moe_nvlink_sizeof_emulated_{kernel}_args() {{
  return {count} * static_cast<int>(sizeof(moe_nvlink::HeadArgs));
}}
extern "C" void moe_nvlink_emulated_{kernel}(const moe_nvlink::HeadArgs* of, void*) {{
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < {count}; ++rank) {{
    ranks.emplace_back([=] {{
      moe_nvlink::host::Grid grid(2);
      moe_nvlink_{kernel}(&of[rank], &grid);
    }});
  }}
  for (std::thread& rank : ranks) rank.join();
}}
"""


def stand_in_source(count: int) -> str:
    """What tests/support/fake_cuda runs when these kernels are launched: a thread per rank."""
    entries = (_STAND_IN_ENTRY.format(kernel=name, count=count) for name in KERNELS)
    return kernel_texts.host_source() + "".join(entries)


class Backend(Protocol):
    """What launches a kernel for all ranks at once."""

    def limits(self, kernel: str) -> shape.Limits | None:
        """What one rank may fill; None: there is nothing to choose."""
        ...

    def prepare(
        self, kernel: str, rank_arguments: Sequence[Any], chosen: shape.Shape | None
    ) -> Callable[[], None]:
        """A launch with these arguments, one per rank, which it copies."""
        ...

    def close(self) -> None:
        """Gives threads or modules back."""
        ...


class CpuBackend:
    """A thread per rank, each with a grid of one host CTA."""

    def __init__(self, ranks: int) -> None:
        self._library = host.load(HEAD.host_source())
        self._run = {each.name: self._library.kernel(each.name, each.args_type()) for each in RUN}
        self._grids = [self._library.create_grid(1) for _ in range(ranks)]
        self._threads = concurrent.futures.ThreadPoolExecutor(ranks)

    def limits(self, kernel: str) -> shape.Limits | None:
        return None

    def prepare(
        self, kernel: str, rank_arguments: Sequence[Any], chosen: shape.Shape | None
    ) -> Callable[[], None]:
        copies = [type(args).from_buffer_copy(args) for args in rank_arguments]

        def launch() -> None:
            running = [
                self._threads.submit(self._run[kernel], args, grid)
                for args, grid in zip(copies, self._grids, strict=True)
            ]
            for future in running:
                future.result()

        return launch

    def close(self) -> None:
        self._threads.shutdown()
        for grid in self._grids:
            self._library.destroy_grid(grid)


class CudaBackend:
    """One cooperative launch on torch's current stream: all ranks are resident, or it fails."""

    def __init__(self, ranks: int, config: HeadConfig, device: str = "cuda:0") -> None:
        self._ranks, self._device = ranks, torch.device(device)
        gpu = driver.device(self._device.index or 0)
        self._index, self._num_sms = gpu.index, gpu.num_sms
        text = device_source(element_code(config.dtype), ranks)
        code = nvrtc.compile_cubin(text, gpu.architecture, strict=False)
        with driver.on_device(self._index):
            self._module = driver.call("cuModuleLoadData", code)
            self._kernels = {
                name: emulated._Kernel(self._index, self._module, f"moe_nvlink_emulated_{name}")
                for name in KERNELS
            }

    def limits(self, kernel: str) -> shape.Limits | None:
        found = self._kernels[kernel]
        return shape.Limits(self._num_sms // self._ranks, found.max_threads, found.blocks_per_sm)

    def prepare(
        self, kernel: str, rank_arguments: Sequence[Any], chosen: shape.Shape | None
    ) -> Callable[[], None]:
        assert chosen is not None
        packed = (structs()["HeadArgs"] * self._ranks)(*rank_arguments)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        grid = (chosen.blocks, self._ranks)
        function = self._kernels[kernel].function

        def launch(keep: Any = packed) -> None:
            config = emulated.launch_config(grid, chosen.threads, self._stream(), pdl=False)
            with driver.on_device(self._index):
                driver.call("cuLaunchKernelEx", config, function, ctypes.addressof(parameters), 0)

        return launch

    def _stream(self) -> int:
        if self._device.type != "cuda":  # the stand-in's
            return 0
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with driver.on_device(self._index):
            driver.call("cuModuleUnload", self._module)


class EmulatedHead:
    """All ranks of one group with `rows` rows each, and what each does in one step.

    Attributes:
        gather, argmax: the kernels of all ranks, one launch each.
    """

    def __init__(
        self, configs: Sequence[HeadConfig], backend: Backend, hidden: Sequence[torch.Tensor]
    ) -> None:
        self.configs, self.hidden = configs, hidden
        first = configs[0]
        self.rows, self.device = len(hidden[0]), hidden[0].device
        (self._regions,) = emulated._packed_regions(head_layout(first))
        end = max(region.offset + region.size_bytes for region in self._regions.values())
        shape_of_all = (first.tp_size, -(-end // 4096) * 4096)
        self._memory = torch.zeros(shape_of_all, dtype=torch.uint8, device=self.device)
        slots = first.tp_size * self.rows
        widths = [last - at for at, last in (config.shard(config.tp_rank) for config in configs)]
        self.logits = [
            torch.empty((slots, width), dtype=first.dtype, device=self.device) for width in widths
        ]
        self.ids = [torch.empty(self.rows, dtype=torch.int64, device=self.device) for _ in configs]
        launched, gather, argmax = self._arguments(), None, None
        gather_limits, argmax_limits = (backend.limits(name) for name in KERNELS)
        row_bytes = first.hidden_size * first.dtype.itemsize
        if gather_limits is not None:
            gather = shapes.head_rows_shape(self.rows, row_bytes, first.tp_size, gather_limits)
        if argmax_limits is not None:
            width_bytes = first.shard_size * first.dtype.itemsize
            argmax = shapes.head_argmax_shape(slots, width_bytes, argmax_limits)
            for args in launched:
                args.row_splits = argmax.splits
        self.gather = backend.prepare("head_gather", launched, gather)
        self.argmax = backend.prepare("head_argmax", launched, argmax)

    def _arguments(self) -> list[Any]:
        """Of both kernels, one per rank."""
        launched = []
        for rank, config in enumerate(self.configs):
            window = (self._memory.data_ptr(), self._memory.stride(0))
            args = head_arguments(config, self._regions, *window)
            args.geometry.num_rows = args.geometry.row_bound = self.rows
            args.hidden = self.hidden[rank].data_ptr()
            args.logits, args.output = self.logits[rank].data_ptr(), self.ids[rank].data_ptr()
            args.scale = 1.0
            launched.append(args)
        return launched

    def product(self, rank: int, head: torch.Tensor) -> None:
        """One rank's part of the logits, of the rows that it has gathered."""
        config = self.configs[rank]
        first, last = config.shard(rank)
        torch.mm(self._gathered(rank), head[first:last].T, out=self.logits[rank])

    def _gathered(self, rank: int) -> torch.Tensor:
        config, region = self.configs[rank], self._regions["head_rows"]
        slots = config.tp_size * self.rows
        size = slots * config.hidden_size * config.dtype.itemsize
        rows = self._memory[rank, region.offset : region.offset + size]
        return rows.view(config.dtype).view(slots, config.hidden_size)

    def step(self, head: torch.Tensor) -> None:
        """What all ranks together do for one draft step."""
        self.gather()
        for rank in range(len(self.configs)):
            self.product(rank, head)
        self.argmax()

    def check_faults(self) -> None:
        """AssertionError where a rank has a fault word; waits for the device."""
        field: Any = structs()["LocalControl"].fault
        at = self._regions["local"].offset + field.offset
        words = self._memory[:, at : at + 8].cpu().contiguous().view(torch.int64)
        assert not words.any(), f"fault words {words.flatten().tolist()}"
