"""SGLang's own FlashinferDispatcher on our drop-in. SGLang's environment runs this as a program.

    python -m tests.flashinfer.sglang_ranks FOLDER

What SGLang asks of its server, and quantisers that need a GPU, are patched; the class is SGLang's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.flashinfer import wires
from tests.flashinfer.wires import HIDDEN, MAX_TOKENS, TOP_K, Wire
from tests.support import flashinfer_wheel
from tests.support.ranks import run_processes

SIZES = (2, 4)
BY_TYPE = {
    "BF16": wires.BF16,
    **{wire.format: wire for wire in wires.WIRES if wire.format in ("MXFP8", "NVFP4")},
}


@contextlib.contextmanager
def contexts(module: Any, wire: Wire, dispatch_type: str, counts: list[int]) -> Iterator[None]:
    """What a server of SGLang would answer, with data-parallel attention."""
    spec = types.SimpleNamespace(speculative_algorithm=None)
    flags = types.SimpleNamespace(moe=types.SimpleNamespace(speculative_context=False))
    answers = {
        "get_flashinfer_a2a_dispatch_type": module.FlashinferA2ADispatchType[dispatch_type],
        "StandardDispatcher": mock.Mock(),
        "flashinfer_a2a_max_dispatch_tokens_per_rank": MAX_TOKENS,
        "max_prefill_buffer_tokens": MAX_TOKENS,
        "get_spec": spec,
        "get_flags": flags,
        "get_is_extend_in_batch": False,
        "get_dp_global_num_tokens": counts,
        "is_dp_attention_enabled": True,
        "get_parallel": types.SimpleNamespace(attn_tp_size=1),
    }

    def quantise(x: torch.Tensor, *_args: object, **_options: object) -> Any:
        rows, scales = wire.make(x.float())
        assert scales is not None
        return rows, scales.view(torch.uint8)  # as FlashInfer's quantisers return them

    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(module, name, return_value=answer))
        patches.enter_context(mock.patch.object(module, "fp4_quantize", quantise))
        patches.enter_context(mock.patch("flashinfer.mxfp8_quantize", quantise))
        yield


class Runner:
    """As much of a runner backend as the dispatcher asks: of FlashInfer's CUTLASS experts."""

    def __init__(self, *, is_cutlass: bool) -> None:
        self.is_cutlass = is_cutlass

    def __getattr__(self, name: str) -> Any:
        return lambda: self.is_cutlass and name == "is_flashinfer_cutlass"


def body(rank: int, ep_size: int) -> int:
    """Serve layers of three formats; each is compared with the reference. Return how many."""
    from sglang.srt.layers.moe.token_dispatcher import flashinfer as module
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    num_experts, done = 2 * ep_size, 0
    interleave = mock.patch.object(module, "nvfp4_block_scale_interleave", lambda scales: scales)
    for dispatch_type, wire in BY_TYPE.items():
        for seed, is_cutlass in ((2, True), (3, False)):
            counts = [(seed + 2 * r) % MAX_TOKENS + 1 for r in range(ep_size)]
            counts[-1] *= seed % 2
            work = wires.works(ep_size, num_experts, counts, seed)[rank]
            config = types.SimpleNamespace(runner_backend=Runner(is_cutlass=is_cutlass))
            with contexts(module, wire, dispatch_type, counts), interleave:
                subject = module.FlashinferDispatcher(
                    dist.group.WORLD,
                    TOP_K,
                    num_experts,
                    2,
                    HIDDEN,
                    torch.bfloat16,
                    moe_runner_config=config,
                )
                subject.set_quant_config(
                    {"input_global_scale": torch.tensor([4.0]), "use_mxfp8": True}
                )
                x = work.hidden.bfloat16()
                got = subject.dispatch(x, StandardTopKOutput(work.weights, work.ids, None))
                assert got.hidden_states.shape[0] == ep_size * max(counts)
                assert (got.moe_output is not None) == is_cutlass
                routing = got.topk_output
                scales = got.hidden_states_scale
                if scales is not None and dispatch_type == "NVFP4":
                    scales = scales.view(torch.float8_e4m3fn)
                partial = wires.local_sums(
                    wire.read(got.hidden_states, scales),
                    routing.topk_ids,
                    routing.topk_weights,
                    2 * rank,
                    2 * rank + 2,
                ).bfloat16()
                if is_cutlass:
                    partial = got.moe_output.copy_(partial)
                total = subject.combine(module.FlashinferCombineInput(partial))
            same = wires.Work(x.float(), work.ids, work.weights)
            assert torch.equal(total, wires.expected(wire, same, ep_size, num_experts)), wire.name
            assert type(subject.moe_a2a).__module__.startswith("moe_nvlink_plugin")
            done += 1
    return done


def main(folder: Path) -> None:
    """Run every number of ranks, forked after one import of SGLang and FlashInfer."""
    os.environ["MOE_NVLINK_TIMEOUT_S"] = "120"
    with flashinfer_wheel.importable():
        from moe_nvlink_plugin.integration import flashinfer

        flashinfer.install()
        from sglang.srt.layers.moe.token_dispatcher import flashinfer as module

        assert module.MoeAlltoAll is flashinfer.MoeAlltoAll
        for size in SIZES:
            place = folder / str(size)
            place.mkdir()
            print(size, "ranks:", run_processes(size, body, place, method="fork"), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
