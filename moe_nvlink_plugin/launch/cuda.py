"""GPU ranks: a launch puts the kernel on the current stream and returns.

A launch allocates nothing and waits for nothing, so it may be captured into a CUDA graph from the
first one on. The arguments are one packed struct, which the driver copies at the launch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import driver, env
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import CompileError, DriverError, MoeNvlinkError
from moe_nvlink_plugin.exchange.arguments import combine_code, element_code
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.jit.source import HEAD_KERNELS
from moe_nvlink_plugin.lm_head.config import HeadConfig

from . import shape
from .shape import Limits, Shape

logger = logging.getLogger(__name__)

#: Prepared launches that a launcher keeps; serving uses a few dozen token counts and streams.
_MOST_PREPARED = 4096

_NO_ROOM = "leave more room on the GPU (vLLM: lower --gpu-memory-utilization)"
_EARLIER = (
    "if an earlier kernel failed, its error shows here: run with CUDA_LAUNCH_BLOCKING=1 to find it"
)
_DEFAULT_STREAM = "while another stream captures a CUDA graph, the default stream may not be used"
_TOO_OLD = "they are built by CUDA 13 and need driver 580 or newer"


class _Kernel:
    """One function of a loaded module."""

    def __init__(self, module: Any, name: str) -> None:
        self.function = driver.call("cuModuleGetFunction", module, name.encode())
        # Now, not at the first launch, which may be inside a capture.
        driver.call("cuFuncLoad", self.function)
        attribute = driver.api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        self.max_threads = int(driver.call("cuFuncGetAttribute", attribute, self.function))

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def blocks_per_sm(self, threads: int) -> int:
        """CTAs of so many threads that one SM holds."""
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(driver.call(query, self.function, threads, 0))

    def limits(self, num_sms: int) -> Limits:
        return Limits(num_sms, self.max_threads, self.blocks_per_sm)


@functools.cache
def _kernels(
    index: int, top_k: int, element: int, pdl: bool, quantiser: int, combine: int
) -> tuple[_Kernel, _Kernel]:
    """(dispatch, combine) on a device. The module stays loaded: a CUDA graph may hold it."""
    architecture = driver.device(index).architecture
    cubin = nvrtc.kernels_for(top_k, element, architecture, pdl, quantiser, combine)
    dispatch, combine_kernel = _load(index, cubin, ("dispatch", "combine"))
    return dispatch, combine_kernel


@functools.cache
def _head_kernels(index: int, element: int, pdl: bool) -> dict[str, _Kernel]:
    """The kernels of the shared LM head by name, as _kernels."""
    cubin = nvrtc.head_kernels_for(element, driver.device(index).architecture, pdl)
    return dict(zip(HEAD_KERNELS, _load(index, cubin, HEAD_KERNELS), strict=True))


def _load(index: int, cubin: bytes, names: Iterable[str]) -> list[_Kernel]:
    with driver.on_device(index):
        try:
            module = driver.call("cuModuleLoadData", cubin)
            return [_Kernel(module, f"moe_nvlink_{name}") for name in names]
        except DriverError as error:
            major, minor = driver.driver_version()
            no_room = error.status == "CUDA_ERROR_OUT_OF_MEMORY"
            raise CompileError(
                f"the driver (CUDA {major}.{minor}) does not load the kernels built for "
                f"{driver.device(index).architecture}: {error}; {_NO_ROOM if no_room else _TOO_OLD}"
            ) from error


class _Prepared(NamedTuple):
    """A launch configuration, made once per shape and stream."""

    config: Any
    stream: Any
    hidden_splits: int


def _prepared(launch_shape: Shape, stream: int, pdl: bool) -> _Prepared:
    api = driver.api()
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch_shape.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch_shape.threads, 1, 1
    config.sharedMemBytes = 0
    config.hStream = api.CUstream(stream)
    if pdl:
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return _Prepared(config, config.hStream, launch_shape.hidden_splits)


class _Launch:
    """One kernel of one layer: from a token count to a launch. On the host's hot path: what can be
    looked up once is.
    """

    def __init__(
        self,
        kernel: _Kernel,
        choose: Callable[[int], Shape],
        executor: CudaExecutor,
        pdl: bool,
    ) -> None:
        self._function, self._choose = kernel.function, choose
        self._executor, self._pdl = executor, pdl
        self._prepared: dict[tuple[int, int], _Prepared] = {}
        self._launch = driver.api().cuLaunchKernelEx
        self._success = driver.api().CUresult.CUDA_SUCCESS
        self._pointers = (ctypes.c_void_p * 1)()
        self._pointers_address = ctypes.addressof(self._pointers)

    def prepare(self, num_tokens: int) -> _Prepared:
        """The configuration for so many tokens on the current stream; in the device's context,
        which a thread of the caller's need not have.
        """
        key = (num_tokens, self._executor.stream())
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            found = _prepared(self._choose(num_tokens), key[1], self._pdl)
            self._prepared[key] = found
        return found

    def __call__(self, prepared: _Prepared, args: Any) -> None:
        """The launch; in the device's context."""
        self._pointers[0] = ctypes.addressof(args)
        self._executor.note_capture(prepared.stream)
        (status,) = self._launch(prepared.config, self._function, self._pointers_address, 0)
        if status != self._success:
            raise DriverError(
                f"cuLaunchKernelEx of {type(args).__name__}: {status.name}; {_EARLIER}",
                call="cuLaunchKernelEx",
                status=status.name,
            )


