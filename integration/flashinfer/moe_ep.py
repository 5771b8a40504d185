"""Backend `moe_nvlink` of flashinfer.moe_ep, in FlashInfer's own registry.

    MoEEpLayer(bootstrap, fleet_params, weights, backend=SplitConfig(comm=MoeNvlinkConfig()))
    create_communication(bootstrap, params, "moe_nvlink")

Rows travel as bytes, so every dispatch_format does, also MXFP4, of which no kernel of ours knows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from flashinfer.moe_ep.core.comm.communication import (
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    register_communication,
)

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.config import ACTIVATION_DTYPES
from moe_nvlink_plugin.errors import ExchangeStateError, InputError
from moe_nvlink_plugin.integration import overrides

from .communicators import default_device, group_of
from .opaque_rows import Kind, OpaqueRows, check_bound, refuse_rows_beyond, row_bytes

BACKEND = "moe_nvlink"

_COMM = "BootstrapConfig(process_group=...) or MoeNvlinkConfig(comm_backend=...)"


@dataclasses.dataclass
class MoeNvlinkConfig:
    """Options of the backend, equal on all ranks, `device` and `comm_backend` apart.

    Attributes:
        comm_backend: how ranks meet at start-up: an object with Get_rank, Get_size and allgather.
            None: BootstrapConfig.process_group; without that, all ranks of torch.distributed.
        device: where the tensors live. None: this rank's GPU; without CUDA, the CPU.
        extra_payload_bytes_per_token: bytes of activations and scales that a token may have beside
            MoEEpCommParams.dispatch_bytes_per_token.
        combine_dtypes: types of the experts' output beside MoEEpCommParams.dtype.
        combine: as AllToAllConfig.combine: "fp8_block" or "nvfp4" quantises rows on their way back,
            and "fp8_tensor" casts them, as use_low_precision_combine of NVLinkOneSidedConfig does.
        timeout_s: as AllToAllConfig.timeout_s.
        enable_rank_mask: whether dispatch takes an active_rank_mask, as NVLinkOneSidedConfig has
            it. False makes combine cheaper.
    """

    backend_name: str = BACKEND
    comm_backend: Any = None
    device: torch.device | str | None = None
    extra_payload_bytes_per_token: int = 0
    combine_dtypes: tuple[torch.dtype, ...] = ()
    combine: str | None = None
    timeout_s: float | None = None
    enable_rank_mask: bool = False


class _Shared(NamedTuple):
    """Rows that communications of one geometry share."""

    rows: OpaqueRows
    users: set[int]


#: As FlashInfer's own backends do, communications of equal geometry share a workspace: a model has
#: one communication for each layer, and one layer at a time has a round in flight.
_shared: dict[object, _Shared] = {}


@register_communication(BACKEND)
class MoeNvlinkCommunication(MoEEpCommunication):
    """Rank-major dispatch and combine by MoeAllToAll.

    What FlashInfer's contract leaves open: an empty row's ids are invalid_expert_id; its other
    contents are arbitrary. If invalid_expert_id is -1, a received row has all ids and weights of
    its token. Otherwise an id whose expert is on another rank becomes invalid_expert_id, and has
    weight 0.

    Args:
        bootstrap: rank and size; `process_group` if config has no comm_backend; `device`.
        params: geometry.
        config: options.

    Raises:
        ValueError: params or sizes are out of range (FlashInfer), or ConfigError of ours.
        DisagreementError, PeerError, TransportError, CompileError: as MoeAllToAll.create.
    """

    @overrides
    def __init__(
        self, bootstrap: Any, params: MoEEpCommParams, config: MoeNvlinkConfig | None = None
    ) -> None:
        self.config = MoeNvlinkConfig() if config is None else config
        super().__init__(bootstrap, params)
        self._rows: OpaqueRows | None = None
        self._max_tokens = 0
        self._received_ids: str | int = (
            "global" if params.invalid_expert_id == -1 else params.invalid_expert_id
        )
        self._most_bytes = (
            params.dispatch_bytes_per_token + self.config.extra_payload_bytes_per_token
        )
        chosen = self.config.device
        self._device = default_device(bootstrap.device) if chosen is None else torch.device(chosen)
        group = group_of(self.config.comm_backend, bootstrap.process_group, _COMM)
        self._key = self._key_of(group)
        shared = _shared.get(self._key)
        if shared is None:
            shared = _Shared(OpaqueRows(group, self._config_of), set())
        # Before the first dispatch, which may be captured.
        shared.rows.prepare(Kind(_format_row_bytes(params), self._received_ids), self._device)
        shared.users.add(id(self))
        _shared[self._key] = shared
        self._rows = shared.rows

    @classmethod
    @overrides
    def is_platform_supported(cls) -> bool:
        """Return True: CPU ranks work anywhere; for GPUs, `create` says what is missing. Local."""
        return True

    @overrides
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Send each token once to every rank that owns one of its experts. Collective.

        Capturable after a first call with this mask, with statistics of this length, and with rows
        of these bytes if they are not those of dispatch_format; the graph keeps the mask.

        Args:
            hidden_states: `[num_tokens, *]`, any dtype.
            topk_ids: `[num_tokens, top_k]` int32 or int64.
            topk_weights: `[num_tokens, top_k]` float32; None: the result has none.
            hidden_states_scale: `[num_tokens, *]`, any dtype.
            max_tokens_per_rank: bound of the call, equal on all ranks; None: that of params.
            eplb_local_stats: `[n]` int32, the same n on all ranks, 1..65536; they need not be
                counts of these tokens. None: no statistics travel. The result has those of all
                ranks as eplb_gathered_stats, `[ep_size, n]` int32, valid until the next dispatch
                of a communication of this geometry; zeros for ranks that the mask leaves out.
            active_rank_mask: what flashinfer.comm.moe_a2a_active_rank_mask returns, equal on all
                ranks that it names; None: all ranks take part. The others must not call; their
                experts are no experts, and they cannot take part in later rounds on the workspace.
                Only with MoeNvlinkConfig(enable_rank_mask=True).

        Raises:
            InputError: a tensor or the bound does not fit. Nothing was sent.
            ConfigError: the rows of a token have no room. Nothing was sent.
            ExchangeStateError: the last dispatch has not been combined, destroy() was called, a
                capture comes before the first call, or a round has failed.
            ExchangeTimeoutError, DisagreementError, PeerError: as MoeAllToAll.dispatch. The
                workspace is unusable until all communications on it are destroyed, on every rank.
        """
        rows = self._live()
        self._check_mask(active_rank_mask)
        capacity = self.params.max_tokens_per_rank
        bound = capacity
        if max_tokens_per_rank is not None:
            bound = check_bound("max_tokens_per_rank", max_tokens_per_rank, capacity)
        payloads = [hidden_states]
        if hidden_states_scale is not None:
            payloads.append(hidden_states_scale)
        refuse_rows_beyond(
            [row_bytes(payload) for payload in payloads],
            self._most_bytes,
            "the dispatch_bytes_per_token of MoEEpCommParams and extra_payload_bytes_per_token of "
            "MoeNvlinkConfig; name the dispatch_format, or raise the latter",
        )
        received = rows.dispatch(
            topk_ids,
            topk_weights,
            payloads,
            received_ids=self._received_ids,
            max_tokens=bound,
            active_rank_mask=active_rank_mask,
            expert_counts=eplb_local_stats,
        )
        return MoEEpDispatchResult(
            hidden_states=received.payloads[0],
            topk_ids=received.topk_ids,
            topk_weights=None if topk_weights is None else received.topk_weights,
            tokens_per_rank=bound,
            hidden_states_scale=None if hidden_states_scale is None else received.payloads[1],
            eplb_gathered_stats=received.expert_counts,
        )

    @overrides
    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the experts' output, from which combine copies nothing. Local.

        Returns:
            `[ep_size * tokens_per_rank, hidden_size]` of `dtype`, valid until combine.

        Raises:
            ExchangeStateError: no dispatch is in flight.
            InputError: combine does not reduce `dtype`.
        """
        return self._live().combine_input(dtype, self.params.hidden_size)

    @overrides
    def combine(
        self,
        expert_output: torch.Tensor,
        *,
        output: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add up the partial rows of this rank's tokens. Collective; capturable.

        Args:
            expert_output: `[ep_size * tokens_per_rank, hidden]` or
                `[ep_size, tokens_per_rank, hidden]`; MoEEpCommParams.dtype or one of
                MoeNvlinkConfig.combine_dtypes.
            output: `[num_tokens, hidden]` in the type of expert_output; None allocates it.
            active_rank_mask: that of dispatch, or None.

        Raises:
            InputError, ExchangeStateError, ExchangeTimeoutError, PeerError: as MoeAllToAll.combine.
        """
        self._check_mask(active_rank_mask)
        if expert_output.dim() not in (2, 3):
            raise InputError(
                f"expert_output has shape {list(expert_output.shape)}; pass 2 or 3 dimensions: "
                "[ep_size * tokens_per_rank, hidden] or [ep_size, tokens_per_rank, hidden]"
            )
        return self._live().combine(expert_output.flatten(0, -2), output, active_rank_mask)

    @overrides
    def destroy(self) -> None:
        """Give up the exchange; the last user of a workspace frees it. Local; idempotent."""
        self._rows = None
        shared = _shared.get(self._key)
        if shared is None or id(self) not in shared.users:
            return
        shared.users.discard(id(self))
        if not shared.users:
            del _shared[self._key]
            shared.rows.close()

    def _check_mask(self, mask: torch.Tensor | None) -> None:
        if mask is not None and not self.config.enable_rank_mask:
            raise InputError(
                "active_rank_mask is given, but enable_rank_mask=False; create the communication "
                "with MoeNvlinkConfig(enable_rank_mask=True)"
            )

    def _live(self) -> OpaqueRows:
        if self._rows is None:
            raise ExchangeStateError(
                "this communication is destroyed; create a new one with create_communication()"
            )
        return self._rows

    def _config_of(self, kind: Kind) -> AllToAllConfig:
        params, options = self.params, self.config
        first, *others = kind.row_bytes
        return AllToAllConfig(
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            num_experts=params.num_experts,
            top_k=params.top_k,
            hidden_size=params.hidden_size,
            max_tokens_per_rank=params.max_tokens_per_rank,
            dtype=_combined_dtype(params),
            recipe=f"bytes_{first}",
            combine=options.combine,
            combine_dtypes=options.combine_dtypes,
            extra_payload_bytes=tuple(others),
            received_ids=kind.received_ids,
            num_expert_counts=kind.num_counts,
            timeout_s=options.timeout_s,
            ranks_may_leave=bool(options.enable_rank_mask),
        )

    def _key_of(self, group: Any) -> object:
        """Return what communications that share a workspace have in common."""
        params, options = self.params, self.config
        meets = group if self.config.comm_backend is None else self.config.comm_backend
        geometry = (params.num_experts, params.top_k, params.max_tokens_per_rank)
        rows = (params.hidden_size, _combined_dtype(params), options.combine_dtypes)
        # The group stays alive as long as its rows, so nothing else gets its id.
        others = (options.combine, options.timeout_s, bool(options.enable_rank_mask))
        return (id(meets), self._device, geometry, rows, *others)


def _combined_dtype(params: MoEEpCommParams) -> torch.dtype:
    """Return the type of the experts' output: that of the tokens, or bf16 if these are bytes."""
    dtype: torch.dtype = params.token_dtype
    return dtype if dtype in ACTIVATION_DTYPES else torch.bfloat16


def _format_row_bytes(params: MoEEpCommParams) -> tuple[int, ...]:
    """Return the bytes of the rows that dispatch will get: activations, and scales if any travel.

    The activations of a quantised format have a power of two of bits; the other bytes are scales.
    """
    total: int = params.dispatch_bytes_per_token
    name = None if params.dispatch_format is None else params.dispatch_format.name
    rows = {
        **dict.fromkeys(("DeepSeekFp8", "MXFP8"), params.hidden_size),
        **dict.fromkeys(("NVFP4", "MXFP4"), -(-params.hidden_size // 2)),
    }.get(name or "", total)
    return (rows,) if rows == total else (rows, total - rows)
