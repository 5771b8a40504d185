"""A drop-in for `flashinfer.comm.MoeAlltoAll`, for code that has not moved to flashinfer.moe_ep.

    from moe_nvlink_plugin.integration import flashinfer
    flashinfer.install()  # before anything imports MoeAlltoAll from flashinfer.comm

Signatures are FlashInfer's. What has no counterpart here raises UnsupportedError and names one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from flashinfer.tllm_enums import SfLayout

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.errors import (
    ConfigError,
    ExchangeStateError,
    InputError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration import overrides

from .communicators import CommunicatorGroup, group_of
from .opaque_rows import (
    Kind,
    OpaqueRows,
    check_bound,
    is_capturing,
    refuse_rows_beyond,
    row_bytes,
)

#: FlashInfer's sizes of workspaces are multiples of this number of bytes.
_ALIGNMENT = 128
#: Combine's types, and the widest of them, in which the room for the experts' output is counted.
_WIDEST, _OTHERS = torch.float32, (torch.bfloat16, torch.float16)
#: The format of combine that casts, and the number of which its rows have multiples.
_FP8, _FP8_BLOCK = "fp8_tensor", 16


class _Geometry(NamedTuple):
    """What an object needs to share a workspace with another; FlashInfer's key, and ours."""

    workspace_size_per_rank: int
    ep_rank: int
    ep_size: int
    max_num_tokens: int
    top_k: int
    num_experts: int
    enable_rank_mask: bool

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's payloads and its row of the experts' output."""
        return self.workspace_size_per_rank // (self.ep_size * self.max_num_tokens)

    def config_of(self, kind: Kind) -> AllToAllConfig:
        """Return the configuration for calls of one kind."""
        first, *others = kind.row_bytes
        is_fp8 = kind.combine == _FP8
        dtype, block = (torch.bfloat16, _FP8_BLOCK) if is_fp8 else (_WIDEST, 1)
        hidden_size = -(-kind.combined_bytes // (dtype.itemsize * block)) * block
        return AllToAllConfig(
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=hidden_size,
            max_tokens_per_rank=self.max_num_tokens,
            dtype=dtype,
            recipe=f"bytes_{first}",
            combine=kind.combine,
            combine_dtypes=() if is_fp8 else _OTHERS,
            extra_payload_bytes=tuple(others),
            received_ids=kind.received_ids,
            num_expert_counts=kind.num_counts,
            ranks_may_leave=self.enable_rank_mask,
        )


class _Plan(NamedTuple):
    """How the payloads of a call travel, by their indices; equal on all ranks.

    Attributes:
        ids: payload that is token_selected_experts itself and travels as the exchange's ids; None:
            none does.
        weights: payload that travels as the exchange's weights; None: none does.
        rows: payloads that travel as they are; at least one.
    """

    ids: int | None
    weights: int | None
    rows: tuple[int, ...]

    @classmethod
    def of(
        cls,
        experts: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        id_index: int | None,
        *,
        may_have_weights: bool,
    ) -> _Plan:
        """Make a plan. Local.

        Args:
            id_index: payload that is to be the ids; None: ids are a payload as any other.
            may_have_weights: whether the exchange's weights arrive as they were sent.
        """
        ids = None
        if id_index is not None and _is_same(payloads[id_index], experts):
            ids = id_index
        weights = None
        if may_have_weights:
            weights = next((i for i, each in enumerate(payloads) if _is_like(each, experts)), None)
        rows = tuple(index for index in range(len(payloads)) if index not in (ids, weights))
        return cls(ids, weights, rows or (0,))


class _Internals:
    """An attribute of FlashInfer's object that shows the workspace of its kernels."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(
            f"moe_nvlink's MoeAlltoAll has no {self._name}, which shows the workspace of "
            "FlashInfer's kernels; ours have another one, and dispatch returns all that arrives"
        )


