"""Turns a user's ``--all2all-backend moe_nvlink`` into an entry of ``additional_config``."""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import (
    BACKEND,
    CARRIER,
    KEY,
    OurPlatform,
    is_selected,
)

_OPTION = "--all2all-backend"
_ADDITIONAL_OPTION = "--additional-config"
#: To what vLLM changes the carrier if the experts that --moe-backend names exchange rows.
PASSTHROUGH = "passthrough"
_HELP = (
    f'\n\n- "{BACKEND}": dispatch and combine of the moe_nvlink_plugin package'
    " (needs --enable-expert-parallel and --data-parallel-size of 2 or more)."
)

#: Modules that the server process or its workers import. The flag checks them, because otherwise a
#: missing one would show only after a worker has loaded its model.
_NEEDED = (
    "moe_nvlink_plugin.kernels",
    "moe_nvlink_plugin.integration.common.pool",
    "moe_nvlink_plugin.integration.vllm.draft.draft_head",
    "moe_nvlink_plugin.integration.vllm.plugin.validation",
)

logger = logging.getLogger(__name__)


def require_all_of_ours() -> None:
    """Check that the backend can be imported. Local.

    The choice is on the command line even if the backend cannot be imported. Otherwise vLLM would
    call our name an invalid choice, and no user would see the reason.

    Raises:
        UnsupportedError: it cannot be imported; the message has the reason.
    """
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except Exception as error:
        logger.exception("moe_nvlink cannot be imported")
        import moe_nvlink_plugin

        raise UnsupportedError(
            f"{BACKEND} cannot be used, because {name} cannot be imported: "
            f"{type(error).__name__}: {error}. The package is {moe_nvlink_plugin.__path__[0]}: "
            "install moe-nvlink-plugin again, or choose another backend."
        ) from error


