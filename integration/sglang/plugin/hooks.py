"""What we register with SGLang, and when it takes effect.

In every process: the flag, our wrappers of steps of the resolution, and a hook after SGLang has
published the arguments. If those name us and the process builds a model, that hook puts the other
three in place. So without the flag nothing of SGLang's layers is imported or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_nvlink_plugin.integration.sglang import backend, effect

from . import flag

ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
PUBLISH = "sglang.srt.runtime_context.publish"
CREATE_DISPATCHER = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw"
MAKE_GROUPS = "sglang.srt.distributed.parallel_state.initialize_model_parallel"
IS_FLASHINFER = "sglang.srt.layers.moe.utils.MoeA2ABackend.is_flashinfer"
#: Roles that SGLang publishes for processes without a model.
WITHOUT_MODEL = ("tokenizer", "detokenizer", "dp_controller", "encoder", "weight_cache_daemon")


def register() -> None:
    """Register the hooks of every process; SGLang applies them after all plugins. Local."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADD_CLI_ARGS, flag.add_choice, HookType.AFTER)
    HookRegistry.register(PUBLISH, after_publish, HookType.AFTER)
    for step in ("handle_moe_kernel_config", "handle_a2a_moe"):
        register_resolution_hook(step)(_resolves(step))
    register_resolution_hook("validate_flashinfer_a2a_token_budget")(
        _resolves("validate_token_budget")
    )


def _resolves(ours: str) -> Callable[[Any, Callable[[Any], None]], None]:
    """Return a wrapper of a step, which imports ours if the arguments name us. Local."""

    def wrapped(server_args: Any, previous: Callable[[Any], None]) -> None:
        if not backend.is_selected(server_args):
            previous(server_args)
            return
        from . import resolution

        getattr(resolution, ours)(server_args, previous)

    return wrapped


def after_publish(result: Any, server_args: Any, *args: Any, role: str = "", **more: Any) -> None:
    """Hook the layers of processes that build a model for us, after ``publish``. Local.

    Args:
        result: result of the hooked function, which stays as it is.
        server_args: as SGLang passes it.
        role: as SGLang passes it.

    Raises:
        UnsupportedError: as `effect.assert_hooks`.
    """
    if backend.is_selected(server_args) and role not in WITHOUT_MODEL:
        put_in_place()
        if backend.keeps_record(server_args):
            watch_ranks()


def put_in_place() -> None:
    """Put our dispatchers in the place of SGLang's, and tell its layers what they do.

    Before SGLang makes its groups, the ranks will check our exchange.

    Local; idempotent.

    Raises:
        UnsupportedError: as `effect.assert_hooks`.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from moe_nvlink_plugin.integration.sglang import compat
    from moe_nvlink_plugin.integration.sglang.moe import fused

    if not getattr(put_in_place, "done", False):
        compat.check_names()
        before = layer.create_moe_dispatcher, parallel_state.initialize_model_parallel
        us = HookSource(backend.BACKEND, "moe-nvlink-plugin")  # SGLang knows it at loading only
        HookRegistry.register(CREATE_DISPATCHER, create_dispatcher, HookType.AROUND, source=us)
        HookRegistry.register(IS_FLASHINFER, is_flashinfer, HookType.AROUND, source=us)
        HookRegistry.register(MAKE_GROUPS, before_groups, HookType.BEFORE, source=us)
        HookRegistry.apply_hooks()
        after = layer.create_moe_dispatcher, parallel_state.initialize_model_parallel
        for name, was, now in zip((CREATE_DISPATCHER, MAKE_GROUPS), before, after, strict=True):
            if now is was:
                effect.note_failure(name, RuntimeError("SGLang has not applied the hook"))
    effect.assert_hooks()
    fused.register()  # a layer looks for its fused function before it asks for a dispatcher
    put_in_place.done = True  # type: ignore[attr-defined]


def watch_ranks() -> None:
    """Surround each forward of a model, to write SGLang's record of the ranks that live.

    Local; idempotent.

    Raises:
        UnsupportedError: as `effect.assert_hooks`.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if getattr(watch_ranks, "done", False):
        return
    before = ModelRunner._forward_raw
    us = HookSource(backend.BACKEND, "moe-nvlink-plugin")
    HookRegistry.register(FORWARD, forward_raw, HookType.AROUND, source=us)
    HookRegistry.apply_hooks()
    if ModelRunner._forward_raw is before:
        effect.note_failure(FORWARD, RuntimeError("SGLang has not applied the hook"))
    effect.assert_hooks()
    watch_ranks.done = True  # type: ignore[attr-defined]


def forward_raw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``ModelRunner._forward_raw``. Collective; as `lost_ranks.forward`."""
    from moe_nvlink_plugin.integration.sglang import worker
    from moe_nvlink_plugin.integration.sglang.moe import lost_ranks

    pool = worker.pool(worker.TARGET)
    return lost_ranks.forward(pool, lambda: original(*args, **kwargs))


def before_groups(*args: Any, **kwargs: Any) -> None:
    """Decide which exchange this server uses, before SGLang makes its groups. Collective.

    It comes before SGLang's ``initialize_model_parallel``, whose arguments stay as they are; raises
    as `start.choose`.
    """
    from . import start

    start.choose()


def create_dispatcher(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return our dispatcher for layers that we serve. Collective; raises as `forms.create`.

    It surrounds SGLang's ``create_moe_dispatcher``.
    """
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    if not get_moe_a2a_backend().is_customized():
        return original(*args, **kwargs)
    from moe_nvlink_plugin.integration.sglang.moe import forms

    return forms.create(*args, **kwargs)


def is_flashinfer(original: Callable[[Any], bool], member: Any) -> bool:
    """Return True for our backend too, around ``MoeA2ABackend.is_flashinfer``. Local.

    All its callers ask whether combine returns reduced rows, with expert parallelism across all
    tensor-parallel ranks and replicated shared experts. Ours does.
    """
    return original(member) or member.is_customized()
