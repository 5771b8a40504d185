"""GPU ranks: a launch puts the kernel on the current stream and returns.

A launch allocates nothing and waits for nothing, so a CUDA graph may capture every launch, the
first one too. The arguments are one packed struct, which the driver copies at the launch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import driver, env
from moe_nvlink_plugin.errors import CompileError, DriverError, MoeNvlinkError
from moe_nvlink_plugin.jit.header import structs

from . import machine_code, shape
from .base import Budget
from .kernel import PDL, Build, Kernel, S, Variant
from .shape import Limits, Shape

logger = logging.getLogger(__name__)

#: Most prepared launches that a launcher keeps. A server uses a few dozen token counts and streams.
_MOST_PREPARED = 4096

_NO_ROOM = "leave more room on the GPU (vLLM: lower --gpu-memory-utilization)"
_EARLIER = (
    "if an earlier kernel failed, its error shows here: run with CUDA_LAUNCH_BLOCKING=1 to find it"
)
_DEFAULT_STREAM = "while another stream captures a CUDA graph, the default stream may not be used"
_TOO_OLD = "they are built by CUDA 13 and need driver 580 or newer"


class _Function:
    """Function of a loaded module. The module stays loaded, because a CUDA graph may hold it."""

    def __init__(self, module: Any, name: str) -> None:
        self.function = driver.call("cuModuleGetFunction", module, name.encode())
        # The driver loads the code here. The first launch, which may be captured, need not.
        driver.call("cuFuncLoad", self.function)
        attribute = driver.api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        self.max_threads = int(driver.call("cuFuncGetAttribute", attribute, self.function))

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def blocks_per_sm(self, threads: int) -> int:
        """Return how many CTAs of so many threads one SM holds."""
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(driver.call(query, self.function, threads, 0))

    def limits(self, num_sms: int) -> Limits:
        """Return what the function may use of so many SMs."""
        return Limits(num_sms, self.max_threads, self.blocks_per_sm)


#: (index of the device, build) -> function that is loaded there.
_loaded: dict[tuple[int, Build], _Function] = {}


def _function(index: int, build: Build, wanted: Variant) -> _Function:
    """Return a build's function on a device; compile and load the build on first use."""
    found = _loaded.get((index, build))
    if found is None:
        cubin = machine_code.cubin_for(build, driver.device(index).architecture, wanted)
        found = _loaded.setdefault((index, build), _load(index, cubin, build.kernel.entry))
    return found


def _load(index: int, cubin: bytes, entry: str) -> _Function:
    with driver.on_device(index):
        try:
            return _Function(driver.call("cuModuleLoadData", cubin), entry)
        except DriverError as error:
            major, minor = driver.driver_version()
            no_room = error.status == "CUDA_ERROR_OUT_OF_MEMORY"
            raise CompileError(
                f"the driver (CUDA {major}.{minor}) does not load the kernels built for "
                f"{driver.device(index).architecture}: {error}; {_NO_ROOM if no_room else _TOO_OLD}"
            ) from error


class _Prepared(NamedTuple):
    """Launch configuration, made once per shape, stream, and whether the launch follows an event.

    Attributes:
        follows_event: the stream has waited for another stream's event since its last launch of
            ours.
    """

    config: Any
    stream: Any
    splits: int
    follows_event: bool


def _prepared(launch_shape: Shape, stream: int, pdl: bool, follows_event: bool) -> _Prepared:
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
    return _Prepared(config, config.hStream, launch_shape.splits, follows_event)


