"""Dispatch and combine as vLLM's prepare and finalize: what CPU and CUDA ranks have in common.

The experts apply the router weights and sum over their local experts (vLLM calls that
TopKWeightAndReduceNoOP). Our combine sums the partial rows of the ranks without weights.

`common.formats` decides in which format rows travel. The experts get different rows on different
devices: `cpu_prepare_finalize` collects the filled rows, and `cuda_prepare_finalize` leaves rows
where the peers put them.

`prepare_async` and `finalize_async` start the verbs beside vLLM's stream or thread, and return a
hook and a receiver. Two things can run meanwhile: with dual batch overlap the other micro-batch,
whose thread calls the hook; between finalize_async and its receiver the shared experts. Each
micro-batch has a channel of the exchange.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
)

from moe_nvlink_plugin import Dispatched, DispatchMetadata, InFlight, MoeAllToAll
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.audit import Audit
from moe_nvlink_plugin.integration.common.formats import DispatchFormat
from moe_nvlink_plugin.integration.common.pool import bound_of_step

from .experts_input import VllmExpertsInput
from .features import BASE, NUMBER_BYTES

T = TypeVar("T")

#: Activations as they are, for experts that take floats.
UNQUANTISED = DispatchFormat()


class Epilogue(NamedTuple):
    """What combine does with the sum of a layer.

    After the routed experts vLLM multiplies their sum by the routed scaling factor and adds the
    output of the shared experts: two more launches, and two more roundings. Combine does both while
    it sums.

    Attributes:
        scale: factor of the sum.
        take_added: returns rows `[num_tokens, hidden_size]` that combine adds, or None. Finalize
            calls it directly before combine, so the rows may still be computed on another stream
            until then.
    """

    scale: float = 1.0
    take_added: Callable[[], torch.Tensor | None] = lambda: None


#: Of layers that vLLM ends itself.
SUM_ONLY = Epilogue()
#: Between the runner and finalize, vLLM's modular kernel has no argument for an epilogue, so the
#: runner says it here. Each thread has its own value, which is gone when the call returns or
#: raises.
_epilogue = contextvars.ContextVar("epilogue of the layer", default=SUM_ONLY)


def current_epilogue() -> Epilogue:
    """Return how the layer ends that this thread runs. Local."""
    return _epilogue.get()


@contextlib.contextmanager
def with_epilogue(epilogue: Epilogue) -> Iterator[None]:
    """Surround one call of a layer that ends so. Local."""
    token = _epilogue.set(epilogue)
    try:
        yield
    finally:
        _epilogue.reset(token)


class Arrived(NamedTuple):
    """Rows that arrived, in the types that travel, with ids and weights for the experts.

    Attributes:
        rows: `[num_rows, elements]`.
        scales: `[num_rows, scales per row]` or None.
        ids: `[num_rows, top_k]` int32.
        weights: `[num_rows, top_k]` float32; 0 for ids of other ranks' experts.
        adapters: `[num_rows]` int32: numbers of the rows' adapters (``lora``); None if they do not
            travel.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    adapters: torch.Tensor | None = None


class Once(Generic[T]):
    """The end of a verb that runs beside its caller; the hook and the receiver both ask for it.

    The other micro-batch's thread may call the hook, but only one of these threads runs at a time.
    """

    def __init__(self, in_flight: InFlight[T]) -> None:
        self._in_flight: InFlight[T] | None = in_flight

    def __call__(self) -> T:
        """Wait if nobody has waited yet; return what the verb returns."""
        if self._in_flight is not None:
            self._result = self._in_flight.wait()
            self._in_flight = None
        return self._result


class MoeNvlinkPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular, abc.ABC):
    """Prepare and finalize of one MoE layer. Layers of one geometry share an exchange.

    Args:
        exchange: the layer's exchange.
        expert_map: vLLM's map of global to local expert ids, or None.
        dispatch_format: how rows travel.

    Raises:
        UnsupportedError: vLLM has not placed experts in contiguous ranges.
    """

    #: Whether the shared experts run beside combine, also without dual batch overlap.
    overlaps_shared_experts = False
    #: What compares rows while serving; None without Options.audit_every.
    audit: Audit | None = None

    def __init__(
        self,
        exchange: MoeAllToAll,
        expert_map: torch.Tensor | None,
        dispatch_format: DispatchFormat = UNQUANTISED,
    ) -> None:
        super().__init__()
        config = exchange.config
        self._exchange = exchange
        self._format = dispatch_format
        self._first, self._end = local_expert_range(
            config.num_experts, config.ep_size, config.ep_rank
        )
        _check_placement(expert_map, self._first, self._end)
        #: Channel -> dispatch that has no combine yet.
        self._received: dict[int, Dispatched] = {}
        #: vLLM's MoELoRAContext of the layer, if its experts have adapters.
        self._lora_context: Any = None

    @property
    def dispatch_format(self) -> DispatchFormat:
        """How rows travel."""
        return self._format

    # What vLLM asks a prepare/finalize.

    @property
    @overrides
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Standard: rows of tokens, not rows per expert."""
        return mk.FusedMoEActivationFormat.Standard

    @overrides
    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return int32, which both the exchange and the experts read."""
        return torch.int32

    @overrides
    def max_num_tokens_per_rank(self) -> int | None:
        """Return None: the value matters for the batched activation format only."""
        return None

    @overrides
    def num_dispatchers(self) -> int:
        """Return the number of ranks that put rows into the receive buffer."""
        return int(self._exchange.config.ep_size)

    @overrides
    def output_is_reduced(self) -> bool:
        """Return True: after finalize every token's row is complete on its own rank."""
        return True

    @overrides
    def supports_async(self) -> bool:
        """Return whether vLLM shall call prepare_async and finalize_async. vLLM asks every time.

        Without dual batch overlap vLLM uses them for its shared experts only. Then it no longer
        runs small batches of them on its second stream, beside dispatch and the routed experts, and
        combine can no longer add their output. So that is an option.
        """
        return self.overlaps_shared_experts or dbo_enabled()

    @overrides
    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Raise UnsupportedError for experts whose output combine does not reduce. Local."""
        config = self._exchange.config
        made = fused_experts.workspace_dtype(config.dtype)
        if made != config.dtype:
            raise UnsupportedError(
                f"{type(fused_experts).__name__} reduces its rows into {made}; combine (format "
                f"{config.combine}) takes partial rows of {config.dtype} only. Choose other "
                "experts with --moe-backend, or another --dtype."
            )

    def set_lora_context(self, context: Any) -> None:
        """Let the numbers of the tokens' adapters travel from now on. Local.

        vLLM's LoRA layer calls it. The experts read the same context.

        Args:
            context: vLLM's MoELoRAContext of the layer.

        Raises:
            UnsupportedError: the layer was set up without adapters.
        """
        bytes_here = self._exchange.config.extra_payload_bytes
        if bytes_here[:1] != (NUMBER_BYTES,) or not hasattr(
            context.punica_wrapper, "adapter_numbers"
        ):
            raise UnsupportedError(
                "vLLM gives adapters (LoRA) to a MoE layer that was set up without them "
                f"({type(context.punica_wrapper).__name__}, extra payloads of {bytes_here} bytes). "
                "Please report this with the command that started vLLM; --lora-target-modules can "
                "name other layers."
            )
        self._lora_context = context

    # The two verbs.

    @overrides
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType:
        """Dispatch, and return the rows that arrived. Collective; capturable on CUDA ranks.

        Args:
            a1: `[num_tokens, columns]` activations. If the experts read wider rows, zeros are
                added: some of vLLM's methods leave that to the quantiser.
            topk_weights: `[num_tokens, top_k]`.
            topk_ids: `[num_tokens, top_k]`, global ids.
            num_experts: unused; the exchange knows the number.
            expert_map: unused; the constructor got it.
            apply_router_weight_on_input: whether to multiply a1 by the weights.
            quant_config: vLLM's FusedMoEQuantConfig of the experts.
            defer_input_quant: whether the experts quantise their input themselves.

        Returns:
            Rows and scales as the experts take them (`VllmExpertsInput`), None,
            `[num_rows, top_k]` int32 ids and `[num_rows, top_k]` float32 weights. The subclass
            decides which rows and ids the experts get.

        Raises:
            UnsupportedError: the experts take another format than the layer was set up for.
            DisagreementError: a token has an adapter that this rank has not loaded.
            ExchangeTimeoutError: a rank did not arrive.
        """
        experts = self._experts(quant_config, defer_input_quant)
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        dispatch = self._exchange.dispatch
        return self._arrived(self._send(dispatch, a1, topk_weights, topk_ids, experts), experts)

    @overrides
    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[Callable[[], object], Callable[[], Any]] | Callable[[], Any]:
        """Start dispatch. Collective; capturable on CUDA ranks; arguments and errors as prepare.

        Returns:
            A hook, which waits for dispatch, and a receiver, which waits if nobody has called the
            hook, and returns what prepare returns. Without dual batch overlap nothing could run
            meanwhile: dispatch has run, and there is no hook.
        """
        experts = self._experts(quant_config, defer_input_quant)
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        if not dbo_enabled():
            received = self._send(self._exchange.dispatch, a1, topk_weights, topk_ids, experts)
            return lambda: self._arrived(received, experts)
        dispatch = self._exchange.dispatch_async
        sent = Once(self._send(dispatch, a1, topk_weights, topk_ids, experts))
        return sent, lambda: self._arrived(sent(), experts)

    def _experts(self, quant_config: Any, defer_input_quant: bool) -> VllmExpertsInput:
        """Return what the experts take. Local; raises UnsupportedError if that was not agreed."""
        experts = VllmExpertsInput(quant_config, takes_floats=defer_input_quant)
        if experts.quant_dtype != self._format.quant_dtype:
            raise UnsupportedError(
                f"the experts ask for rows of {experts.quant_dtype}, the exchange was set up for "
                f"{self._format.quant_dtype} when their weights were loaded. Please report this "
                "with the command that started vLLM."
            )
        return experts

    def _send(
        self,
        dispatch: Callable[..., T],
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: VllmExpertsInput,
    ) -> T:
        """Call dispatch or dispatch_async. Collective; capturable on CUDA ranks."""
        missing = self._exchange.config.hidden_size - a1.shape[1]
        if missing > 0:
            a1 = torch.nn.functional.pad(a1, (0, missing))
        sent = self._format.send(a1.contiguous(), experts)
        numbers, payloads = self._adapter_numbers(), tuple[torch.Tensor, ...]()
        if numbers is not None:
            payloads = (numbers.of_tokens(a1.shape[0]),)
        elif self._exchange.config.extra_payload_bytes[:1] == (NUMBER_BYTES,):
            # vLLM gave adapters to other layers only.
            payloads = (a1.new_full((a1.shape[0],), BASE, dtype=torch.int32),)
        ids, weights = topk_ids.contiguous(), topk_weights.contiguous().to(torch.float32)
        is_padding, channel = self._padding(topk_ids.shape[0]), dbo_current_ubatch_id()
        if self.audit is not None:
            payloads += (self.audit.words(sent, ids, weights, is_padding, channel),)
        return dispatch(
            sent.rows,
            ids,
            weights,
            payloads,
            scales=sent.scales,
            global_scale=sent.global_scale,
            is_padding=is_padding,
            max_tokens=bound_of_step(
                _most_tokens_of_a_rank(), self._exchange.config.max_tokens_per_rank
            ),
            channel=channel,
        )

    def _adapter_numbers(self) -> Any:
        """Return the AdapterNumbers of this worker; None if the experts have no adapters."""
        context = self._lora_context
        return None if context is None else context.punica_wrapper.adapter_numbers

    def _arrived(self, received: Dispatched, experts: VllmExpertsInput) -> mk.PrepareResultType:
        """Return what prepare returns. Local."""
        if self.audit is not None:
            received = self.audit.compared(received)
        self._received[received.metadata.channel] = received
        arrived = self._hand_out(received)
        numbers = self._adapter_numbers()
        if numbers is not None and arrived.adapters is not None:
            slots = numbers.slots_of(arrived.adapters)
            self._lora_context.local_token_lora_mapping = slots
        rows, scales = self._format.receive(arrived.rows, arrived.scales, arrived.weights, experts)
        return rows, scales, None, arrived.ids, arrived.weights

    @overrides
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Take the experts' rows and combine into output. Collective; capturable on CUDA ranks.

        Combine ends the layer as the epilogue of this call says.

        Args:
            output: `[num_tokens, columns]`. It may share memory with fused_expert_output, whose
                rows are in the workspace before combine writes output.
            fused_expert_output: the experts' rows, of as many columns as output.
            topk_weights: weights that prepare returned.
            topk_ids: ids that prepare returned.
            apply_router_weight_on_input: whether prepare applied the weights.
            weight_and_reduce_impl: what the experts leave to finalize.

        Raises:
            ExchangeStateError: there was no prepare.
            ExchangeTimeoutError: a rank did not arrive.
        """
        done = ExpertsOutput(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        region, metadata = self._filled(done)
        epilogue = current_epilogue()
        added = epilogue.take_added()
        self._exchange.combine(
            region,
            metadata,
            output=output,
            hidden_size=self._width(region.shape[-1]),
            add=None if added is None else added.contiguous(),
            scale=epilogue.scale,
        )

    @overrides
    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[Callable[[], object], Callable[[], None]]:
        """Take the experts' rows and start combine; arguments and errors as finalize.

        Collective; capturable on CUDA ranks. If combine ends the layer, it multiplies by the
        scaling factor; the receiver adds the shared experts' output, which is not there before.

        Returns:
            A hook, which waits for combine, and a receiver, which waits if nobody has called the
            hook. After the receiver output is complete.
        """
        # vLLM's kernel calls the other micro-batch's hook before prepare_async only.
        dbo_maybe_run_recv_hook()
        done = ExpertsOutput(
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        region, metadata = self._filled(done)
        epilogue = current_epilogue()
        width = self._width(region.shape[-1])
        combine = self._exchange.combine_async
        combined = Once(
            combine(region, metadata, output=output, hidden_size=width, scale=epilogue.scale)
        )

        def receive() -> None:
            combined()
            added = epilogue.take_added()
            if added is not None:
                output.add_(added)

        return combined, receive

    def _filled(self, done: ExpertsOutput) -> tuple[torch.Tensor, DispatchMetadata]:
        """Return the combine region with the experts' rows, and what combine needs. Local.

        Raises:
            ExchangeStateError: there was no prepare.
        """
        received = self._received.pop(dbo_current_ubatch_id(), None)
        if received is None:
            raise ExchangeStateError("finalize without a prepare: call prepare first, once each.")
        region = self._exchange.combine_input(
            done.rows.dtype,
            hidden_size=self._width(done.rows.shape[-1]),
            metadata=received.metadata,
        )
        if done.rows is not region:
            self._fill(region, received, done)
        return region, received.metadata

    def _width(self, columns: int) -> int | None:
        """Return hidden_size of combine for the experts' rows; None: that of dispatch. Local."""
        return None if columns == self._exchange.config.hidden_size else columns

    # Where the devices differ.

    def _padding(self, num_tokens: int) -> torch.Tensor | None:
        """Return `[num_tokens]` bool: tokens that dispatch shall not send; None: all travel.

        Local.
        """
        return None

    @abc.abstractmethod
    def _hand_out(self, received: Dispatched) -> Arrived:
        """Return the rows, ids and weights that this device's experts get. Local."""

    @abc.abstractmethod
    def _fill(self, region: torch.Tensor, received: Dispatched, done: ExpertsOutput) -> None:
        """Put the experts' rows, weighted and reduced, into the combine region. Local."""


class ExpertsOutput(NamedTuple):
    """Arguments of finalize about the experts' rows.

    Attributes:
        rows: rows as the experts left them.
        topk_weights: weights that prepare returned.
        topk_ids: ids that prepare returned.
        weights_on_input: whether prepare applied the router weights.
        impl: what the experts leave to finalize.
    """

    rows: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    weights_on_input: bool
    impl: mk.TopKWeightAndReduce


def _most_tokens_of_a_rank() -> int | None:
    """Return the most tokens of any rank in this step, equal on all ranks; None if unknown. Local.

    The data-parallel ranks all-reduce their sizes before each forward, drafts and dummy batches
    too (coordinate_batch_across_dp). vLLM asserts that the result has this rank's own size, and
    from there each rank computes with equal numbers. With CUDA graphs all sizes are that of the
    graph, so a graph keeps the bound that it was captured with. With sequence parallelism,
    local_sizes are those of the slices.
    """
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().dp_metadata
    if metadata is None or metadata.local_sizes is None:
        return None
    return int(max(metadata.local_sizes))


def _weighted(a1: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Multiply activations by router weights, for models with one expert per token."""
    if topk_weights.shape[1] != 1:
        raise UnsupportedError(
            f"router weights on the input need top_k 1, this layer has {topk_weights.shape[1]}."
        )
    return a1 * topk_weights.to(a1.dtype)


def _check_placement(expert_map: torch.Tensor | None, first: int, end: int) -> None:
    """Check that vLLM has placed experts in contiguous ranges, as the exchange does."""
    if expert_map is None:
        return
    placed = torch.nonzero(expert_map >= 0).flatten().tolist()
    if placed != list(range(first, end)):
        raise UnsupportedError(
            f"vLLM placed experts {placed} on this rank, the exchange expects {first}..{end - 1}. "
            "Remove --expert-placement-strategy."
        )
