"""moe-nvlink doctor: the truth on a machine without a GPU, and against the fake driver.

What a driver answers comes from tests/support/fake_cuda in a child process, as in real use;
software is written down here, for no test environment has torch's CUDA build.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_nvlink_plugin import driver, env
from moe_nvlink_plugin.errors import CompileError, ConfigError, PeerError, TransportError
from moe_nvlink_plugin.integration.demo.server import free_port
from moe_nvlink_plugin.jit import host, nvrtc
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.tools import cli, doctor, precompile
from moe_nvlink_plugin.tools.doctor import gpu, inquiry, report, sockets, together
from moe_nvlink_plugin.tools.doctor.gpu import Fabric, Gpus, Peer, Trial
from moe_nvlink_plugin.tools.doctor.inquiry import EntryPoint, Facts, Found
from moe_nvlink_plugin.tools.doctor.verdict import Verdict, device_reasons
from moe_nvlink_plugin.transport import host as shared_memory
from tests.support import fake_cuda
from tests.support.long_tests import first_of
from tests.support.programs import python

Fake = Callable[..., Gpus]
KINDS = tuple(map(str, precompile.kinds("sm_90a")))
_answers: dict[object, Gpus] = {}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    return fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """probe() on a machine with the fake driver, set up by keywords of fake_cuda.environment."""

    def ask(local_rank: int | None = None, **options: Any) -> Gpus:
        variables = fake_cuda.environment(library, **options)
        key = (local_rank, *sorted(variables.items()))
        if key not in _answers:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                _answers[key] = gpu.probe(local_rank, time_limit_s=200)
        return _answers[key]

    return ask


def good(gpus: Gpus, **changes: Any) -> Facts:
    """A machine where all but the GPUs is as it should be."""
    names = {device.architecture for device in gpus.devices if device.architecture}
    found = Facts(
        rank=None,
        world_size=None,
        local_rank=None,
        host="alpha",
        host_id="1",
        descriptor_domain="1 net:[1]",
        software=inquiry.Software(
            plugin="1.0",
            python="3.12.0",
            kernel_text="abc",
            torch_cuda="13.0",
            torch_error="",
            distributions={"torch": "2.13.0"},
            entry_points=(),
            transports={"host": False, "nvlink": True},
            plugin_error="",
        ),
        cache=Found("/cache"),
        cpu=inquiry.Cpu(
            Found("g++"), Found("loaded"), Found("1 GiB"), "1:1", sockets.Sockets((0, 1), (0,), 1)
        ),
        gpus=gpus,
        kernels=inquiry.Kernels(
            Found("13.0"), {name: dict.fromkeys(KINDS, Found("in the cache")) for name in names}
        ),
        variables=dict.fromkeys(env.VARIABLES),
        bad_variables=(),
    )
    return dataclasses.replace(found, **changes)


def judge(gpus: Gpus, **changes: Any) -> Verdict:
    return doctor.judge_gpu_ranks([good(gpus, **changes)])


def text_of(*found: Facts) -> str:
    return report.as_text(list(found), [])


# ---- what a driver may answer


def test_two_good_gpus(fake: Fake) -> None:
    gpus = fake(devices=2)
    assert (gpus.unavailable, gpus.cuda_version, len(gpus.devices)) == ("", "13.0", 2)
    first, second = gpus.devices
    assert (first.architecture, first.capability) == ("sm_90a", "9.0")
    assert first.uuid != second.uuid
    assert first.peers == (Peer(index=1, access=True, native_atomics=True, performance_rank=1),)
    assert first.posix_fd == second.posix_fd == Trial(True, True, "")
    assert first.fabric_handle == Trial(False)
    verdict = judge(gpus)
    assert str(verdict) == "GPU ranks: will work: 2 GPUs (Fake GPU, sm_90a)"


@pytest.mark.parametrize(
    ("options", "expected"),
    first_of(
        [
            ({"mig": 1}, r"GPUs 0-1: Fake GPU MIG 1g.10gb is a MIG slice.*nvidia-smi -mig 0"),
            ({"p2p": 0}, r"no NVLink between GPUs 0-1: .*nvidia-smi topo -p2p n.*another all-to"),
            ({"atomics": 0}, r"no NVLink between GPUs 0-1: "),
            ({"driver": 12040}, r"the driver serves CUDA 12\.4, .* need 13\.0; install driver 580"),
            ({"capability": "8.0"}, r"GPUs 0-1: .*capability 8\.0, .*9\.0, 10\.0.*use another"),
            ({"vmm": 0}, r"no virtual memory management.*use another"),
            ({"devices": 0}, r"does not start \(CUDA_ERROR_NO_DEVICE\).*CUDA_VISIBLE_DEVICES"),
            ({"fail": "cuInit:1:CUDA_ERROR_SYSTEM_NOT_READY"}, r"start nvidia-fabricmanager"),
        ],
        2,
    ),
)
def test_what_will_not_work(fake: Fake, options: dict[str, Any], expected: str) -> None:
    verdict = judge(fake(**{"devices": 2, **options}))
    assert not verdict.works
    line = str(verdict)
    assert line.startswith("GPU ranks: will not work: ")
    assert "\n" not in line
    assert re.search(expected, line), line


@pytest.mark.parametrize(
    "call",
    first_of(
        ["cuMemMap", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"]
        + ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemSetAccess"]
        + ["cuDevicePrimaryCtxRetain"]
    ),
)
def test_a_handle_that_fails_at_any_step(fake: Fake, call: str) -> None:
    gpus = fake(devices=1, fail=f"{call}:1:CUDA_ERROR_NOT_PERMITTED")
    trial = gpus.devices[0].posix_fd
    assert (trial.tried, trial.works) == (True, False)
    assert trial.error == f"{call}: CUDA_ERROR_NOT_PERMITTED"
    assert f"GPU 0: its memory cannot be shared ({trial.error})" in str(judge(gpus))


@pytest.mark.parametrize(
    "call", first_of(["", "cuMemMap", "cuMemExportToShareableHandle", "cuMemSetAccess"], 2)
)
def test_nothing_stays_behind(library: Path, call: str) -> None:
    """All that a trial has made is given back, also when it fails in the middle."""
    options: dict[str, Any] = {"fail": f"{call}:1:CUDA_ERROR_UNKNOWN"} if call else {}
    code = (
        "from moe_nvlink_plugin.tools.doctor import gpu;"
        "from tests.support.fake_cuda import control;"
        "import os; before = len(os.listdir('/proc/self/fd'));"
        "device, = gpu._gather(None).devices; print(device.posix_fd, device.fabric_handle);"
        "assert device.posix_fd.tried and device.fabric_handle.tried;"
        "assert not any(control().live().values()), control().live();"
        "assert len(os.listdir('/proc/self/fd')) == before"
    )
    variables = fake_cuda.environment(library, devices=1, fabric=1, **options)
    done = python("-c", code, variables=variables)
    assert done.returncode == 0, done.stderr
    assert ("CUDA_ERROR_UNKNOWN" in done.stdout) == bool(call)


def test_the_handle_that_would_be_used(fake: Fake) -> None:
    """Inside a host that is the descriptor, unless the device has none."""
    (device,) = fake(devices=1, fabric=1).devices
    failed = Trial(True, True, "cuMemMap: CUDA_ERROR_UNKNOWN")
    assert device_reasons(dataclasses.replace(device, posix_fd=failed))
    assert not device_reasons(dataclasses.replace(device, posix_fd=Trial(False)))
    assert not device_reasons(dataclasses.replace(device, fabric_handle=failed))
    neither = dataclasses.replace(device, posix_fd=Trial(False), fabric_handle=Trial(False))
    assert "offers no handle" in device_reasons(neither)[0]


def test_fabric(fake: Fake) -> None:
    assert fake(devices=1, fabric=1).devices[0].fabric_handle == Trial(True, True, "")
    # Promised by the attribute, refused without an IMEX channel: still fine inside one host.
    gpus = fake(devices=1, fabric="broken")
    trial = gpus.devices[0].fabric_handle
    assert (trial.supported, trial.works) == (True, False)
    assert trial.error.endswith("CUDA_ERROR_NOT_PERMITTED")
    assert judge(gpus).works


def test_gpus_of_different_kinds(fake: Fake) -> None:
    gpus = fake(devices=2)
    other = dataclasses.replace(gpus.devices[1], capability="12.0", architecture="sm_120a")
    mixed = dataclasses.replace(gpus, devices=(gpus.devices[0], other))
    assert "GPUs of different kinds (compute capabilities 12.0, 9.0)" in str(judge(mixed))


def test_a_question_that_fails(fake: Fake) -> None:
    gpus = fake(devices=2, fail="cuDeviceTotalMem:2:CUDA_ERROR_ECC_UNCORRECTABLE")
    assert not gpus.devices[0].error
    assert gpus.devices[1].error == "cuDeviceTotalMem: CUDA_ERROR_ECC_UNCORRECTABLE"
    verdict = judge(gpus)
    assert verdict.works  # on the other one
    assert "GPU 1: cuDeviceTotalMem" in str(verdict)
    assert "CUDA_VISIBLE_DEVICES hides" in str(verdict)


def test_a_rank_tries_its_own_gpu_only(fake: Fake) -> None:
    gpus = fake(local_rank=1, devices=3)
    assert [device.tried for device in gpus.devices] == [False, True, False]
    found = good(gpus, rank=1, world_size=3, local_rank=1)
    assert [device.index for device in found.own_devices()] == [1]
    # Where a launcher shows each rank one GPU it is that one.
    gpus = fake(local_rank=1, devices=1)
    assert [device.tried for device in gpus.devices] == [True]
    assert len(good(gpus, rank=1, world_size=3, local_rank=1).own_devices()) == 1


def test_more_ranks_than_gpus(fake: Fake) -> None:
    gpus = fake(local_rank=2, devices=2)
    verdict = judge(gpus, rank=2, world_size=3, local_rank=2)
    assert "LOCAL_RANK=2 and this process sees 2 GPUs; start no more ranks" in str(verdict)


def test_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = pytest.importorskip("cuda.bindings.nvml", reason="these cuda-bindings have no NVML")
    by_uuid = mock.Mock(return_value=1)
    info = nvml.GpuFabricInfo_v3()
    info.state, info.clique_id = nvml.GpuFabricState.COMPLETED, 32766
    info.cluster_uuid = list(range(240, 256))
    monkeypatch.setattr(nvml, "init_v2", lambda: None)
    monkeypatch.setattr(nvml, "device_get_handle_by_uuid", by_uuid)
    monkeypatch.setattr(nvml, "device_get_gpu_fabric_info_v", lambda handle: info)
    uuid = "00112233445566778899aabbccddeeff"
    assert gpu._fabric(uuid) == Fabric("completed", bytes(range(240, 256)).hex(), 32766)
    by_uuid.assert_called_once_with("GPU-00112233-4455-6677-8899-aabbccddeeff")


# ---- drivers that are not there, hang or crash


def test_a_file_that_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("not ELF")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "no CUDA driver (" in gpu.probe().unavailable


def test_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "pid"
    text = (
        "#include <cstdio>\n#include <unistd.h>\n"
        f'extern "C" int cuInit(unsigned) {{ FILE* f = fopen("{mark}", "w");'
        ' fprintf(f, "%d", getpid()); fclose(f); for (;;) sleep(1000); }'
        'extern "C" int cuGetProcAddress_v2(const char* name, void** out, int, unsigned long long,'
        " int*) { *out = (void*)cuInit; return 0; }"
    )
    host.compile_text(text, tmp_path / "libcuda.so.1", ("-shared", "-fPIC"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    # Only the end of a limit is played: on a busy machine any number of seconds may be too few.
    really = subprocess.Popen.wait

    def wait(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        while timeout == 77 and not (mark.exists() and mark.read_text()):
            assert child.poll() is None, "the child never got as far as the driver"
            time.sleep(0.01)
        return really(child, 0.01 if timeout == 77 else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    verdict = judge(gpu.probe(time_limit_s=77))
    assert "did not answer within 77 s; see whether nvidia-smi answers" in str(verdict)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), signal.SIGKILL)


def test_the_time_limit_is_the_drivers(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that starts slowly is waited for, and the driver's limit begins after that."""
    go = tmp_path / "go"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    )
    for name, value in fake_cuda.environment(library, devices=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    starts: Callable[..., Any] = select.select
    waits = subprocess.Popen.wait

    def start(*arguments: Any) -> Any:
        assert not starts(*arguments[:3], 0)[0]
        go.touch()
        return starts(*arguments)

    def wait(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert go.exists(), "the limit has begun, and the child has not"
        return waits(child, timeout)

    monkeypatch.setattr(select, "select", start)
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert len(gpu.probe().devices) == 1


def test_a_child_that_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "_START_LIMIT_S", 0.01)
    reason = gpu.probe().unavailable
    assert "Python did not come as far as the CUDA driver within 0.01 s; see what keeps" in reason


def test_a_driver_that_crashes(fake: Fake) -> None:
    gpus = fake(devices=1, fail="cuMemCreate:1:KILL")
    assert gpus.unavailable == "asking the CUDA driver ended with status -9: no message"


def test_a_file_in_the_current_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('what is this?')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3]), *filter(None, sys.path)])
    assert "what is this?" not in gpu.probe().unavailable


