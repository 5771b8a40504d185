"""CUDA graphs and torch.compile: what no graph can hold, and what all ranks must configure alike.

While a worker starts, it runs the model once for each size that it compiles or captures. Each run
is a round of the exchange in every MoE layer, so all ranks must run the same sizes in the same
order. vLLM compares the parallel configuration of the ranks, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.errors import DisagreementError
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.vllm import compat

#: The ops of MoE layers as `splitting_ops` names them: vLLM's, and ours of moe/layers.py.
LAYER_OPS = frozenset(f"vllm::{name}" for name in (*compat.OPS, "moe_nvlink_forward"))

#: Fields of vLLM's CompilationConfig that decide which sizes run while a worker starts.
COMPARED = (
    *("mode", "cudagraph_mode", "cudagraph_capture_sizes", "compile_sizes"),
    "compile_ranges_endpoints",
)


def problems(vllm_config: Any) -> Iterator[str]:
    """Yield a problem if piecewise CUDA graphs are to be split at the MoE layers. Local.

    A split leaves the op between two graphs, and the op returns a new tensor. The graph after it
    reads the address that the tensor had during the capture. vLLM compares addresses only at log
    level DEBUG; attention may stand between two graphs because it writes into a given tensor.
    """
    compilation = vllm_config.compilation_config
    named = [
        op for op in compilation.splitting_ops or () if op.removesuffix(".default") in LAYER_OPS
    ]
    if named and compilation.cudagraph_mode.has_piecewise_cudagraphs():
        yield (
            f"splitting_ops names {', '.join(named)}, and cudagraph_mode is "
            f"{compilation.cudagraph_mode.name}: a graph captured after a MoE layer would read the "
            "layer's output where it was during the capture. Remove these ops from splitting_ops "
            "(our layers can be captured), or set cudagraph_mode to FULL_DECODE_ONLY or NONE."
        )


def agree(vllm_config: Any, ranks: Ranks) -> None:
    """Compare what decides which sizes the ranks run while they start. Collective.

    Raises:
        DisagreementError: a field differs between two ranks; the message has its value on each.
    """
    compilation = vllm_config.compilation_config
    mine = {name: str(getattr(compilation, name)) for name in COMPARED}
    mine["use_v2_model_runner"] = str(vllm_config.use_v2_model_runner)
    everyones = ranks.gather(mine)
    differing = [name for name in mine if len({theirs[name] for theirs in everyones}) > 1]
    if differing:
        each = "; ".join(
            f"{name}: "
            + ", ".join(f"rank {r} has {theirs[name]}" for r, theirs in enumerate(everyones))
            for name in differing
        )
        raise DisagreementError(
            f"{ranks.wording.flag}: the ranks compile or capture different sizes, so they would "
            f"wait for each other in vain ({each}). Start every rank with the same "
            "--enforce-eager, --compilation-config and --optimization-level."
        )
