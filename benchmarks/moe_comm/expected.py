"""Say what a backend is to the benchmark, and hold all backends to what must arrive.

The check has experts of its own: rank r's output for a token is the token times a factor made of
the ids and weights of r's experts among the token's. So the sum shows a row that is lost, altered,
or computed by another rank than it should be. Every rank can make every other rank's tokens
(routers.py), and with them all that must arrive.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.recipes import combine_formats
from tests.support import cases

from .options import Options
from .routers import RankTokens, owners, target_table, tokens_of

#: Tokens at a time in the check, so that its fp32 copies stay small.
CHUNK = 256

#: All ranks' tokens are kept for the check where they are together no larger than this.
KEPT_BYTES = 32 * 2**20


class WrongResult(RuntimeError):  # noqa: N818  what it is, not that it is one
    """A backend moved something else than it had to. No number is reported of such a run."""


class Side(Protocol):
    """One rank's side of one backend for one batch; every method but close is collective.

    given: what it is spared: packing, split sizes that are known, and the like.
    """

    given: str

    def dispatch(self) -> None:
        """Moves the tokens to the ranks of their experts."""
        ...

    def combine(self) -> None:
        """Moves the experts' rows back; after a dispatch."""
        ...

    def check(self) -> None:
        """Both, held to what must arrive. All its collective steps run, whatever it finds.

        Raises:
            WrongResult: naming backend, batch, rank and place.
        """
        ...

    def close(self) -> None:
        """Gives up what it holds. Local."""
        ...