def test_this_process_stays_free_of_the_driver(library: Path) -> None:
    code = (
        "from moe_nvlink_plugin.tools.doctor import gpu; assert gpu.probe().devices;"
        "raise SystemExit('libcuda.so' in open('/proc/self/maps').read())"
    )
    variables = fake_cuda.environment(library, devices=1)
    assert python("-c", code, variables=variables).returncode == 0


# ---- software and kernels


def change(found: Facts, **changes: Any) -> Facts:
    return dataclasses.replace(found, software=dataclasses.replace(found.software, **changes))


def with_cpu(found: Facts | None = None, **changes: Any) -> Facts:
    """A machine with another CPU; without a GPU unless there is one."""
    found = found or good(Gpus(unavailable="no driver"))
    return dataclasses.replace(found, cpu=dataclasses.replace(found.cpu, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_cuda": ""}, "torch 2.13.0 is a build without CUDA; install torch's CUDA build"),
        ({"numpy_error": "Numpy is not available: pip install numpy"}, "Numpy is not available"),
        ({"transports": {"host": False}}, "no transport that serves GPUs"),
        ({"plugin_error": "a plugin fails"}, "a plugin fails"),
    ],
)
def test_software(fake: Fake, changes: dict[str, Any], expected: str) -> None:
    verdict = doctor.judge_gpu_ranks([change(good(fake(devices=1)), **changes)])
    assert expected in str(verdict)
    assert not verdict.works


