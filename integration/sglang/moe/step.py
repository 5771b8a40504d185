"""How many tokens a rank may have in this step: the number that every rank reads alike."""

from __future__ import annotations

from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.runtime_context import get_forward, get_parallel


def most_tokens_of_a_rank() -> int | None:
    """Return the most tokens of any rank in this step, equal on all ranks; None if unknown. Local.

    It reads only integers of the host, so a captured graph keeps the size it was captured for.
    SGLang agrees on the batch of each data-parallel rank before the forward; the ranks of its
    attention group then share these rows out. If prefill is sequence parallel, SGLang shares rows
    out in another way, and the result is None.
    """
    batches: list[int] | None = get_dp_global_num_tokens()
    if not batches or get_forward().sp_active:
        return None
    ranks: int = get_parallel().attn_tp_size
    return -(-max(batches) // ranks)