class _BackendAction(argparse._StoreAction):
    """Stores vLLM's own names as vLLM does; turns our name into the carrier and our key."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        additional = getattr(namespace, "additional_config", None) or {}
        if values == BACKEND:
            try:
                require_all_of_ours()
            except UnsupportedError as error:
                parser.error(f"argument {_OPTION}: {error}")
            namespace.additional_config = {**additional, KEY: BACKEND}
            values = CARRIER
        elif additional.get(KEY) == BACKEND:  # the last flag wins
            namespace.additional_config = {k: v for k, v in additional.items() if k != KEY}
        super().__call__(parser, namespace, values, option_string)


class _AdditionalConfigAction(argparse._StoreAction):
    """Keeps our key if ``--additional-config`` follows the flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, "additional_config", None) or {}
        if isinstance(values, dict) and before.get(KEY) == BACKEND:
            values = {KEY: BACKEND, **values}
        super().__call__(parser, namespace, values, option_string)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add our name to the choices of ``--all2all-backend``, if it has any. Local; idempotent.

    It does not change a parser without that option, such as some of vLLM's tools build.
    """
    options = parser._option_string_actions
    action: Any = options.get(_OPTION)
    additional = options.get(_ADDITIONAL_OPTION)
    if action is None or additional is None or isinstance(action, _BackendAction):
        return
    # With a registry of backends (`moe.factory`), vLLM takes any name, and shows those it has.
    if action.choices is not None:
        action.choices = [*action.choices, BACKEND]
    elif isinstance(action.metavar, list):
        action.metavar = [*action.metavar, BACKEND]
    action.help = (action.help or "") + _HELP
    # The actions keep vLLM's groups and order; only their reaction to a value changes.
    action.__class__ = _BackendAction
    additional.__class__ = _AdditionalConfigAction


def stands_aside(vllm_config: Any) -> bool:
    """Return whether experts exchange rows themselves; then take our choice back. Local.

    Then nothing of ours is needed, in this process and in the workers. vLLM changes the carrier for
    FlashInfer's experts of that kind, and leaves it for DeepGEMM's.

    Args:
        vllm_config: vLLM's VllmConfig, which asks for our backend.

    Raises:
        ConfigError: our options are not well-formed.
    """
    moe_backend = vllm_config.kernel_config.moe_backend
    is_changed = vllm_config.parallel_config.all2all_backend == PASSTHROUGH
    if not is_changed and not _exchanges_rows(moe_backend):
        return False
    from moe_nvlink_plugin.integration.vllm.choices import options_of

    options_of(vllm_config)
    additional = vllm_config.additional_config
    vllm_config.additional_config = {k: v for k, v in additional.items() if k != KEY}
    logger.warning(
        "--moe-backend %s dispatches and combines inside its kernels, so %s %s and its options "
        "have no effect. With --moe-backend auto rows go through %s.",
        moe_backend,
        _OPTION,
        BACKEND,
        BACKEND,
    )
    return True


def _exchanges_rows(moe_backend: str) -> bool:
    """Return whether the experts of a --moe-backend exchange rows themselves. Local."""
    from vllm.config.kernel import MEGA_MOE_BACKENDS

    return moe_backend in MEGA_MOE_BACKENDS


def _balances(engine_args: Any) -> bool:
    """Return whether we serve load balancing; if `stands_aside` will be true, we do not. Local."""
    if not (is_selected(engine_args) and engine_args.enable_eplb):
        return False
    chosen = engine_args.moe_backend
    if chosen == "auto":
        chosen = engine_args.kernel_config.moe_backend
    return not _exchanges_rows(chosen)


def map_engine_args(engine_args: Any) -> None:
    """Change ``EngineArgs(all2all_backend="moe_nvlink")`` in place to what vLLM accepts. Local.

    Raises:
        UnsupportedError: vLLM runs on a platform that is not ours.
        ConfigError: ``additional_config`` is not a dict.
    """
    if engine_args.all2all_backend != BACKEND:
        return
    from vllm.platforms import current_platform

    if not isinstance(current_platform, OurPlatform):
        raise UnsupportedError(
            f'all2all_backend="{BACKEND}" needs the platform plugin of this package, but vLLM runs '
            f"on {type(current_platform).__name__}. Unset VLLM_TARGET_DEVICE, list moe_nvlink in "
            "VLLM_PLUGINS if that is set, and uninstall or disable other platform plugins."
        )
    engine_args.additional_config = _with_key(engine_args.additional_config)
    engine_args.all2all_backend = CARRIER


def _with_key(additional: Any) -> dict[str, Any]:
    """Return ``additional_config`` with our key. Local; raises ConfigError if it is no dict."""
    if not isinstance(additional or {}, dict):
        raise ConfigError(
            f"additional_config is a {type(additional).__name__}; with "
            f'all2all_backend="{BACKEND}" it must be a dict, to which the key "{KEY}" is added.'
        )
    return {**(additional or {}), KEY: BACKEND}


def take_name(vllm_config: Any) -> None:
    """Change ``ParallelConfig(all2all_backend="moe_nvlink")`` in place to the carrier. Local.

    Only a vLLM that has a registry of backends (`moe.factory`) accepts our name there.

    Raises:
        ConfigError: ``additional_config`` is not a dict.
    """
    if vllm_config.parallel_config.all2all_backend == BACKEND:
        vllm_config.additional_config = _with_key(vllm_config.additional_config)
        vllm_config.parallel_config.all2all_backend = CARRIER


def patch_engine_args() -> None:
    """Wrap ``EngineArgs.create_engine_config``. Local; idempotent.

    If a later vLLM has moved the method, the command line still works, and a warning says what to
    write in Python instead.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = getattr(EngineArgs, "create_engine_config", None)
    if original is None or KEY not in getattr(EngineArgs, "__dataclass_fields__", {}):
        logger.warning(
            "This vLLM has no EngineArgs.create_engine_config, so vLLM will refuse "
            'LLM(all2all_backend="%s"). Use LLM(additional_config={"%s": "%s"}) instead.',
            BACKEND,
            KEY,
            BACKEND,
        )
        return
    if hasattr(original, "moe_nvlink_original"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        map_engine_args(self)
        if not _balances(self):
            return original(self, *args, **kwargs)
        from moe_nvlink_plugin.integration.vllm.balancing import eplb

        with eplb.allowed():
            return original(self, *args, **kwargs)

    create_engine_config.moe_nvlink_original = original  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
