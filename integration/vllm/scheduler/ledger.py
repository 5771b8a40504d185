"""Who holds KV blocks, and how many more all of them may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .demand import Group, Hits


class Ledger:
    """The claims of all requests that hold blocks.

    A claim is the number of free blocks that a request may still take until its end. vLLM changes
    tables in many places. So the ledger counts anew, but only once a step, and only in steps in
    which somebody asks. Between two questions of one step, only admissions change claims.

    Args:
        groups: bounds of the KV cache groups.
        end_of: number of tokens of which a request's KV cache may have to hold slots.
        on_end: is told, not at once, of each request that holds no blocks any more.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        end_of: Callable[[Any], int],
        on_end: Callable[[Any], None],
    ) -> None:
        self._groups = groups
        self._end_of = end_of
        self._on_end = on_end
        self._holders: dict[str, Any] = {}
        self._shared: dict[str, frozenset[int]] = {}
        self._claims: dict[str, int] = {}
        self._total = 0
        self._counted_in = -1

    def holds_blocks(self, request: Any) -> bool:
        """Return whether a request holds blocks of any group."""
        return any(group.manager.req_to_blocks.get(request.request_id) for group in self._groups)

    def needed(self, request: Any, end: int, hits: Hits) -> int:
        """Return how many free blocks a request without blocks may take to get to `end` tokens."""
        return sum(
            group.at_admission(request, end, found, hits)
            for group, found in zip(self._groups, hits.blocks, strict=True)
        )

    def most(self, request: Any, end: int) -> int:
        """Return how many blocks a request may hold at once on its way to `end` tokens."""
        return sum(group.most(request, end) for group in self._groups)

    def fewest(self, request: Any, tokens: int) -> int:
        """Return how many blocks a request with `tokens` tokens holds at once for certain."""
        return sum(group.fewest(request, tokens) for group in self._groups)

    def claimed(self, step: int, newcomer: Any = None) -> int:
        """Return the claims of all holders but the newcomer, in vLLM's step of that number."""
        if step != self._counted_in:
            self.count()
            self._counted_in = step
        own = 0 if newcomer is None else self._claims.get(newcomer.request_id, 0)
        return self._total - own

    def admit(self, request: Any, shared: frozenset[int]) -> None:
        """Note that a request got its first blocks.

        Args:
            request: vLLM's request.
            shared: ids of blocks in its tables that another request held before.
        """
        self._holders[request.request_id] = request
        self._shared[request.request_id] = shared
        self._set_claim(request)

    def shared_by(self, hits: Hits) -> frozenset[int]:
        """Return the ids of hits that somebody holds, of groups that give blocks back."""
        return frozenset(
            block.block_id
            for group, found in zip(self._groups, hits.blocks, strict=True)
            if group.cap
            for block in found
            if block.ref_cnt and not block.is_null
        )

    def count(self) -> int:
        """Count anew; return the claims of all holders."""
        self._claims, self._total = {}, 0
        for request_id, request in list(self._holders.items()):
            if request.is_finished() or not self.holds_blocks(request):
                del self._holders[request_id], self._shared[request_id]
                self._on_end(request)
            else:
                self._set_claim(request)
        return self._total

    def _set_claim(self, request: Any) -> None:
        end, shared = self._end_of(request), self._shared[request.request_id]
        claim = sum(group.still(request, end, shared) for group in self._groups)
        self._total += claim - self._claims.get(request.request_id, 0)
        self._claims[request.request_id] = claim