class _CudaLaunch:
    """Launches one kernel of one caller.

    A call is on the host's hot path, so the constructor looks up whatever does not change.
    """

    def __init__(
        self,
        function: _Function,
        kernel: Kernel[Any],
        choose: Callable[[int], Shape],
        executor: CudaExecutor,
        pdl: bool,
    ) -> None:
        self._function, self._choose = function.function, choose
        self._name, self._count, self._splits = kernel.name, kernel.count, kernel.splits
        self._executor, self._pdl = executor, pdl
        self._prepared: dict[tuple[int, int, bool], _Prepared] = {}
        self._launch = driver.api().cuLaunchKernelEx
        self._success = driver.api().CUresult.CUDA_SUCCESS
        self._pointers = (ctypes.c_void_p * 1)()
        self._pointers_address = ctypes.addressof(self._pointers)

    def _prepare(self, count: int) -> _Prepared:
        """Return the configuration for so many items on the current stream.

        The device's context must be current; a caller's thread may lack it.
        """
        stream = self._executor.stream()
        follows_event = self._executor.follows_event(stream)
        key = (count, stream, follows_event)
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            # PDL orders a kernel after the one before it in its stream. Whether it also keeps the
            # order after another stream's event, no GPU has told us.
            pdl = self._pdl and not follows_event
            found = _prepared(self._choose(count), stream, pdl, follows_event)
            self._prepared[key] = found
        return found

    def __call__(self, args: Any) -> None:
        with self._executor.context():
            prepared = self._prepare(self._count(args))
            if self._splits:
                setattr(args, self._splits, prepared.splits)
            self._pointers[0] = ctypes.addressof(args)
            self._executor.note_capture(prepared.stream)
            (status,) = self._launch(prepared.config, self._function, self._pointers_address, 0)
            if status != self._success:
                raise DriverError(
                    f"cuLaunchKernelEx of {self._name}: {status.name}; {_EARLIER}",
                    call="cuLaunchKernelEx",
                    status=status.name,
                )
            if prepared.follows_event:
                self._executor.note_launch(int(prepared.stream))


class _Room:
    """What the kernels of one launcher may use of their GPU beside other kernels that wait there.

    Attributes:
        is_shared: whether kernels of other channels or other ranks may wait on the GPU at the same
            time. If so, no kernel may let its successor start early. Such a successor, ours or
            third-party, could fill the free SMs and wait there. Then the other channels' kernels
            would find no SM, and their peers would wait for them.
    """

    def __init__(self, num_sms: int, budget: Budget) -> None:
        self.is_shared = budget.num_channels * budget.ranks_on_device > 1
        self._num_sms = min(budget.max_sms or num_sms, num_sms)
        self._share = shape.share(num_sms, budget.num_channels, budget.ranks_on_device)

    def limits(self, function: _Function) -> Limits:
        limits = function.limits(self._num_sms)
        return limits.beside_others(self._share) if self.is_shared else limits


_advice = threading.Lock()
_advised = False


def _advise_eager_loading() -> None:
    """Log the advice once per process, even if several ranks are threads of the process."""
    global _advised
    with _advice:
        is_first, _advised = not _advised, True
    if is_first and driver.loads_lazily():
        logger.warning(
            "moe_nvlink: num_channels is above 1, and the driver loads every kernel of this "
            "process at its first launch. For that the driver may wait until the GPU is idle. If "
            "a kernel of one channel waits there for a rank whose driver loads in the same way in "
            "another channel, neither rank continues. Start all ranks with "
            "CUDA_MODULE_LOADING=EAGER, or run the whole model once, one channel at a time, before "
            "several channels are in flight"
        )


@functools.cache
def _advise_connections(connections: int, num_channels: int) -> None:
    """Log, once per process, that streams of the channels may share a queue of the hardware."""
    logger.warning(
        "moe_nvlink: CUDA_DEVICE_MAX_CONNECTIONS=%d, and %d channels and the caller have a stream "
        "each: two streams may share a queue, and a kernel that waits for a peer then holds back "
        "the other channel's. Two ranks can wait for each other so until the timeout. Unset it "
        "(the driver's default is 8), or use one channel",
        connections,
        num_channels,
    )


class _CudaLauncher:
    def __init__(self, executor: CudaExecutor, variant: Variant, budget: Budget) -> None:
        self._executor, self._variant = executor, variant
        self._room = _Room(executor.num_sms(), budget)
        self._pdl = executor.pdl and not self._room.is_shared
        if budget.num_channels > 1 and budget.num_ranks > 1:
            _advise_eager_loading()
            connections = env.cuda_connections()
            if connections is not None and connections <= budget.num_channels:
                _advise_connections(connections, budget.num_channels)

    def load(self, kernel: Kernel[S], sizes: S, **instead: int) -> _CudaLaunch:
        """See Launcher. Compile the kernel on first use, or take it from the cache."""
        # A kernel without the axis does not wait for the kernel before it, so it may not start
        # before that kernel ends.
        pdl = self._pdl and PDL in kernel.axes
        build = self._variant.build(kernel, pdl=pdl, **instead)
        # What a user would have to precompile: a variant has the values that are always loaded too.
        always = {axis.name: axis.always for axis in kernel.axes}
        others = {name: code for name, code in instead.items() if code not in always[name]}
        wanted = self._variant.instead(**others)
        function = _function(self._executor.device_facts.index, build, wanted)
        limits = self._room.limits(function)

        def choose(count: int) -> Shape:
            return kernel.shape(count, sizes, limits)

        return _CudaLaunch(function, kernel, choose, self._executor, pdl)


