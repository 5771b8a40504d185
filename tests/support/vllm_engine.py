"""One rank of vLLM's engine on a GPU that it may share, as a program; tests/gpu starts it.

    python -m tests.support.vllm_engine task.json

vLLM's Python files and its Triton kernels are those of its release. In the place of its compiled
operators there is plain torch, as in vllm_triton.py, and torch's distributed groups are gloo's:
NCCL takes no two ranks on one GPU. Says each phase with the seconds since the program began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any, cast

from tests.support import vllm_files

BEGAN = time.monotonic()
#: Numbers of tokens; those of prompts are for pieces of a graph.
CAPTURED = [1, 2, 4, 8, 64, 128, 256]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank does.

    Attributes:
        checkpoint: folder of the model.
        prompts, lengths: of this rank's requests: token ids, and how many to answer.
        with_ours: whether the ranks exchange rows by our backend.
        graphs: value of vLLM's cudagraph_mode; "": none, and every step is eager.
        compiled: whether torch.compile makes the model's pieces.
        options: of our backend, as additional_config has them.
        fault: what is planted in our kernels, a key of lost_rows.FAULTS; "": nothing.
        limit_s: when the stacks of all threads are printed, and the program ends.
        answers: the file to write, a list of token ids for each request.
    """

    checkpoint: str
    prompts: list[list[int]]
    lengths: list[int]
    with_ours: bool
    graphs: str
    compiled: bool
    options: dict[str, Any]
    fault: str
    limit_s: float
    answers: str

    def engine(self) -> dict[str, Any]:
        """Arguments of vLLM's LLM."""
        compilation: dict[str, Any] = {"custom_ops": ["none"], "mode": 3 if self.compiled else 0}
        if self.graphs:
            compilation |= {
                "cudagraph_mode": self.graphs,
                "cudagraph_capture_sizes": CAPTURED if self.compiled else CAPTURED[:4],
            }
        ours = {
            "all2all_backend": "moe_nvlink",
            "enable_expert_parallel": True,
            "additional_config": {"moe_nvlink": self.options},
        }
        return {
            "model": self.checkpoint,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": not self.graphs,
            "compilation_config": compilation,
            "kernel_config": {
                "moe_backend": "triton",
                "enable_jit_warmup": False,
                "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
            },
            "attention_backend": "TRITON_ATTN",
            "distributed_executor_backend": "uni",  # in this process, which has the stand-ins
            "kv_cache_memory_bytes": 64 << 20,
            "gpu_memory_utilization": 0.1,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": False,
            "disable_custom_all_reduce": True,
            "disable_nccl_for_dp_synchronization": True,
            # In this process a step that only fetches results would leave the other rank alone.
            "async_scheduling": False,
            "seed": 0,
            **(ours if self.with_ours else {}),
        }


def say(phase: str) -> None:
    """Print a phase, and when it was reached."""
    print(f"PHASE {time.monotonic() - BEGAN:6.1f} s: {phase}", flush=True)


def _topk_softmax(
    weights: Any,
    ids: Any,
    places: Any,
    logits: Any,
    renormalize: bool = False,
    bias: Any = None,
    is_padding: Any = None,
) -> None:
    """The k most probable experts of each row; rows of padding get -1."""
    import torch

    assert bias is None
    chosen = torch.softmax(logits.float(), -1).topk(ids.shape[1], -1)
    picked, values = chosen.indices, chosen.values
    if renormalize:
        values = values / values.sum(-1, keepdim=True)
    if is_padding is not None:
        picked = torch.where(is_padding[: len(ids), None], -1, picked)
    weights.copy_(values)
    ids.copy_(picked)
    places.zero_()


def _summed(communicator: Any, rows: Any) -> Any:
    """The sum over the ranks of a communicator, on the host."""
    import torch

    rows = rows.cpu()
    torch.distributed.all_reduce(rows, group=communicator.cpu_group)
    return rows


def _place(communicator: Any, sizes: list[int]) -> slice:
    begin = sum(sizes[: communicator.rank_in_group])
    return slice(begin, begin + sizes[communicator.rank_in_group])


def _all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """All ranks' rows, for vLLM's own exchange of rows, which has NCCL alone."""
    assert dim == 0
    if not isinstance(given, list):
        return _all_gatherv(self, [given], 0, sizes)[0]
    sizes = sizes or [len(given[0])] * self.world_size
    gathered = []
    for rows in given:
        every = rows.new_zeros((sum(sizes), *rows.shape[1:]))
        every[_place(self, sizes)] = rows
        gathered.append(_summed(self, every).to(rows.device))
    return gathered


