"""How `moe_nvlink` is asked for: the command line, Python, and what happens when nobody asks."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

import pytest

import moe_nvlink_plugin
from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.integration import vllm as adapter
from moe_nvlink_plugin.integration.vllm.backend import (
    BACKEND,
    CARRIER,
    KEY,
    VERSION_KEY,
    is_selected,
)
from moe_nvlink_plugin.integration.vllm.plugin import flag, platform
from tests.integration.servers.servers import OF_VLLM_LIBRARIES, Template
from tests.integration.vllm import vllm_config

ASKED = {KEY: BACKEND}
FLAG = ["--all2all-backend", BACKEND]


@pytest.fixture(scope="module")
def libraries() -> Iterator[Template]:
    """Runs programs that import vLLM and our plugin anew, without importing their libraries."""
    template = Template.started({}, OF_VLLM_LIBRARIES)
    yield template
    template.close()


@pytest.mark.parametrize(
    ("group", "function"),
    [("vllm.platform_plugins", "platform_plugin"), ("vllm.general_plugins", "register")],
)
def test_entry_points_lead_to_us(group: str, function: str) -> None:
    (entry,) = [e for e in entry_points(group=group) if e.name == "moe_nvlink"]
    assert entry.load() is getattr(adapter, function)


def test_the_choice_is_added_once() -> None:
    parser = vllm_config.parser()
    flag.add_choice(parser)
    option = parser._option_string_actions["--all2all-backend"]
    assert list(option.choices).count(BACKEND) == 1
    assert list(option.choices)[-1] == BACKEND
    assert "moe_nvlink_plugin" in option.help


@pytest.mark.parametrize(
    ("arguments", "backend", "additional"),
    [
        ([], CARRIER, {}),
        (FLAG, CARRIER, ASKED),
        (["--all2all_backend=moe_nvlink"], CARRIER, ASKED),
        (["--all2all-backend", "deepep_v2"], "deepep_v2", {}),
        ([*FLAG, "--additional-config", '{"a": 1}'], CARRIER, {**ASKED, "a": 1}),
        (["--additional-config", '{"a": 1}', *FLAG], CARRIER, {**ASKED, "a": 1}),
        ([*FLAG, "--additional-config.a", "1"], CARRIER, {**ASKED, "a": 1}),
        ([*FLAG, "--all2all-backend", "naive"], "naive", {}),
        (["--additional-config", json.dumps(ASKED)], CARRIER, ASKED),
    ],
)
def test_command_line(arguments: list[str], backend: str, additional: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine_args = AsyncEngineArgs.from_cli_args(vllm_config.parser().parse_args(arguments))
    assert engine_args.all2all_backend == backend
    assert engine_args.additional_config == additional


def test_one_parse_leaves_nothing_for_the_next() -> None:
    parser = vllm_config.parser()
    parser.parse_args(FLAG)
    assert parser.parse_args([]).additional_config == {}


def test_an_unknown_name_is_still_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_config.parser().parse_args(["--all2all-backend", "no_such_backend"])
    assert "invalid choice: 'no_such_backend'" in capsys.readouterr().err


def test_python_takes_the_name(checkpoint: Path) -> None:
    config = vllm_config.config_with_us(checkpoint, additional_config={"mine": 1})
    assert is_selected(config)
    ours = {**ASKED, VERSION_KEY: platform.code_version()}
    assert config.additional_config == {"mine": 1, **ours}
    assert config.parallel_config.all2all_backend == CARRIER
    # Graphs that vLLM has compiled with other code of ours are not taken.
    before = config.compute_hash()
    config.additional_config[VERSION_KEY] = "0.0.0"
    assert config.compute_hash() != before


def test_the_version_of_the_code_changes_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, linked = tmp_path / "package", tmp_path / "linked"
    for folder in (package, linked):
        folder.mkdir()
    (package / "__init__.py").write_text("")
    (linked / "ops.py").write_text("before")
    (package / "integration").symlink_to(linked)  # as in a checkout
    monkeypatch.setattr(moe_nvlink_plugin, "__file__", str(package / "__init__.py"))
    seen = []
    for text in ("before", "after", "before"):
        (linked / "ops.py").write_text(text)
        seen.append(platform.code_version.__wrapped__())
    assert seen[0] == seen[2] != seen[1]
    assert seen[0].startswith(version("moe-nvlink-plugin") + "+")


def test_register_patches_once() -> None:
    from vllm.engine.arg_utils import EngineArgs

    adapter.register()
    patched = EngineArgs.create_engine_config
    adapter.register()
    assert EngineArgs.create_engine_config is patched
    assert not hasattr(patched.moe_nvlink_original, "moe_nvlink_original")


def test_register_warns_when_vllm_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delattr(EngineArgs, "create_engine_config")
    adapter.register()
    assert not hasattr(EngineArgs, "create_engine_config")
    assert 'additional_config={"all2all_backend": "moe_nvlink"}' in caplog.text


def test_python_on_a_foreign_platform_says_why(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    args = vllm_config.args_with_us(checkpoint)
    monkeypatch.setattr(platforms, "current_platform", CpuPlatform(), raising=False)
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS"):
        flag.map_engine_args(args)


def test_additional_config_must_be_a_dict(checkpoint: Path) -> None:
    args = vllm_config.args_with_us(checkpoint)
    args.additional_config = object()
    with pytest.raises(ConfigError, match="must be a dict"):
        flag.map_engine_args(args)


# Where our own modules cannot be imported.


def _serve_parser() -> Any:
    """The parser of `vllm serve`, as vLLM's command line builds it."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    cmd_init()[0].subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