def test_a_torch_that_cannot_be_imported(library: Path, tmp_path: Path) -> None:
    """Who asks for the report then needs it most. The process that asks the driver has none."""
    (tmp_path / "torch.py").write_text("raise OSError('no libtorch_cpu.so')")
    variables = fake_cuda.environment(library, capability="8.0") | {"PYTHONPATH": str(tmp_path)}
    done = python("-m", "moe_nvlink_plugin", "doctor", variables=variables)
    assert done.returncode == 1, done.stderr
    *lines, gpus, cpus = done.stdout.splitlines()
    assert any("compute capability 8.0" in line for line in lines)
    for verdict in (gpus, cpus):
        assert "torch cannot be imported (OSError: no libtorch_cpu.so)" in verdict


def test_a_torch_of_which_a_part_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted pip leaves."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert inquiry._torch() == ("", "AttributeError: module 'torch' has no attribute 'version'")


@pytest.mark.parametrize("error", [TransportError("no room"), ValueError("no room")])
def test_a_trial_of_shared_memory_that_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CPU ranks would fail there too."""
    monkeypatch.setattr(sockets, "_trial", mock.Mock(side_effect=error))
    (tmp_path / "kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "kernel/mm/transparent_hugepage/shmem_enabled").write_bytes(b"\xff")
    verdict = doctor.judge_cpu_ranks([with_cpu(sockets=sockets.look(tmp_path))])
    assert not verdict.works
    assert "a trial of shared memory failed: " in str(verdict)
    assert "no room" in str(verdict)


def test_a_torch_that_finds_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`create` would fail on every rank: torch gathers their configurations through numpy."""
    missing = mock.Mock(side_effect=RuntimeError("Numpy is not available"))
    monkeypatch.setattr(torch.Tensor, "numpy", missing)
    found = dataclasses.replace(good(Gpus()), software=inquiry._software())
    assert "Numpy is not available: " in str(doctor.judge_cpu_ranks([found]))
    assert "pip install numpy" in text_of(found)


