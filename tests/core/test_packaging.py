"""What a user installs: pure-Python archives with every kernel source, and nothing of our tools.

And the checkout beside an installation: Python finds our package wherever it is started.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests import dist

ROOT = dist.ROOT
PACKAGE = "moe_nvlink_plugin"
#: The package's folders by what stands for them in the checkout.
PLACES = {
    PACKAGE: PACKAGE,
    "kernels": f"{PACKAGE}/kernels",
    "integration": f"{PACKAGE}/integration",
}
KERNEL_SUFFIXES = {".cu", ".h", ".cpp"}
#: Of a wheel, beside the package.
INFORMATION = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"}
INFORMATION |= {"licenses/LICENSE"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dist.Built:
    return dist.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: dist.Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an installation of the wheel: not editable, as a user has it."""
    return dist.install(built.wheel, tmp_path_factory.mktemp("installed") / "venv") / "python"


def product() -> Iterator[tuple[str, Path]]:
    """What ships, by its name in the package."""
    for folder, place in PLACES.items():
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT / folder)
            is_ours_alone = folder == "integration" and name.parts[0] == "demo"
            ships = path.suffix in {".py", *KERNEL_SUFFIXES} or path.name in {"py.typed"}
            ships = ships or (folder != PACKAGE and path.suffix == ".md")
            if ships and not is_ours_alone:
                yield f"{place}/{name.as_posix()}", path


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_the_product_and_nothing_else(built: dist.Built) -> None:
    """Not the demo, not tests, not the runner of vLLM's tests; every byte as in the checkout."""
    assert built.wheel.name.endswith("-py3-none-any.whl")
    expected = {name: path.read_bytes() for name, path in product()}
    for needed in ("__init__.py", "integration/common/__init__.py", "integration/vllm/__init__.py"):
        assert f"{PACKAGE}/{needed}" in expected
    assert any(name.endswith(".cu") for name in expected)
    held = contents(built.wheel)
    information = {name for name in held if name.split("/")[0].endswith(".dist-info")}
    assert {name: held[name] for name in held if name not in information} == expected
    assert {name.split("/", 1)[1] for name in information} == INFORMATION


def test_the_sdist_has_the_same_and_builds_the_same_wheel(
    built: dist.Built, tmp_path: Path
) -> None:
    """`build` made the wheel of the sdist; pip makes this one of the sources."""
    with tarfile.open(built.sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        assert all(member.isfile() or member.isdir() for member in archive), "links lead nowhere"
    assert {name for name, _ in product()} <= held
    assert not [name for name in held if "demo" in name.split("/") or name.startswith("tests")]
    source = tmp_path / "source"
    source.mkdir()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(dist.copy_sources(source))]
    subprocess.run(command, check=True, timeout=600)
    (of_sources,) = tmp_path.glob("*.whl")
    assert contents(of_sources) == contents(built.wheel)


def test_the_first_example_beside_nothing_but_torch(built: dist.Built, tmp_path: Path) -> None:
    """`pip install torch WHEEL`: what we import, or torch for us, the wheel must ask for."""
    python = dist.install_alone(built.wheel, tmp_path / "venv") / "python"
    code = "import importlib.util as u; print(u.find_spec('pytest'), u.find_spec('pip'))"
    assert printed(python, tmp_path, "-c", code) == "None None\n"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## PyTorch alone")[2]
    (tmp_path / "exchange.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed(python, tmp_path, *ranks, "exchange.py")


# Beside vLLM, and in the checkout.

VLLM_SERVE = """
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = cmd_init()[0].subparser_init(FlexibleArgumentParser().add_subparsers())
chosen = parser.parse_args(["model", "--all2all-backend", "moe_nvlink"])
assert chosen.additional_config == {"all2all_backend": "moe_nvlink"}, chosen.additional_config
"""

#: Prints where the parts of the package are that vLLM loads by our entry points, and the modules
#: that our flag needs.
OUR_PARTS = """
from importlib import metadata
from importlib.util import find_spec

import moe_nvlink_plugin.kernels
from moe_nvlink_plugin.integration import common, vllm
from moe_nvlink_plugin.integration.vllm.plugin import flag

for group in ("vllm.platform_plugins", "vllm.general_plugins"):
    (found,) = metadata.entry_points(group=group, name="moe_nvlink")
    assert found.load().__module__ == vllm.__name__
for part in (moe_nvlink_plugin, moe_nvlink_plugin.kernels, common, vllm):
    print(part.__file__)
for name in flag._NEEDED:
    print(find_spec(name).origin)
"""


def printed(python: Path, folder: Path, *arguments: str) -> str:
    """What Python prints when it is started in a folder."""
    done = subprocess.run(
        [str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("is_editable", "is_in_checkout"), [(False, True), (False, False), (True, False)]
)
def test_python_finds_the_whole_package_wherever_it_is_started(
    installed: Path, tmp_path: Path, *, is_editable: bool, is_in_checkout: bool
) -> None:
    """In the checkout Python takes the package that lies there: it must be as whole as the wheel's.

    Elsewhere Python takes what is installed.
    """
    python = Path(sys.executable) if is_editable else installed
    folder = ROOT if is_in_checkout else tmp_path
    expected = ROOT / PACKAGE if is_editable or is_in_checkout else installed.parents[1]
    for found in printed(python, folder, "-c", OUR_PARTS).splitlines():
        assert Path(found).is_relative_to(expected)


def test_vllm_serve_knows_our_flag(installed: Path, tmp_path: Path) -> None:
    """Of the wheel: every server of the other tests has the editable installation's."""
    if importlib.util.find_spec("vllm") is None:  # importing it here would take as long again
        pytest.skip("vLLM is not installed")
    printed(installed, tmp_path, "-c", VLLM_SERVE)


@pytest.mark.parametrize("script", ["bench_moe_comm.py", "bench_serve.py"])
def test_benchmarks_run_beside_an_installed_wheel(installed: Path, script: str) -> None:
    """Both import the product, one also the demo, which the wheel does not have."""
    assert "usage" in printed(installed, ROOT, f"benchmarks/{script}", "--help")


def test_the_demo_runs_from_the_checkout_beside_an_installed_wheel(
    installed: Path, tmp_path: Path
) -> None:
    demo = f"{PACKAGE}.integration.demo"
    assert "usage" in printed(installed, ROOT, "-m", demo, "--help")
    code = f"import importlib.util; print(importlib.util.find_spec({demo!r}))"
    assert printed(installed, tmp_path, "-c", code) == "None\n"


def test_sglang_finds_us() -> None:
    """SGLang loads the function in every process, where none of its modules need be importable."""
    (found,) = metadata.entry_points(group="sglang.srt.plugins", name="moe_nvlink")
    assert found.value == f"{PACKAGE}.integration.sglang:register"
    assert callable(found.load())


def test_command_line_is_installed() -> None:
    (found,) = metadata.entry_points(group="console_scripts", name="moe-nvlink")
    assert callable(found.load())