class MoeAlltoAll:
    """Dispatch and combine with the methods of `flashinfer.comm.MoeAlltoAll`.

    If dispatch gets an invalid_token_expert_id, empty rows have it as their ids. If it is
    num_experts or more, an id whose expert is on another rank becomes the invalid id too, as
    FlashInfer's docstring has it. With any other, a received row keeps all ids of its token, as
    with FlashInfer's kernels; if it is not -1 either, torch writes it, by further launches. An id
    outside 0..num_experts-1 has no destination. It arrives as -1 or the invalid id if one is given,
    else as it was; FlashInfer's kernels send it to a rank.

    After an ExchangeTimeoutError, DisagreementError or PeerError the workspace is unusable, for new
    objects of the same sizes too, until every rank has called _reset_workspace on one of them. So
    a mask must name the live ranks before a round waits for a dead one.

    Args:
        mapping: has moe_ep_rank and moe_ep_size.
        max_num_tokens: most tokens that a rank dispatches in one call.
        top_k: expert ids of a token.
        num_experts: experts of all ranks.
        workspace_size_per_rank: bytes, as moe_a2a_get_workspace_size_per_rank returns them: for
            every payload and the experts' output. None: from hidden_size, for 16-bit rows.
        hidden_size: elements of a row if workspace_size_per_rank is None.
        mnnvl_config: its comm_backend is how ranks meet; None: all ranks of torch.distributed.
        eplb_stats_num_experts: int32 words of statistics that a dispatch may gather; 0: none.
        enable_rank_mask: whether dispatch takes an active_rank_mask. False makes combine cheaper.
        backend: "trtllm". The kernels are ours.

    Raises:
        ConfigError: a size is out of range, or the ranks cannot meet.
        UnsupportedError: an argument asks for what is not here.
    """

    # The exchanges, one for each size of workspace, as FlashInfer caches them.
    _WORKSPACE_CACHE: dict[_Geometry, OpaqueRows] = {}  # noqa: RUF012

    metainfo = _Internals()
    mnnvl_mem = _Internals()
    workspace = _Internals()

    @overrides
    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        _refuse_backend(backend)
        self.ep_size: int = mapping.moe_ep_size
        self.ep_rank: int = mapping.moe_ep_rank
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.eplb_stats_num_experts = eplb_stats_num_experts
        self.enable_eplb = eplb_stats_num_experts > 0
        self.enable_rank_mask = enable_rank_mask
        for name in ("ep_size", "max_num_tokens", "top_k", "num_experts"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ConfigError("pass workspace_size_per_rank, or hidden_size; both are None")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                self.ep_size, top_k, max_num_tokens, hidden_size
            )
        self.workspace_size_per_rank = workspace_size_per_rank
        self._geometry = _Geometry(
            workspace_size_per_rank,
            self.ep_rank,
            self.ep_size,
            max_num_tokens,
            top_k,
            num_experts,
            bool(enable_rank_mask),
        )
        # An example of what travels: raises if a size is out of range.
        self._geometry.config_of(Kind((1,), "global", _WIDEST.itemsize, eplb_stats_num_experts))
        rows = self._WORKSPACE_CACHE.get(self._geometry)
        if rows is None:
            rows = OpaqueRows(_ep_group(mapping, mnnvl_config), self._geometry.config_of)
            self._WORKSPACE_CACHE[self._geometry] = rows
        self._rows = rows
        self._bound = 0
        self._sends_fp8 = False  # what the next dispatch prepares its combine for
        self._gathered_stats: torch.Tensor | None = None

    @classmethod
    @overrides
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Any,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> dict[str, Any]:
        """Raise UnsupportedError: the workspace is not the caller's to see."""
        refuse("get_workspace", "the constructor of MoeAlltoAll, which creates or shares it")

    @staticmethod
    @overrides
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Return the bytes for 16-bit rows, ids and weights. Local."""
        row = hidden_size * 2
        return moe_a2a_get_workspace_size_per_rank(
            ep_size,
            max_num_tokens,
            row + _routing_bytes(top_k) + extra_payload_bytes_per_token,
            row,
            eplb_stats_num_experts,
            backend=backend,
        )

    @classmethod
    @overrides
    def _init_constants(cls, backend: str = "trtllm") -> None:
        """Do nothing: FlashInfer reads the offsets of its workspace here."""

    @property
    @overrides
    def eplb_gathered_stats(self) -> torch.Tensor | None:
        """`[ep_size, eplb_stats_num_experts]` int32: eplb_local_stats of all ranks.

        None after combine, and if the last dispatch had none.
        """
        return self._gathered_stats

    @overrides
    def checkpoint_prepare(self) -> None:
        """Give the workspace's memory back until `checkpoint_restore`. Collective.

        All objects of these sizes share it. Addresses stay, so CUDA graphs stay valid. A second
        call does nothing. Raises as MoeAllToAll.release.
        """
        self._rows.release()

    @overrides
    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Map memory anew, at the same addresses. Collective; without a prepare it does nothing.

        Args:
            comm_backend: how the ranks meet from now on; of the same size and rank.

        Raises:
            ConfigError: it is of another size or rank.
            as MoeAllToAll.renew; call it again on all ranks.
        """
        group = CommunicatorGroup(comm_backend)
        if (group.size, group.rank) != (self.ep_size, self.ep_rank):
            raise ConfigError(
                f"comm_backend has {group.size} ranks and this is rank {group.rank}, but the "
                f"workspace has ep_size={self.ep_size} and ep_rank={self.ep_rank}; pass a "
                "comm_backend of the expert-parallel group"
            )
        self._rows.renew(group)

    @overrides
    def _reset_workspace(self) -> None:
        """Close the workspace. No object on it is usable afterwards. Local; idempotent.

        An object that is created afterwards has another one.
        """
        if self._WORKSPACE_CACHE.get(self._geometry) is self._rows:
            del self._WORKSPACE_CACHE[self._geometry]
        self._rows.close()

    @overrides
    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Send each token's payloads once to every rank that owns one of its experts. Collective.

        Capturable after a first call with payloads of these sizes and this mask; the graph keeps
        the mask.

        Args:
            token_selected_experts: `[num_tokens, top_k]` int32.
            input_payloads: one or more, each `[num_tokens, *]`, any dtype. Up to 8 have room beside
                token_selected_experts, if an invalid id is given, and beside one float32 of its
                shape, if no invalid id is given or it is below num_experts.
            runtime_max_tokens_per_rank: bound of the call, equal on all ranks; 0 counts as 1.
            invalid_token_expert_id: id of empty rows; see the class.
            expert_id_payload_index: which payload has the ids, if invalid_token_expert_id is given.
                It must be token_selected_experts itself.
            eplb_local_stats: `[eplb_stats_num_experts]` int32; then eplb_gathered_stats has those
                of all ranks. All ranks pass it, or none does. A capture comes after a first call
                with it.
            active_rank_mask: what flashinfer.comm.moe_a2a_active_rank_mask returns, equal on all
                ranks that it names; None: all ranks take part. The others must not call; their
                experts are no experts, and they cannot take part in later rounds on the workspace.
                Payloads of these sizes, and statistics if any, must have travelled among all ranks
                before.

        Returns:
            For each payload `[ep_size, runtime_max_tokens_per_rank, *]`, valid until combine.

        Raises:
            InputError, ConfigError, UnsupportedError, ExchangeStateError: nothing was sent.
            ExchangeTimeoutError, DisagreementError, PeerError: as MoeAllToAll.dispatch.
        """
        self._check_stats(eplb_local_stats)
        self._check_mask(active_rank_mask)
        if not input_payloads:
            raise InputError("input_payloads is empty; pass one tensor [num_tokens, ...] or more")
        bound = check_bound(
            "runtime_max_tokens_per_rank", runtime_max_tokens_per_rank or 1, self.max_num_tokens
        )
        _check_ids(invalid_token_expert_id, expert_id_payload_index, len(input_payloads))
        if token_selected_experts.dtype != torch.int32:
            raise InputError(
                f"token_selected_experts has dtype {token_selected_experts.dtype}; pass "
                ".to(torch.int32), the only type that FlashInfer takes"
            )
        received_ids = self._received_ids(invalid_token_expert_id)
        plan = _Plan.of(
            token_selected_experts,
            input_payloads,
            None if invalid_token_expert_id is None else expert_id_payload_index,
            may_have_weights=received_ids == "global",
        )
        if invalid_token_expert_id is not None and plan.ids is None:
            refuse(
                "invalid_token_expert_id for a payload that is not token_selected_experts",
                "token_selected_experts itself as that payload",
            )
        row_sizes = [row_bytes(payload) for payload in input_payloads]
        most_bytes = self._geometry.token_bytes
        refuse_rows_beyond(
            row_sizes,
            most_bytes - _WIDEST.itemsize,
            f"what workspace_size_per_rank={self.workspace_size_per_rank} leaves to a token beside "
            "the experts' output; compute it by moe_a2a_get_workspace_size_per_rank",
        )
        received = self._rows.dispatch(
            token_selected_experts,
            None if plan.weights is None else input_payloads[plan.weights],
            [input_payloads[index] for index in plan.rows],
            received_ids=received_ids,
            max_tokens=bound,
            combined_bytes=most_bytes - sum(row_sizes),
            active_rank_mask=active_rank_mask,
            expert_counts=eplb_local_stats,
            combine=_FP8 if self._sends_fp8 else "bf16",
        )
        self._gathered_stats = received.expert_counts
        self._bound = runtime_max_tokens_per_rank
        ids = received.topk_ids
        if received_ids == "global" and invalid_token_expert_id not in (None, -1):
            ids.masked_fill_((ids < 0).all(dim=1, keepdim=True), invalid_token_expert_id)
        found = dict(zip(plan.rows, received.payloads, strict=True))
        if plan.ids is not None:
            found[plan.ids] = ids
        if plan.weights is not None:
            found[plan.weights] = received.topk_weights
        return [
            found[index].view(self.ep_size, bound, *found[index].shape[1:])[
                :, :runtime_max_tokens_per_rank
            ]
            for index in range(len(input_payloads))
        ]

    @overrides
    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add up the partial rows of this rank's tokens. Collective; capturable.

        Args:
            payload: `[ep_size, runtime_max_tokens_per_rank, hidden_size]` bf16, fp16 or fp32.
            runtime_max_tokens_per_rank: that of dispatch.
            payload_in_workspace: whether payload is what get_combine_payload_tensor_in_workspace
                returned.
            output_dtype: None or the type of the result.
            output_scales: must be None.
            output_scalar_scale: must be 1.0.
            sf_layout: not used, as without output_scales in FlashInfer.
            output: `[num_tokens, hidden_size]`; None allocates it.
            use_low_precision: whether rows are cast to e4m3, without a scale, so that magnitudes
                above 448 become 448; the result is bf16. An infinity becomes NaN (FlashInfer: 448).
                Equal on all ranks and in all calls of this object. The first call only casts; it
                creates, or a later dispatch does, the exchange through which bf16 rows of a
                multiple of 16 elements travel in FP8 from then on. If the first call has other
                rows, they are cast and travel in bf16, with the same result. Later calls have rows
                of the same type, and widths that are multiples of 16 or not, as the first.
            active_rank_mask: that of dispatch, or None.

        Raises:
            InputError, UnsupportedError, ExchangeStateError: nothing was sent.
            ExchangeTimeoutError, DisagreementError, PeerError: as MoeAllToAll.combine.
        """
        result_dtype = torch.bfloat16 if use_low_precision else payload.dtype
        _refuse_quantised(result_dtype, output_dtype, output_scales, output_scalar_scale)
        self._check_mask(active_rank_mask)
        self._check_round("combine", runtime_max_tokens_per_rank)
        shape = (self.ep_size, runtime_max_tokens_per_rank)
        if payload.dim() != 3 or payload.shape[:2] != shape:
            raise InputError(
                f"payload has shape {list(payload.shape)}; pass [{shape[0]}, {shape[1]}, "
                "hidden_size], the rows of the last dispatch"
            )
        rows = payload.flatten(0, 1)
        if runtime_max_tokens_per_rank == 0:  # no rank has tokens, and the round has one empty slot
            rows = payload.new_empty((self.ep_size, payload.shape[2]))
        elif payload_in_workspace:
            self._check_in_workspace(payload)
        kind = self._rows.kind
        if use_low_precision and (kind.combine != _FP8 or rows.dtype != torch.bfloat16):
            # Casts that travel in bf16 have the same sums, and cast again they are themselves.
            rows = _cast(rows)
        elif kind.combine == _FP8 and not use_low_precision:
            raise InputError(
                "use_low_precision=False, but this object's combine before had True, and its "
                "dispatch is for FP8; combine with another MoeAlltoAll of the same sizes, which "
                "shares the workspace"
            )
        all_take_part = not self._rows.leaves_out
        total = self._rows.combine(rows, output, active_rank_mask)
        self._gathered_stats = None
        if use_low_precision and all_take_part and not is_capturing(payload.device):
            self._send_fp8(kind, payload)
        return total

    def _send_fp8(self, kind: Kind, payload: torch.Tensor) -> None:
        """Let later rounds of such rows travel in FP8, if they can. Collective the first time.

        The exchange is created now, because all ranks take part in this round, and the next one may
        be captured.
        """
        fits = payload.dtype == torch.bfloat16 and payload.shape[2] % _FP8_BLOCK == 0
        if fits and kind.combine != _FP8:
            self._rows.prepare(kind._replace(combine=_FP8), payload.device)
        self._sends_fp8 = fits

    @overrides
    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return memory for the experts' output, from which combine copies nothing. Local.

        Returns:
            `[ep_size, runtime_max_tokens_per_rank, hidden_size]` of `dtype`, valid until combine.

        Raises:
            ExchangeStateError: no dispatch is in flight.
            InputError: the bound is not that of dispatch, or there is no room for such rows.
        """
        self._check_round("get_combine_payload_tensor_in_workspace", runtime_max_tokens_per_rank)
        region = self._rows.combine_input(dtype, hidden_size)
        return region.view(self.ep_size, -1, hidden_size)[:, :runtime_max_tokens_per_rank]

    def _received_ids(self, invalid_id: int | None) -> str | int:
        """Return AllToAllConfig.received_ids for a call."""
        return "global" if invalid_id is None or invalid_id < self.num_experts else invalid_id

    def _check_stats(self, stats: torch.Tensor | None) -> None:
        if stats is not None and list(stats.shape) != [self.eplb_stats_num_experts]:
            raise InputError(
                f"eplb_local_stats has shape {list(stats.shape)}, but eplb_stats_num_experts="
                f"{self.eplb_stats_num_experts}; construct MoeAlltoAll with the number that each "
                "rank passes"
            )

    def _check_mask(self, mask: torch.Tensor | None) -> None:
        if mask is not None and not self.enable_rank_mask:
            raise InputError(
                "active_rank_mask is given, but enable_rank_mask=False; construct MoeAlltoAll with "
                "enable_rank_mask=True"
            )

    def _check_round(self, verb: str, runtime_max_tokens_per_rank: int) -> None:
        if not self._rows.is_dispatched:
            self._rows.check_usable()
            raise ExchangeStateError(f"{verb} called before a successful dispatch; call it first")
        if runtime_max_tokens_per_rank != self._bound:
            raise InputError(
                f"runtime_max_tokens_per_rank={runtime_max_tokens_per_rank}, but the dispatch had "
                f"{self._bound}; pass the same number"
            )

    def _check_in_workspace(self, payload: torch.Tensor) -> None:
        region = self._rows.combine_input(payload.dtype, payload.shape[2])
        if payload.data_ptr() != region.data_ptr():
            raise InputError(
                "payload_in_workspace=True, but payload lies elsewhere; pass the tensor that "
                "get_combine_payload_tensor_in_workspace returned, or payload_in_workspace=False"
            )


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Return the bytes of all payloads and of the experts' output. Local.

    It is FlashInfer's sum without its own control data; the workspace has ours beside these bytes.
    """
    _refuse_backend(backend)
    slots = ep_size * max_num_tokens
    parts = (total_dispatch_payload_size_per_token, combine_payload_size_per_token)
    return sum(-(-slots * part // _ALIGNMENT) * _ALIGNMENT for part in parts)


def _ep_group(mapping: Any, mnnvl_config: Any) -> Any:
    """Return the expert-parallel group of this rank, as `MoeAllToAll.create` takes it.

    Raises:
        ConfigError: the communicator has other ranks than the mapping's group, or there is none.
    """
    wanted = (mapping.moe_ep_size, mapping.moe_ep_rank)
    communicator = None if mnnvl_config is None else mnnvl_config.comm_backend
    group = group_of(communicator, None, "mnnvl_config with a comm_backend")
    if communicator is None:
        found = (group.size(), group.rank())
    else:
        # Split is collective, so all ranks of the communicator decide together.
        if any(group.all_gather_object((group.size, group.rank) != wanted)):
            # All ranks of the model, say: those of one group have the same colour.
            split = communicator.Split(min(mapping.moe_ep_group), mapping.moe_ep_rank)
            group = CommunicatorGroup(split)
        found = (group.size, group.rank)
    if found != wanted:
        raise ConfigError(
            f"the communicator has {found[0]} ranks and this is rank {found[1]}, but the mapping "
            f"has moe_ep_size={wanted[0]} and moe_ep_rank={wanted[1]}; pass a comm_backend of the "
            "expert-parallel group"
        )
    return group


def _check_ids(invalid_id: int | None, index: int | None, num_payloads: int) -> None:
    """Check which payload is to have the invalid id.

    Raises:
        InputError: an invalid id is given, and the ids are not among the payloads.
    """
    if index is not None and not 0 <= index < num_payloads:
        raise InputError(
            f"expert_id_payload_index={index} names none of {num_payloads} payloads; pass 0 to "
            f"{num_payloads - 1}"
        )
    if invalid_id is not None and index is None:
        raise InputError(
            "expert_id_payload_index=None, but invalid_token_expert_id is given; pass the index of "
            "token_selected_experts among the payloads"
        )


def _routing_bytes(top_k: int) -> int:
    """Return the bytes of a token's ids and weights."""
    return top_k * (torch.int32.itemsize + torch.float32.itemsize)


def _is_same(payload: torch.Tensor, experts: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory in the same form.

    Empty ones are told apart too, by their storage: a rank without tokens answers as the others.
    """
    return payload.dtype == experts.dtype and payload.is_set_to(experts)


def _is_like(payload: torch.Tensor, experts: torch.Tensor) -> bool:
    """Return whether a payload can travel as the exchange's weights."""
    return payload.dtype == torch.float32 and payload.shape == experts.shape


def _refuse_backend(backend: str) -> None:
    if backend != "trtllm":
        refuse(f"backend={backend!r}", 'backend="trtllm"; the kernels are those of moe_nvlink')


def _cast(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as bf16, rounded to e4m3 as combine in FP8 rounds them. Local; capturable."""
    values = rows.float()
    # e4m3 ends at 448; without the clamp older versions of torch make NaN of what lies beyond.
    numbers = torch.where(values.isfinite(), values.clamp(-448.0, 448.0), torch.nan)
    return numbers.to(torch.float8_e4m3fn).to(torch.bfloat16)


def _refuse_quantised(
    result_dtype: torch.dtype,
    dtype: torch.dtype | None,
    scales: torch.Tensor | None,
    scalar_scale: float,
) -> None:
    if scales is not None or scalar_scale != 1.0:
        refuse("output_scales", "quantisation of combine's output after combine")
    if dtype not in (None, result_dtype):
        refuse(f"output_dtype={dtype}", f"output_dtype={result_dtype}, and convert afterwards")


def refuse(what: str, instead: str) -> NoReturn:
    """Raise what says that this package has no such thing, and what to use."""
    raise UnsupportedError(f"moe_nvlink has no {what}; use {instead}")
