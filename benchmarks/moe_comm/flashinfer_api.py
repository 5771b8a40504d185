"""Call FlashInfer's moe_a2a as these benchmarks need it, always with parameters by name.

Names, parameters and meanings were read in the wheel flashinfer-python 0.7.2.post1, its Python and
its CUDA sources. If another release lacks a name, load() says which. If a function takes other
parameters, the first call says which, and a trial in a process of its own finds it
(emulated_flashinfer.probe).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import SimpleNamespace

import torch

from benchmarks import common
from moe_nvlink_plugin.verify import cases
from tests.support import flashinfer_wheel

from . import expected
from .options import Options
from .routers import RankTokens

READ_FROM = flashinfer_wheel.VERSION

#: Its kernels' limits (moeAlltoAllKernels.h).
MOST_RANKS, MOST_TOP_K = 64, 22
#: Dispatch sets the ids of slots without a row to this: no rank has such an expert.
NO_EXPERT = -1
#: Which of the payloads are the expert ids.
IDS_INDEX = 1

#: Module of flashinfer.comm -> what is called of it.
CALLS = {
    "": (
        "moe_a2a_get_workspace_size_per_rank",
        "moe_a2a_initialize",
        "moe_a2a_dispatch",
        "moe_a2a_sanitize_expert_ids",
        "moe_a2a_combine",
        "moe_a2a_wrap_payload_tensor_in_workspace",
        "Mapping",
        "MoeAlltoAll",
    ),
    ".trtllm_moe_alltoall": ("get_moe_alltoall_module",),
    ".mnnvl": ("MnnvlConfig", "TorchDistBackend"),
}


class DriftError(RuntimeError):
    """FlashInfer cannot be imported, or is not the release that this adapter was written for."""


def load() -> SimpleNamespace:
    """Return the functions and classes of CALLS by their names, and `version`.

    Raises:
        DriftError: FlashInfer does not import, or lacks one of them.
    """
    try:
        found = {
            name: getattr(importlib.import_module(f"flashinfer.comm{module}"), name)
            for module, names in CALLS.items()
            for name in names
        }
    except Exception as error:  # whatever it lacks: a name, a driver, a package of its own
        raise DriftError(
            f"flashinfer {version()} cannot be called as {READ_FROM}, from which this adapter was "
            f"read: {error}; install {READ_FROM}, mend {__name__}.CALLS or leave it out"
        ) from error
    return SimpleNamespace(**found, version=version())


def version() -> str:
    """Return the distribution's version, or "unknown"."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def unsupported(options: Options) -> str | None:
    """Say why FlashInfer cannot run these options, wherever it is installed; None: it can."""
    if options.device != "cuda" or not torch.cuda.is_available():
        return "its kernels need a GPU: --device cuda on a machine that has one"
    limits = {"ep_size": MOST_RANKS, "top_k": MOST_TOP_K}
    for name, most in limits.items():
        if getattr(options, name) > most:
            return f"{name}={getattr(options, name)}, and its kernels take at most {most}; lower it"
    if not options.payload_in_workspace:
        return "it is timed with its rows in the workspace; leave --no_payload_in_workspace out"
    if options.combine != "bf16":
        return f"it has no combine in {options.combine}; --combine bf16"
    if options.dtype == "float32":
        return "not compared for float32; --dtype bfloat16"
    return None


def missing() -> str | None:
    """Say why what is installed here cannot be called; None: it can."""
    if not common.is_installed("flashinfer"):
        return "not installed; benchmarks/carry.sh packs it for a machine without a network"
    try:
        load()
    except DriftError as error:
        return str(error)
    return None


def payloads_of(options: Options, mine: RankTokens) -> list[torch.Tensor]:
    """Return what a rank hands over, `[tokens, n]` each: rows, ids, weights, and scales if any.

    Rows that travel quantised are made before the clock starts: FlashInfer has no quantiser in its
    dispatch. 8-bit and 4-bit types go as uint8, which every binding knows.
    """
    rows, scales = cases.quantised(options.config(0, 1), mine.hidden)
    rows = rows if rows.dtype == mine.hidden.dtype else rows.view(torch.uint8)
    tensors = [rows, mine.topk_ids, mine.topk_weights]
    if scales is not None:
        tensors.append(scales if scales.dtype == torch.float32 else scales.view(torch.uint8))
    return [tensor.flatten(1).contiguous() for tensor in tensors]


def run_experts(
    options: Options, rank: int, arrived: list[torch.Tensor], back: torch.Tensor
) -> None:
    """Run the check's experts from what arrived, `[ep_size, tokens, n]` a payload, to `back`."""
    rows, ids, weights, *scales = (tensor.flatten(0, 1) for tensor in arrived)
    filled, config = ids[:, 0] >= 0, options.config(0, 1)
    like = cases.quantised(config, rows.new_zeros((1, options.hidden_size), dtype=config.dtype))
    given_scales = None
    if scales and like.scales is not None:
        given_scales = scales[0][filled].contiguous().view(like.scales.dtype)
    mine = rows[filled].contiguous().view(like.rows.dtype)
    hidden = cases.activations(config, mine, given_scales)
    made = expected.expert_rows(options, rank, hidden, ids[filled], weights[filled])
    back.flatten(0, 1)[filled] = made


def given(options: Options, api: SimpleNamespace) -> str:
    """Say what FlashInfer is spared, on processes and emulated ranks alike."""
    is_plain = cases.quantising(options.config(0, 1)) is None
    spared = "nothing" if is_plain else "rows quantised before"
    return f"flashinfer {api.version}; {spared}; marks empty slots in a launch of its own (timed)"


def workspace_bytes(
    options: Options, payloads: list[torch.Tensor], capacity: int, api: SimpleNamespace
) -> int:
    """Return the size of one rank's workspace for batches of up to `capacity` tokens."""
    size: int = api.moe_a2a_get_workspace_size_per_rank(
        ep_size=options.ep_size,
        max_num_tokens=capacity,
        total_dispatch_payload_size_per_token=sum(part[0].nbytes for part in payloads),
        combine_payload_size_per_token=options.hidden_size * options.torch_dtype.itemsize,
    )
    return size
