"""Say what a backend is to the benchmark, and hold all backends to what must arrive.

The check has experts of its own: rank r's output for a token is the token times a factor made of
the ids and weights of r's experts among the token's. So the sum shows a row that is lost, altered,
or computed by another rank than it should be. Every rank can make every other rank's tokens
(routers.py), and with them all that must arrive.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig, reference
from moe_nvlink_plugin.recipes import combine_formats
from moe_nvlink_plugin.verify import cases

from .options import Options
from .routers import RankTokens, owners, target_table, tokens_of

#: Tokens at a time in the check, so that its fp32 copies stay small.
CHUNK = 256

#: The check keeps all ranks' tokens if they are together no larger than this.
KEPT_BYTES = 32 * 2**20


class WrongResult(RuntimeError):  # noqa: N818  what it is, not that it is one
    """A backend moved something else than it had to. No number is reported of such a run."""


@dataclasses.dataclass(frozen=True)
class Context:
    """One rank's part of one batch.

    Attributes:
        tokens: this rank's, on `device`.
        group: a torch ProcessGroup that serves CPU tensors and, on a GPU, CUDA tensors too.
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
        """Make another rank's tokens, on `device`."""
        row_bytes = self.options.hidden_size * self.options.torch_dtype.itemsize
        small = self.num_tokens * row_bytes * self.options.ep_size <= KEPT_BYTES
        made = (_kept_tokens if small else tokens_of)(self.options, self.num_tokens, rank)
        return made.to(self.device)

    def gathered(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        values: list[Any] = [None] * self.options.ep_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def targets(self, ids: torch.Tensor) -> torch.Tensor:
        """Say which ranks own an expert of the token, `[tokens, ep_size] bool`."""
        return target_table(ids, self.options.num_experts, self.options.ep_size)


_kept_tokens = functools.lru_cache(maxsize=128)(tokens_of)


class Complaints:
    """What a check finds; raised after all its collective steps."""

    def __init__(self, backend: str, context: Context) -> None:
        self._where = f"{backend}, {context.num_tokens} tokens per rank, rank {context.rank}"
        self._found: list[str] = []

    def same(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Demand equal values and shapes; a NaN equals nothing."""
        if actual.shape != expected.shape:
            self._found.append(
                f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
            )
        elif not torch.equal(actual, expected):
            self._add_place(actual != expected, what)

    def near(self, actual: torch.Tensor, expected: torch.Tensor, bound: Any, what: str) -> None:
        """Demand |actual - expected| <= bound, element by element; a NaN is never near."""
        self._add_place(~((actual.double() - expected.double()).abs() <= bound), what)

    def alike(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Demand rows off by at most a twentieth of their length: a few codes, no other row."""
        error = (actual.float() - expected.float()).norm(dim=1)
        bound = 0.05 * expected.float().norm(dim=1).double()
        self.near(error, torch.zeros_like(error), bound, what)

    def _add_place(self, wrong: torch.Tensor, what: str) -> None:
        count = int(wrong.sum())
        if count:
            place = wrong.nonzero()[0].tolist()
            self._found.append(f"{what}: {count} of {wrong.numel()} wrong, the first at {place}")

    def raise_any(self) -> None:
        """Raise WrongResult if anything was found."""
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
    """Return a rank's partial rows of activations `[n, hidden_size]`; zeros if it has no expert.

    rank: one for all tokens, or one each, `[n] int64`. The bits are the same on every device.
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

    Attributes:
        where: the tokens.
        rows: `[n, top_k, hidden_size]` partial rows as the experts write them: the k-th of the rank
            of the k-th id, zeros if an earlier id has the same rank.
    """

    where: slice
    rows: torch.Tensor


def terms(options: Options, tokens: RankTokens) -> Iterator[Terms]:
    """Yield the terms of one rank's tokens, some tokens at a time."""
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
    """Return what our combine writes for Terms.rows, `[n, hidden_size]`, as the reference does.

    A missing row is added as zeros here, which changes no value.
    """
    back = combine_formats.combine_format(options.combine)
    each: Sequence[torch.Tensor] = rows.unbind(1)
    if back is not None:
        each = [back.dequantise(back.quantise(row)) for row in each]
    total = reference.pairwise_tree(each)
    assert total is not None
    return total.to(options.torch_dtype)


def sum_and_bound(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact sum over k of Terms.rows, and how far a sum in their dtype may be from it.

    Adding n terms in any order, rounding each time to nearest, is off by at most n units in the
    last place of the sum of magnitudes.
    """
    exact = rows.double()
    unit = torch.finfo(rows.dtype).eps
    return exact.sum(1), exact.abs().sum(1) * unit * rows.shape[1] + torch.finfo(rows.dtype).tiny


def check_combined(
    complaints: Complaints, context: Context, combined: torch.Tensor, how: str
) -> None:
    """Hold this rank's result to the check's experts.

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


class Side(abc.ABC):
    """One rank's side of one backend for one batch; every method but close is collective.

    Attributes:
        given: what it is spared: packing, split sizes that are known, and the like.
        combined: this rank's result, where combine leaves it.
        how: what the result is held to, as check_combined's.
        capturable: whether a CUDA graph can hold its verbs.
        is_checked: whether `check` holds the verbs to anything.
    """

    name: str
    given: str
    combined: torch.Tensor
    how = "sum"
    capturable = True
    is_checked = True

    def __init__(self, context: Context) -> None:
        self.context = context

    @staticmethod
    @abc.abstractmethod
    def unavailable(options: Options) -> str | None:
        """Say why it cannot run these options on this machine; None: it can. Local."""

    @abc.abstractmethod
    def dispatch(self) -> None:
        """Move the tokens to the ranks of their experts."""

    @abc.abstractmethod
    def combine(self) -> None:
        """Move the experts' rows back; after a dispatch."""

    @abc.abstractmethod
    def run_experts(self, complaints: Complaints) -> None:
        """Hold what arrived to what was sent, and run the check's experts on it."""

    def check_result(self, complaints: Complaints) -> None:
        """Hold what came back to the check's experts."""
        check_combined(complaints, self.context, self.combined, self.how)

    def check(self) -> None:
        """Hold both verbs to what must arrive. All collective steps run, whatever it finds.

        Raises:
            WrongResult: naming backend, batch, rank and place.
        """
        complaints = Complaints(self.name, self.context)
        self.combined.fill_(float("nan"))
        self.dispatch()
        self.run_experts(complaints)
        self.combine()
        self.check_result(complaints)
        complaints.raise_any()

    def close(self) -> None:  # noqa: B027
        """Give up what it holds. Local; most hold buffers alone."""


# Packed rows: a peer's token as bytes, so that one collective moves all of it.


class Packing:
    """`[n, bytes] uint8`: rows that travel, scales, ids and weights side by side."""

    def __init__(self, context: Context) -> None:
        self._options, self._config = context.options, context.config
        self._like = self._parts(*(tensor[:0] for tensor in context.tokens))

    def _parts(self, *tokens: torch.Tensor) -> list[torch.Tensor]:
        hidden, ids, weights = tokens
        rows, scales = cases.quantised(self._config, hidden)
        return [rows, *([] if scales is None else [scales]), ids, weights]

    def pack(self, tokens: RankTokens) -> torch.Tensor:
        """Pack these tokens; quantise them if the recipe says so."""
        parts = self._parts(*tokens)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return rows, scales if any, ids, weights; each contiguous."""
        widths = [like.shape[1] * like.dtype.itemsize for like in self._like]
        parts = zip(torch.split(packed, widths, dim=1), self._like, strict=True)
        return [part.contiguous().view(like.dtype) for part, like in parts]

    def expert_rows(self, rank: int, packed: torch.Tensor) -> torch.Tensor:
        """Run the check's experts on packed rows."""
        rows, *scales, ids, weights = self.unpack(packed)
        hidden = cases.activations(self._config, rows, scales[0] if scales else None)
        return expert_rows(self._options, rank, hidden, ids, weights)
