"""Our subclass of the platform vLLM chooses: three hooks, each a no-op without the flag."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from moe_nvlink_plugin.integration.common import logs
from moe_nvlink_plugin.integration.vllm import backend

from . import flag

logger = logging.getLogger(__name__)

_GROUP = "vllm.platform_plugins"
#: The module of our entry points, `integration.vllm`.
_ADAPTER = __name__.removesuffix(".plugin.platform")
_PREFIX = "MoeNvlink"
# The platforms of vLLM that we stand on, and the communicator each gets from us.
_COMMUNICATORS = {
    "vllm.platforms.cpu.CpuPlatform": "cpu_communicator.MoeNvlinkCpuCommunicator",
    "vllm.platforms.zen_cpu.ZenCpuPlatform": "cpu_communicator.MoeNvlinkCpuCommunicator",
    "vllm.platforms.cuda.CudaPlatform": "cuda_communicator.MoeNvlinkCudaCommunicator",
}

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform as _Base
else:
    _Base = object


class MoeNvlinkPlatform(_Base):
    """Mixin in front of one of vLLM's platform classes; everything else is inherited."""

    _communicator = ""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Adds our choice to vLLM's command line."""
        super().pre_register_and_update(parser)
        if parser is not None:
            flag.add_choice(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuses what we cannot serve, before vLLM's own platform adjusts the configuration.

        That chooses the worker's class, which becomes ours.
        """
        is_selected = backend.is_selected(vllm_config)
        if is_selected:
            logs.show_through(logging.getLogger("vllm"))  # vLLM has configured its loggers since
            flag.require_all_of_ours()
            from moe_nvlink_plugin.integration.vllm.draft import drafts

            from . import validation

            drafts.ask_for_tokens(vllm_config, validation.check(vllm_config, cls.device_type))
        super().check_and_update_config(vllm_config)
        if is_selected:
            from . import worker

            worker.put_in_place(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Our communicator in a worker that was asked for it, vLLM's own everywhere else."""
        if backend.selected_here():
            return f"{__package__}.{cls._communicator}"
        return str(super().get_device_communicator_cls())


def choose() -> str | None:
    """See `platform_plugin`. Local."""
    if _another_plugin_is_active():
        return None
    base = _builtin_choice()
    if base not in _COMMUNICATORS:
        return None
    return f"{__name__}.{_PREFIX}{base.rpartition('.')[2]}"


def _builtin_choice() -> str:
    """The platform class vLLM itself would take, "" where it would take none or complain."""
    from vllm.platforms import builtin_platform_plugins

    found = [name for name in map(_probe, builtin_platform_plugins.values()) if name is not None]
    return found[0] if len(found) == 1 else ""


def _another_plugin_is_active() -> bool:
    """Whether a different out-of-tree platform would answer; vLLM stops when two of them do."""
    from vllm import envs

    allowed = envs.VLLM_PLUGINS
    for entry in entry_points(group=_GROUP):
        ours = entry.value.partition(":")[0] == _ADAPTER
        if ours or (allowed is not None and entry.name not in allowed):
            continue
        try:
            answer = _probe(entry.load())
        except Exception:  # vLLM logs a plugin that does not load and goes on; so do we
            continue
        if answer is not None:
            logger.warning(
                "Platform plugin %s is active, and vLLM takes one: --all2all-backend %s is not "
                "available. Set VLLM_PLUGINS to choose another.",
                entry.name,
                backend.BACKEND,
            )
            return True
    return False


def _probe(plugin: Any) -> str | None:
    """What one platform plugin answers; a probe that fails says no, as it does in vLLM."""
    try:
        answer = plugin()
    except Exception:
        return None
    return None if answer is None else str(answer)


def __getattr__(name: str) -> Any:
    """Builds ``MoeNvlink<Base>`` when vLLM resolves it: its base cannot be imported earlier."""
    for qualified, communicator in _COMMUNICATORS.items():
        if name == _PREFIX + qualified.rpartition(".")[2]:
            from vllm.utils.import_utils import resolve_obj_by_qualname

            base = resolve_obj_by_qualname(qualified)
            members = {"__module__": __name__, "_communicator": communicator}
            cls = type(name, (MoeNvlinkPlatform, base, backend.OurPlatform), members)
            globals()[name] = cls
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
