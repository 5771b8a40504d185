"""Every environment variable of the package: name, default, meaning. Read here and nowhere else.

Each function reads the environment when called, so a test or a launcher may set the variable late.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError

#: name -> (default as text, meaning); `moe-nvlink doctor` and the README print this table.
VARIABLES: dict[str, tuple[str, str]] = {
    "MOE_NVLINK_CACHE_DIR": ("the user's cache directory", "where compiled kernels are kept"),
    "MOE_NVLINK_CXX": ("g++", "host compiler for the CPU ranks' kernels"),
    "MOE_NVLINK_HOST_THREADS": ("1", "threads per CPU rank that dispatch and combine use"),
    "MOE_NVLINK_TIMEOUT_S": ("300", "seconds a rank waits for the others before it reports them"),
    "MOE_NVLINK_FIRST_TIMEOUT_S": (
        "1800",
        "the same while the ranks start: until the first complete round; in vLLM until the first "
        "request or CUDA graph",
    ),
    "MOE_NVLINK_PDL": ("1", "0: launch kernels on GPUs without programmatic dependent launch"),
    "MOE_NVLINK_MAX_SMS": ("unset", "SMs that a kernel of ours may fill; unset: all of them"),
    "MOE_NVLINK_COMBINE": ("bf16", "how rows travel back: bf16 (as they are), fp8_block or nvfp4"),
    "MOE_NVLINK_DISPATCH": (
        "auto",
        "vLLM: recipe of dispatch; auto: what the model's experts take",
    ),
    "MOE_NVLINK_MTP_LM_HEAD_TP": (
        "1",
        "vLLM: data-parallel ranks that share an MTP draft's LM head; 1: none do; or auto",
    ),
    "MOE_NVLINK_ALLOW_SHARED_GPU": (
        "0",
        "1: let ranks that are processes of their own share one GPU, each with its part of the SMs "
        "(for tests; slow, because without MPS the GPU runs one process at a time)",
    ),
    "MOE_NVLINK_STATS_DIR": ("unset", "vLLM workers write rank<N>.json with their counters here"),
}


def _text(name: str) -> str | None:
    assert name in VARIABLES, name
    value = os.environ.get(name, "").strip()
    return value or None


def _positive(name: str, kind: type[int] | type[float], default: float) -> float:
    text = _text(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value < float("inf"):
        unset = f"{default:g}" if default else "all of them"
        raise ConfigError(f"{name}={text!r} is not a positive number; unset it for {unset}")
    return value


def cache_dir() -> Path | None:
    """Directory for compiled kernels, or None for the user's cache directory."""
    text = _text("MOE_NVLINK_CACHE_DIR")
    return Path(text).expanduser() if text else None


def use_cache_dir(path: Path) -> None:
    """Sets MOE_NVLINK_CACHE_DIR for this process and those it starts."""
    os.environ["MOE_NVLINK_CACHE_DIR"] = str(path)


def current() -> dict[str, str | None]:
    """The text of every variable of ours, None where it is not set."""
    return {name: _text(name) for name in VARIABLES}


class Launched(NamedTuple):
    """What a launcher such as torchrun tells a process of its rank."""

    rank: int
    world_size: int
    local_rank: int | None


def launched() -> Launched | None:
    """This process's rank, or None where no launcher has set RANK, WORLD_SIZE and a master.

    Raises:
        ConfigError: RANK, WORLD_SIZE or LOCAL_RANK is no such number.
    """
    if not all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return None
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        rank, size, local = (None if text is None else int(text) for text in texts.values())
    except ValueError as error:
        raise ConfigError(f"{texts} must be numbers; unset them to run alone") from error
    if rank is None or size is None or not 0 <= rank < size or (local is not None and local < 0):
        raise ConfigError(f"{texts} name no rank; unset them to run alone")
    return Launched(rank, size, local)


def cxx() -> str:
    """Host compiler command."""
    return _text("MOE_NVLINK_CXX") or "g++"


def _switch(name: str, default: bool) -> bool:
    text = _text(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r} must be 0 or 1; unset it for {int(default)}")
    return text == "1"


def pdl() -> bool:
    """Whether kernels are launched with programmatic dependent launch."""
    return _switch("MOE_NVLINK_PDL", True)


def allow_shared_gpu() -> bool:
    """Whether ranks of one group may be on the same GPU, each in a process of its own."""
    return _switch("MOE_NVLINK_ALLOW_SHARED_GPU", False)


def max_sms() -> int | None:
    """Default of AllToAllConfig.max_sms; None is all of the GPU's."""
    if _text("MOE_NVLINK_MAX_SMS") is None:
        return None
    return int(_positive("MOE_NVLINK_MAX_SMS", int, 0))


def host_threads() -> int:
    """Threads per CPU rank."""
    return int(_positive("MOE_NVLINK_HOST_THREADS", int, 1))


def timeout_s() -> float:
    """Default of AllToAllConfig.timeout_s, in seconds."""
    return _positive("MOE_NVLINK_TIMEOUT_S", float, 300.0)


def first_timeout_s() -> float:
    """Default of AllToAllConfig.first_timeout_s, in seconds; never below MOE_NVLINK_TIMEOUT_S."""
    return max(_positive("MOE_NVLINK_FIRST_TIMEOUT_S", float, 1800.0), timeout_s())


def combine() -> str:
    """Default of AllToAllConfig.combine, which checks it."""
    return _text("MOE_NVLINK_COMBINE") or "bf16"


def dispatch() -> str | None:
    """Name of the recipe that vLLM's layers dispatch in, None where the model decides."""
    text = _text("MOE_NVLINK_DISPATCH")
    return None if text == "auto" else text


def mtp_lm_head_tp() -> int | str:
    """How many data-parallel ranks share the LM head of vLLM's MTP draft: 1 and up, or "auto".

    Raises:
        ConfigError: neither of them.
    """
    text = _text("MOE_NVLINK_MTP_LM_HEAD_TP") or "1"
    if text == "auto":
        return text
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(
            f"MOE_NVLINK_MTP_LM_HEAD_TP={text!r} is no number of ranks from 1 up, nor auto; unset "
            "it to leave the draft's LM head whole"
        )
    return size


def stats_dir() -> Path | None:
    """Directory for the counters' JSON files, or None when they are not wanted."""
    text = _text("MOE_NVLINK_STATS_DIR")
    return Path(text) if text else None