class _MappedFaultWords:
    """Words in the host's memory, to which the GPU writes directly."""

    def __init__(self, index: int, count: int) -> None:
        flags = driver.api().CU_MEMHOSTALLOC_PORTABLE | driver.api().CU_MEMHOSTALLOC_DEVICEMAP
        with driver.on_device(index):
            address = int(driver.call("cuMemHostAlloc", 8 * count, flags))
            self._device_address = int(driver.call("cuMemHostGetDevicePointer", address, 0))
        self.words = (ctypes.c_uint64 * count).from_address(address)
        for channel in range(count):
            self.words[channel] = 0
        self._free = weakref.finalize(self, _free_host_memory, index, address)
        self._free.atexit = False

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        field: Any = structs()["LocalControl"].host_fault
        address = self._device_address + 8 * channel
        # The caller may have set another default device.
        word = torch.tensor([address], dtype=torch.int64, device="cpu")
        local_control[field.offset : field.offset + 8].copy_(word.view(torch.uint8))

    def clear(self, channel: int) -> None:
        self.words[channel] = 0

    def leak(self) -> None:
        self._free.detach()


class _SideStreamReader:
    """Copies words to pinned memory on a stream of its own, which waits for no other stream.

    The thread that copies is in the relaxed mode meanwhile, so the copy is no mistake of a capture
    in another thread.
    """

    def __init__(self, index: int, most: int) -> None:
        self._index, self._lock = index, threading.Lock()
        # Allocated now: an allocation may wait for the device, and later kernels may be running.
        with driver.on_device(index):
            self._address = int(driver.call("cuMemHostAlloc", 8 * most, 0))
            self._free = weakref.finalize(self, _free_host_memory, index, self._address)
            self._free.atexit = False
            flag = driver.api().CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = driver.call("cuStreamCreate", flag)
            weakref.finalize(self, _destroy_stream, index, self._stream).atexit = False
        self._words = (ctypes.c_uint64 * most).from_address(self._address)

    def read(self, address: int, count: int) -> list[int]:
        with self._lock, driver.on_device(self._index), driver.relaxed_capture():
            driver.call("cuMemcpyDtoHAsync", self._address, address, 8 * count, self._stream)
            driver.call("cuStreamSynchronize", self._stream)
            return self._words[:count]


def _destroy_stream(index: int, stream: Any) -> None:
    """Give up a reader's stream after its last user has gone."""
    try:
        with driver.on_device(index), driver.relaxed_capture():
            driver.call("cuStreamDestroy", stream)
    except MoeNvlinkError as error:  # a finalizer cannot raise
        logger.warning("moe_nvlink: a stream of GPU %d stays open: %s", index, error)


def _free_host_memory(index: int, address: int) -> None:
    """Free pinned words after their last user has gone.

    The garbage collector may call this while a thread captures a CUDA graph that does not use the
    words.
    """
    try:
        with driver.on_device(index), driver.relaxed_capture():
            driver.call("cuMemFreeHost", address)
    except MoeNvlinkError as error:  # a finalizer cannot raise; few words are lost
        logger.warning("moe_nvlink: pinned words of GPU %d stay allocated: %s", index, error)


class _Side(NamedTuple):
    """The stream of one channel's launches beside the caller's stream, and its two events.

    Attributes:
        stream: its priority is the highest, so its CTAs find a place before those of a large
            kernel's next wave.
        begun: what the caller's stream has done before the launch.
        done: the launch.
    """

    stream: Any
    begun: Any
    done: Any

    @classmethod
    def create(cls, index: int) -> _Side:
        """Create a channel's stream on a device, also while a thread captures a CUDA graph."""
        api = driver.api()
        with driver.on_device(index), driver.relaxed_capture():
            _least, greatest = driver.call("cuCtxGetStreamPriorityRange")
            flags = api.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = driver.call("cuStreamCreateWithPriority", flags, greatest)
            untimed = api.CUevent_flags.CU_EVENT_DISABLE_TIMING
            events = [driver.call("cuEventCreate", untimed) for _ in range(2)]
        return cls(stream, *events)

    @staticmethod
    def destroy(index: int, sides: dict[int, _Side]) -> None:
        """Destroy streams and events; what still runs on the streams ends first."""
        if not sides:
            return
        try:
            with driver.on_device(index), driver.relaxed_capture():
                for side in sides.values():
                    driver.call("cuStreamDestroy", side.stream)
                    driver.call("cuEventDestroy", side.begun)
                    driver.call("cuEventDestroy", side.done)
        except MoeNvlinkError as error:  # a finalizer cannot raise
            logger.warning("moe_nvlink: streams of GPU %d stay: %s", index, error)


