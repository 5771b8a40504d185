"""Lists of payloads, whose rows differ from call to call, through exchanges on one workspace.

FlashInfer's callers say what a token's payloads are when they dispatch. An exchange of ours knows
the bytes of its rows when it is created. So there is one exchange for each kind of call, created at
the first call of that kind; all of them share one workspace. The first payload travels as the row
of recipe bytes_N, the others as extra payloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import AllToAllConfig, DispatchMetadata, MoeAllToAll, rank_mask
from moe_nvlink_plugin.errors import ConfigError, ExchangeStateError, InputError


class Kind(NamedTuple):
    """What calls have in common that use the same exchange.

    Attributes:
        row_bytes: bytes of a row of each payload.
        received_ids: as AllToAllConfig.received_ids.
        combined_bytes: bytes of a row of the experts' output; 0: as always.
        num_counts: as AllToAllConfig.num_expert_counts.
        combine: as AllToAllConfig.combine, where calls choose it.
    """

    row_bytes: tuple[int, ...]
    received_ids: str | int
    combined_bytes: int = 0
    num_counts: int = 0
    combine: str = "bf16"


class Received(NamedTuple):
    """Views of what this rank received; see Dispatched.

    Attributes:
        topk_ids: `[ep_size * max_tokens, top_k]` int32.
        topk_weights: `[ep_size * max_tokens, top_k]` float32.
        payloads: each `[ep_size * max_tokens, ...]`, in the dtype and row shape of the sent one.
        max_tokens: bound of the dispatch.
        expert_counts: `[ep_size, num_counts]` int32, valid until the next dispatch; None: none
            were given.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    payloads: tuple[torch.Tensor, ...]
    max_tokens: int
    expert_counts: torch.Tensor | None


class _Round(NamedTuple):
    kind: Kind
    exchange: MoeAllToAll
    metadata: DispatchMetadata
    mask: tuple[int, ...] | None


