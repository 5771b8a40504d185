"""How many KV blocks one request may still take until it ends.

vLLM keeps one block table per request and KV cache group; all groups take blocks from one pool. Two
bounds hold for what a request may still take in one group:

* A table only grows. So the request takes at most `length at the end - length now`.
* Some groups give blocks back while the request runs: sliding windows, chunked local attention,
  Mamba states. There a request holds at most `cap` blocks at once, so it takes at most
  `cap - blocks it holds`, counted without the blocks that it shares with a request that had them
  first: if it gives back one of those, the pool may gain nothing.

If the sum of these bounds over all requests that hold blocks fits into the free blocks, all of them
can run to their ends, in any order.

Both bounds have margins. So a request may have a bound above the whole pool, and vLLM could serve
it all the same. Such a request starts when the pool is empty, and nobody starts beside it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CircularBufferManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    RSWAManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)

from moe_nvlink_plugin.errors import UnsupportedError

#: Groups whose tables only grow, one block per `block_size` tokens.
_GROWING = (FullAttentionManager, RSWAManager, SinkFullAttentionManager)
#: Groups that hold the last blocks of the table only.
_WINDOWS = (SlidingWindowManager, ChunkedLocalAttentionManager)


class Hits(NamedTuple):
    """What a request finds in the caches when vLLM tries to admit it.

    Attributes:
        blocks: per group, the blocks found in the prefix cache.
        num_local: number of tokens that these blocks hold.
        num_computed: number of tokens that need no computation, with those a KV connector brings.
    """

    blocks: tuple[Sequence[Any], ...]
    num_local: int
    num_computed: int


class Group(NamedTuple):
    """The bound of one KV cache group.

    Attributes:
        manager: vLLM's manager of the group.
        fixed: length of every request's table; 0: it grows with the tokens.
        extra: entries of a table beyond one per `manager.block_size` tokens.
        cap: the most blocks that one request holds at once; 0: as many as its table is long.
        copies: blocks that vLLM may take more, to copy a block shared up to its middle.
        tails: blocks that vLLM may take more, to keep the state at the end of the request's own
            prompt for others: the request's next step overwrites the block which has that state.
        least: if the group has a cap: the blocks that a long request holds at once for certain.
        is_window: whether a table's empty entries all stand before its blocks.
    """

    manager: Any
    fixed: int = 0
    extra: int = 0
    cap: int = 0
    copies: int = 0
    tails: int = 0
    least: int = 0
    is_window: bool = False

    def length(self, request: Any, end: int) -> int:
        """Return the length of a request's table when it has `end` tokens."""
        if self.fixed:
            return self.fixed
        if isinstance(self.manager, CrossAttentionManager):
            inputs = range(request.num_encoder_inputs)
            end = sum(request.get_num_encoder_embeds(number) for number in inputs)
        blocks: int = cdiv(end, self.manager.block_size)
        return blocks + self.extra

    def at_admission(self, request: Any, end: int, found: Sequence[Any], hits: Hits) -> int:
        """Return how many free blocks a request that holds none may take from now to its end."""
        size = self.manager.block_size
        skipped: int = max(self.manager.get_num_skipped_tokens(hits.num_computed) // size, 0)
        missing = max(self.length(request, end) - max(len(found), skipped), 0)
        if found and hits.num_local % size:
            missing += 1  # vLLM copies a block that is shared up to its middle
        kept = [block for block in found[skipped:] if not block.is_null]
        if not self.cap:
            cached: int = sum(block.ref_cnt == 0 for block in kept)
            return missing + cached
        return min(missing + len(kept), self.cap) + self.tails

    def most(self, request: Any, end: int) -> int:
        """Return how many blocks a request may hold at once if the caches have nothing for it."""
        most = self.length(request, end) + self.copies
        return min(most, self.cap) + self.tails if self.cap else most

    def fewest(self, request: Any, tokens: int) -> int:
        """Return how many blocks a request with `tokens` tokens holds at once for certain.

        vLLM itself serves no request for which the pool has fewer.
        """
        fewest = self.length(request, tokens)
        return min(fewest, self.least) if self.cap else fewest

    def still(self, request: Any, end: int, shared: frozenset[int]) -> int:
        """Return how many free blocks a request that holds blocks may take until its end.

        Args:
            request: vLLM's request.
            end: number of tokens of which the KV cache may have to hold slots.
            shared: ids of the blocks that another request held when this one was admitted.
        """
        table: Sequence[Any] = self.manager.req_to_blocks.get(request.request_id, ())
        missing = max(self.length(request, end) - len(table), 0)
        if not self.cap:
            return missing
        adopted = 0
        if shared:
            adopted = sum(
                not block.is_null and block.block_id in shared for block in table[-self.cap :]
            )
        own = self._held(table) - adopted
        return min(missing + adopted, max(self.cap - own, 0)) + self.tails

    def _held(self, table: Sequence[Any]) -> int:
        if self.is_window:
            return len(table) - bisect.bisect_left(table, True, key=_is_block)
        return sum(not block.is_null for block in table[-self.cap :])


def _is_block(entry: Any) -> bool:
    return not entry.is_null


def groups_of(kv_cache_manager: Any, num_lookahead: int, num_batches: int) -> tuple[Group, ...]:
    """Return the bounds of all KV cache groups. Local.

    Args:
        kv_cache_manager: vLLM's.
        num_lookahead: slots beyond a step's tokens that a draft model takes.
        num_batches: number of steps that vLLM has in flight at once.

    Raises:
        UnsupportedError: of one group nobody knows how many blocks a request may take.
    """
    coordinator = kv_cache_manager.coordinator
    copies = int(coordinator.enable_partial_hash_hits)
    return tuple(
        _group(manager, num_lookahead, num_batches, copies)
        for manager in coordinator.single_type_managers
    )


def _group(manager: Any, num_lookahead: int, num_batches: int, copies: int) -> Group:
    kind = type(manager)
    if kind in _GROWING:
        return Group(manager, copies=copies)
    if kind is CrossAttentionManager:
        return Group(manager)
    if kind is CircularBufferManager:
        return Group(manager, fixed=1)
    if kind in _WINDOWS:
        # vLLM's own cap leaves out the draft's slots.
        least = manager.max_admission_blocks_per_request
        cap = least + cdiv(num_lookahead, manager.block_size) + copies
        return Group(manager, cap=cap, copies=copies, least=least, is_window=True)
    if kind is MambaManager:
        return _mamba(manager, num_batches, copies)
    raise UnsupportedError(
        f"GuaranteedNoEvictScheduler does not know how many KV blocks a request may take of a "
        f"{kind.__name__}. Serve this model without --scheduler-cls"
    )


def _mamba(manager: Any, num_batches: int, copies: int) -> Group:
    spec = manager.kv_cache_spec
    drafts = spec.num_speculative_blocks
    if spec.mamba_cache_mode != "align":
        return Group(manager, extra=drafts, copies=copies)
    # A step leaves a state, perhaps a checkpoint, perhaps a copy. A step in flight keeps them, and
    # each step reads the state of the step before.
    each = 1 + spec.num_prefill_checkpoint_blocks + copies
    extra = drafts + spec.num_prefill_checkpoint_blocks
    cap = drafts + each * (num_batches + 1)
    return Group(manager, extra=extra, cap=cap, copies=copies, tails=copies, least=1 + drafts)
