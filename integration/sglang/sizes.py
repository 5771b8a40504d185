"""The sizes of a model's exchange, as the arguments of the server have them."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view

from .budget import Budget


def num_experts(config: Any) -> int:
    """Return the number of routed experts of a layer; 0 without experts. Local.

    Args:
        config: configuration of the text model; those that we serve name the number in two ways.
    """
    return getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None) or 0


def of(server_args: Any, budget: Budget) -> dict[str, Any]:
    """Return fields of AllToAllConfig: of every layer with experts, before any is built. Local."""
    view, model = resolved_view(server_args), model_config_of(server_args)
    text = model.hf_text_config
    return {
        "ep_size": view.tp_size,
        "num_experts": num_experts(text) + (view.ep_num_redundant_experts or 0),
        "top_k": getattr(text, "num_experts_per_tok", 0),
        # Nemotron-H may exchange rows of another width than its residual stream.
        "hidden_size": getattr(text, "moe_latent_size", None) or text.hidden_size,
        "max_tokens_per_rank": budget.tokens_per_rank,
        "dtype": model.dtype,
    }
