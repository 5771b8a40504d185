"""Checks whether our hooks took effect in this process.

SGLang logs the failure of a plugin and goes on. With some hooks and without others a server would
run and compute wrong sums. Therefore every dispatcher asks here before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_nvlink_plugin.errors import UnsupportedError

from .backend import BACKEND, CARRIER, FLAG

_failures: list[str] = []


def note_failure(what: str, error: Exception) -> None:
    """Remember for `assert_hooks` why a part of the plugin did not load. Local."""
    _failures.append(f"{what}: {type(error).__name__}: {error}")


def forget() -> None:
    """Forget what `note_failure` was told, because the plugin registers anew. Local; idempotent."""
    _failures.clear()


def assert_hooks() -> None:
    """Check that each hook took effect. Local.

    Processes that build a model call it after SGLang has published its arguments.

    Raises:
        UnsupportedError: hooks have no effect; the message lists them, and why if that is known.
    """
    missing = list(_missing())
    if not missing and not _failures:
        return
    told = "".join(f"\n  - {one}" for one in [*missing, *_failures])
    raise UnsupportedError(
        f"{FLAG}: not every hook of the plugin took effect in this process:{told}\n"
        "SGLang's log has the traceback of a plugin or hook that failed. If another plugin hooks "
        f"the same function, load {BACKEND} alone (SGLANG_PLUGINS={BACKEND}); or drop the flag."
    )


def _missing() -> Iterator[str]:
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_exec, get_parallel

    if not MoeA2ABackend(CARRIER).is_flashinfer():
        yield "MoeA2ABackend.is_flashinfer does not know us: layers would reduce outputs twice"
    moe, parallel = get_exec().moe, get_parallel()
    if moe.moe_a2a_backend != CARRIER:
        yield f"handle_a2a_moe: moe_a2a_backend is {moe.moe_a2a_backend!r}, not {CARRIER!r}"
    if parallel.ep_size != parallel.tp_size:
        yield f"handle_a2a_moe: ep_size is {parallel.ep_size}, tp_size {parallel.tp_size}"
    if not moe.disable_shared_experts_fusion:
        yield "handle_a2a_moe: shared experts are fused"
