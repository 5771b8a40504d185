"""Two forms on CUDA ranks: every slot of the receive buffer, with local or with global ids.

The runner reads the receive buffer where the peers wrote it. The host learns nothing of the data,
and no call waits for the device: all of it may be captured.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe.token_dispatcher import FlashinferDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.base import CombineInputFormat
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from .base import Arrived, MoeNvlinkDispatcher, Round
from .routing import sorted_routes, triton_kernel_output
from .runners import AFTER_LAST


class StandardFormDispatcher(MoeNvlinkDispatcher):
    """Local ids: for triton, triton_kernel, and deep_gemm if rows are no BF16.

    A choice of another rank, and every choice of an empty slot, becomes -1 with weight 0, which
    SGLang's runners leave out.
    """

    combine_format = CombineInputFormat.STANDARD

    def _hand_out(self, current: Round) -> StandardDispatchOutput:
        arrived = self._arrived(current)
        topk_output = self._topk_output(arrived, current)
        if arrived.scales is None:
            return StandardDispatchOutput(arrived.rows, None, topk_output)
        # Triton reads quantised rows beside BF16 ones, of which it takes type and shape, and the
        # place for its output if it works in place: that is the combine region.
        region = self._combine_input(current)
        return StandardDispatchOutput(region, None, topk_output, (arrived.rows, arrived.scales))

    def _arrived(self, current: Round) -> Arrived:
        received = current.received
        local = self._is_local(received.topk_ids)
        # Fresh tensors: the receive buffer is the peers' to write, and combine's to rely on.
        ids = (received.topk_ids - self._first).masked_fill(~local, -1)
        weights = received.topk_weights.masked_fill(~local, 0.0)
        rows, scales = self._format.receive(
            received.hidden_states, received.scales, weights, self._experts
        )
        if self._runner.clears_empty and scales is None:
            # Old bytes of empty slots would enter the runner's maximum of all rows.
            rows = rows.masked_fill(~local.any(1, keepdim=True), 0.0)
        return Arrived(rows, scales, ids, weights)

    def _topk_output(self, arrived: Arrived, current: Round) -> Any:
        if self._runner.sorted_routes:
            routes = sorted_routes(arrived.ids, arrived.weights, self._end - self._first)
            return triton_kernel_output(routes, arrived.ids.shape[1])
        return StandardTopKOutput(arrived.weights, arrived.ids, current.routing.logits)


class FlashinferFormDispatcher(MoeNvlinkDispatcher):
    """Global ids, as in SGLang's ``FlashinferDispatcher``: for FlashInfer, and deep_gemm in BF16.

    Rows are rank-major, with the ids that the tokens have on their own rank. A choice of no expert
    and every choice of an empty slot get the padding id of the runner.
    """

    combine_format = CombineInputFormat.FLASHINFER

    def _hand_out(self, current: Round) -> FlashinferDispatchOutput:
        received, dtype = current.received, self._geometry.dtype
        nowhere = received.topk_ids < 0
        # Fresh tensors: the receive buffer is the peers' to write, and combine's to rely on.
        ids = received.topk_ids.masked_fill(nowhere, self._padding)
        weights = received.topk_weights.masked_fill(nowhere, 0.0)
        rows, scales = self._format.receive(
            received.hidden_states, received.scales, weights, self._experts
        )
        return FlashinferDispatchOutput(
            hidden_states=rows,
            hidden_states_scale=scales,
            topk_output=StandardTopKOutput(weights, ids, current.routing.logits),
            moe_output=self._combine_input(current) if self._runner.takes_region else None,
            output_dtype=dtype,
        )

    @property
    def _padding(self) -> int:
        return self._geometry.num_experts if self._runner.padding == AFTER_LAST else -1
