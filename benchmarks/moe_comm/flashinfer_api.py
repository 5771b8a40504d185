"""FlashInfer's moe_a2a as these benchmarks call it, held to the signatures of what is installed.

Names, parameters and meanings were read in the wheel flashinfer-python 0.7.2.post1, its Python and
its CUDA sources. Another release may have others: load() then says which, rather than calling them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks import common

from .backends import base
from .options import Options
from .routers import RankTokens

READ_FROM = "0.7.2.post1"

#: Its kernels' limits (moeAlltoAllKernels.h).
MOST_RANKS, MOST_TOP_K = 64, 22
#: Where dispatch puts no row, the ids are set to this: no rank has such an expert.
NO_EXPERT = -1

_COMM = "flashinfer.comm"
_RANK = ("ep_rank", "ep_size")
_ROUND = ("workspace", "metainfo", "runtime_max_tokens_per_rank", *_RANK, "top_k")
#: "module:name" -> the parameters that are handed over, all by name.
CALLS: dict[str, tuple[str, ...]] = {
    f"{_COMM}:moe_a2a_get_workspace_size_per_rank": (
        "ep_size",
        "max_num_tokens",
        "total_dispatch_payload_size_per_token",
        "combine_payload_size_per_token",
    ),
    f"{_COMM}:moe_a2a_initialize": ("workspace", *_RANK, "max_num_tokens"),
    f"{_COMM}:moe_a2a_dispatch": (
        *("token_selected_experts", "input_payloads", *_ROUND),
        *("num_experts", "enable_pdl"),
    ),
    f"{_COMM}:moe_a2a_sanitize_expert_ids": (
        *("expert_ids", "workspace", "metainfo"),
        *("ep_rank", "invalid_expert_id", "enable_pdl"),
    ),
    f"{_COMM}:moe_a2a_combine": (
        *("payload", "local_num_tokens", *_ROUND),
        *("combine_payload_offset", "payload_in_workspace", "output", "enable_pdl"),
    ),
    f"{_COMM}:moe_a2a_wrap_payload_tensor_in_workspace": (
        *("workspace", "leading_shape", "slice_start", "slice_end", "dtype"),
    ),
    f"{_COMM}.trtllm_moe_alltoall:get_moe_alltoall_module": (),
    f"{_COMM}:Mapping": ("world_size", "rank", "gpus_per_node", "tp_size", "moe_ep_size"),
    f"{_COMM}.mnnvl:MnnvlConfig": ("comm_backend",),
    f"{_COMM}.mnnvl:TorchDistBackend": ("group",),
    f"{_COMM}:MoeAlltoAll": (
        *("mapping", "max_num_tokens", "top_k", "num_experts"),
        *("workspace_size_per_rank", "mnnvl_config"),
    ),
    f"{_COMM}:MoeAlltoAll.dispatch": (
        *("self", "token_selected_experts", "input_payloads", "runtime_max_tokens_per_rank"),
        *("invalid_token_expert_id", "expert_id_payload_index"),
    ),
    f"{_COMM}:MoeAlltoAll.get_combine_payload_tensor_in_workspace": (
        *("self", "runtime_max_tokens_per_rank", "hidden_size", "dtype"),
    ),
    f"{_COMM}:MoeAlltoAll.combine": (
        *("self", "payload", "runtime_max_tokens_per_rank", "payload_in_workspace", "output"),
    ),
}


class DriftError(RuntimeError):
    """What is installed is not what the adapter was written for."""


def load() -> SimpleNamespace:
    """The functions and classes of CALLS by their names, and `version`.

    Raises:
        DriftError: one is missing or takes other parameters; or FlashInfer does not import.
    """
    try:
        found = _found()
    except Exception as error:  # whatever it lacks: a driver, a package of its own
        said = f"flashinfer does not import here: {error}; mend it or leave it out"
        raise DriftError(said) from error
    mistakes = [text for name in CALLS if (text := _mistake(name, found[name]))]
    if mistakes:
        raise DriftError(
            f"flashinfer {version()} is not the one this adapter was read from, {READ_FROM}: "
            f"{'; '.join(mistakes)}; install {READ_FROM} or mend {__name__}.CALLS"
        )
    plain = {name.split(":")[1]: made for name, made in found.items() if "." not in _tail(name)}
    return SimpleNamespace(**plain, version=version())


def _found() -> dict[str, Any]:
    return {name: _resolve(*name.split(":")) for name in CALLS}


def _tail(name: str) -> str:
    return name.split(":")[1]


def _resolve(module: str, path: str) -> Any:
    """The object, or the name of what is not there."""
    holder: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(holder, part):
            return f"{module} has no {path}"
        holder = getattr(holder, part)
    return holder


def _mistake(name: str, made: Any) -> str:
    if isinstance(made, str):
        return made
    try:
        inspect.signature(made).bind(**dict.fromkeys(CALLS[name]))
    except TypeError as error:
        return f"{_tail(name)}: {error}"
    return ""


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
        rows, scales = base.quantised(options, mine.hidden)
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
    filled = ids[:, 0] >= 0
    like = base.quantised(options, torch.zeros(1, options.hidden_size, dtype=options.torch_dtype))
    given_scales = None
    if scales and like.scales is not None:
        given_scales = scales[0][filled].contiguous().view(like.scales.dtype)
    mine = rows[filled].contiguous().view(like.rows.dtype)
    hidden = base.activations(options, mine, given_scales)
    made = base.expert_rows(options, rank, hidden, ids[filled], weights[filled])
    back.flatten(0, 1)[filled] = made


def given(options: Options, api: SimpleNamespace) -> str:
    """What it is spared, on processes and emulated alike."""
    spared = "nothing" if base.recipe_of(options) is None else "rows quantised before"
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