class _Room:
    """What the kernels of one launcher may take of their GPU, beside others that wait there.

    Attributes:
        is_shared: kernels of other channels, or of other ranks, may wait on the GPU at the same
            time. Then no kernel may signal early: the kernel that follows it, ours or a
            third-party's, would take the places left and wait there; the kernels of the others
            could find none, and peers wait for those.
    """

    def __init__(
        self, num_sms: int, max_sms: int | None, num_channels: int, ranks_on_device: int
    ) -> None:
        self.is_shared = num_channels * ranks_on_device > 1
        self._num_sms = max_sms or num_sms
        self._share = shape.share(num_sms, num_channels, ranks_on_device)

    def limits(self, kernel: _Kernel) -> Limits:
        limits = kernel.limits(self._num_sms)
        return limits.beside_others(self._share) if self.is_shared else limits


_advice = threading.Lock()
_advised = False


def _advise_eager_loading() -> None:
    """Once a process; ranks may be its threads."""
    global _advised
    with _advice:
        is_first, _advised = not _advised, True
    if is_first and driver.loads_lazily():
        logger.warning(
            "moe_nvlink: num_channels is above 1, and this process loads a kernel, anybody's, at "
            "its first launch. The driver may wait for that until the GPU is idle. If a kernel of "
            "one channel waits there for a rank whose host does the same in another channel, "
            "neither rank goes on. Start all ranks with CUDA_MODULE_LOADING=EAGER, or run the "
            "whole model once, one channel at a time, before several are in flight"
        )


class _CudaLauncher:
    def __init__(
        self,
        executor: CudaExecutor,
        config: AllToAllConfig,
        row_bytes: Mapping[str, int],
        quantiser: int,
        ranks_on_device: int,
    ) -> None:
        self._executor = executor
        device = executor.device_facts
        room = _Room(device.num_sms, config.max_sms, config.num_channels, ranks_on_device)
        pdl = executor.pdl and not room.is_shared
        if config.num_channels > 1 and config.ep_size > 1:
            _advise_eager_loading()
        element = element_code(config.dtype)
        format_code = combine_code(config)
        dispatch, combine = _kernels(device.index, config.top_k, element, pdl, 0, format_code)
        widest = max(row_bytes.values())
        ids_bytes = config.ep_size * config.max_tokens_per_rank * row_bytes["recv_topk_ids"]
        element_bytes = config.dtype.itemsize
        slots = config.ep_size * config.max_tokens_per_rank if format_code else 0

        def dispatch_launch(kernel: _Kernel, lanes_bytes: int) -> _Launch:
            limits = room.limits(kernel)
            return _Launch(
                kernel,
                lambda n: shape.dispatch_shape(n, lanes_bytes, ids_bytes, limits),
                executor,
                pdl,
            )

        self._dispatches = {0: dispatch_launch(dispatch, widest)}
        if quantiser:
            # Dispatch is the same for every format of combine: one module for all of them.
            fused, _ = _kernels(device.index, config.top_k, element, pdl, quantiser, 0)
            lanes = shape.quantising_lanes(config.hidden_size)
            self._dispatches[quantiser] = dispatch_launch(fused, lanes * shape.VECTOR_BYTES)
        combine_limits = room.limits(combine)
        self._combine = _Launch(
            combine,
            lambda n: shape.combine_shape(
                n, config.hidden_size, element_bytes, combine_limits, slots
            ),
            executor,
            pdl,
        )

    def dispatch(self, args: Any) -> None:
        launch = self._dispatches[args.quantiser]
        with self._executor.context():
            launch(launch.prepare(args.geometry.num_tokens), args)

    def combine(self, args: Any) -> None:
        with self._executor.context():
            prepared = self._combine.prepare(args.geometry.num_tokens)
            args.hidden_splits = prepared.hidden_splits
            self._combine(prepared, args)


