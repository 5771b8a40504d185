"""FlashInfer's moe_a2a as these benchmarks call it, always with parameters by name.

Names, parameters and meanings were read in the wheel flashinfer-python 0.7.2.post1, its Python and
its CUDA sources. If another release lacks a name, load() says which; if a function takes other
parameters, the first call says which, and a trial in a process of its own finds it (probe).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import NamedTuple

import torch

from benchmarks import common
from tests.support import cases

from . import expected
from .options import Options
from .routers import RankTokens

READ_FROM = "0.7.2.post1"

#: Its kernels' limits (moeAlltoAllKernels.h).
MOST_RANKS, MOST_TOP_K = 64, 22
#: Where dispatch puts no row, the ids are set to this: no rank has such an expert.
NO_EXPERT = -1

_COMM = "flashinfer.comm"
#: Module -> what is called of it.
CALLS = {
    _COMM: (
        "moe_a2a_get_workspace_size_per_rank",
        "moe_a2a_initialize",
        "moe_a2a_dispatch",
        "moe_a2a_sanitize_expert_ids",
        "moe_a2a_combine",
        "moe_a2a_wrap_payload_tensor_in_workspace",
        "Mapping",
        "MoeAlltoAll",
    ),
    f"{_COMM}.trtllm_moe_alltoall": ("get_moe_alltoall_module",),
    f"{_COMM}.mnnvl": ("MnnvlConfig", "TorchDistBackend"),
}


class DriftError(RuntimeError):
    """What is installed is not what the adapter was written for."""


def load() -> SimpleNamespace:
    """The functions and classes of CALLS by their names, and `version`.

    Raises:
        DriftError: FlashInfer does not import, or lacks one of them.
    """
    try:
        found = {
            name: getattr(importlib.import_module(module), name)
            for module, names in CALLS.items()
            for name in names
        }
    except AttributeError as error:
        raise DriftError(
            f"flashinfer {version()} is not the one this adapter was read from, {READ_FROM}: "
            f"{error}; install {READ_FROM} or mend {__name__}.CALLS"
        ) from error
    except Exception as error:  # whatever it lacks: a driver, a package of its own
        said = f"flashinfer does not import here: {error}; mend it or leave it out"
        raise DriftError(said) from error
    return SimpleNamespace(**found, version=version())


def version() -> str:
    """Of the distribution, or "unknown"."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def unavailable(options: Options) -> str | None:
    """Why FlashInfer cannot run these options here; None: it can, as far as a look shows."""
    return unsupported(options) or missing()


def unsupported(options: Options) -> str | None:
    """Why FlashInfer cannot run these options, wherever it is installed."""
    if options.device != "cuda" or not torch.cuda.is_available():
        return "its kernels need a GPU: --device cuda on a machine that has one"
    for name, value, most in (
        ("ep_size", options.ep_size, MOST_RANKS),
        ("top_k", options.top_k, MOST_TOP_K),
    ):
        if value > most:
            return f"{name}={value}, and its kernels take at most {most}; lower it"
    if options.combine != "bf16":
        return f"it has no combine in {options.combine}; --combine bf16"
    if options.dtype == "float32":
        return "not compared for float32; --dtype bfloat16"
    return None


def missing() -> str | None:
    """Why what is installed here cannot be called; None: it can."""
    if not common.is_installed("flashinfer"):
        return "not installed; benchmarks/carry.sh packs it for a machine without a network"
    try:
        load()
    except DriftError as error:
        return str(error)
    return None


class Payloads(NamedTuple):
    """What a rank hands over, `[tokens, n]` each: activations, ids, weights, and scales if any.

    Rows that travel quantised are made before the clock starts: FlashInfer has no quantiser in its
    dispatch.
    """

    tensors: list[torch.Tensor]
    ids_index: int = 1

    @classmethod
    def of(cls, options: Options, mine: RankTokens) -> Payloads:
        rows, scales = cases.quantised(options.config(0, 1), mine.hidden)
        tensors = [_as_bytes(rows, mine.hidden.dtype), mine.topk_ids, mine.topk_weights]
        if scales is not None:
            tensors.append(_as_bytes(scales, torch.float32))
        return cls([tensor.flatten(1).contiguous() for tensor in tensors])

    @property
    def token_bytes(self) -> int:
        """Of one token, all payloads together."""
        return sum(tensor.shape[1] * tensor.dtype.itemsize for tensor in self.tensors)


def _as_bytes(tensor: torch.Tensor, plain: torch.dtype) -> torch.Tensor:
    """8-bit and 4-bit types as uint8, which every binding knows."""
    return tensor if tensor.dtype == plain else tensor.view(torch.uint8)


def experts(options: Options, rank: int, arrived: list[torch.Tensor], back: torch.Tensor) -> None:
    """The check's experts: from what arrived of each payload, `[ep_size, tokens, n]`, to `back`."""
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
    """What it is spared, on processes and emulated alike."""
    is_plain = cases.quantising(options.config(0, 1)) is None
    spared = "nothing" if is_plain else "rows quantised before"
    return f"flashinfer {api.version}; {spared}; marks empty slots in a launch of its own (timed)"


def workspace_bytes(
    options: Options, payloads: Payloads, capacity: int, api: SimpleNamespace
) -> int:
    """Of one rank for batches of up to `capacity` tokens."""
    size: int = api.moe_a2a_get_workspace_size_per_rank(
        ep_size=options.ep_size,
        max_num_tokens=capacity,
        total_dispatch_payload_size_per_token=payloads.token_bytes,
        combine_payload_size_per_token=options.hidden_size * options.torch_dtype.itemsize,
    )
    return size