_VALIDATION = "moe_nvlink_plugin.integration.vllm.plugin.validation"


@pytest.fixture(
    params=[
        ("moe_nvlink_plugin.kernels", "moe_nvlink_plugin.kernels"),
        ("moe_nvlink_plugin.integration.common.options", _VALIDATION),
    ],
    ids=["kernels", "options"],
)
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Breaks the import of one module; returns what has to be said of it."""
    for name in flag._NEEDED:  # whatever ran before: the last of them alone is imported again
        importlib.import_module(name)
    broken, needed = request.param
    monkeypatch.setitem(sys.modules, broken, None)
    monkeypatch.delitem(sys.modules, _VALIDATION, raising=False)
    return f"because {needed} cannot be imported: ModuleNotFoundError: import of {broken} halted"


def test_the_command_line_says_why_we_cannot_be_used(
    reason: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    parser = _serve_parser()
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["serve", "model", *FLAG])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"argument --all2all-backend: moe_nvlink cannot be used, {reason}" in told
    assert "install moe-nvlink-plugin again" in told
    assert "Traceback" in caplog.text
    # Nobody who does not ask for us hears of it.
    caplog.clear()
    parser.parse_args(["serve", "model", "--all2all-backend", "allgather_reducescatter"])
    assert caplog.text == ""


def test_python_says_why_we_cannot_be_used(checkpoint: Path, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        vllm_config.config_with_us(checkpoint)


_BROKEN_SERVE = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ImportError(f"{name} is broken for this test")

sys.meta_path.insert(0, Broken())
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
cmd_init()[0].subparser_init(parser.add_subparsers(dest="subparser"))
parser.parse_args(["serve", "model"])
parser.parse_args(["serve", "model", "--all2all-backend", "moe_nvlink"])
"""


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        # Before our choice is on the command line, our entry points say it; vLLM does if it cannot
        # load them. vLLM has not configured its logger yet; Python prints errors all the same.
        ("moe_nvlink_plugin.integration.vllm.plugin.platform", "moe_nvlink is installed, and its"),
        ("moe_nvlink_plugin.integration.vllm.logs", "moe_nvlink is installed, and its"),
        ("moe_nvlink_plugin.integration.vllm", "Failed to load plugin moe_nvlink"),
    ],
    ids=["platform", "logs", "entry points"],
)
def test_a_plugin_that_cannot_be_loaded_is_logged_as_an_error(
    broken: str, told: str, libraries: Template, tmp_path: Path
) -> None:
    status, printed = libraries.run(_BROKEN_SERVE, broken, folder=tmp_path, environment=os.environ)
    assert status == 2, printed[-3000:]
    assert "invalid choice: 'moe_nvlink'" in printed
    before, reason, _refusal = printed.partition(f"ImportError: {broken} is broken for this test")
    assert told in before
    assert reason


# The platform.


def test_the_platform_is_vllms_own_choice_with_four_hooks() -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    cls = type(current_platform)
    assert cls.__mro__[:3] == (cls, platform.MoeNvlinkPlatform, CpuPlatform)
    ours = {*vars(cls), *vars(platform.MoeNvlinkPlatform)}
    assert {name for name in ours if not name.startswith("_")} == {
        "pre_register_and_update",
        "check_and_update_config",
        "get_device_communicator_cls",
        "get_punica_wrapper",
    }
    assert current_platform._enum is CpuPlatform._enum
    assert current_platform.is_cpu()


