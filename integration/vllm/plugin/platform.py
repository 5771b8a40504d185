"""Our subclass of the platform that vLLM chooses: four hooks, no-ops without the flag."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moe_nvlink_plugin
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.vllm import backend, logs

from . import flag

logger = logging.getLogger(__name__)

_GROUP = "vllm.platform_plugins"
#: The module of our entry points, `integration.vllm`.
_ADAPTER = __name__.removesuffix(".plugin.platform")
_DISTRIBUTION = "moe-nvlink-plugin"
_PREFIX = "MoeNvlink"
#: Variable of vLLM: prefixes of the variables that it copies to its engines that are Ray actors.
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
# Platform of vLLM that we can extend -> our communicator for it.
_COMMUNICATORS = {
    "vllm.platforms.cpu.CpuPlatform": "cpu_communicator.MoeNvlinkCpuCommunicator",
    "vllm.platforms.zen_cpu.ZenCpuPlatform": "cpu_communicator.MoeNvlinkCpuCommunicator",
    "vllm.platforms.cuda.CudaPlatform": "cuda_communicator.MoeNvlinkCudaCommunicator",
}

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform as _Base
else:
    _Base = object


@functools.cache
def code_version() -> str:
    """Return the version of this package and a digest of its modules' text: `0.1.0+2b7e151628`.

    Files that no import finds are no modules, such as an editor's lock `.#ops.py`. The version
    alone is the same for every commit of a checkout. 200 files take about 10 ms.
    """
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(
        Path(moe_nvlink_plugin.__file__).parent, followlinks=True
    ):
        folders[:] = sorted(filter(str.isidentifier, folders))
        for name in sorted(names):
            if name.endswith(".py") and name.removesuffix(".py").isidentifier():
                digest.update(f"{name} ".encode() + Path(folder, name).read_bytes())
    return f"{version(_DISTRIBUTION)}+{digest.hexdigest()[:10]}"


class MoeNvlinkPlatform(_Base):
    """Mixin for one of vLLM's platform classes, which does everything else."""

    _communicator = ""

    @classmethod
    @overrides
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Add our choice to vLLM's command line. Local."""
        super().pre_register_and_update(parser)
        if parser is not None:
            flag.add_choice(parser)

    @classmethod
    @overrides
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Check the configuration, let vLLM's platform adjust it, then choose our worker. Local.

        Raises:
            UnsupportedError: we cannot serve the configuration.
            ConfigError: it has options that nothing would read.
        """
        flag.take_name(vllm_config)
        is_selected = backend.is_selected(vllm_config)
        if is_selected:
            logs.show_through(logging.getLogger("vllm"))  # vLLM has configured its loggers again
            is_selected = not flag.stands_aside(vllm_config)
        if is_selected:
            flag.require_all_of_ours()
            from moe_nvlink_plugin.integration.vllm.balancing import eplb
            from moe_nvlink_plugin.integration.vllm.draft import drafts

            from . import validation

            drafts.ask_for_tokens(vllm_config, validation.check(vllm_config, cls.device_type))
            eplb.adjust(vllm_config, cls.device_type)
            # vLLM hashes it into the key of its compile cache. A graph that other code of ours left
            # there may call another op for a layer than the layer takes now.
            stamp = {backend.VERSION_KEY: code_version()}
            vllm_config.additional_config = {**vllm_config.additional_config, **stamp}
            if vllm_config.parallel_config.data_parallel_backend == "ray":
                from moe_nvlink_plugin import env

                env.add_to_list(_RAY_PREFIXES, "MOE_NVLINK_")
        super().check_and_update_config(vllm_config)
        if is_selected:
            from moe_nvlink_plugin.integration.vllm import metrics

            from . import worker

            worker.put_in_place(vllm_config)
            metrics.serve(vllm_config)
        if backend.schedules(vllm_config):
            from moe_nvlink_plugin.integration.vllm.scheduler import capacity

            capacity.prepare(vllm_config)
        else:
            _refuse_options_of_our_scheduler(vllm_config)

    @classmethod
    @overrides
    def get_device_communicator_cls(cls) -> str:
        """Return our communicator if a worker's configuration asks for us, else vLLM's. Local."""
        if backend.selected_here():
            return f"{__package__}.{cls._communicator}"
        return str(super().get_device_communicator_cls())

    @classmethod
    @overrides
    def get_punica_wrapper(cls) -> str:
        """Return what computes adapters (LoRA): ours if the flag was given, else vLLM's. Local."""
        chosen = str(super().get_punica_wrapper())
        if not backend.selected_here():
            return chosen
        from moe_nvlink_plugin.integration.vllm.lora import punica

        return punica.extended(chosen)


def _refuse_options_of_our_scheduler(vllm_config: Any) -> None:
    if not backend.additional(vllm_config):
        return  # no user of ours; our other modules are not needed
    from moe_nvlink_plugin.errors import ConfigError
    from moe_nvlink_plugin.integration.vllm.choices import CAPACITY, KEY, names

    chosen = vllm_config.scheduler_config.scheduler_cls
    if isinstance(chosen, str) and not chosen.startswith("vllm."):
        return  # perhaps a subclass of ours, which reads the option
    if names(vllm_config, CAPACITY):
        raise ConfigError(
            f'additional_config["{KEY}"]["{CAPACITY}"] has no effect with another scheduler than '
            f"ours. Add --scheduler-cls {_ADAPTER}.scheduler.GuaranteedNoEvictScheduler, or remove "
            f"the option"
        )


def choose() -> str | None:
    """Return what `platform_plugin` returns. Local."""
    if _another_plugin_is_active():
        return None
    base = _builtin_choice()
    if base not in _COMMUNICATORS:
        return None
    return f"{__name__}.{_PREFIX}{base.rpartition('.')[2]}"


def _builtin_choice() -> str:
    """Return the platform class that vLLM itself would take; "" if it would take none or fail."""
    from vllm.platforms import builtin_platform_plugins

    found = [name for name in map(_probe, builtin_platform_plugins.values()) if name is not None]
    return found[0] if len(found) == 1 else ""


def _another_plugin_is_active() -> bool:
    """Return whether another out-of-tree platform would answer; vLLM stops if two do."""
    from vllm import envs

    allowed = envs.VLLM_PLUGINS
    for entry in entry_points(group=_GROUP):
        ours = entry.value.partition(":")[0] == _ADAPTER
        if ours or (allowed is not None and entry.name not in allowed):
            continue
        try:
            answer = _probe(entry.load())
        except Exception:  # vLLM logs a plugin that does not load, and continues
            continue
        if answer is not None:
            logger.warning(
                "Platform plugin %s is active, and vLLM uses one only: --all2all-backend %s is not "
                "available. Set VLLM_PLUGINS to choose another.",
                entry.name,
                backend.BACKEND,
            )
            return True
    return False


def _probe(plugin: Any) -> str | None:
    """Return what a platform plugin answers; a probe that fails means None, as in vLLM."""
    try:
        answer = plugin()
    except Exception:
        return None
    return None if answer is None else str(answer)


def __getattr__(name: str) -> Any:
    """Build ``MoeNvlink<Base>`` when vLLM resolves it; the base cannot be imported earlier."""
    for qualified, communicator in _COMMUNICATORS.items():
        if name == _PREFIX + qualified.rpartition(".")[2]:
            from vllm.utils.import_utils import resolve_obj_by_qualname

            base = resolve_obj_by_qualname(qualified)
            members = {"__module__": __name__, "_communicator": communicator}
            cls = type(name, (MoeNvlinkPlatform, base, backend.OurPlatform), members)
            globals()[name] = cls
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
