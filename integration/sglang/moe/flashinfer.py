"""FlashInfer's form on CUDA ranks: every slot of the receive buffer, with global ids.

The rows are those of SGLang's ``FlashinferDispatcher``: rank-major, with the ids that the tokens
have on their own rank. A choice of no expert and every choice of an empty slot get the padding id
of the runner. As in `standard`, nothing waits for the device.
"""

from __future__ import annotations

from sglang.srt.layers.moe.token_dispatcher import FlashinferDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.base import CombineInputFormat
from sglang.srt.layers.moe.topk import StandardTopKOutput

from .base import MoeNvlinkDispatcher, Round
from .runners import AFTER_LAST


class FlashinferFormDispatcher(MoeNvlinkDispatcher):
    """For the runners of FlashInfer, and for deep_gemm in BF16."""

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