@pytest.mark.parametrize("built_in", ["rocm", "xpu", "tpu", "unknown", "two of them", "none"])
def test_no_platform_is_offered_where_we_cannot_serve(
    built_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import platforms

    answers = {
        "two of them": ["vllm.platforms.cpu.CpuPlatform", "vllm.platforms.cuda.CudaPlatform"],
        "none": [],
    }.get(built_in, [f"vllm.platforms.{built_in}.Platform"])
    probes = {f"probe{i}": (lambda name=name: name) for i, name in enumerate(answers)}
    monkeypatch.setattr(platforms, "builtin_platform_plugins", probes)
    assert adapter.platform_plugin() is None


@pytest.mark.parametrize("base", ["cpu.CpuPlatform", "zen_cpu.ZenCpuPlatform", "cuda.CudaPlatform"])
def test_a_failing_probe_is_passed_over(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    def broken() -> str:
        raise OSError("no driver")

    probes = {"broken": broken, "none": lambda: None, "found": lambda: f"vllm.platforms.{base}"}
    monkeypatch.setattr(platforms, "builtin_platform_plugins", probes)
    name = adapter.platform_plugin()
    assert name == f"{platform.__name__}.MoeNvlink{base.rpartition('.')[2]}"


def _other_platform() -> str:
    return "somebody.elses.Platform"


def _other_platform_elsewhere() -> None:
    return None


@pytest.mark.parametrize(
    ("function", "allowed", "stays_out"),
    [
        ("_other_platform", None, True),
        ("_other_platform", ["moe_nvlink"], False),
        ("_other_platform_elsewhere", None, False),
        ("missing_function", None, False),
    ],
)
def test_another_active_platform_plugin_has_precedence(
    function: str, allowed: list[str] | None, stays_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = EntryPoint("other", f"{__name__}:{function}", "vllm.platform_plugins")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(platform, "entry_points", lambda group: [other])
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", ",".join(allowed))
    assert (adapter.platform_plugin() is None) == stays_out


# Without the flag.

_NEUTRAL = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.platforms import current_platform
import vllm.model_executor.layers.fused_moe.routed_experts as routed
import vllm.model_executor.layers.fused_moe.runner.moe_runner as runner
from vllm.config import set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot

parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
arguments = ["--model", sys.argv[1], "--skip-tokenizer-init", "--data-parallel-size=2",
             "--enable-expert-parallel", "--max-model-len=512"]
config = AsyncEngineArgs.from_cli_args(parser.parse_args(arguments)).create_engine_config()
with set_current_vllm_config(config):
    communicator = current_platform.get_device_communicator_cls()
    punica = current_platform.get_punica_wrapper()
print("RESULT" + json.dumps({
    "platform": type(current_platform).__name__,
    "choices": parser._option_string_actions["--all2all-backend"].choices,
    "defaults": {a.dest: str(a.default) for a in parser._actions},
    "others": {o: str(a.choices) for o, a in parser._option_string_actions.items()
               if o != "--all2all-backend"},
    "config": config.compute_hash(),
    "text": str(config),
    "additional": config.additional_config,
    "backend": config.parallel_config.all2all_backend,
    "communicator": communicator,
    "punica": punica,
    "enum": str(current_platform._enum),
    "device": [current_platform.device_name, current_platform.device_type,
               current_platform.dispatch_key, current_platform.dist_backend],
    "replaced": sorted(op_registry_oot),
    "classes": [routed.RoutedExperts.__module__, runner.MoERunner.__module__],
    "ours": sorted(m for m in sys.modules if m.startswith("moe_nvlink_plugin")),
}))
"""


def test_without_the_flag_vllm_is_as_before(
    checkpoint: Path, libraries: Template, tmp_path: Path
) -> None:
    def config(name: str, **environment: str) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        variables = {**os.environ, **environment}
        _, printed = libraries.run(_NEUTRAL, str(checkpoint), folder=folder, environment=variables)
        lines = [line for line in printed.splitlines() if line.startswith("RESULT")]
        assert lines, printed[-3000:]
        result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT"))
        return result

    ours, theirs = config("ours"), config("theirs", VLLM_PLUGINS="")
    assert ours.pop("platform") == "MoeNvlinkCpuPlatform"
    assert theirs.pop("platform") == "CpuPlatform"
    assert ours.pop("choices") == [*theirs.pop("choices"), "moe_nvlink"]
    package, porch = "moe_nvlink_plugin", "moe_nvlink_plugin.integration"
    assert ours.pop("ours") == [
        *(package, f"{package}.errors", porch),
        f"{porch}.vllm",
        *(f"{porch}.vllm.{name}" for name in ("backend", "faults", "logs", "plugin")),
        f"{porch}.vllm.plugin.flag",
        f"{porch}.vllm.plugin.platform",
    ]
    assert theirs.pop("ours") == []
    assert ours == theirs
