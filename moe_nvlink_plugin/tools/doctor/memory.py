"""moe-nvlink doctor --memory: what a layer's workspace takes on a rank, and what halves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange.all_to_all import MoeAllToAll
from moe_nvlink_plugin.tools.precompile import values_of

_NEEDED = ("ep_size", "max_tokens_per_rank", "hidden_size", "top_k")
_NUMBERS = (*_NEEDED, "num_experts", "num_channels")
_NAMES = ("recipe", "combine")
#: More than any limit has; int() refuses thousands.
_MOST_DIGITS = 18


def main(text: str, device: str) -> int:
    """Print it; return the exit code. Local.

    Args:
        text: fields of AllToAllConfig: "ep_size=64,max_tokens_per_rank=8192,hidden_size=7168,
            top_k=8", and as one likes num_experts, num_channels, recipe and combine.
        device: "cpu" or "cuda": where the ranks would work.

    Raises:
        ConfigError: the text names no layer, or we cannot serve the layer.
    """
    print("\n".join(_lines(_config(text), device)))
    return 0


def _config(text: str) -> AllToAllConfig:
    given: dict[str, Any] = dict(values_of(text.split(",")))
    wrong = [name for name in given if name not in (*_NUMBERS, *_NAMES)]
    wrong += [name for name in _NUMBERS if not _is_number(str(given.get(name, 1)))]
    missing = [name for name in _NEEDED if name not in given]
    if wrong or missing:
        problem = f"not so: {', '.join(wrong)}" if wrong else f"missing: {', '.join(missing)}"
        raise ConfigError(
            f"--memory {text:.200}: {problem}; give numbers of at most {_MOST_DIGITS} digits for "
            f"{', '.join(_NEEDED)}, and as you like for num_experts and num_channels, and names "
            f"for {' and '.join(_NAMES)}"
        )
    fields: dict[str, Any] = {name: int(given[name]) for name in _NUMBERS if name in given}
    fields |= {name: given[name] for name in _NAMES if name in given}
    fields.setdefault("num_experts", max(fields["ep_size"], fields["top_k"]))
    return AllToAllConfig(ep_rank=0, **fields)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _lines(config: AllToAllConfig, device: str) -> Iterator[str]:
    parts = MoeAllToAll.memory(config, device)
    total = sum(parts.values())
    yield f"{_size(total)} on each of {config.ep_size} ranks, for all such layers of a model"
    for part, size_bytes in parts.items():
        yield f"  {_size(size_bytes)}  {part}"
    for advice, other in _smaller(config):
        yield f"{_size(sum(MoeAllToAll.memory(other, device).values()))} with {advice}"


def _smaller(config: AllToAllConfig) -> Iterator[tuple[str, AllToAllConfig]]:
    """Yield what needs less memory, and its configuration."""
    half = config.max_tokens_per_rank // 2
    if half:
        fewer = dataclasses.replace(config, max_tokens_per_rank=half)
        yield f"max_tokens_per_rank={half}", fewer
    if config.recipe is None and config.hidden_size % 128 == 0:
        quantised = dataclasses.replace(config, recipe="fp8_block")
        yield "recipe=fp8_block, if the experts take such rows", quantised
    if config.num_channels > 1:
        yield "num_channels=1", dataclasses.replace(config, num_channels=1)


def _size(size_bytes: int) -> str:
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:7.1f} MiB"
    return f"{size_bytes / 2**30:7.1f} GiB"