#: (index of the device, handle) of streams that have waited for a side stream's event, and on which
#: no kernel of ours was launched since. Of the process: another layer may be next on that stream.
_joined: set[tuple[int, int]] = set()


class CudaExecutor:
    """Launches kernels on the current stream of one GPU.

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
        # Raises for an unsupported GPU before anything is allocated.
        _ = self.device_facts.architecture
        self._sides: dict[int, _Side] = {}  # channel -> its stream
        self._beside = threading.local()  # .stream: where this thread launches now
        keep = weakref.finalize(self, _Side.destroy, self.device_facts.index, self._sides)
        keep.atexit = False

    def follows_event(self, stream: int) -> bool:
        """Return whether the next launch on this stream waits for another stream's event.

        On a side stream each one does.
        """
        beside = getattr(self._beside, "stream", None) is not None
        return beside or (self.device_facts.index, stream) in _joined

    def note_launch(self, stream: int) -> None:
        """After a launch, forget events that this stream has waited for before."""
        _joined.discard((self.device_facts.index, stream))

    def beside(self, channel: int, launch: Callable[[], None]) -> Callable[[], None]:
        """See Executor. Each channel has a stream of its own.

        On one stream for all, ranks that start two channels in different order would wait for
        each other forever.
        """
        with self.context():
            side = self._sides.get(channel)
            if side is None:
                side = _Side.create(self.device_facts.index)
                self._sides[channel] = side
            driver.call("cuEventRecord", side.begun, self._current())
            driver.call("cuStreamWaitEvent", side.stream, side.begun, 0)
            self._beside.stream = int(side.stream)
            try:
                launch()
            finally:
                self._beside.stream = None
            driver.call("cuEventRecord", side.done, side.stream)
        done = side.done

        def wait() -> None:
            with self.context():
                driver.call("cuStreamWaitEvent", self._current(), done, 0)
                _joined.add((self.device_facts.index, self.stream()))

        return wait

    def _current(self) -> Any:
        return driver.api().CUstream(self.stream())

    def stream(self) -> int:
        """Return the handle of the stream on which our kernels launch in this thread.

        It is the stream of torch, apart from launches that run beside the caller.
        """
        beside = getattr(self._beside, "stream", None)
        if beside is not None:
            return int(beside)
        if self._torch_device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._torch_device).cuda_stream)

    def num_sms(self) -> int:
        """Return how many SMs the kernels may use: a green context or MPS may leave fewer."""
        return driver.usable_sms(self.device_facts)

    def context(self) -> Any:
        """Return a context manager that makes the device's context current in this thread."""
        return driver.on_device(self.device_facts.index)

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a CUDA graph."""
        with self.context():
            return self._captures(driver.api().CUstream(self.stream()))

    def note_capture(self, stream: Any) -> None:
        """Before a launch, record whether a CUDA graph will hold the workspace's addresses."""
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
        """See Executor."""
        with self.context():
            driver.call("cuStreamSynchronize", driver.api().CUstream(self.stream()))

    def synchronize_device(self) -> None:
        """See Executor."""
        with self.context():
            driver.call("cuCtxSynchronize")

    def is_in_handler(self) -> bool:
        """Return False: the host does not wait in a launch."""
        return False

    def fault_words(self, count: int) -> _MappedFaultWords:
        """See WorkspaceExecutor. The words lie in pinned host memory, mapped into the GPU."""
        return _MappedFaultWords(self.device_facts.index, count)

    def word_reader(self, most: int) -> _SideStreamReader:
        """See WorkspaceExecutor."""
        return _SideStreamReader(self.device_facts.index, most)

    def launcher(self, variant: Variant, budget: Budget) -> _CudaLauncher:
        """See Executor."""
        return _CudaLauncher(self, variant, budget)