class _CudaHeadLauncher:
    def __init__(self, executor: CudaExecutor, config: HeadConfig, ranks_on_device: int) -> None:
        self._executor = executor
        device = executor.device_facts
        room = _Room(device.num_sms, config.max_sms, 1, ranks_on_device)
        pdl = executor.pdl and not room.is_shared
        kernels = _head_kernels(device.index, element_code(config.dtype), pdl)
        row_bytes = config.hidden_size * config.dtype.itemsize
        logits_bytes = config.shard_size * config.dtype.itemsize

        def launch(name: str, choose: Callable[[int, Limits], Shape]) -> _Launch:
            limits = room.limits(kernels[name])
            return _Launch(kernels[name], lambda n: choose(n, limits), executor, pdl)

        tp_size = config.tp_size
        self._gather = launch(
            "head_gather", lambda n, limits: shape.head_rows_shape(n, row_bytes, tp_size, limits)
        )
        self._argmax = launch(
            "head_argmax", lambda n, limits: shape.head_argmax_shape(n, logits_bytes, limits)
        )
        self._collect = launch(
            "head_collect",
            lambda n, limits: shape.head_rows_shape(n, logits_bytes, tp_size, limits),
        )

    def gather(self, args: Any) -> None:
        with self._executor.context():
            self._gather(self._gather.prepare(args.geometry.num_rows), args)

    def argmax(self, args: Any) -> None:
        with self._executor.context():
            # How many rows there are only the GPU knows.
            prepared = self._argmax.prepare(args.geometry.row_bound * args.geometry.tp_size)
            args.row_splits = prepared.hidden_splits
            self._argmax(prepared, args)

    def collect(self, args: Any) -> None:
        with self._executor.context():
            self._collect(self._collect.prepare(args.geometry.num_rows), args)


class _MappedFaultWords:
    """Words in the host's memory that the GPU writes to directly."""

    def __init__(self, index: int, count: int) -> None:
        flags = driver.api().CU_MEMHOSTALLOC_PORTABLE | driver.api().CU_MEMHOSTALLOC_DEVICEMAP
        with driver.on_device(index):
            address = int(driver.call("cuMemHostAlloc", 8 * count, flags))
            self._device_address = int(driver.call("cuMemHostGetDevicePointer", address, 0))
        self._words = (ctypes.c_uint64 * count).from_address(address)
        for channel in range(count):
            self._words[channel] = 0
        self._free = weakref.finalize(self, _free_host_memory, index, address)
        self._free.atexit = False

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        field: Any = structs()["LocalControl"].host_fault
        address = self._device_address + 8 * channel
        # Whatever the default device of the caller is.
        word = torch.tensor([address], dtype=torch.int64, device="cpu")
        local_control[field.offset : field.offset + 8].copy_(word.view(torch.uint8))

    def read(self, channel: int) -> int:
        return self._words[channel]

    def leak(self) -> None:
        self._free.detach()


def _free_host_memory(index: int, address: int) -> None:
    """Runs when the words' last user goes: perhaps in the garbage collector, while this or another
    thread captures a CUDA graph that has nothing to do with them.
    """
    try:
        with driver.on_device(index), driver.relaxed_capture():
            driver.call("cuMemFreeHost", address)
    except MoeNvlinkError as error:  # nobody would see it, and a few words are no loss
        logger.warning("moe_nvlink: fault words of GPU %d stay allocated: %s", index, error)


class CudaExecutor:
    """Launches on the current stream of one GPU.

    Raises:
        UnsupportedError: there is no driver, or the kernels are not built for this GPU.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        api = driver.api()
        self.captured = False
        self.pdl = env.pdl()
        self._is_capturing = api.cuStreamIsCapturing
        self._success = api.CUresult.CUDA_SUCCESS
        self._no_capture = api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self._torch_device = device
        self.device_facts = driver.device(device.index or 0)
        _ = self.device_facts.architecture  # refuses what is not supported, before any memory

    def stream(self) -> int:
        """Handle of the stream torch would launch on in this thread."""
        if self._torch_device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._torch_device).cuda_stream)

    def context(self) -> Any:
        """The device's context, current in this thread."""
        return driver.on_device(self.device_facts.index)

    def is_capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        with self.context():
            return self._captures(driver.api().CUstream(self.stream()))

    def note_capture(self, stream: Any) -> None:
        """Before a launch: remembers whether a graph will hold the workspace's addresses."""
        if not self.captured:
            self.captured = self._captures(stream)

    def _captures(self, stream: Any) -> bool:
        status, capture = self._is_capturing(stream)
        if status != self._success:
            implicit = status.name == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
            hint = _DEFAULT_STREAM if implicit else _EARLIER
            raise DriverError(
                f"cuStreamIsCapturing: {status.name}; {hint}",
                call="cuStreamIsCapturing",
                status=status.name,
            )
        return bool(capture != self._no_capture)

    def synchronize(self) -> None:
        """Waits for the current stream."""
        with self.context():
            driver.call("cuStreamSynchronize", driver.api().CUstream(self.stream()))

    def fault_words(self, count: int) -> _MappedFaultWords:
        """Pinned host memory, mapped into the GPU."""
        return _MappedFaultWords(self.device_facts.index, count)

    def launcher(
        self,
        config: AllToAllConfig,
        row_bytes: Mapping[str, int],
        quantiser: int,
        ranks_on_device: int = 1,
    ) -> _CudaLauncher:
        """See Executor. Compiles the kernels on first use, or takes them from the cache."""
        return _CudaLauncher(self, config, row_bytes, quantiser, ranks_on_device)

    def head_launcher(self, config: HeadConfig, ranks_on_device: int = 1) -> _CudaHeadLauncher:
        """See Executor. Compiles the kernels on first use, or takes them from the cache."""
        return _CudaHeadLauncher(self, config, ranks_on_device)
