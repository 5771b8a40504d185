"""MoeAllToAll: the two verbs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import plugins
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError, InputError, MoeNvlinkError
from moe_nvlink_plugin.groups import Group, all_or_none, as_group, refuse_differences
from moe_nvlink_plugin.launch.base import Executor
from moe_nvlink_plugin.launch.executors import executor_for, with_index
from moe_nvlink_plugin.memory import layout
from moe_nvlink_plugin.memory.workspace import ExchangeStats, Workspace
from moe_nvlink_plugin.recipes import Recipe

from . import layer as exchange
from . import ops

logger = logging.getLogger(__name__)

#: Config fields that may differ from rank to rank.
_OWN_FIELDS = ("ep_rank", "num_threads", "max_sms")


class DispatchMetadata(NamedTuple):
    """What combine needs to know of a dispatch. Opaque to the caller; valid for one combine.

    Attributes:
        send_slots: `[num_tokens, top_k] int32`, where each token's rows went.
        channel: the channel they went through.
        handle: the layer that sent them.
        round: which of the layer's dispatches through that channel; -1 from compiled code, where
            the graph itself ties a combine to its dispatch.
    """

    send_slots: torch.Tensor
    channel: int
    handle: int
    round: int


class Dispatched(NamedTuple):
    """What this rank received: views into the workspace, valid until the matching combine.

    Rank-major: rows `s * max_tokens_per_rank ... + recv_counts[s]` came from rank s, in its own
    order; the rows behind them are empty, hold expert id -1 in all of `topk_ids` and anything
    elsewhere.

    In a function under torch.compile, let only the experts' output that combine takes depend on
    these tensors. A compiler orders the other readers as it likes, also behind the combine, where
    the peers' next dispatch may have overwritten the rows; nothing in torch can forbid it that.

    Attributes:
        hidden_states: `[ep_size * max_tokens_per_rank, elements of the recipe's row]`.
        scales: `[ep_size * max_tokens_per_rank, scales per row]`, or None.
        topk_ids: `[ep_size * max_tokens_per_rank, top_k] int32`, global ids; -1 is no expert.
        topk_weights: `[ep_size * max_tokens_per_rank, top_k] float32`.
        extra_payloads: each `[ep_size * max_tokens_per_rank, ...]` in the dtype this rank sent.
        recv_counts: `[ep_size] int32`, rows received from each rank.
        metadata: for combine.
    """

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    extra_payloads: tuple[torch.Tensor, ...]
    recv_counts: torch.Tensor
    metadata: DispatchMetadata


class MoeAllToAll:
    """Exchange of one MoE layer among the ranks of an expert-parallel group.

    Who weights, who adds: the experts multiply by the router weights and add up their LOCAL experts
    for each received row; combine adds those partial rows as they are, in fp32, as a fixed pairwise
    tree over k. Nothing is weighted or reduced twice.

    Attributes:
        config: as given to create, defaults filled in.
        recipe: what travels; a QuantisingRecipe can `dequantise` what was received.
    """

    def __init__(self, layer: exchange.LayerExchange) -> None:
        self._layer = layer
        self._handle = layer.handle
        self.config = layer.config
        self.recipe = layer.recipe

    @staticmethod
    def check(config: AllToAllConfig) -> Recipe:
        """The recipe of a configuration whose rows can travel. Local; allocates nothing.

        For those who refuse a configuration before any rank has started; create checks it too.

        Raises:
            ConfigError: an unknown recipe, or a hidden_size that it or combine's format cannot do.
        """
        recipe = plugins.find_recipe(config)
        layout.payload_rows(config, recipe)
        layout.quantised_combine_rows(config)
        return recipe

    @classmethod
    def create(
        cls,
        config: AllToAllConfig,
        group: Any,
        device: torch.device | str = "cpu",
        *,
        share_with: MoeAllToAll | None = None,
    ) -> MoeAllToAll:
        """Makes the exchange of one layer. Collective; not capturable.

        Args:
            config: equal on every rank, `ep_rank`, `num_threads` and `max_sms` apart.
            group: a torch ProcessGroup (with a CPU backend), or an object with rank, size and
                all_gather_object.
            device: where the tensors live.
            share_with: another layer of the same group, whose workspace serves this one too. It
                grows where it must, to the union of both needs.

        Raises:
            ConfigError: the configuration does not fit the group, or names unknown parts.
            DisagreementError: on every rank, when the ranks' configurations differ.
            UnsupportedError: no transport serves the device.
            TransportError, CompileError: this rank could not get its memory or its kernels.
            PeerError: another rank could not, or never came; nothing is left behind.
        """
        ranks = as_group(group, float(config.timeout_s or 0))
        recipe, workspace = all_or_none(
            ranks,
            "preparing the exchange",
            lambda: _prepare(config, ranks, torch.device(device), share_with),
        )
        _check_agreement(config, ranks, workspace, shares=share_with is not None)
        workspace.ensure(
            lambda alignment: layout.WorkspaceLayout.for_geometry(config, recipe, alignment)
        )
        try:
            layer = all_or_none(
                ranks,
                "loading the kernels",
                lambda: exchange.LayerExchange(config, recipe, workspace),
            )
        except Exception:
            workspace.release()
            raise
        return cls(layer)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        extra_payloads: Sequence[torch.Tensor] = (),
        *,
        scales: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        channel: int = 0,
    ) -> Dispatched:
        """Sends each token once to every rank that owns one of its experts. Collective.

        Args:
            hidden_states: either activations, `[num_tokens, hidden_size]` config.dtype, which a
                quantising recipe quantises on the way, or rows quantised by the caller,
                `[num_tokens, elements]` in the recipe's dtype. num_tokens may be 0 and differ from
                rank to rank, up to max_tokens_per_rank.
            topk_ids: `[num_tokens, top_k]` int32 or int64, global expert ids; an id outside
                0..num_experts-1 (as -1, for padding) goes nowhere.
            topk_weights: `[num_tokens, top_k]` float32; travels, is not applied here.
            extra_payloads: each `[num_tokens, ...]`, any dtype; rows of extra_payload_bytes bytes.
            scales: `[num_tokens, scales per row]` of rows quantised by the caller, for recipes that
                have them.
            global_scale: one float32 on the device, for activations and recipes that need it
                (fp8_tensor, nvfp4); from 2^-126 to 2^126. Checked on CPU; on a GPU only when it is
                first seen (at its address: not a new one where an old one was) and no CUDA graph is
                being captured, because that waits for the device.
            channel: which of the num_channels independent exchanges.

        Raises:
            InputError: a tensor is not as above; nothing was sent.
            ExchangeStateError: closed, or the channel's last dispatch has not been combined.
            ExchangeTimeoutError: a rank did not come within timeout_s.
            DisagreementError: a rank dispatched through a layer of another geometry.
            PeerError: a rank went on after a failure of its own.
        """
        ids, weights, hidden, counts, slots = ops.dispatch(
            self._layer.workspace.pending,
            hidden_states,
            scales,
            topk_ids,
            topk_weights,
            list(extra_payloads),
            global_scale,
            self._handle,
            channel,
        )
        has_scales = "recv_scales" in self._layer.rows
        more = [
            ops.received(counts, like, index, self._handle, channel)
            for index, like in enumerate(extra_payloads)
        ]
        return Dispatched(
            hidden_states=hidden,
            scales=ops.received_scales(counts, self._handle, channel) if has_scales else None,
            topk_ids=ids,
            topk_weights=weights,
            extra_payloads=tuple(more),
            recv_counts=counts,
            metadata=DispatchMetadata(slots, channel, self._handle, self._round(channel)),
        )

    def combine_input(self, dtype: torch.dtype | None = None, *, channel: int = 0) -> torch.Tensor:
        """Where the experts may write their output: combine then copies nothing. Local.

        Returns:
            `[ep_size * max_tokens_per_rank, hidden_size]`, same slots as the received rows. Write
            to it between dispatch and combine only; rows of empty slots are never read.

        Raises:
            InputError: `dtype` is not config.dtype, the only type combine reduces.
        """
        if dtype not in (None, self.config.dtype):
            raise InputError(
                f"combine_input of {dtype} was asked for, combine reduces {self.config.dtype}; "
                "create the exchange with that dtype or convert the experts' output"
            )
        return exchange.find(self._handle).channel(channel).combine_region

    def combine(
        self,
        expert_output: torch.Tensor,
        metadata: DispatchMetadata,
        *,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fetches the partial rows of this rank's tokens and adds them up. Collective.

        Args:
            expert_output: `[ep_size * max_tokens_per_rank, hidden_size]` config.dtype, weighted
                sums over this rank's experts in the slots of the received rows; best the tensor of
                combine_input(), otherwise it is copied there.
            metadata: of the dispatch.
            output: `[num_tokens, hidden_size]` to write to; None allocates it.

        Returns:
            `[num_tokens, hidden_size]` config.dtype; zero for a token without a valid expert. The
            same bits for the same rows and routing, whatever the timing.

        Raises:
            InputError, ExchangeStateError, ExchangeTimeoutError, PeerError: as dispatch.
        """
        if metadata.handle != self._handle:
            raise InputError(
                f"metadata belongs to exchange {metadata.handle}, this is {self._handle}; pass "
                "what this layer's dispatch returned"
            )
        if metadata.round >= 0 and not torch.compiler.is_compiling():
            self._layer.check_round(metadata.round, metadata.channel)
        pending = self._layer.workspace.pending
        if output is None:
            result: torch.Tensor = ops.combine(
                pending, expert_output, metadata.send_slots, self._handle, metadata.channel
            )
            return result
        ops.combine_out(
            pending, expert_output, metadata.send_slots, output, self._handle, metadata.channel
        )
        return output

    def _round(self, channel: int) -> int:
        # A number that grows would have compiled code made anew at every call.
        return -1 if torch.compiler.is_compiling() else self._layer.rounds[channel]

    def synchronize(self) -> None:
        """Waits for this thread's stream, reports what went wrong in verbs. Local; not capturable.

        On CPU ranks a verb has run when it returns. On GPUs it runs later, and a failure is raised
        by the next verb, or here.

        Raises:
            ExchangeTimeoutError, DisagreementError, PeerError: as dispatch.
        """
        self._layer.synchronize()

    def hold_startup(self) -> None:
        """Lets ranks wait first_timeout_s for one another until `end_startup`. Local.

        Of all layers on the workspace. For programs whose ranks go on to compile or tune after a
        first round. Without it start-up lasts until the first complete round. A capture of a CUDA
        graph ends it too.
        """
        self._layer.workspace.startup.hold()

    def end_startup(self) -> None:
        """From the next launch on this rank waits timeout_s. Local; idempotent."""
        self._layer.workspace.startup.end()

    def failure(self) -> MoeNvlinkError | None:
        """What went wrong in a verb so far, or None. Local; waits for nothing; for any thread.

        For programs that only replay CUDA graphs: no verb of theirs is there to raise it. After a
        failure the verbs of this rank exchange nothing, and combine writes NaN.
        """
        return self._layer.failure()

    def stats(self) -> ExchangeStats:
        """This rank's totals over all layers that share the workspace. Local; not capturable.

        Waits for this thread's stream: verbs launched on others may be missing.
        """
        return self._layer.workspace.stats()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of this rank's workspace, shared by all layers on it."""
        return self._layer.workspace.layout.total_bytes

    def close(self) -> None:
        """Ends this layer's exchange; the last layer of a workspace gives it up. Local.

        On a GPU it waits for the device, so no thread may be capturing a CUDA graph on it. Tensors
        that dispatch handed out stay readable: memory they hold on to is given back by the next
        close or create in the process. Memory that was captured into a CUDA graph stays mapped
        until the process ends, with a warning: a replay would still write to it.
        """
        self._layer.close()

    def __enter__(self) -> MoeAllToAll:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _prepare(
    config: AllToAllConfig, group: Group, device: torch.device, share_with: MoeAllToAll | None
) -> tuple[Recipe, Workspace[Executor]]:
    """All that can fail on this rank alone."""
    if (group.size, group.rank) != (config.ep_size, config.ep_rank):
        raise ConfigError(
            f"the group has {group.size} ranks and this is rank {group.rank}, but ep_size="
            f"{config.ep_size} and ep_rank={config.ep_rank}; pass the expert-parallel group"
        )
    device = with_index(device)
    recipe = plugins.find_recipe(config)
    if share_with is not None:
        workspace = exchange.find(share_with._handle).workspace
        theirs = (workspace.group.size, workspace.group.rank, workspace.device)
        if theirs != (group.size, group.rank, device):
            raise ConfigError(
                f"share_with belongs to (group size, rank, device) {theirs}, this layer to "
                f"{(group.size, group.rank, device)}; layers share a workspace within one "
                "expert-parallel group only"
            )
        return recipe, workspace
    transport = plugins.find_transport(config.transport, device)
    executor = executor_for(transport.executor, device)
    return recipe, Workspace(group, transport, executor, device)


def _check_agreement(
    config: AllToAllConfig, group: Group, workspace: Workspace[Executor], *, shares: bool
) -> None:
    """Also that all ranks mean the same workspace: else some would grow theirs, and wait."""
    values = {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OWN_FIELDS
    }
    values["share_with"] = f"a layer of workspace {workspace.name}" if shares else "None"
    everyones = group.all_gather_object((values, workspace.name))
    refuse_differences([theirs for theirs, _name in everyones])
    if not shares:
        workspace.name = everyones[0][1]