class OpaqueRows:
    """Exchanges of one group that carry rows of any bytes.

    One dispatch may be in flight at a time.

    Args:
        group: as `MoeAllToAll.create` takes it.
        config_of: returns the configuration of the exchange for a kind of call, `recipe`,
            `extra_payload_bytes` and `received_ids` apart.
    """

    def __init__(self, group: Any, config_of: Callable[[Kind], AllToAllConfig]) -> None:
        self.group = group
        self._config_of = config_of
        self._exchanges: dict[Kind, MoeAllToAll] = {}
        self._no_weights: torch.Tensor | None = None
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._round: _Round | None = None
        self._is_closed = self._is_released = False

    @property
    def is_dispatched(self) -> bool:
        """Whether a dispatch waits for its combine."""
        return self._round is not None

    @property
    def kind(self) -> Kind:
        """What the dispatch in flight has in common with others."""
        return self._in_flight("combine").kind

    @property
    def leaves_out(self) -> bool:
        """Whether the dispatch in flight leaves ranks out."""
        current = self._in_flight("combine")
        ep_size = current.exchange.config.ep_size
        return current.mask is not None and len(_ranks(current.mask, ep_size)) < ep_size

    def prepare(self, kind: Kind, device: torch.device) -> MoeAllToAll:
        """Return the exchange for a kind of call. Collective if it is the first of its kind.

        Raises:
            ExchangeStateError: it is the first of its kind, and a CUDA graph captures; or `close`
                was called.
            as AllToAllConfig and MoeAllToAll.create.
        """
        self._check_open()
        found = self._exchanges.get(kind)
        if found is not None:
            return found
        if is_capturing(device):
            raise ExchangeStateError(
                f"the first dispatch of payloads of {kind.row_bytes} bytes with {kind.num_counts} "
                "statistics is being captured; run it once before the capture, because it allocates"
            )
        first = next(iter(self._exchanges.values()), None)
        created = MoeAllToAll.create(self._config_of(kind), self.group, device, share_with=first)
        self._exchanges[kind] = created
        return created

    def dispatch(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        payloads: Sequence[torch.Tensor],
        *,
        received_ids: str | int,
        max_tokens: int,
        combined_bytes: int = 0,
        active_rank_mask: torch.Tensor | None = None,
        expert_counts: torch.Tensor | None = None,
        combine: str = "bf16",
    ) -> Received:
        """Send payloads to the ranks that own the tokens' experts. Collective.

        Capturable after a first call with rows of these bytes, counts of this length and this
        mask; the graph keeps the mask.

        Args:
            topk_ids: `[num_tokens, top_k]` int32 or int64.
            topk_weights: `[num_tokens, top_k]` float32; None: arbitrary weights travel.
            payloads: one or more, each `[num_tokens, ...]`, any dtype.
            received_ids: as AllToAllConfig.received_ids.
            max_tokens: bound of the call.
            combined_bytes: as in Kind.
            active_rank_mask: which ranks take part, as FlashInfer's: words of 64 bits on the CPU.
                The others must not call. None: all do.
            expert_counts: `[num_counts]` int32, which every rank gets from all ranks. All ranks
                pass as many, or None.
            combine: as in Kind.

        Raises:
            InputError, ExchangeStateError, and what waits raise: as MoeAllToAll.dispatch.
        """
        if self._round is not None:
            self.check_usable()
            raise ExchangeStateError(
                "dispatch twice: the dispatch before has not been combined; call combine first"
            )
        words = _words(active_rank_mask)
        rows = [_rows(index, tensor) for index, tensor in enumerate(payloads)]
        num_counts = _num_counts(expert_counts)
        sizes = tuple(row.shape[1] for row in rows)
        kind = Kind(sizes, received_ids, combined_bytes, num_counts, combine)
        exchange = self.prepare(kind, topk_ids.device)
        if topk_weights is None:
            topk_weights = self._weights(exchange.config, topk_ids)
        received = exchange.dispatch(
            rows[0],
            topk_ids,
            topk_weights,
            rows[1:],
            max_tokens=max_tokens,
            active_ranks=self._active_ranks(words, exchange.config, topk_ids.device),
            expert_counts=expert_counts,
        )
        self._round = _Round(kind, exchange, received.metadata, words)
        views = (received.hidden_states, *received.extra_payloads)
        return Received(
            received.topk_ids,
            received.topk_weights,
            tuple(
                view.view(sent.dtype).view(view.shape[0], *sent.shape[1:])
                for view, sent in zip(views, payloads, strict=True)
            ),
            max_tokens,
            received.expert_counts,
        )

    def combine_input(self, dtype: torch.dtype, hidden_size: int) -> torch.Tensor:
        """Return memory for the experts' output of the dispatch in flight. Local.

        Returns:
            `[ep_size * max_tokens, hidden_size]`.
        """
        current = self._in_flight("combine_input")
        return current.exchange.combine_input(
            dtype, hidden_size=hidden_size, metadata=current.metadata
        )

    def combine(
        self,
        rows: torch.Tensor,
        output: torch.Tensor | None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add up the partial rows of this rank's tokens. Collective; capturable.

        Args:
            rows: `[ep_size * max_tokens, hidden_size]`, the experts' output.
            output: `[num_tokens, hidden_size]`; None allocates it.
            active_rank_mask: that of dispatch, or None.

        Raises:
            InputError, ExchangeStateError, and what waits raise: as MoeAllToAll.combine.
        """
        current = self._in_flight("combine")
        mask = _words(active_rank_mask)
        if mask not in (None, current.mask):
            raise InputError(
                f"active_rank_mask={mask}, but the dispatch had {current.mask}; pass the same mask"
            )
        width = rows.shape[-1]
        total = current.exchange.combine(rows, current.metadata, output=output, hidden_size=width)
        self._round = None
        return total

    def release(self) -> None:
        """Give all memory back until `renew`. Collective; a second call does nothing.

        Raises as MoeAllToAll.release.
        """
        self._check_open()
        if not self._is_released:
            for exchange in list(self._exchanges.values())[:1]:  # they share the workspace
                exchange.release()
        self._is_released = True

    def renew(self, group: Any) -> None:
        """Map memory anew, at the same addresses. Collective; it does nothing before a release.

        Args:
            group: as `MoeAllToAll.create` takes it, with the same ranks.

        Raises as MoeAllToAll.renew.
        """
        self._check_open()
        if self._is_released:
            for exchange in list(self._exchanges.values())[:1]:
                exchange.renew(group, range(exchange.config.ep_size))
            self.group, self._is_released = group, False

    def close(self) -> None:
        """Close all exchanges. Local; idempotent."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()
        self._round = None
        self._is_closed = True

    def check_usable(self) -> None:
        """Check that no round has failed, and that `close` was not called. Local.

        Raises:
            ExchangeStateError: the message says why.
        """
        self._check_open()
        for exchange in self._exchanges.values():
            failure = exchange.failure()
            if failure is not None:
                raise ExchangeStateError(
                    f"the exchange is unusable since: {failure}; close it and create it anew"
                ) from failure

    def _check_open(self) -> None:
        if self._is_closed:
            raise ExchangeStateError("the workspace is closed; create a new object on it")

    def _in_flight(self, verb: str) -> _Round:
        if self._round is None:
            self.check_usable()
            raise ExchangeStateError(f"{verb} without dispatch; call dispatch first")
        return self._round

    def _active_ranks(
        self, words: tuple[int, ...] | None, config: AllToAllConfig, device: torch.device
    ) -> torch.Tensor | None:
        """Return a mask of FlashInfer's as dispatch takes it. Each lies on the device once.

        Raises:
            ExchangeStateError: a CUDA graph captures its first use.
        """
        if words is None:
            return None
        found = self._masks.get(words)
        if found is None:
            if is_capturing(device):
                raise ExchangeStateError(
                    f"the first dispatch with active_rank_mask={words} is being captured; run it "
                    "once before the capture, because it copies the mask to the GPU"
                )
            ranks = _ranks(words, config.ep_size)
            found = self._masks[words] = rank_mask(ranks, config.ep_size, device)
        return found

    def _weights(self, config: AllToAllConfig, topk_ids: torch.Tensor) -> torch.Tensor:
        shape = (config.max_tokens_per_rank, config.top_k)
        if self._no_weights is None or self._no_weights.shape != shape:
            self._no_weights = torch.zeros(shape, device=topk_ids.device)
        return self._no_weights[: topk_ids.shape[0]]


def _words(mask: torch.Tensor | None) -> tuple[int, ...] | None:
    """Return the words of a mask, each 0 or more.

    Raises:
        InputError: it is no mask of FlashInfer's.
    """
    if mask is None:
        return None
    if mask.dtype != torch.uint64 or mask.dim() != 1 or mask.device.type != "cpu":
        raise InputError(
            f"active_rank_mask is {mask.dtype} {list(mask.shape)} on {mask.device}; pass what "
            "flashinfer.comm.moe_a2a_active_rank_mask returns"
        )
    return tuple(mask.tolist())


def _ranks(words: tuple[int, ...], ep_size: int) -> list[int]:
    """Return the ranks that a mask's words name."""
    bits = sum(word << 64 * index for index, word in enumerate(words))
    return [rank for rank in range(ep_size) if bits >> rank & 1]


def _num_counts(counts: torch.Tensor | None) -> int:
    """Return how many counts a call sends.

    Raises:
        InputError: they are no counts.
    """
    if counts is None:
        return 0
    if counts.dim() != 1 or counts.dtype != torch.int32 or counts.numel() == 0:
        raise InputError(
            f"eplb_local_stats is {counts.dtype} {list(counts.shape)}; pass [num_experts] int32, "
            "as many on all ranks"
        )
    return counts.numel()


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what runs on the device. Local."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def row_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a row of a payload `[num_tokens, ...]`. Local."""
    return math.prod(tensor.shape[1:]) * tensor.dtype.itemsize


def _rows(index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a payload as `[num_tokens, bytes of a row]` uint8.

    Raises:
        InputError: it has no rows, rows of 0 bytes, or is not contiguous.
    """
    if tensor.dim() == 0 or row_bytes(tensor) == 0:
        raise InputError(
            f"payload {index} has shape {list(tensor.shape)}; pass [num_tokens, ...] with rows of "
            "1 byte or more"
        )
    if not tensor.is_contiguous():
        raise InputError(
            f"payload {index} is not contiguous (strides {list(tensor.stride())}); call "
            ".contiguous() first"
        )
    # Flat in between: strides of dimensions with one element, or none, are arbitrary.
    return tensor.view(-1).view(torch.uint8).view(tensor.shape[0], row_bytes(tensor))


def check_bound(name: str, max_tokens: object, capacity: int) -> int:
    """Return the bound of a call. Local.

    Raises:
        InputError: it is no integer from 1 to the capacity.
    """
    if not isinstance(max_tokens, int) or not 1 <= max_tokens <= capacity:
        raise InputError(
            f"{name}={max_tokens!r} is no integer from 1 to {capacity}; pass the most tokens that "
            "any rank dispatches in this call, or create the exchange with a larger capacity"
        )
    return max_tokens


def refuse_rows_beyond(row_bytes: Sequence[int], most_bytes: int, what: str) -> None:
    """Check that the payloads of a token have room. Local.

    Raises:
        ConfigError: they have not.
    """
    if sum(row_bytes) > most_bytes:
        raise ConfigError(
            f"payloads of {'+'.join(map(str, row_bytes))} bytes per token exceed {most_bytes}, "
            f"{what}"
        )
