"""What the CUDA driver and the GPUs offer, asked in a process of its own.

If the driver hangs, crashes or leaves a context behind, it does so in that process, not in the one
that asks. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import DriverError, MoeNvlinkError, UnsupportedError

#: Contexts on eight GPUs take seconds; a GPU that recovers from an error takes longer.
TIME_LIMIT_S = 120.0
#: A Python process that has not come as far as the driver by then never will.
_START_LIMIT_S = 600.0

_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_IMEX_CAPABILITY = Path("/proc/driver/nvidia/capabilities/fabric-imex-mgmt")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_TRIAL_BYTES = 1


@dataclasses.dataclass(frozen=True)
class Peer:
    """What one GPU may do with the memory of another GPU that this process sees.

    Attributes:
        index: number of the other GPU.
        access: whether it may load and store.
        native_atomics: whether atomics work there; as a rule they do over NVLink, not over PCIe.
        performance_rank: the driver's rank of the connection; 0 is the best.
    """

    index: int
    access: bool
    native_atomics: bool
    performance_rank: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """Attempt to create, export, import and map memory and to give access to it; then undo all.

    Attributes:
        supported: whether the device's attribute says that this works.
        tried: whether the attempt was made.
        error: the call that failed and its error; "" if no call failed.
    """

    supported: bool
    tried: bool = False
    error: str = ""

    @property
    def works(self) -> bool:
        """Whether it was tried and no call failed."""
        return self.tried and not self.error


@dataclasses.dataclass(frozen=True)
class Fabric:
    """What NVML says of the NVLink fabric that spans hosts.

    Attributes:
        state: "completed" if the GPU has joined the fabric; "" if NVML does not say.
        cluster: 32 hexadecimal digits; all 0 outside of a fabric of several hosts.
        clique: number of the clique; GPUs of one cluster and clique reach each other.
        error: why NVML does not say.
    """

    state: str = ""
    cluster: str = ""
    clique: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class GpuDevice:
    """One GPU.

    Attributes:
        index: the driver's number of the GPU in this process.
        name: the driver's name of the GPU.
        uuid: 32 hexadecimal digits.
        capability: compute capability, such as "9.0".
        architecture: architecture of its kernels; "" if there are no kernels for it.
        num_sms: number of SMs.
        total_bytes: bytes of its memory.
        is_mig: whether it is a MIG slice.
        virtual_memory: whether it supports virtual memory management.
        peers: the other GPUs that this process sees.
        posix_fd: attempt to share memory by a POSIX file descriptor.
        fabric_handle: attempt to share memory by a FABRIC handle.
        fabric: the NVLink fabric that spans hosts.
        tried: whether both attempts were made if supported; a rank makes them on its own GPU only.
        error: question that the driver failed to answer; the fields after it are then unknown.
    """

    index: int
    name: str = ""
    uuid: str = ""
    capability: str = ""
    architecture: str = ""
    num_sms: int = 0
    total_bytes: int = 0
    is_mig: bool = False
    virtual_memory: bool = False
    peers: tuple[Peer, ...] = ()
    posix_fd: Trial = Trial(False)
    fabric_handle: Trial = Trial(False)
    fabric: Fabric = Fabric()
    tried: bool = False
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The driver and every GPU this process sees.

    Attributes:
        unavailable: why the driver cannot be used; "" if it can.
        cuda_version: the newest CUDA that the driver serves, such as "13.0"; "" without a driver.
        driver_release: release of the kernel module, such as "580.65.06"; "" if unknown.
        imex_channels: names in /dev/nvidia-caps-imex-channels.
        imex_capability: whether the kernel module knows IMEX.
        lazy_loading: whether the driver loads a kernel at its first launch.
        devices: the GPUs, in the driver's order.
    """

    unavailable: str = ""
    cuda_version: str = ""
    driver_release: str = ""
    imex_channels: tuple[str, ...] = ()
    imex_capability: bool = False
    lazy_loading: bool = False
    devices: tuple[GpuDevice, ...] = ()


def probe(local_rank: int | None = None, time_limit_s: float = TIME_LIMIT_S) -> Gpus:
    """Ask the driver in a child process. Local; seconds.

    If the child gives no answer, `unavailable` of the result says why. A driver that hangs takes
    the time that the child needs to start, and at most 5 s more than time_limit_s.

    Args:
        local_rank: number of this rank on its host. The rank tries its own GPU only; None tries
            all.
        time_limit_s: seconds after which the child is killed, from where it calls the driver.
    """
    # Files, not pipes: if the child cannot be killed, this process must not wait for a pipe's end.
    # In memory, because there may be no temporary directory.
    with _file("answer") as out, _file("log") as log:
        status = _run(local_rank, time_limit_s, out, log)
        out.seek(0)
        log.seek(0)
        answer, said = (file.read().decode(errors="replace").splitlines() for file in (out, log))
    if isinstance(status, str):
        reason = status
    elif status != 0 or not answer:
        last = (said or ["no message"])[-1]
        reason = f"asking the CUDA driver ended with status {status}: {last}"
    else:
        return from_json(json.loads(answer[-1]))
    return dataclasses.replace(_surroundings(), unavailable=reason)


