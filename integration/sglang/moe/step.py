"""How many tokens a rank may have in this step: the number that every rank reads alike."""

from __future__ import annotations

from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.runtime_context import get_forward, get_parallel


def most_tokens_of_a_rank() -> int | None:
    """The most tokens of any rank in this step, equal on all ranks; None if SGLang has no number.

    Local; reads host integers alone, so that a captured graph keeps the size it was captured for.
    SGLang agrees on the batch of each data-parallel rank before the forward; the ranks of its
    attention group then share these rows out. Where prefill is sequence parallel, rows are shared
    out in another way, and None is the answer.
    """
    batches: list[int] | None = get_dp_global_num_tokens()
    if not batches or get_forward().sp_active:
        return None
    ranks: int = get_parallel().attn_tp_size
    return -(-max(batches) // ranks)