def with_kernels(found: Facts, nvrtc: Found, missing: dict[str, str]) -> Facts:
    """A machine without these kinds of kernels for sm_90a, and why."""
    kinds = {kind: Found(error=missing.get(kind, "")) for kind in KINDS}
    return dataclasses.replace(found, kernels=inquiry.Kernels(nvrtc, {"sm_90a": kinds}))


def test_a_long_log_is_shortened_in_the_verdict(fake: Fake) -> None:
    """NVRTC's warnings come before its errors."""
    lines = [*map("(1): warning: {}".format, range(50)), "(2): error: no", "(3): error: nor this"]
    log = "\n".join(["NVRTC 13.0 failed", *lines, "what to do"])
    found = with_kernels(good(fake(devices=1)), Found("13.0"), {KINDS[1]: log})
    line = str(doctor.judge_gpu_ranks([found]))
    assert line.endswith(f"{KINDS[1]}: NVRTC 13.0 failed (2): error: no ... what to do")
    assert log in text_of(found)


def compiled_as(refuse: Callable[[str], bool]) -> Callable[..., bytes]:
    """An NVRTC that refuses some texts; of the others it makes the beginning of a cubin."""

    def compile_cubin(text: str, architecture: str, **_options: Any) -> bytes:
        if refuse(text):
            raise CompileError(f"NVRTC 13.0 failed for {architecture}:\nmoe_nvlink.cu(9): error")
        return b"\x7fELF".ljust(18, b"\0") + (190).to_bytes(2, "little")

    return compile_cubin


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "empty cache"))


def own_texts(refused: Variant) -> list[str]:
    """What is compiled for one kind and for no other."""
    of_kinds = {
        kind: {build.text() for build in kind.builds(pdl=env.pdl())}
        for kind in precompile.kinds("sm_90a")
    }
    mine = of_kinds.pop(refused)
    return sorted(mine.difference(*of_kinds.values()))


