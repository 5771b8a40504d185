"""How many tokens one rank may dispatch at once: the capacity of its exchange.

With an all-to-all backend SGLang gives each rank of an attention group its own share of the group's
tokens. A group has a prefill chunk, or one step of every running request, or a CUDA graph of such a
step. The largest of them bounds the share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.overrides import (
    max_prefill_buffer_tokens,
    max_speculative_num_draft_tokens,
)
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import attn_tp_size_of

#: The most requests that SGLang runs per data-parallel rank where --max-running-requests is unset.
MOST_REQUESTS = 4096


class Budget(NamedTuple):
    """Tokens of one attention group, and the ranks that share them.

    Attributes:
        prefill: tokens of one chunk; 0 if this server does no prefill.
        requests: requests that run at once.
        tokens_per_request: tokens of one step; more than one with speculative decoding.
        captured: requests of the largest decode graph; 0 without graphs.
        ranks: ranks of an attention group.
    """

    prefill: int
    requests: int
    tokens_per_request: int
    captured: int
    ranks: int

    @property
    def tokens_per_rank(self) -> int:
        """The most tokens that one rank dispatches in one round."""
        # SGLang pads a step to a multiple of the ranks in requests, not in tokens.
        step = -(-max(self.requests, self.captured) // self.ranks) * self.tokens_per_request
        return max(-(-self.prefill // self.ranks), step)


def of(server_args: Any) -> Budget:
    """Return the budget of arguments, resolved or being resolved. Local.

    It is equal on all ranks: nothing of it depends on a rank or on free memory.
    """
    view = resolved_view(server_args)
    decodes = view.disaggregation_mode != "prefill"
    prefills = view.disaggregation_mode != "decode"
    requests = MOST_REQUESTS
    if view.max_running_requests is not None:
        requests = max(1, view.max_running_requests // view.attn_dp_size)
    return Budget(
        prefill=_prefill(server_args, view) if prefills else 0,
        # A prefill server decodes nothing, but SGLang warms it up with one token of each request.
        requests=requests,
        tokens_per_request=_tokens_per_request(server_args, view) if decodes else 1,
        captured=_captured(view) if decodes else 0,
        ranks=max(1, attn_tp_size_of(view)),
    )


def _prefill(server_args: Any, view: Any) -> int:
    graphs = view.cuda_graph_config
    captured = 0
    if graphs is not None and graphs.prefill.backend != Backend.DISABLED:
        captured = graphs.prefill.max_bs or 0
    return max(int(max_prefill_buffer_tokens(server_args)), captured)


def _tokens_per_request(server_args: Any, view: Any) -> int:
    if not view.speculative_algorithm:
        return 1
    verified = max_speculative_num_draft_tokens(server_args) or 1
    return max(verified, view.speculative_eagle_topk or 1)


def _captured(view: Any) -> int:
    graphs = view.cuda_graph_config
    if graphs is None or graphs.decode.backend == Backend.DISABLED:
        return 0
    return graphs.decode.max_bs or 0
