"""Every environment variable of the package: name, default, meaning. No other module reads them.

Each function reads the environment when it is called, so a test or a launcher may set a variable
late. Every function is local. If a variable has an unusable value, its function raises ConfigError,
which names the variable, the value and the default.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError

#: name -> (default as text, meaning). `moe-nvlink doctor` prints this table with what
#: `frameworks.variables` adds, and integration/README.md contains it.
VARIABLES: dict[str, tuple[str, str]] = {
    "MOE_NVLINK_CACHE_DIR": ("the user's cache directory", "directory for compiled kernels"),
    "MOE_NVLINK_CXX": ("g++", "host compiler for the CPU ranks' kernels"),
    "MOE_NVLINK_HOST_THREADS": ("1", "threads per CPU rank that dispatch and combine use"),
    "MOE_NVLINK_TIMEOUT_S": ("300", "seconds a rank waits for the others before it reports them"),
    "MOE_NVLINK_FIRST_TIMEOUT_S": (
        "1800",
        "the same limit while the ranks start: until the second complete round",
    ),
    "MOE_NVLINK_PDL": ("1", "0: launch kernels on GPUs without programmatic dependent launch"),
    "MOE_NVLINK_MAX_SMS": (
        "unset",
        "SMs that each of our kernels may fill; unset: all SMs. Up to 32, combine gets rows by TMA",
    ),
    "MOE_NVLINK_SMALL_TOKENS": (
        "up to 32 on GPUs, 0 on CPU ranks",
        "most tokens of a rank that travel by the kernels for small batches; 0: none. Unset: "
        "as many as gain, at most 32, and fewer in combine",
    ),
    "MOE_NVLINK_UNIT_DATA_BYTES": (
        "14",
        "bytes of data in 16 bytes of a small batch's rows between GPUs; 12 relies on words of 8 "
        "bytes alone",
    ),
    "MOE_NVLINK_TUNING": (
        "unset",
        "file that `moe-nvlink tune` wrote on such a machine: launches choose as it says",
    ),
    "MOE_NVLINK_COMBINE": (
        "bf16",
        "format in which rows travel back: bf16 (unquantised), fp8_block, nvfp4, fp8_tensor",
    ),
    "MOE_NVLINK_DISPATCH": (
        "auto",
        "recipe of dispatch; auto: the format that the model's experts take",
    ),
    "MOE_NVLINK_MTP_LM_HEAD_TP": (
        "1",
        "number of data-parallel ranks that share an MTP draft's LM head; 1: no sharing; or auto",
    ),
    "MOE_NVLINK_ALLOW_SHARED_GPU": (
        "0",
        "1: ranks may share a GPU if each is a process of its own; each gets its part of the SMs "
        "(for tests; slow, because without MPS the GPU runs one process at a time)",
    ),
    "MOE_NVLINK_LINEINFO": (
        "0",
        "1: kernels for GPUs name the lines of their source, for profilers and debuggers; the "
        "source lies beside them in the cache",
    ),
    "MOE_NVLINK_STATS_DIR": (
        "unset",
        "directory in which each worker writes its counters: rank0.json and so on",
    ),
}


#: Limits of the fields of AllToAllConfig that variables fill. config.py, which imports this module,
#: checks the fields against them.
MAX_HOST_THREADS = 1024
MAX_SMS = 1024
MAX_SMALL_TOKENS = 64
#: Bytes of data that a unit of a small batch's rows may have; the first is the default.
UNIT_DATA_BYTES = (14, 12)
MAX_SECONDS = 1e6  # the limit itself is not allowed


def add_to_list(name: str, item: str) -> None:
    """Add an item to a variable of another program that holds items between commas. Idempotent.

    Args:
        name: the variable.
        item: the item.
    """
    items = [one.strip() for one in os.environ.get(name, "").split(",") if one.strip()]
    if item not in items:
        os.environ[name] = ",".join([*items, item])


def _text(name: str) -> str | None:
    assert name in VARIABLES, name
    value = os.environ.get(name, "").strip()
    return value or None


def _integer(name: str, most: int, unset: str) -> int | None:
    """Return a variable's integer from 1 to `most`; None if it is not set."""
    text = _text(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise ConfigError(
            f"{name}={text!r} is no integer from 1 to {most}; set one, or unset it for {unset}"
        )
    return value


def _seconds(name: str, default: float) -> float:
    """Return a variable's seconds, or the default if it is not set."""
    text = _text(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_SECONDS:
        raise ConfigError(
            f"{name}={text!r} is no number of seconds above 0 and below {MAX_SECONDS:g}; set one, "
            f"or unset it for {default:g}"
        )
    return value


def cache_dir() -> Path | None:
    """Return the directory for compiled kernels, or None for the user's cache directory."""
    text = _text("MOE_NVLINK_CACHE_DIR")
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError as error:  # there is no such user
        raise ConfigError(
            f"MOE_NVLINK_CACHE_DIR={text!r} names no user; write the directory's path in full"
        ) from error


def use_cache_dir(path: Path) -> None:
    """Set MOE_NVLINK_CACHE_DIR for this process and the processes it starts."""
    os.environ["MOE_NVLINK_CACHE_DIR"] = str(path)


def current() -> dict[str, str | None]:
    """Return the text of every variable of the package; None if it is not set."""
    return {name: _text(name) for name in VARIABLES}


class Launched(NamedTuple):
    """What a launcher such as torchrun says about a process's rank.

    Attributes:
        rank: 0..world_size-1.
        world_size: number of processes that the launcher started.
        local_rank: number of the process on its host; None if the launcher does not set it.
    """

    rank: int
    world_size: int
    local_rank: int | None


def launched() -> Launched | None:
    """Return this process's rank; None if no launcher has set RANK, WORLD_SIZE and MASTER_ADDR.

    Raises:
        ConfigError: RANK, WORLD_SIZE or LOCAL_RANK is not a valid number.
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
    """Return the command of the host compiler."""
    return _text("MOE_NVLINK_CXX") or "g++"


def cxx_words() -> list[str]:
    """Return the command of the host compiler as a shell would split it; at least one word."""
    try:
        words = shlex.split(cxx())
    except ValueError as error:  # a quotation mark without its other half
        raise ConfigError(f"MOE_NVLINK_CXX={cxx()!r}: {error}; unset it for g++") from error
    if not words or not words[0]:
        raise ConfigError(f"MOE_NVLINK_CXX={cxx()!r} names no compiler; unset it for g++")
    return words


def _switch(name: str, default: bool) -> bool:
    text = _text(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r} must be 0 or 1; unset it for {int(default)}")
    return text == "1"


def pdl() -> bool:
    """Return whether kernels use programmatic dependent launch."""
    return not _WITHOUT_PDL.get() and _switch("MOE_NVLINK_PDL", True)


#: Of this thread, whatever other ranks in the process do.
_WITHOUT_PDL = contextvars.ContextVar("moe_nvlink_without_pdl", default=False)


@contextlib.contextmanager
def without_pdl() -> Iterator[None]:
    """Have what this thread creates in the block launch without programmatic dependent launch."""
    token = _WITHOUT_PDL.set(True)
    try:
        yield
    finally:
        _WITHOUT_PDL.reset(token)


def lineinfo() -> bool:
    """Return whether kernels for GPUs are compiled with the lines of their source."""
    return _switch("MOE_NVLINK_LINEINFO", False)


def share_gpu() -> None:
    """Let this process's ranks use one GPU together, as MOE_NVLINK_ALLOW_SHARED_GPU=1 does."""
    os.environ["MOE_NVLINK_ALLOW_SHARED_GPU"] = "1"


def allow_shared_gpu() -> bool:
    """Return whether ranks of one group may use one GPU, each in a process of its own."""
    return _switch("MOE_NVLINK_ALLOW_SHARED_GPU", False)


def cuda_connections() -> int | None:
    """Return the driver's own CUDA_DEVICE_MAX_CONNECTIONS; None if it is unset or no number."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    return int(text) if text.isdecimal() else None


def max_sms() -> int | None:
    """Return the default of AllToAllConfig.max_sms; None means all SMs of the GPU."""
    return _integer("MOE_NVLINK_MAX_SMS", MAX_SMS, "all of them")


def small_tokens() -> int | None:
    """Return the default of AllToAllConfig.small_tokens; None means that the device decides."""
    text = _text("MOE_NVLINK_SMALL_TOKENS")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) > MAX_SMALL_TOKENS:
        raise ConfigError(
            f"MOE_NVLINK_SMALL_TOKENS={text!r} is no number from 0 to {MAX_SMALL_TOKENS}; unset "
            "it for up to 32 on GPUs and 0 on CPU ranks"
        )
    return int(text)


def unit_data_bytes() -> int:
    """Return the default of AllToAllConfig.unit_data_bytes."""
    text = _text("MOE_NVLINK_UNIT_DATA_BYTES") or "14"
    if text not in map(str, UNIT_DATA_BYTES):
        raise ConfigError(
            f"MOE_NVLINK_UNIT_DATA_BYTES={text!r} is neither 14 nor 12; unset it for 14"
        )
    return int(text)


def asked_host_threads() -> int | None:
    """Return the number of threads per CPU rank that the user has set; None if it is not set."""
    return _integer("MOE_NVLINK_HOST_THREADS", MAX_HOST_THREADS, "1")


def host_threads() -> int:
    """Return the number of threads per CPU rank."""
    return asked_host_threads() or 1


def tuning() -> str:
    """Return the default of AllToAllConfig.tuning; "" means no file."""
    return _text("MOE_NVLINK_TUNING") or ""


def timeout_s(default: float = 300.0) -> float:
    """Return the default of AllToAllConfig.timeout_s, in seconds; `default` if nobody says."""
    return _seconds("MOE_NVLINK_TIMEOUT_S", default)


def first_timeout_s() -> float:
    """Return the default of AllToAllConfig.first_timeout_s, in seconds; at least timeout_s()."""
    return max(_seconds("MOE_NVLINK_FIRST_TIMEOUT_S", 1800.0), timeout_s())


def framework_plugins(variable: str) -> list[str] | None:
    """Return the plugins that a framework's own variable allows; None if it allows every plugin."""
    names = [name.strip() for name in os.environ.get(variable, "").split(",")]
    return [name for name in names if name] or None


def counts_for_prometheus() -> bool:
    """Return whether processes count together, in prometheus_client's PROMETHEUS_MULTIPROC_DIR."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


def combine() -> str:
    """Return the default of AllToAllConfig.combine. AllToAllConfig checks it."""
    return _text("MOE_NVLINK_COMBINE") or "bf16"


def dispatch() -> str | None:
    """Return the name of the recipe of an adapter's layers; None if the model decides."""
    text = _text("MOE_NVLINK_DISPATCH")
    return None if text == "auto" else text


def mtp_lm_head_tp() -> int | str:
    """Return how many data-parallel ranks share the LM head of an MTP draft, or "auto".

    Raises:
        ConfigError: the value is neither "auto" nor an integer from 1 up.
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
    """Return the directory for the counters' JSON files; None if no files are wanted."""
    text = _text("MOE_NVLINK_STATS_DIR")
    return Path(text) if text else None
