"""SGLang's fused functions, registered for our backend's name as well.

SGLang looks for a runner's fused function by the name of the backend, and ours is "customized"
there. Without these entries the FlashInfer runners refuse to start, and Triton takes a path that
does not read quantised rows.
"""

from __future__ import annotations

import importlib
import logging
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

#: What SGLang calls a backend that a plugin brings.
CUSTOMIZED = "customized"
_RUNNERS = "sglang.srt.layers.moe.moe_runner"


class Fused(NamedTuple):
    """A fused function of SGLang: its runner, the backend it is made for, and its module."""

    runner: str
    backend: str
    module: str


#: The functions made for FlashInfer's backend take FlashinferDispatchOutput, as ours emits it.
FUSED = (
    Fused("triton", "none", f"{_RUNNERS}.triton"),
    Fused("flashinfer_cutlass", "flashinfer", f"{_RUNNERS}.flashinfer_cutlass"),
    Fused("flashinfer_cutedsl", "flashinfer", f"{_RUNNERS}.flashinfer_cutedsl"),
    Fused("flashinfer_trtllm", "flashinfer", f"{_RUNNERS}.flashinfer_trtllm"),
    Fused("flashinfer_trtllm_routed", "flashinfer", f"{_RUNNERS}.flashinfer_trtllm"),
)


def register() -> None:
    """Register what this machine can import; nothing on a machine without CUDA. Local; idempotent.

    It logs a runner that cannot be imported. If a layer asks for it, SGLang refuses to start.
    """
    if not torch.cuda.is_available():
        return  # the experts for a CPU have no runner
    for one in FUSED:
        try:
            importlib.import_module(one.module)
        except ImportError as error:
            logger.warning(
                "moe_nvlink cannot serve --moe-runner-backend %s here: %s", one.runner, error
            )
            continue
        alias(one)


def alias(one: Fused) -> None:
    """Register one function, whose module is imported, under our backend's name. Local.

    It leaves an entry alone that is there. It logs a warning if SGLang has no such function.
    """
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, register_fused_func

    if FusedOpPool.get_fused_func(CUSTOMIZED, one.runner) is not None:
        return
    function = FusedOpPool.get_fused_func(one.backend, one.runner)
    if function is None:
        logger.warning(
            "moe_nvlink cannot serve --moe-runner-backend %s: this SGLang has no fused function "
            "for the backend %s",
            one.runner,
            one.backend,
        )
        return
    register_fused_func(CUSTOMIZED, one.runner)(function)
