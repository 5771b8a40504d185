"""A program: what SGLang looks like without a plugin and with ours, when nobody names our backend.

Prints one line of JSON, with a snapshot of each of two processes. Both are forked from this one,
which has imported SGLang's arguments and has loaded no plugin.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from typing import Any

from sglang.srt.server_args import ServerArgs


def _plain(value: object) -> Any:
    """Comparable with what another process has: no addresses."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(str(one) for one in value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _parser() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        f"{action.dest}"
        if action.option_strings[0].endswith(action.dest.replace("_", "-"))
        else action.option_strings[0]: _plain(vars(action) | {"container": None})
        for action in parser._actions
        if action.option_strings
    }


def _wrapped() -> dict[str, str]:
    """Functions that a hook could have wrapped, of those that are."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    places = (
        (ServerArgs, "add_cli_args"),
        (runtime_context, "publish"),
        (layer, "create_moe_dispatcher"),
        (MoeA2ABackend, "is_flashinfer"),
    )
    return {
        name: getattr(owner, name).__module__
        for owner, name in places
        if hasattr(getattr(owner, name), "__wrapped__")
    }


def snapshot(plugins: str, model: str) -> dict[str, Any]:
    """Of this process, after it has loaded the plugins that are named."""
    os.environ["SGLANG_PLUGINS"] = plugins
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    sources = {str(hook[2].plugin_name) for one in HookRegistry._hooks.values() for hook in one}
    found: dict[str, Any] = {"plugins": sorted(sources), "imported": sorted(sys.modules)}
    found["parser"] = _parser()

    from sglang.srt import runtime_context

    given = {"tp_size": 2, "device": "cpu", "attention_backend": "torch_native"}
    server_args = ServerArgs(
        model_path=model, disable_cuda_graph=True, skip_tokenizer_init=True, **given
    )
    server_args.resolve_once()
    # Drawn at random by SGLang.
    drawn = {"random_seed", "port", "nccl_port"}
    resolved = server_args.resolved_dict()
    found["resolved"] = {k: _plain(v) for k, v in resolved.items() if k not in drawn}
    stash = getattr(server_args, "_resolved_overrides", ())
    found["declared"] = [[source, sorted(fields)] for source, fields in stash]
    found["environ"] = {k: v for k, v in os.environ.items() if k != "SGLANG_PLUGINS"}
    runtime_context.publish(server_args, role="scheduler")
    found["wrapped"] = _wrapped()
    return found


def _send(plugins: str, model: str, pipe: Any) -> None:
    pipe.send(snapshot(plugins, model))


def in_child(plugins: str, model: str) -> dict[str, Any]:
    """The snapshot of a process forked from this one."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(plugins, model, sender))
    child.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    finally:
        child.join(30)
    return found


if __name__ == "__main__":
    sys.stdout.flush()
    model = sys.argv[1]
    print(json.dumps({"without": in_child("none", model), "with": in_child("moe_nvlink", model)}))
