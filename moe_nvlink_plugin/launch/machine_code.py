"""The machine code of a build for a GPU, from the cache or compiled into it; loaded there."""

from __future__ import annotations

import functools
import logging
from typing import Any

from moe_nvlink_plugin import driver, frameworks
from moe_nvlink_plugin.errors import CompileError, DriverError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.jit import cache, nvrtc

from .kernel import PDL, Build, Variant
from .shape import Limits

logger = logging.getLogger(__name__)

#: The driver can do nothing with the machine code, as it says.
_NOT_FOR_THIS_DRIVER = (
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
)
_TOO_OLD = "they are built by CUDA 13 and need driver 580 or newer"


def cubin_for(build: Build, architecture: str, wanted: Variant) -> bytes:
    """Return the cubin that a GPU of `architecture` gets; it holds one kernel. Local.

    Args:
        build: the kernel with its values.
        architecture: as in nvrtc.ARCHITECTURES.
        wanted: what the caller loads the build for. Errors name all of it.

    Raises:
        UnsupportedError: the cubin is not in the cache and cannot be compiled here. The message has
            the command that fills a cache elsewhere.
        CompileError: NVRTC refused the text, or the cache directory cannot be used.
    """
    try:
        return nvrtc.load_or_compile(build.text(), architecture)
    except UnsupportedError as error:
        raise UnsupportedError(missing(build, architecture, wanted, error)) from error


def missing(build: Build, architecture: str, wanted: Variant, error: UnsupportedError) -> str:
    """Return what cubin_for says if the cache lacks the build and NVRTC raised `error`. Local."""
    pdl = PDL not in build.kernel.axes or bool(build.values[build.kernel.axes.index(PDL)])
    return (
        f"no compiled kernels for {', '.join(wanted.words())} on {architecture} in "
        f"{_searched()}: {error}; or run, where NVRTC is,\n"
        f"  {precompile_line(wanted, architecture, pdl=pdl)} --cache-dir DIR\n"
        "and set MOE_NVLINK_CACHE_DIR=DIR here"
    )


def precompile_line(wanted: Variant, architecture: str, *, pdl: bool) -> str:
    """Return the command that puts every build of a variant into a cache."""
    line = f"moe-nvlink precompile --arch {architecture} --geometry {wanted}"
    return line if pdl else f"{line} --no-pdl"


def _searched() -> str:
    try:
        found = {cache.shipped_directory(), cache.directory()} - {None}
    except MoeNvlinkError as error:
        return f"the cache ({error})"
    return " or ".join(sorted(map(str, found)))


class Function:
    """Function of a loaded module. The module stays loaded, because a CUDA graph may hold it."""

    def __init__(self, index: int, module: Any, name: str) -> None:
        self.function = driver.call("cuModuleGetFunction", module, name.encode())
        # The driver loads the code here. The first launch, which may be captured, need not.
        driver.call("cuFuncLoad", self.function)
        attributes = driver.api().CUfunction_attribute
        self.max_threads = self._attribute(attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        most = driver.api().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        of_device = int(
            driver.call("cuDeviceGetAttribute", most, driver.call("cuDeviceGet", index))
        )
        declared = self._attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.shared_bytes = of_device - declared

    def _attribute(self, attribute: Any) -> int:
        return int(driver.call("cuFuncGetAttribute", attribute, self.function))

    def allow_shared(self) -> None:
        """Let launches ask for as much shared memory as a CTA can have; without it for 48 KiB."""
        name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        attribute = getattr(driver.api().CUfunction_attribute, name)
        driver.call("cuFuncSetAttribute", self.function, attribute, self.shared_bytes)

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def blocks_per_sm(self, threads: int) -> int:
        """Return how many CTAs of so many threads one SM holds."""
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(driver.call(query, self.function, threads, 0))

    def limits(self, num_sms: int) -> Limits:
        """Return what the function may use of so many SMs."""
        return Limits(num_sms, self.max_threads, self.blocks_per_sm, self.shared_bytes)


#: (index of the device, build) -> function that is loaded there.
_loaded: dict[tuple[int, Build], Function] = {}


def function_of(index: int, build: Build, wanted: Variant) -> Function:
    """Return a build's function on a device; compile and load the build on first use."""
    found = _loaded.get((index, build))
    if found is None:
        cubin = cubin_for(build, driver.device(index).architecture, wanted)
        found = _loaded.setdefault((index, build), _load(index, build, cubin))
    return found


def _load(index: int, build: Build, cubin: bytes) -> Function:
    with driver.on_device(index):
        try:
            try:
                return _function(index, cubin, build)
            except DriverError as error:
                if error.status not in _NOT_FOR_THIS_DRIVER:
                    raise
                return _function(index, _compiled_here(index, build, error), build)
        except DriverError as error:
            major, minor = driver.driver_version()
            what_to_do = _TOO_OLD
            if error.status == "CUDA_ERROR_OUT_OF_MEMORY":
                other = frameworks.advice(frameworks.GPU_MEMORY)
                what_to_do = f"leave more room on the GPU{other}"
            raise CompileError(
                f"the driver (CUDA {major}.{minor}) does not load the kernels built for "
                f"{driver.device(index).architecture}: {error}; {what_to_do}"
            ) from error


def _function(index: int, cubin: bytes, build: Build) -> Function:
    return Function(index, driver.call("cuModuleLoadData", cubin), build.kernel.entry)


def _compiled_here(index: int, build: Build, refused: DriverError) -> bytes:
    """Return a cubin of this machine's NVRTC: a newer one may have filled the cache elsewhere."""
    try:
        cubin = nvrtc.load_or_compile(
            build.text(), driver.device(index).architecture, of_this_nvrtc=True
        )
    except (CompileError, UnsupportedError):
        raise refused from None
    logger.warning(
        "moe_nvlink: the driver refuses a kernel of the cache (%s); another, of this machine's "
        "NVRTC, takes its place",
        refused,
    )
    return cubin
