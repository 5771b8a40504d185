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
from moe_nvlink_plugin.errors import DriverError

from . import shape
from .base import Budget
from .host_words import MappedFaultWords, SideStreamReader
from .kernel import PDL, Kernel, S, Variant
from .machine_code import Function, function_of
from .shape import Limits, Shape
from .side_streams import SideStream

logger = logging.getLogger(__name__)

#: Most prepared launches that a launcher keeps. A server uses a few dozen token counts and streams.
_MOST_PREPARED = 4096

#: Of a call, to ask for the most shared memory of a kernel.
_MANY_ITEMS = 2**20

_EARLIER = (
    "if an earlier kernel failed, its error shows here: run with CUDA_LAUNCH_BLOCKING=1 to find it"
)
#: torch's function from the index of a device to the handle of this thread's current stream there.
#: Inductor's code calls it before each launch. A torch without it: current_stream takes longer.
_RAW_STREAM = "_cuda_getCurrentRawStream"
_DEFAULT_STREAM = "while another stream captures a CUDA graph, the default stream may not be used"


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
    config.sharedMemBytes = launch_shape.shared_bytes
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
        function: Function,
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
        self._current_context = driver.api().cuCtxGetCurrent
        self._context = driver.primary_context(executor.device_facts.index)
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
        # As executor.context(), which makes an object: mostly the context is current already.
        status, current = self._current_context()
        if status == self._success and int(current) == self._context:
            self._run(args)
            return
        with self._executor.context():
            self._run(args)

    def _run(self, args: Any) -> None:
        prepared = self._prepare(self._count(args))
        if self._splits:
            setattr(args, self._splits, prepared.splits)
        self._pointers[0] = ctypes.addressof(args)
        if not self._executor.captured:
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

    def limits(self, function: Function) -> Limits:
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
        self._pdl = executor.pdl and budget.pdl and not self._room.is_shared
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
        function = function_of(self._executor.device_facts.index, build, wanted)
        limits = self._room.limits(function)
        with self._executor.context():
            if kernel.shape(_MANY_ITEMS, sizes, limits).shared_bytes:
                function.allow_shared()

        def choose(count: int) -> Shape:
            return kernel.shape(count, sizes, limits)

        return _CudaLaunch(function, kernel, choose, self._executor, pdl)


#: (index of the device, handle) of streams that have waited for a side stream's event, and on which
#: no kernel of ours was launched since. Of the process: another layer may be next on that stream.
_joined: set[tuple[int, int]] = set()


class _Beside(threading.local):
    """Handle of the side stream on which this thread launches now; None: on that of torch.

    A default of the class, because to find no attribute takes many times as long.
    """

    stream: int | None = None


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
        self._torch_device, self._is_torchs = device, device.type == "cuda"
        self.device_facts = driver.device(device.index or 0)
        # Raises for an unsupported GPU before anything is allocated.
        _ = self.device_facts.architecture
        self._sides: dict[int, SideStream] = {}  # channel -> its stream
        self._beside = _Beside()
        # Of torch: set at the first question, which may initialise it.
        self._raw_stream: Callable[[int], int] | None = None
        keep = weakref.finalize(self, SideStream.destroy, self.device_facts.index, self._sides)
        keep.atexit = False

    def follows_event(self, stream: int) -> bool:
        """Return whether the next launch on this stream waits for another stream's event.

        On a side stream each one does.
        """
        if self._beside.stream is not None:
            return True
        return bool(_joined) and (self.device_facts.index, stream) in _joined

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
                side = SideStream.create(self.device_facts.index)
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
        beside = self._beside.stream
        if beside is not None:
            return beside
        if not self._is_torchs:
            return 0
        if self._raw_stream is not None:
            return self._raw_stream(self.device_facts.index)
        # Initialises torch, if nobody has; later calls need no object of a stream.
        current = int(torch.cuda.current_stream(self._torch_device).cuda_stream)
        if self._torch_device.index is not None:  # else torch means the current device
            self._raw_stream = getattr(torch._C, _RAW_STREAM, None)
        return current

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

    def fault_words(self, count: int) -> MappedFaultWords:
        """See WorkspaceExecutor. The words lie in pinned host memory, mapped into the GPU."""
        return MappedFaultWords(self.device_facts.index, count)

    def word_reader(self, most: int) -> SideStreamReader:
        """See WorkspaceExecutor."""
        return SideStreamReader(self.device_facts.index, most)

    def launcher(self, variant: Variant, budget: Budget) -> _CudaLauncher:
        """See Executor."""
        return _CudaLauncher(self, variant, budget)
