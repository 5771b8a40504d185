"""What each MoE runner of SGLang takes from a dispatcher, and gives back. Imports no SGLang.

| runner | ids | not computed here | output | quantised rows |
|---|---|---|---|---|
| triton | local | -1 | new, or in place of the rows | fp8_block |
| triton_kernel | local, sorted | any expert, weight 0 | new | |
| deep_gemm, BF16 | global | -1 | new | |
| deep_gemm, other types | local | -1 | new | |
| flashinfer_cutlass | global | num_experts | the combine region | nvfp4, interleaved scales |
| flashinfer_cutedsl | global | num_experts | copied to the combine region | nvfp4 |
| flashinfer_trtllm, flashinfer_trtllm_routed | global | -1 | new | nvfp4, mxfp8 |

"Global" rows keep the ids of other ranks' experts, which the runner leaves out by its ep_rank; only
the choices of no expert, and those of empty slots, get the padding id. The table follows SGLang's
``FlashinferDispatcher`` and ``StandardDispatcher`` of 0.5.23, as read. For want of a GPU, only
triton has run with our exchange, in Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_nvlink_plugin.errors import UnsupportedError

#: Padding by the id after the last expert, or by -1.
AFTER_LAST, MINUS_ONE = "num_experts", "-1"


class Runner(NamedTuple):
    """One line of the table above.

    Attributes:
        name: SGLang's name.
        global_ids: whether to hand out ``FlashinferDispatchOutput``; else
            ``StandardDispatchOutput``.
        padding: padding of global ids.
        takes_region: whether `moe_output` is the combine region.
        wires: recipes whose rows the runner takes as they travel.
        interleaves_nvfp4: whether it takes nvfp4's scales in the layout of FlashInfer's
            ``nvfp4_block_scale_interleave``.
        sorted_routes: whether it takes routes sorted by expert.
        clears_empty: whether empty slots are handed out as zeros, because the runner may take one
            maximum of all rows.
    """

    name: str
    global_ids: bool
    padding: str = MINUS_ONE
    takes_region: bool = False
    wires: tuple[str, ...] = ()
    interleaves_nvfp4: bool = False
    sorted_routes: bool = False
    clears_empty: bool = False


_LOCAL = (
    Runner("triton", False, wires=("fp8_block",)),
    Runner("triton_kernel", False, sorted_routes=True),
    Runner("deep_gemm", False),
)
_GLOBAL = (
    Runner("deep_gemm", True),
    Runner("flashinfer_cutlass", True, AFTER_LAST, True, ("nvfp4",), interleaves_nvfp4=True),
    Runner("flashinfer_cutedsl", True, AFTER_LAST, True, ("nvfp4",)),
    Runner("flashinfer_trtllm", True, wires=("nvfp4", "mxfp8")),
    Runner("flashinfer_trtllm_routed", True, wires=("nvfp4", "mxfp8")),
)
#: SGLang's experts on a CPU, whichever runner the layer names: they take floats.
CPU = Runner("cpu", False)

NAMES = tuple(dict.fromkeys(runner.name for runner in (*_LOCAL, *_GLOBAL)))


def taking(recipe: str) -> frozenset[str]:
    """Return the names of the runners that take a recipe's rows as they travelled. Local."""
    return frozenset(one.name for one in (*_LOCAL, *_GLOBAL) if recipe in one.wires)


def runner_of(name: str | None, dtype: torch.dtype, flag: str) -> Runner:
    """Return what a runner takes, for activations of a type. Local.

    Args:
        name: SGLang's name of the runner; None: a kernel without a runner computes the layer.
        dtype: type of the activations.
        flag: what chose our backend, for messages.

    Raises:
        UnsupportedError: the runner is not in the table.
    """
    preferred = [*_GLOBAL, *_LOCAL] if dtype == torch.bfloat16 else [*_LOCAL, *_GLOBAL]
    for runner in preferred:
        if runner.name == name:
            return runner
    raise UnsupportedError(
        f"{flag}: SGLang computes this MoE layer with "
        f"{'a kernel without a runner' if name is None else f'the runner {name}'}, which does not "
        f"read what our dispatch delivers. Set --moe-runner-backend to one of {', '.join(NAMES)}."
    )
