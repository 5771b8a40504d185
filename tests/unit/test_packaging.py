"""What a user installs: a pure-Python wheel that carries every kernel source and its types."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata, resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
#: What pip needs of the repository to build; build/ and environments stay out of the copy.
BUILD_INPUTS = ["pyproject.toml", "README.md", "LICENSE"]
BUILD_INPUTS += ["moe_nvlink_plugin", "kernels", "integration"]
KERNEL_SUFFIXES = {".cu", ".h", ".cpp"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no earlier build's leftovers get into it."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILD_INPUTS:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_is_pure_python(wheel: Path, members: set[str]) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in members if name.endswith((".so", ".pyd", ".cubin", ".o"))]


def test_wheel_has_every_kernel_source(wheel: Path, members: set[str]) -> None:
    sources = [path for path in KERNELS.rglob("*") if path.suffix in KERNEL_SUFFIXES]
    assert sources
    with zipfile.ZipFile(wheel) as archive:
        for path in sources:
            name = f"moe_nvlink_plugin/kernels/{path.relative_to(KERNELS).as_posix()}"
            assert name in members
            assert archive.read(name) == path.read_bytes()


def test_wheel_has_every_module(members: set[str]) -> None:
    """Packages are listed one by one in pyproject.toml, so a new one can be forgotten there."""
    places = {"moe_nvlink_plugin": "", "kernels": "moe_nvlink_plugin/", "integration": ""}
    places["integration"] = "moe_nvlink_plugin/"
    for folder, prefix in places.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert prefix + path.relative_to(ROOT).as_posix() in members


def test_wheel_has_types_licence_and_nothing_else_on_top(members: set[str]) -> None:
    assert "moe_nvlink_plugin/py.typed" in members
    assert any(name.endswith("/licenses/LICENSE") for name in members)
    top = {name.split("/")[0] for name in members}
    assert all(name.startswith("moe_nvlink_plugin") for name in top), top


@pytest.mark.parametrize(
    ("group", "attribute"),
    [("vllm.platform_plugins", "platform_plugin"), ("vllm.general_plugins", "register")],
)
def test_vllm_finds_us(group: str, attribute: str) -> None:
    (found,) = metadata.entry_points(group=group, name="moe_nvlink")
    assert found.value == f"moe_nvlink_plugin.integration.vllm:{attribute}"
    assert callable(found.load())


def test_command_line_is_installed() -> None:
    (found,) = metadata.entry_points(group="console_scripts", name="moe-nvlink")
    assert callable(found.load())


def test_kernel_sources_are_found_where_the_package_is_installed() -> None:
    assert (resources.files("moe_nvlink_plugin.kernels") / "exchange" / "dispatch.cu").is_file()
