"""What the ranks of an expert-parallel group agree on before they exchange anything.

If ranks set up a layer differently, rows would be misplaced. Therefore each rank sends its proposal
to the others. A rank that cannot set up a layer reports the reason to the others, so no rank waits
for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.errors import DisagreementError, PeerError, UnsupportedError

from .options import Wording


class Geometry(NamedTuple):
    """Sizes and formats of a MoE layer. Layers of equal geometry can share one exchange."""

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    recipe: str | None = None
    received_ids: str | int = "global"
    scales_layout: str = "linear"
    extra_payload_bytes: tuple[int, ...] = ()


class Proposal(NamedTuple):
    """What one rank proposes for a layer.

    Attributes:
        layer: name of the layer.
        geometry: geometry of its exchange; None if the ranks do not compare it in this step.
        static_scale: scale that quantises its rows; None if they have their own scales.
        problem: why this rank cannot set up the layer; None if it can.
        named_scale: global scale of a recipe that a user named; None if it has none.
        audit_every: Options.audit_every, if the ranks compare a geometry.
    """

    layer: str
    geometry: Geometry | None = None
    static_scale: float | None = None
    problem: str | None = None
    named_scale: float | None = None
    audit_every: int = 0


class Ranks:
    """The ranks of one group, as one of them sees it; used at start-up only.

    Args:
        group: as `MoeAllToAll.create` takes it: a ProcessGroup with a CPU backend (gloo), or an
            object with rank, size and all_gather_object.
        rank: number of this rank.
        size: number of ranks.
        wording: words of the framework's messages.
    """

    def __init__(self, group: Any, rank: int, size: int, wording: Wording) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.wording = wording
        self._met = False

    def gather(self, mine: object) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective."""
        if not isinstance(self.group, torch.distributed.ProcessGroup):
            return list(self.group.all_gather_object(mine))
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def meet(self) -> None:
        """Wait for all ranks in the first call; later calls do nothing. Collective.

        Ranks load weights at different speeds, and may differ by more time than an exchange waits.
        Here the first rank waits as long as the framework's own group does.
        """
        if self._met:
            return
        if isinstance(self.group, torch.distributed.ProcessGroup):
            torch.distributed.barrier(self.group)
        else:
            self.gather(None)
        self._met = True

    def agree(self, mine: Proposal) -> None:
        """Compare the proposals of all ranks for a layer. Collective.

        A rank whose own proposal has a problem returns, because its own error says more.

        Raises:
            UnsupportedError: static scales differ. One rank would quantise a token by its scale,
                and another rank would read it by another scale.
            DisagreementError: anything else differs.
            PeerError: another rank has a problem.
        """
        self.meet()
        self._refuse_differences(mine, self.gather(mine))

    @contextlib.contextmanager
    def telling_all(self, layer: str) -> Iterator[None]:
        """Surround a local step of setting up a layer. Collective if the step raises.

        Every rank calls `agree` after such a step. If the step raises on this rank, the other ranks
        get a PeerError there, which contains this rank's exception. This rank raises the exception.
        """
        try:
            yield
        except Exception as error:
            told = Proposal(layer, problem=f"{type(error).__name__}: {error}")
            with contextlib.suppress(Exception):  # the exception of the step says more
                self.agree(told)
            raise

    def _refuse_differences(self, mine: Proposal, everyones: list[Proposal]) -> None:
        if mine.problem is not None:
            return  # this rank's own error says more
        refuse_failed([p.problem for p in everyones], mine.layer)
        if any(
            theirs._replace(static_scale=None) != mine._replace(static_scale=None)
            for theirs in everyones
        ):
            raise DisagreementError(
                "the ranks set up different layers or formats; "
                + ", ".join(
                    f"rank {r} has {p.layer}: {p.geometry}, dispatch_global_scale {p.named_scale}, "
                    f"audit_every {p.audit_every}"
                    for r, p in enumerate(everyones)
                )
            )
        if len({theirs.static_scale for theirs in everyones}) > 1:
            each = ", ".join(f"rank {r} has {p.static_scale}" for r, p in enumerate(everyones))
            raise UnsupportedError(
                f"{self.wording.flag}: the static activation scale of {mine.layer} differs "
                f"between ranks: {each}. {self.wording.framework} takes it from the experts of "
                "each rank, but a token that one rank quantises is read by others. "
                f"{self.wording.quantise_on_arrival}"
            )


def refuse_failed(problems: list[str | None], what: str) -> None:
    """Raise PeerError if a rank has a problem with `what`; problems: text or None, by rank."""
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if failed:
        raise PeerError(f"{what} cannot be set up on another rank; {'; '.join(failed)}")