def _reduce_scatterv(
    self: Any, rows: Any, dim: int, sizes: list[int] | None, output: Any = None
) -> Any:
    """This rank's part of the sum."""
    assert dim == 0
    sizes = sizes or [len(rows) // self.world_size] * self.world_size
    mine = _summed(self, rows)[_place(self, sizes)].to(rows.device)
    return mine if output is None else output.copy_(mine)


def plant(fault: str) -> None:
    """Change our kernels before they are compiled for the GPU."""
    from moe_nvlink_plugin.jit import nvrtc
    from tests.integration.servers.lost_rows import FAULTS

    inner = nvrtc.load_or_compile
    right, wrong = FAULTS[fault]

    def load_or_compile(text: str, *args: Any, **options: Any) -> bytes:
        if right in text:
            say("a kernel with a planted fault")
        return inner(text.replace(right, wrong), *args, **options)

    nvrtc.load_or_compile = load_or_compile


def prepare() -> None:
    """Let the engine run in this process: before anything of vLLM's is imported."""
    say("importing torch")
    import torch

    vllm_files.complete()
    say(f"torch {torch.__version__}; importing vLLM")
    from vllm.platforms import cuda

    cuda.CudaPlatformBase.dist_backend = "gloo"
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    cast(Any, CudaCommunicator).all_gatherv = _all_gatherv
    cast(Any, CudaCommunicator)._reduce_scatterv = _reduce_scatterv
    from vllm.utils import platform_utils

    # Of vLLM's ways to hand host buffers to a GPU the one that needs no operator of its library.
    cast(Any, platform_utils).is_uva_available = lambda: False
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.utils import torch_utils

    say(f"platform {type(current_platform).__mro__[0:3]}; stand-ins")
    cast(Any, torch_utils).weak_ref_tensor = lambda tensor: tensor
    from tests.integration.vllm.moe import vllm_triton

    cast(Any, vllm_triton).init_workspace_manager = lambda _device: None  # the worker makes it
    vllm_triton.stand_in(setattr, "cuda")
    cast(Any, ops).topk_softmax = _topk_softmax
    from vllm.model_executor.layers.fused_moe.router import grouped_topk_router

    # The form in torch, without a compilation of its own.
    plain = cast(Any, grouped_topk_router.grouped_topk)._torchdynamo_orig_callable
    cast(Any, grouped_topk_router).grouped_topk = plain
    from vllm.model_executor.models import registry
    from vllm.v1.worker import gpu_worker

    # Asks torch for settings of its allocator, for which older torch has no name.
    cast(Any, gpu_worker).Worker._scoped_allocator_max_split = lambda *_, **__: (
        contextlib.nullcontext()
    )

    # The process that vLLM starts to look at a model's class lacks these stand-ins.
    cast(Any, registry)._run_in_subprocess = lambda function: function()


def prepare_compiler() -> None:
    """Let torch.compile run without vLLM's fusions, which are into operators of its library."""
    import vllm

    folder = Path(vllm.__path__[0]) / "compilation/passes/fusion"
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            vllm_files.make_empty(f"vllm.compilation.passes.fusion.{path.stem}")
    from vllm.compilation.passes.utility import fix_functionalization

    cast(Any, fix_functionalization).FixFunctionalizationPass.__call__ = lambda *_: None


def generate(task: Task) -> list[list[int]]:
    """Build the engine and answer the requests, greedily."""
    from vllm import LLM, SamplingParams

    say("building the engine")
    llm = LLM(**task.engine())
    say("the engine is built; generating")
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in task.lengths
    ]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in task.prompts]
    answers = llm.generate(prompts, params, use_tqdm=False)
    say("generated")
    return [list(answer.outputs[0].token_ids) for answer in answers]


def main(path: str) -> int:
    """Run the task of a file. Returns the exit status."""
    task = Task(**json.loads(Path(path).read_text("utf-8")))
    faulthandler.dump_traceback_later(task.limit_s, exit=True)
    try:
        prepare()
        if task.compiled:
            prepare_compiler()
        if task.fault:
            plant(task.fault)
        answers = generate(task)
        Path(task.answers).write_text(json.dumps(answers), "utf-8")
    except BaseException:  # the other rank may be waiting for this one at exit
        traceback.print_exc()
        say("failed")
        return 1
    say("ending")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
