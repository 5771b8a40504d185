"""What the ranks of an expert-parallel group agree on before they exchange anything.

If ranks set a layer up differently, rows would be misplaced; so each rank sends the others what it
proposes. A rank that cannot set a layer up reports the reason to the others, so that no rank waits
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
    """What makes two MoE layers able to share one exchange."""

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    recipe: str | None = None


class Proposal(NamedTuple):
    """What one rank would set a layer up with.

    layer: its name; geometry: of its exchange, None where that is not the question; static_scale:
    that its rows are quantised by, None where they bring their own; problem: why this rank cannot
    set it up, None where it can; named_scale: of a recipe that a user named, None where it has
    none.
    """

    layer: str
    geometry: Geometry | None = None
    static_scale: float | None = None
    problem: str | None = None
    named_scale: float | None = None


class Ranks:
    """The ranks of one group, as one of them sees it; used at start-up only."""

    def __init__(self, group: Any, rank: int, size: int, wording: Wording) -> None:
        """group: as `MoeAllToAll.create` takes it; a ProcessGroup of a CPU backend (gloo), or an
        object with rank, size and all_gather_object. wording: of the framework's messages.
        """
        self.group, self.rank, self.size = group, rank, size
        self.wording = wording
        self._met = False

    def gather(self, mine: object) -> list[Any]:
        """What every rank passes, by rank. Collective."""
        if not isinstance(self.group, torch.distributed.ProcessGroup):
            return list(self.group.all_gather_object(mine))
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def meet(self) -> None:
        """Waits for all ranks, the first time that it is called. Collective.

        Ranks load weights at different speeds, for longer than an exchange would wait: the first
        to arrive waits as long as the framework's own group does.
        """
        if self._met:
            return
        if isinstance(self.group, torch.distributed.ProcessGroup):
            torch.distributed.barrier(self.group)
        else:
            self.gather(None)
        self._met = True

    def agree(self, mine: Proposal) -> None:
        """Returns when all ranks propose the same for a layer. Collective.

        Raises:
            UnsupportedError: static scales differ; a token quantised by one rank's scale would be
                read by another's.
            DisagreementError: anything else differs.
            PeerError: another rank has a problem; a rank with one of its own returns.
        """
        self.meet()
        self._refuse_differences(mine, self.gather(mine))

    @contextlib.contextmanager
    def telling_all(self, layer: str) -> Iterator[None]:
        """Surrounds a local step of setting a layer up. Collective if the step raises.

        The other ranks wait in `agree`, which every rank calls after such a step; there they get a
        PeerError with the exception of this rank, which goes on here.
        """
        try:
            yield
        except Exception as error:
            told = Proposal(layer, problem=f"{type(error).__name__}: {error}")
            with contextlib.suppress(Exception):  # this rank's own exception says more
                self.agree(told)
            raise

    def _refuse_differences(self, mine: Proposal, everyones: list[Proposal]) -> None:
        if mine.problem is not None:
            return  # its own error says more
        refuse_failed([p.problem for p in everyones], mine.layer)
        if any(
            theirs._replace(static_scale=None) != mine._replace(static_scale=None)
            for theirs in everyones
        ):
            raise DisagreementError(
                "the ranks set up different layers or formats; "
                + ", ".join(
                    f"rank {r} has {p.layer}: {p.geometry}, dispatch_global_scale {p.named_scale}"
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
    """Raises PeerError if a rank has a problem with `what`; problems: None or text, by rank."""
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if failed:
        raise PeerError(f"{what} cannot be set up on another rank; {'; '.join(failed)}")
