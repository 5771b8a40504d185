"""SGLang's own exchange, with which a server goes on whose ranks cannot use ours.

Without an all-to-all backend (its name is "none") each rank of SGLang computes its part of the
experts for all tokens of the group, and the ranks add up what they computed. Which part depends on
--ep-size, as the user gave it: with 1, SGLang's default, a slice of every expert.

The ranks must decide before SGLang makes its groups. The width of the expert-parallel group is
fixed there (``initialize_model_parallel``), and layers take their slices of the weights from it
when they are built, before weights are loaded. Nothing else of SGLang has read the backend then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.runtime_context import (
    derive_spawn_ranks,
    get_context,
    get_flags,
    get_parallel,
)

from moe_nvlink_plugin.integration.common.options import Options

from . import backend
from .choices import OWN_BACKEND, WORDING

_SOURCE = backend.BACKEND


def refusals(server_args: Any, view: Any, options: Options) -> Iterator[str]:
    """Yield why a server of these arguments could not go on with SGLang's own exchange. Local.

    Args:
        server_args: arguments as the user gave them.
        view: the same, as far as they are resolved.
        options: what the user chose; nothing is yielded without `fallback`.
    """
    if options.fallback is None:
        return
    what = f"{WORDING.options}: fallback={options.fallback!r}"
    divides_experts = server_args.ep_size > 1
    if view.device == "cpu" and divides_experts:
        yield (
            f"{what} and --ep-size {server_args.ep_size} on CPU ranks: without an all-to-all "
            "backend SGLang's experts for a CPU compute slices of all experts, or nothing. Remove "
            "--ep-size, which becomes --tp-size for our exchange."
        )
    if view.moe_runner_backend == "triton_kernel" and divides_experts:
        yield (
            f"{what} and --moe-runner-backend triton_kernel with --ep-size: SGLang has no such "
            "experts without an all-to-all backend. Remove --ep-size."
        )
    if view.enable_eplb or view.ep_num_redundant_experts or view.init_expert_location != "trivial":
        yield (
            f"{what} and experts that are balanced or redundant: SGLang chooses replicas in "
            f"another way without an all-to-all backend. Remove fallback, or --enable-eplb, "
            "--ep-num-redundant-experts and --init-expert-location."
        )
    if server_args.speculative_moe_a2a_backend not in (None, OWN_BACKEND, backend.BACKEND):
        yield (
            f"{what} and --speculative-moe-a2a-backend {server_args.speculative_moe_a2a_backend}: "
            "the draft would exchange tokens with a backend that needs --ep-size equal to "
            "--tp-size. Remove one of the two."
        )


def put_in_place(server_args: Any) -> None:
    """Let this process build its groups and its model as with --moe-a2a-backend none. Local.

    Every rank calls it, or none, before SGLang makes the groups.
    """
    changed = {"moe_a2a_backend": OWN_BACKEND, "ep_size": server_args.ep_size}
    if backend.names_draft(server_args):
        changed["speculative_moe_a2a_backend"] = OWN_BACKEND
    get_context().override(_SOURCE, **changed)
    _take_places(server_args.ep_size)
    # SGLang's layers read flags, which its benchmark has made of the arguments before.
    if get_flags().moe.a2a_backend is not None:
        initialize_moe_config()


def _take_places(ep_size: int) -> None:
    """Give this rank its place in expert-parallel groups of another width. Local."""
    parallel = get_parallel()
    ranks = derive_spawn_ranks(
        world_rank=parallel.launch_world_rank,
        tp_size=parallel.tp_size,
        ep_join_rank_offset=parallel.ep_join_rank_offset,
        attn_cp_size=parallel.attn_cp_size,
        attn_tp_size=parallel.attn_tp_size,
        moe_dp_size=parallel.moe_dp_size,
        moe_ep_size=ep_size,
    )
    parallel.override_permanently(
        moe_ep_size=ep_size,
        moe_tp_size=parallel.tp_size // parallel.moe_dp_size // ep_size,
        moe_ep_rank=ranks["moe_ep_rank"],
        moe_tp_rank=ranks["moe_tp_rank"],
    )