def _file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b")


def _run(local_rank: int | None, time_limit_s: float, out: IO[bytes], log: IO[bytes]) -> int | str:
    """Run print_answer in a child; return its exit status, or why it was killed."""
    ready, started = os.pipe()
    # `-c` would import what lies in the current directory: a random.py, say.
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; "
    code += f"from {__name__} import print_answer; print_answer({local_rank!r}, {started})"
    try:
        # The child has its own session, which is killed with every process that the driver started.
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=out,
            stderr=log,
            start_new_session=True,
            pass_fds=(started,),
        )
        os.close(started)
        if not _has_started(ready):
            reason = (
                f"Python did not come as far as the CUDA driver within {_START_LIMIT_S:g} s; see "
                "what keeps this machine busy, and run moe-nvlink doctor again"
            )
        else:
            try:
                return child.wait(time_limit_s)
            except subprocess.TimeoutExpired:
                reason = (
                    f"the CUDA driver did not answer within {time_limit_s:g} s; see whether "
                    "nvidia-smi answers and what dmesg says of NVRM and Xid"
                )
    finally:
        os.close(ready)
    os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # may sleep in the kernel forever
        child.wait(5)
    return reason


def _has_started(ready: int) -> bool:
    """Return whether the child is about to call the driver, or has ended, within the limit."""
    return bool(select.select([ready], [], [], _START_LIMIT_S)[0])


def from_json(values: dict[str, Any]) -> Gpus:
    """Return the Gpus that dataclasses.asdict and JSON have made `values` of."""
    devices = [
        GpuDevice(
            **{
                **device,
                "peers": tuple(Peer(**peer) for peer in device["peers"]),
                "posix_fd": Trial(**device["posix_fd"]),
                "fabric_handle": Trial(**device["fabric_handle"]),
                "fabric": Fabric(**device["fabric"]),
            }
        )
        for device in values["devices"]
    ]
    channels = tuple(values["imex_channels"])
    return Gpus(**{**values, "imex_channels": channels, "devices": tuple(devices)})


def own_index(local_rank: int | None, num_devices: int) -> int | None:
    """Return the index of a rank's GPU: the only visible one, or the one with the rank's number.

    Without a local rank the result is None, which means all GPUs.
    """
    if local_rank is None:
        return None
    return 0 if num_devices == 1 else local_rank


# ---- in the child


def print_answer(local_rank: int | None, started: int) -> None:
    """Print Gpus as one line of JSON. This is all that the child does.

    Args:
        local_rank: as in probe.
        started: end of a pipe, into which a byte goes when only the driver is left to wait for.
    """
    with contextlib.suppress(Exception):  # driver.unavailable says it
        import cuda.bindings.driver  # noqa: F401
    os.write(started, b"x")
    os.close(started)
    print(json.dumps(dataclasses.asdict(_gather(local_rank))))


def _surroundings() -> Gpus:
    """Return what the file system says without the driver."""
    release = ""
    try:
        match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", _KERNEL_MODULE.read_text())
        release = match[0] if match else ""
    except OSError:
        pass
    try:
        channels = tuple(sorted(path.name for path in _CHANNELS.iterdir()))
    except OSError:
        channels = ()
    return Gpus(
        driver_release=release, imex_channels=channels, imex_capability=_IMEX_CAPABILITY.exists()
    )


def _gather(local_rank: int | None) -> Gpus:
    found = _surroundings()
    reason = driver.unavailable()
    if reason is not None:
        return dataclasses.replace(found, unavailable=reason)
    try:
        version = ".".join(map(str, driver.driver_version()))
        count, lazy_loading = driver.num_devices(), driver.loads_lazily()
    except MoeNvlinkError as error:
        return dataclasses.replace(found, unavailable=str(error))
    own = own_index(local_rank, count)
    devices = tuple(_device(index, count, own in (None, index)) for index in range(count))
    return dataclasses.replace(
        found, cuda_version=version, lazy_loading=lazy_loading, devices=devices
    )