@pytest.mark.parametrize("number", first_of(range(1, len(KINDS))), ids=KINDS[1:])
def test_one_kind_that_nvrtc_refuses(
    fake: Fake, empty_cache: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Doctor compiles each kind, and does not say "will work" if one of them is refused."""
    refused = precompile.kinds("sm_90a")[number]
    texts = own_texts(refused)
    assert texts
    monkeypatch.setattr(nvrtc, "compile_cubin", compiled_as(lambda text: text in texts))
    gpus = fake(devices=1)
    found = good(gpus, kernels=inquiry._kernels(gpus))
    (line,) = doctor.judge_gpu_ranks([found]).reasons
    assert line.startswith(f"no kernels on sm_90a for {refused}: NVRTC 13.0 failed for sm_90a:")
    assert "pip install nvidia-cuda-nvrtc==" in line
    text = report.as_text([found], [doctor.judge_gpu_ranks([found])])
    assert f"NO  kernels for sm_90a, {refused}: NVRTC 13.0 failed" in text
    assert f"ok  kernels for sm_90a: {len(KINDS) - 1} compiled now, of {len(KINDS)} kinds" in text


def test_each_build_is_compiled_once(
    fake: Fake, empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of layer needs the same dispatch: threads must not wait for one another's."""
    load_or_compile = mock.Mock(return_value=b"code")
    monkeypatch.setattr(nvrtc, "load_or_compile", load_or_compile)
    kernels = inquiry._kernels(fake(devices=2))
    asked = [call.args[0] for call in load_or_compile.call_args_list]
    assert len(asked) == len(set(asked)) > 0
    assert {found.text for found in kernels.architectures["sm_90a"].values()} == {"compiled now"}
    monkeypatch.setenv("MOE_NVLINK_PDL", "perhaps")
    kernels = inquiry._kernels(fake(devices=2))
    assert all(
        "MOE_NVLINK_PDL" in found.error for found in kernels.architectures["sm_90a"].values()
    )


def test_an_image_with_some_kinds_and_no_compiler(fake: Fake) -> None:
    """It was made for these: the others are a note. Without rows as they come nothing works."""
    no_nvrtc = Found(error="cuda-bindings finds no NVRTC library")
    found = with_kernels(good(fake(devices=1)), no_nvrtc, dict.fromkeys(KINDS[2:], "not cached"))
    verdict = doctor.judge_gpu_ranks([found])
    assert verdict.works
    assert f"the cache has no kernels on sm_90a for {KINDS[2]}; " in str(verdict)
    assert "nothing here compiles them: cuda-bindings finds no NVRTC library" in str(verdict)
    found = with_kernels(good(fake(devices=1)), no_nvrtc, dict.fromkeys(KINDS, "run precompile"))
    assert doctor.judge_gpu_ranks([found]).reasons == ("run precompile",)


def test_an_nvrtc_that_is_too_old(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdict and report name the version found, the version needed, and the next step."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (0, 12, 8))
    found = with_kernels(
        good(fake(devices=1)), inquiry._ask(nvrtc.version), dict.fromkeys(KINDS[2:], "not cached")
    )
    verdict = doctor.judge_gpu_ranks([found])
    assert verdict.works
    told = f"NVRTC 12.8 is loaded, and the kernels need {nvrtc.TRIED[0]} or newer: install a torch"
    for text in (str(verdict), text_of(found)):
        assert told in text
        assert "no NVRTC" not in text


def test_needed_architectures_are_compiled(
    fake: Fake, empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = fake(devices=1, capability="10.0")
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_cubin", compiled_as(lambda text: False))
        first, again = (inquiry._kernels(gpus).architectures for _ in range(2))
    kinds = tuple(map(str, precompile.kinds("sm_100a")))
    assert set(kinds) - set(KINDS) == {"top_k=8,dtype=bf16,async_release=yes"}
    assert first == {"sm_100a": dict.fromkeys(kinds, Found("compiled now"))}
    assert again == {"sm_100a": dict.fromkeys(kinds, Found("in the cache"))}
    # A machine without a compiler and with an empty cache.
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", f"{os.environ['MOE_NVLINK_CACHE_DIR']} of another")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for kind, answer in inquiry._kernels(gpus).architectures["sm_100a"].items():
        assert f"moe-nvlink precompile --arch sm_100a --geometry {kind}" in answer.error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOE_NVLINK_PDL", "maybe"),
        ("MOE_NVLINK_TIMEOUT_S", "-1"),
        ("MOE_NVLINK_MAX_SMS", "x"),
        ("MOE_NVLINK_LINEINFO", "2"),
        ("MOE_NVLINK_SMALL_TOKENS", "65"),
        ("MOE_NVLINK_UNIT_DATA_BYTES", "13"),
        ("MOE_NVLINK_COMBINE", "fp8"),
        ("MOE_NVLINK_MTP_LM_HEAD_TP", "-3"),
        ("MOE_NVLINK_SMALL_TOKENS", "9" * 5000),
    ],
)
def test_bad_variables(fake: Fake, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    variables, bad = inquiry._environment()
    assert variables[name] == value
    found = good(fake(devices=1), variables=variables, bad_variables=bad)
    for verdict in (doctor.judge_gpu_ranks([found]), doctor.judge_cpu_ranks([found])):
        assert f"{name}={value!r}" in str(verdict)
        assert not verdict.works


def test_a_tuning_file_that_no_layer_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_TUNING", "/none.json")
    monkeypatch.setattr(inquiry, "probe", lambda _rank: Gpus(unavailable="no driver"))
    (bad,) = inquiry.facts().bad_variables
    assert "'/none.json' (MOE_NVLINK_TUNING) cannot be read" in bad


# ---- several ranks


def ranks(count: int, gpus: Callable[[int], Gpus], **changes: Any) -> list[Facts]:
    return [
        good(gpus(rank), **{"rank": rank, "world_size": count, "local_rank": rank, **changes})
        for rank in range(count)
    ]


@pytest.fixture
def two(fake: Fake) -> list[Facts]:
    """Two ranks on two GPUs of one host."""
    return ranks(2, lambda rank: fake(local_rank=rank, devices=2))


def test_a_machine_of_two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores of two nodes, and memory on the wrong one; this machine's own sysfs is not read."""
    files = {
        "devices/system/node/node0/cpulist": "0-3,8-11",
        "devices/system/node/node1/cpulist": "4-7,12-15",
        "devices/system/node/node2/cpulist": "",  # memory without cores
        "kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny",
        "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "7",
        "numa_maps": "10000 default file=/a mapped=1 N0=1\n7f0000200000 default N1=600 N0=424\n",
        "smaps": "7f0000200000-7f0000600000 rw-s\nRss: 4096 kB\nShmemPmdMapped:     2048 kB\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(sockets, "_trial", lambda: sockets.seen(0x7F0000200000, tmp_path))
    for cores, told in [
        ({9, 12}, "cores 9, 12, on NUMA nodes 0-1 of 2; bind each rank to one node (vLLM does"),
        ({4, 5, 6}, "cores 4-6, on NUMA node 1 of 2\n"),
    ]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _thread, cores=cores: cores)
        found = with_cpu(sockets=sockets.look(tmp_path))
        text = text_of(inquiry.from_json(inquiry.to_json(found)))
        assert told in text
        assert "shared memory of this process lies on NUMA nodes 0-1" in text
        assert "2 MiB of a trial's 4 MiB (shmem_enabled: advise; 7 reserved for hugetlbfs" in text


def test_placement_that_cannot_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path / "none")
    found = sockets.look(tmp_path)
    assert "cannot create" in found.error
    assert found.cores
    assert not found.nodes
    assert "huge pages were not tried: cannot create" in text_of(with_cpu(sockets=found))


def test_ranks_that_agree(two: list[Facts]) -> None:
    assert str(doctor.judge_gpu_ranks(two)) == (
        "GPU ranks: will work: ranks 0-1: 1 GPU (Fake GPU, sm_90a)"
    )
    assert doctor.judge_cpu_ranks(two).works


def test_when_kernels_are_loaded(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, when in (("LAZY", "at their first launch"), ("EAGER", "at the start")):
        monkeypatch.setenv("CUDA_MODULE_LOADING", value)
        # A number of GPUs that no other test asks for: the answers are kept.
        found = good(fake(devices=7 if value == "LAZY" else 6))
        assert found.gpus.lazy_loading == (value == "LAZY")
        assert f"kernels are loaded {when} (num_channels > 1: CUDA" in text_of(found)


def test_two_ranks_on_one_gpu(fake: Fake) -> None:
    both = ranks(2, lambda rank: fake(local_rank=rank, devices=2, shared_uuid=1))
    assert "ranks 0-1 are on one GPU (" in str(doctor.judge_gpu_ranks(both))
    assert doctor.judge_cpu_ranks(both).works
    allowed = [
        dataclasses.replace(found, variables={"MOE_NVLINK_ALLOW_SHARED_GPU": "1"}) for found in both
    ]
    verdict = doctor.judge_gpu_ranks(allowed)
    assert verdict.works
    assert "ranks 0-1 are on one GPU (" in str(verdict)
    assert "without MPS the GPU runs one process at a time" in str(verdict)
    assert not doctor.judge_gpu_ranks([allowed[0], both[1]]).works


def test_ranks_on_gpus_of_different_kinds(fake: Fake) -> None:
    both = ranks(2, lambda rank: fake(local_rank=rank, devices=2, capability=("9.0", "10.0")[rank]))
    assert "compute capability differs (9.0 on rank 0, 10.0 on rank 1); use one kind" in str(
        doctor.judge_gpu_ranks(both)
    )


def test_a_reason_names_its_rank(two: list[Facts]) -> None:
    two[1] = change(two[1], torch_cuda="")
    assert "will not work: rank 1: torch 2.13.0 is a build" in str(doctor.judge_gpu_ranks(two))


def test_ranks_with_other_kernels(two: list[Facts]) -> None:
    two[1] = change(two[1], kernel_text="def")
    expected = "the kernels' source differs (abc on rank 0, def on rank 1); install the same"
    for verdict in (doctor.judge_gpu_ranks(two), doctor.judge_cpu_ranks(two)):
        assert expected in str(verdict)
        assert not verdict.works


def test_ranks_with_another_torch_and_driver(fake: Fake, two: list[Facts]) -> None:
    two[1] = change(two[1], distributions={"torch": "2.14.0"})
    newer = dataclasses.replace(two[1].gpus, cuda_version="13.2")
    two[1] = dataclasses.replace(two[1], gpus=newer)
    verdict = doctor.judge_gpu_ranks(two)
    assert verdict.works
    assert "torch differs (2.13.0 on rank 0, 2.14.0 on rank 1)" in str(verdict)
    assert "the driver's CUDA differs (13.0 on rank 0, 13.2 on rank 1)" in str(verdict)


def test_ranks_with_different_adapters(two: list[Facts]) -> None:
    """Each rank's environment may have other plugins: whoever reads knows none of them."""
    two[0] = change(two[0], frameworks={"Serve": Found("1.0 takes it"), "Other": None})
    two[1] = change(two[1], frameworks={"Third": Found(error="1.0 is too old")})
    read = [inquiry.from_json(inquiry.to_json(found)) for found in two]
    assert read == two
    for verdict in (doctor.judge_gpu_ranks(read), doctor.judge_cpu_ranks(read)):
        assert verdict.works
        for text in (
            "Serve differs (an adapter that would work on rank 0, no adapter for Serve on rank 1)",
            "Other differs (no Other on rank 0, no adapter for Other on rank 1)",
            "Third differs (no adapter for Third on rank 0, an adapter that would not work on rank",
        ):
            assert text in str(verdict)
    two[1] = change(two[1], frameworks=two[0].software.frameworks)
    assert str(doctor.judge_cpu_ranks(two)) == "CPU ranks: will work"


#: What the transport says when two ranks of one host meet, each on a GPU of its own; one line for
#: each environment in argv. Forks before the driver is started: torch is imported once.
_TRANSPORT = """
import json, os, sys
from moe_nvlink_plugin.errors import MoeNvlinkError
from moe_nvlink_plugin.transport import topology, vmm
for variables in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(variables)
        try:
            topology.decide([topology.look(index, vmm.FabricTrial(index)) for index in range(2)])
            print("agreed", flush=True)
        except MoeNvlinkError as error:
            print(" ".join(str(error).split()), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
def test_the_verdict_is_the_transports(library: Path, fake: Fake) -> None:
    cases: list[dict[str, Any]] = [{}, {"fabric": 1}, {"fabric": "broken"}]  # these work
    cases += [{"p2p": 0}, {"atomics": 0}, {"mig": 1}, {"shared_uuid": 1}, {"vmm": 0}]
    cases += [{"capability": "8.0"}]
    environments = [fake_cuda.environment(library, devices=2, **options) for options in cases]
    done = python("-c", _TRANSPORT, json.dumps(environments), variables=environments[0])
    answers = done.stdout.splitlines()
    assert [answer == "agreed" for answer in answers] == [True] * 3 + [False] * 6, answers
    for options, answer in zip(cases, answers, strict=True):
        both = ranks(2, lambda rank, options=options: fake(rank, devices=2, **options))  # type: ignore[misc]
        verdict = doctor.judge_gpu_ranks(both)
        assert verdict.works == (answer == "agreed"), (options, str(verdict), answer)


def hosts_apart(fake: Fake, fabrics: list[Fabric] | None = None, **options: Any) -> list[Facts]:
    """One rank on each of two hosts."""
    found = []
    for rank in range(2):
        gpus = fake(local_rank=0, devices=1, host=rank, **options)
        if fabrics is not None:
            device = dataclasses.replace(gpus.devices[0], fabric=fabrics[rank])
            gpus = dataclasses.replace(gpus, devices=(device,))
        place = {"rank": rank, "local_rank": 0, "host": f"host{rank}", "host_id": str(rank)}
        place["descriptor_domain"] = f"{rank} net:[1]"
        found.append(good(gpus, world_size=2, **place))
    return found


def test_hosts_without_a_fabric(fake: Fake) -> None:
    both = hosts_apart(fake)
    line = str(doctor.judge_gpu_ranks(both))
    assert "ranks on several hosts (host0, host1) need one NVLink domain with IMEX" in line
    assert "ranks 0-1: this GPU is in no NVLink fabric" in line
    line = str(doctor.judge_cpu_ranks(both))
    assert "CPU ranks exchange inside one host, these are on host0, host1" in line


def test_hosts_without_an_imex_channel(fake: Fake) -> None:
    line = str(doctor.judge_gpu_ranks(hosts_apart(fake, fabric="broken")))
    assert "CUDA_ERROR_NOT_PERMITTED, and there is no channel in" in line
    assert "start nvidia-imex" in line


def test_hosts_of_one_domain_and_of_two(fake: Fake) -> None:
    one, other = Fabric("completed", "ab" * 16, 7), Fabric("completed", "ab" * 16, 8)
    assert doctor.judge_gpu_ranks(hosts_apart(fake, [one, one], fabric=1)).works
    line = str(doctor.judge_gpu_ranks(hosts_apart(fake, [one, other], fabric=1)))
    assert "NVML names 2 domains: rank 0, rank 1" in line


def test_containers_with_a_network_namespace_each(two: list[Facts]) -> None:
    two[1] = dataclasses.replace(two[1], descriptor_domain="1 net:[2]")
    line = str(doctor.judge_gpu_ranks(two))
    assert "ranks in several network namespaces (docker: --network host gives them one)" in line
    assert doctor.judge_cpu_ranks(two).works


def test_containers_with_a_shm_each(two: list[Facts]) -> None:
    two[1] = with_cpu(two[1], shared_memory_id="2:1")
    assert "the ranks see different /dev/shm" in str(doctor.judge_cpu_ranks(two))
    assert doctor.judge_gpu_ranks(two).works


def test_no_local_rank(fake: Fake) -> None:
    both = ranks(2, lambda rank: fake(devices=2), local_rank=None)
    assert "LOCAL_RANK is not set" in str(doctor.judge_gpu_ranks(both))


# ---- what is printed


def test_the_report(fake: Fake) -> None:
    found = good(fake(devices=2, fabric=1))
    entries = tuple(
        EntryPoint("vllm.platform_plugins", name, f"{name}-dist")
        for name in ("moe_nvlink", "other")
    )
    found = change(found, entry_points=entries)
    lines = report.as_text([found], [doctor.judge_gpu_ranks([found])]).splitlines()
    assert lines[-1].startswith("GPU ranks: will work")
    text = "\n".join(lines)
    assert "torch 2.13.0, for CUDA 13.0" in text
    assert "vllm.platform_plugins: other of other-dist" in text
    assert "vLLM takes one platform plugin: VLLM_PLUGINS chooses" in text
    assert "shared by POSIX file descriptor: exported, imported and mapped" in text
    assert "shared by FABRIC handle: exported, imported and mapped" in text
    assert any(line.split() == ["0", ".", "NVL"] for line in lines)
    for name in env.VARIABLES:
        assert f"{name} unset" in text


# ---- the command


def test_the_command_tells_the_truth_here(capfd: pytest.CaptureFixture[str]) -> None:
    """On the machine that runs the tests, whatever it has: these tests exchange between CPUs."""
    assert cli.main(["doctor"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "CPU ranks: will work"
    if driver.unavailable() is not None:
        assert lines[-2].startswith("GPU ranks: will not work: ")


@pytest.mark.long
def test_the_command_as_json(library: Path) -> None:
    variables = fake_cuda.environment(library, devices=1)
    done = python("-m", "moe_nvlink_plugin", "doctor", "--json", variables=variables)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = inquiry.from_json(json.dumps(answer["ranks"][0]))
    assert [device.name for device in found.gpus.devices] == ["Fake GPU"]
    # By this environment's NVRTC, or in the cache of this run.
    kinds = found.kernels.architectures["sm_90a"]
    assert tuple(kinds) == KINDS
    assert not [answer.error for answer in kinds.values() if answer.error]
    assert [verdict["who"] for verdict in answer["verdicts"]] == ["GPU ranks", "CPU ranks"]


def test_neither_works(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says it: no driver, no host compiler."""
    no_compiler = Found(error="no compiler")
    monkeypatch.setattr(together, "facts", lambda: with_cpu(kernels=no_compiler))
    assert cli.main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == ["GPU ranks: will not work: no driver", "CPU ranks: will not work: no compiler"]
    found = with_cpu(good(fake(devices=1)), kernels=no_compiler)
    monkeypatch.setattr(together, "facts", lambda: found)
    assert cli.main(["doctor"]) == 0


@pytest.mark.parametrize("rank", ["x", "2", "-1"])
def test_a_launcher_that_says_nonsense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 1
    assert "unset them to run alone" in capsys.readouterr().err


def start_rank(rank: int, size: int, port: int, **variables: str) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "moe_nvlink_plugin", "doctor"],
        env={**os.environ, **place, **meeting, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_of_a_launcher_report_together(library: Path) -> None:
    # For such GPUs it compiles nothing.
    variables = fake_cuda.environment(library, devices=2, shared_uuid=1, capability="8.0")
    port = free_port()
    processes = [start_rank(rank, 2, port, **variables) for rank in range(2)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[1][0] == ""
    lines = outputs[0][0].splitlines()
    assert lines[-1] == "CPU ranks: will work"
    assert "ranks 0-1 are on one GPU (" in lines[-2]


def test_a_rank_that_waits_says_for_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell may have a launcher's variables left over, and then nothing comes."""
    said, really = threading.Event(), together._say_what_is_missing

    def say(mine: Facts, timeout_s: float) -> None:
        really(mine, timeout_s)
        said.set()

    def nobody_comes(*_arguments: object, **_options: object) -> None:
        assert said.wait(60), "it waits and says nothing"
        raise RuntimeError("nobody came")

    monkeypatch.setattr(together, "_say_what_is_missing", say)
    monkeypatch.setattr(together, "_SILENT_S", 0.01)
    monkeypatch.setattr(torch.distributed, "init_process_group", nobody_comes)
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "40")
    with pytest.raises(PeerError, match="nobody came; start all 2") as caught:
        together.gather(dataclasses.replace(good(Gpus()), rank=1, world_size=2))
    told = capsys.readouterr().err
    assert "rank 1 of 2 waits for the other ranks, at most 40 s" in told
    for text in (told, str(caught.value)):
        assert "alone: env -u RANK -u WORLD_SIZE moe-nvlink doctor" in text


@pytest.mark.parametrize("command", ['g++ "', "''"])
def test_a_compiler_that_is_no_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setenv("MOE_NVLINK_CXX", command)
    with pytest.raises(ConfigError) as caught:
        host.compile_text("", tmp_path / "a.so")
    for error in (inquiry._compiler().error, str(caught.value)):
        assert error.startswith(f"MOE_NVLINK_CXX={command!r}")
        assert "unset it for g++" in error


def test_a_rank_that_never_comes() -> None:
    process = start_rank(0, 2, free_port(), MOE_NVLINK_TIMEOUT_S="1")
    out, _log = process.communicate(timeout=600)
    assert process.returncode == 1
    for line in out.splitlines()[-2:]:
        assert "will not work: " in line
        assert "rank 0 speaks for itself only: the ranks did not meet" in line