@dataclasses.dataclass(frozen=True)
class Context:
    """One rank's part of one batch.

    tokens: this rank's, on `device`; group: a torch ProcessGroup that serves CPU tensors and, on a
    GPU, CUDA tensors too; device: of the tensors.
    """

    options: Options
    rank: int
    tokens: RankTokens
    group: Any
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.hidden)

    @property
    def config(self) -> AllToAllConfig:
        return self.options.config(self.rank, self.num_tokens)

    def tokens_of(self, rank: int) -> RankTokens:
        """Another rank's, on `device`."""
        row_bytes = self.options.hidden_size * self.options.torch_dtype.itemsize
        small = self.num_tokens * row_bytes * self.options.ep_size <= KEPT_BYTES
        made = (_kept_tokens if small else tokens_of)(self.options, self.num_tokens, rank)
        return made.to(self.device)

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective."""
        values: list[Any] = [None] * self.options.ep_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def targets(self, ids: torch.Tensor) -> torch.Tensor:
        """`[tokens, ep_size] bool`: which ranks own an expert of the token."""
        return target_table(ids, self.options.num_experts, self.options.ep_size)


_kept_tokens = functools.lru_cache(maxsize=128)(tokens_of)


class Complaints:
    """What a check finds, raised once all its collective steps are done."""

    def __init__(self, backend: str, context: Context) -> None:
        self._where = f"{backend}, {context.num_tokens} tokens per rank, rank {context.rank}"
        self._found: list[str] = []

    def same(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Equal values and shapes; a NaN equals nothing."""
        if actual.shape != expected.shape:
            self._found.append(
                f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
            )
        elif not torch.equal(actual, expected):
            self._add_place(actual != expected, what)

    def near(self, actual: torch.Tensor, expected: torch.Tensor, bound: Any, what: str) -> None:
        """|actual - expected| at most bound, element by element; a NaN is never near."""
        self._add_place(~((actual.double() - expected.double()).abs() <= bound), what)

    def alike(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """A row may be off by a twentieth of its length: a few codes, never another row."""
        error = (actual.float() - expected.float()).norm(dim=1)
        bound = 0.05 * expected.float().norm(dim=1).double()
        self.near(error, torch.zeros_like(error), bound, what)

    def _add_place(self, wrong: torch.Tensor, what: str) -> None:
        count = int(wrong.sum())
        if count:
            place = wrong.nonzero()[0].tolist()
            self._found.append(f"{what}: {count} of {wrong.numel()} wrong, the first at {place}")

    def raise_any(self) -> None:
        """Raises WrongResult where anything was found."""
        if self._found:
            raise WrongResult(f"{self._where}: {'; '.join(self._found[:4])}")


# The check's experts.


def expert_rows(
    options: Options,
    rank: int | torch.Tensor,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """A rank's partial rows of activations `[n, hidden_size]`; zeros where it has no expert.

    rank: one for all tokens, or one each, `[n] int64`. The same bits wherever they are computed.
    """
    owner = owners(options.num_experts, options.ep_size).to(ids.device)[ids.long()]
    mine = owner == (rank[:, None] if isinstance(rank, torch.Tensor) else rank)
    factor = torch.zeros(len(ids), device=ids.device)
    for k in range(ids.shape[1]):  # one after the other, so that every device rounds alike
        term = weights[:, k] * (1.0 + ids[:, k].float() / options.num_experts)
        factor = torch.where(mine[:, k], factor + 0.25 + term, factor)
    return (hidden.float() * factor[:, None]).to(options.torch_dtype)


class Terms(NamedTuple):
    """What some tokens' results are added up from.

    where: the tokens; rows: `[n, top_k, hidden_size]` partial rows as the experts write them, the
    k-th of the rank of the k-th id, zeros where an earlier id has the same rank.
    """

    where: slice
    rows: torch.Tensor


def terms(options: Options, tokens: RankTokens) -> Iterator[Terms]:
    """Of one rank's tokens, some at a time."""
    owner, config = owners(options.num_experts, options.ep_size), options.config(0, 1)
    owner = owner.to(tokens.topk_ids.device)
    for start in range(0, len(tokens.hidden), CHUNK):
        where = slice(start, min(start + CHUNK, len(tokens.hidden)))
        hidden, ids, weights = (tensor[where] for tensor in tokens)
        received = cases.activations(config, *cases.quantised(config, hidden))
        targets = owner[ids.long()]
        rows = []
        for k in range(options.top_k):
            again = (targets[:, :k] == targets[:, k : k + 1]).any(dim=1)
            mine = expert_rows(options, targets[:, k], received, ids, weights)
            rows.append(torch.where(again[:, None], torch.zeros_like(mine), mine))
        yield Terms(where, torch.stack(rows, dim=1))


def expected_combined(options: Options, rows: torch.Tensor) -> torch.Tensor:
    """`[n, hidden_size]` that our combine writes for Terms.rows: moe_nvlink_plugin.reference's.

    A missing row is added as zeros here, which changes no value.
    """
    back = combine_formats.combine_format(options.combine)
    level = list(rows.unbind(1))
    if back is not None:
        level = [back.dequantise(back.quantise(row)) for row in level]
    level = [row.float() for row in level]
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0].to(options.torch_dtype)


def sum_and_bound(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact sum over k of Terms.rows, fp64, and how far a sum in their dtype may be from it.

    Adding n terms in any order, rounding each time to nearest, is off by at most n units in the
    last place of the sum of magnitudes.
    """
    exact = rows.double()
    unit = torch.finfo(rows.dtype).eps
    return exact.sum(1), exact.abs().sum(1) * unit * rows.shape[1] + torch.finfo(rows.dtype).tiny


def check_combined(
    complaints: Complaints, context: Context, combined: torch.Tensor, how: str
) -> None:
    """This rank's result against the check's experts.

    Args:
        how: "exact": the very bits of our combine; "alike": of a GPU's nvfp4, whose approximate
            reciprocals may give the next code; "sum": within sum_and_bound.
    """
    for where, rows in terms(context.options, context.tokens):
        what, found = f"combined tokens from {where.start} on", combined[where]
        if how == "sum":
            complaints.near(found, *sum_and_bound(rows), what)
            continue
        held_to = complaints.same if how == "exact" else complaints.alike
        held_to(found, expected_combined(context.options, rows), what)


def check_outputs(layer: Any, outputs: Sequence[torch.Tensor], how: str) -> None:
    """Hold all ranks' combined rows to the check's experts; `how`: as check_combined's.

    Raises:
        WrongResult: naming backend, batch, rank and place.
    """
    for rank, (mine, output) in enumerate(zip(layer.inputs, outputs, strict=True)):
        context = Context(layer.options, rank, mine, None, mine.hidden.device)
        complaints = Complaints(layer.name, context)
        check_combined(complaints, context, output, how)
        complaints.raise_any()


# Packed rows: a peer's token as bytes, so that one collective a way moves all of it.


class Packing:
    """`[n, row_bytes] uint8`: rows that travel, scales, ids and weights side by side."""

    def __init__(self, context: Context) -> None:
        self._options, self._config = context.options, context.config
        parts = self._parts(*(tensor[:0] for tensor in context.tokens))
        self._dtypes = [part.dtype for part in parts]
        self._widths = [part.shape[1] * part.dtype.itemsize for part in parts]
        self.row_bytes = sum(self._widths)

    def _parts(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        rows, scales = cases.quantised(self._config, hidden)
        return [rows, *([] if scales is None else [scales]), ids, weights]

    def pack(self, tokens: RankTokens) -> torch.Tensor:
        """Of these tokens; quantises them where the recipe says so."""
        parts = self._parts(*tokens)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Rows, scales if any, ids, weights; each contiguous."""
        parts = torch.split(packed, self._widths, dim=1)
        return [
            part.contiguous().view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)
        ]

    def expert_rows(self, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
        """The check's experts on what `unpack` gave."""
        rows, *scales, ids, weights = parts
        hidden = cases.activations(self._config, rows, scales[0] if scales else None)
        return expert_rows(self._options, rank, hidden, ids, weights)