def _device(index: int, count: int, try_handles: bool) -> GpuDevice:
    found = GpuDevice(index)
    try:
        device = driver.device(index)
        found = dataclasses.replace(
            found,
            name=device.name,
            uuid=device.uuid,
            capability="{}.{}".format(*device.capability),
            architecture=driver.ARCHITECTURES.get(device.capability, ""),
            num_sms=device.num_sms,
            total_bytes=device.total_bytes,
            is_mig=device.is_mig,
            virtual_memory=_attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
            posix_fd=Trial(_attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
            fabric_handle=Trial(_attribute(device, "HANDLE_TYPE_FABRIC_SUPPORTED")),
            fabric=Fabric(error="a MIG slice") if device.is_mig else _fabric(device.uuid),
        )
        peers = tuple(_peer(device, other) for other in range(count) if other != index)
        found = dataclasses.replace(found, peers=peers)
        return _with_trials(found) if try_handles else found
    except MoeNvlinkError as error:
        return dataclasses.replace(found, error=str(error))


def _attribute(device: driver.Device, name: str) -> bool:
    attribute = getattr(driver.api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return bool(driver.call("cuDeviceGetAttribute", attribute, device.handle))


def _peer(device: driver.Device, index: int) -> Peer:
    other = driver.call("cuDeviceGet", index)
    kind = driver.api().CUdevice_P2PAttribute

    def attribute(name: str) -> int:
        which = getattr(kind, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetP2PAttribute", which, device.handle, other))

    return Peer(
        index=index,
        access=bool(driver.call("cuDeviceCanAccessPeer", device.handle, other)),
        native_atomics=bool(attribute("NATIVE_ATOMIC_SUPPORTED")),
        performance_rank=attribute("PERFORMANCE_RANK"),
    )


def _fabric(uuid: str) -> Fabric:
    """Ask NVML through cuda.bindings, if these have it. Every failure becomes Fabric.error."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        info = nvml.device_get_gpu_fabric_info_v(
            nvml.device_get_handle_by_uuid(driver.nvml_uuid(uuid))
        )
        return Fabric(
            state=nvml.GpuFabricState(int(info.state)).name.lower(),
            cluster=bytes(info.cluster_uuid).hex(),
            clique=int(info.clique_id),
        )
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return Fabric(error=f"{type(error).__name__}: {first}")


def _with_trials(device: GpuDevice) -> GpuDevice:
    types = driver.api().CUmemAllocationHandleType
    by_fd, by_fabric = (
        types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        types.CU_MEM_HANDLE_TYPE_FABRIC,
    )
    return dataclasses.replace(
        device,
        tried=True,
        posix_fd=_trial(device, device.posix_fd, by_fd, lambda fd: int(fd), os.close),
        # cuda.bindings takes the 64 bytes of a fabric handle as bytes.
        fabric_handle=_trial(
            device, device.fabric_handle, by_fabric, lambda shared: bytes(shared.data), None
        ),
    )


def _trial(
    device: GpuDevice,
    known: Trial,
    handle_type: Any,
    to_import: Callable[[Any], Any],
    close: Callable[[int], None] | None,
) -> Trial:
    if not known.supported:
        return known
    undo: list[Callable[[], object]] = []
    error = ""
    try:
        with driver.on_device(device.index):
            try:
                _share(device, handle_type, to_import, close, undo)
            finally:
                for step in reversed(undo):
                    step()
    except (DriverError, UnsupportedError, OSError) as caught:
        error = str(caught)
    return Trial(known.supported, True, error)


def _share(
    device: GpuDevice,
    handle_type: Any,
    to_import: Callable[[Any], Any],
    close: Callable[[int], None] | None,
    undo: list[Callable[[], object]],
) -> None:
    """Do in one process what a transport does with a workspace; append to `undo` how to undo it."""
    api, call = driver.api(), driver.call
    prop = api.CUmemAllocationProp()
    prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device.index
    prop.requestedHandleTypes = handle_type
    minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(call("cuMemGetAllocationGranularity", prop, minimum))
    size = -(-_TRIAL_BYTES // unit) * unit
    memory = call("cuMemCreate", size, prop, 0)
    undo.append(lambda: call("cuMemRelease", memory))
    shared = to_import(call("cuMemExportToShareableHandle", memory, handle_type, 0))
    if close is not None:
        undo.append(lambda: close(shared))
    imported = call("cuMemImportFromShareableHandle", shared, handle_type)
    undo.append(lambda: call("cuMemRelease", imported))
    address = call("cuMemAddressReserve", size, 0, 0, 0)
    undo.append(lambda: call("cuMemAddressFree", address, size))
    call("cuMemMap", address, size, 0, imported, 0)
    undo.append(lambda: call("cuMemUnmap", address, size))
    readers = [device.index, *(peer.index for peer in device.peers if peer.access)]
    access = [_access(api, index) for index in readers]
    call("cuMemSetAccess", address, size, access, len(access))


def _access(api: Any, index: int) -> Any:
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = index
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
