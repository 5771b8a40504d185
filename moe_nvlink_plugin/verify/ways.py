"""What moves tokens to their experts and back: this package, and torch's collectives.

The experts are those of the check: they show a row that is lost, altered, or computed elsewhere.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime
from typing import Any

import torch
import torch.distributed as dist

from moe_nvlink_plugin.config import AllToAllConfig, local_expert_range
from moe_nvlink_plugin.errors import MoeNvlinkError
from moe_nvlink_plugin.exchange.all_to_all import MoeAllToAll
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.testing import random_inputs

#: Their names from torch 2.13 on, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WrongResultError(MoeNvlinkError):
    """A way returned other rows than the experts' sums, so its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's tokens, and the experts of the check.

    The experts of a rank multiply a token by the sum of 1 + weight over its experts there. All
    terms of a sum have one sign, so a sum's relative error is bounded.

    Attributes:
        config: geometry and number of this rank.
        group: whose backend for the device moves the rows of torch's collectives.
        hidden: `[tokens, hidden_size]` config.dtype.
        ids: `[tokens, top_k]` int32; each is an expert.
        weights: `[tokens, top_k]` float32, from 0 to 1/4, so that no term is small beside a sum.
        ends: `[ep_size]` int64, the expert after each rank's last.
    """

    config: AllToAllConfig
    group: dist.ProcessGroup
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, config: AllToAllConfig, group: dist.ProcessGroup, device: torch.device) -> Batch:
        """Make this rank's batch of max_tokens_per_rank tokens. Local."""
        size, generator = config.ep_size, torch.Generator().manual_seed(1000 + config.ep_rank)
        hidden, ids, weights = random_inputs(config, config.max_tokens_per_rank, generator)
        ends = [local_expert_range(config.num_experts, size, rank)[1] for rank in range(size)]
        parts = (hidden, ids, weights / 4, torch.tensor(ends))
        return cls(config, group, *(part.to(device) for part in parts))

    def first(self, tokens: int) -> Batch:
        """Return the batch of the first tokens."""
        hidden, ids, weights = (part[:tokens] for part in (self.hidden, self.ids, self.weights))
        return dataclasses.replace(self, hidden=hidden, ids=ids, weights=weights)

    def targets(self) -> torch.Tensor:
        """Return `[tokens, ep_size]` bool: which ranks own an expert of the token."""
        owners = torch.bucketize(self.ids.long(), self.ends, right=True)
        none = owners.new_zeros((len(owners), self.config.ep_size), dtype=torch.bool)
        return none.scatter_(1, owners, True)

    def sent_bytes(self) -> int:
        """Return the bytes of rows, ids and weights that this rank sends to others. Local."""
        table = self.targets()
        table[:, self.config.ep_rank] = False
        parts = (self.hidden, self.ids, self.weights)
        return int(table.sum()) * sum(part.shape[1] * part.dtype.itemsize for part in parts)

    def run_experts(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write this rank's partial rows of what it received; zeros if it has no expert."""
        config = self.config
        first, end = local_expert_range(config.num_experts, config.ep_size, config.ep_rank)
        is_mine = (ids >= first) & (ids < end)
        factor = torch.where(is_mine, 1 + weights, 0).sum(1, keepdim=True)
        torch.mul(hidden, factor.to(hidden.dtype), out=rows)

    def check(self, way: str, combined: torch.Tensor) -> None:
        """Hold combined rows to the sums.

        Raises:
            WrongResultError: they differ by more than sums in config.dtype may.
        """
        config, limits = self.config, torch.finfo(self.hidden.dtype)
        sums = self.hidden.float() * (1 + self.weights).sum(1, keepdim=True)
        # Half a unit each: of the factors, the products, every addition and the result.
        rtol = (min(config.top_k, config.ep_size) + 2) * limits.eps / 2
        try:
            torch.testing.assert_close(combined.float(), sums, rtol=rtol, atol=limits.tiny)
        except AssertionError as error:
            raise WrongResultError(
                f"{way} returned wrong sums on rank {config.ep_rank} at {len(sums)} tokens a rank, "
                f"so nothing of it is timed: {error}"
            ) from None


class Way(abc.ABC):
    """One rank's side of one way; all but run_experts is collective."""

    @abc.abstractmethod
    def dispatch(self) -> None:
        """Bring the tokens to the ranks of their experts."""

    @abc.abstractmethod
    def run_experts(self) -> None:
        """Write the partial rows. They stay in place for the rounds under the clock."""

    @abc.abstractmethod
    def combine(self) -> torch.Tensor:
        """Return the sums, `[tokens, hidden_size]`."""


class Ours(Way):
    """This package's exchange."""

    def __init__(self, exchange: MoeAllToAll, batch: Batch) -> None:
        self._exchange, self._batch = exchange, batch

    def dispatch(self) -> None:
        one = self._batch
        self._received = self._exchange.dispatch(
            one.hidden, one.ids, one.weights, max_tokens=len(one.hidden)
        )

    def run_experts(self) -> None:
        got = self._received
        rows = self._exchange.combine_input(metadata=got.metadata)
        self._batch.run_experts(got.hidden_states, got.topk_ids, got.topk_weights, rows)

    def combine(self) -> torch.Tensor:
        metadata = self._received.metadata
        return self._exchange.combine(self._exchange.combine_input(metadata=metadata), metadata)


class _Packed:
    """Rows of bytes with ids, weights and activations side by side: one collective moves them."""

    def __init__(self, batch: Batch, rows: int) -> None:
        parts = (batch.ids, batch.weights, batch.hidden)
        widths = [part.shape[1] * part.dtype.itemsize for part in parts]
        width = -(-sum(widths) // 16) * 16  # so that each part can be read in place
        self.bytes = batch.hidden.new_empty((rows, width), dtype=torch.uint8)
        ends = [sum(widths[: place + 1]) for place in range(len(parts))]
        self.ids, self.weights, self.hidden = (
            self.bytes[:, end - width : end].view(part.dtype)
            for part, width, end in zip(parts, widths, ends, strict=True)
        )

    def pack(self, batch: Batch) -> None:
        self.ids.copy_(batch.ids)
        self.weights.copy_(batch.weights)
        self.hidden.copy_(batch.hidden)


class Gather(Way):
    """All tokens to all ranks, and one reduction of the partial rows of all of them."""

    def __init__(self, batch: Batch) -> None:
        self._batch, tokens = batch, len(batch.hidden)
        self._mine, self._all = (_Packed(batch, n) for n in (tokens, tokens * batch.config.ep_size))
        self._rows = torch.empty_like(self._all.hidden, memory_format=torch.contiguous_format)

    def dispatch(self) -> None:
        self._mine.pack(self._batch)
        _all_gather(self._all.bytes, self._mine.bytes, group=self._batch.group)

    def run_experts(self) -> None:
        got = self._all
        self._batch.run_experts(got.hidden, got.ids, got.weights, self._rows)

    def combine(self) -> torch.Tensor:
        combined = torch.empty_like(self._batch.hidden)
        _reduce_scatter(combined, self._rows, group=self._batch.group)
        return combined


class AllToAll(Way):
    """Each token once to each rank that owns one of its experts; it tells the counts first."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self._mine = batch, _Packed(batch, len(batch.hidden))

    def dispatch(self) -> None:
        batch, table = self._batch, self._batch.targets()
        sent, self._order = table.sum(0), table.T.nonzero()[:, 1]
        told = torch.empty_like(sent)
        dist.all_to_all_single(told, sent, group=batch.group)
        self._send, self._receive = sent.tolist(), told.tolist()
        self._mine.pack(batch)
        self._got = _Packed(batch, sum(self._receive))
        self._move(self._got.bytes, self._mine.bytes[self._order], self._receive, self._send)

    def run_experts(self) -> None:
        got = self._got
        self._rows = torch.empty_like(got.hidden, memory_format=torch.contiguous_format)
        self._batch.run_experts(got.hidden, got.ids, got.weights, self._rows)

    def combine(self) -> torch.Tensor:
        hidden = self._batch.hidden
        returned = hidden.new_empty((len(self._order), hidden.shape[1]))
        self._move(returned, self._rows, self._send, self._receive)
        sums = torch.zeros_like(hidden, dtype=torch.float32)
        return sums.index_add_(0, self._order, returned.float()).to(hidden.dtype)

    def _move(self, to: torch.Tensor, of: torch.Tensor, receive: Any, send: Any) -> None:
        dist.all_to_all_single(to, of, receive, send, group=self._batch.group)


def peer_group(
    group: dist.ProcessGroup, device: torch.device, config: AllToAllConfig
) -> tuple[dist.ProcessGroup, str]:
    """Return the group that moves the other ways' rows, and why there is none, or "". Collective.

    It makes a group of NCCL if the caller's has none.
    """
    if config.ep_size == 1:
        return group, "they need two ranks, and this group has one"
    if device.type != "cuda":
        return group, ""
    if not dist.is_nccl_available():
        return group, f"torch {torch.__version__} is built without NCCL; install a CUDA build"
    limit = config.first_timeout_s or config.timeout_s or 0.0
    peers, error = group, ""
    try:  # NCCL refuses, for one, two ranks on one GPU
        if "cuda:nccl" not in dist.get_backend_config(group):
            peers = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=datetime.timedelta(seconds=limit),
                backend="nccl",
                use_local_synchronization=True,
            )
        dist.all_reduce(torch.zeros(1, device=device), group=peers)
        torch.cuda.synchronize(device)
    except RuntimeError as failed:
        error = f"NCCL failed on rank {config.ep_rank}: {str(failed).strip().splitlines()[0]}"
    errors = as_group(group, limit).all_gather_object(error)
    missing = next((one for one in errors if one), "")
    return (group if missing else peers), missing
