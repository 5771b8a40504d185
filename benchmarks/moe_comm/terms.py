"""What is exchanged: the sizes of one call, and the bytes of the formats."""

from __future__ import annotations

from typing import NamedTuple

VERBS = ("dispatch", "combine")

#: Format -> bytes an element of activations takes, bytes of scales an element.
FORMATS = {
    "bf16": (2.0, 0.0),
    "fp8_block": (1.0, 4 / 128),
    "fp8_block_pow2": (1.0, 4 / 128),
    "mxfp8": (1.0, 1 / 32),
    "nvfp4": (0.5, 1 / 16),
}


class Work(NamedTuple):
    """One call on every rank. Sizes in elements, tokens per rank.

    Attributes:
        recipe: what dispatch puts; combine: what combine gets: keys of FORMATS.
    """

    ep_size: int
    tokens: int
    recipe: str = "bf16"
    combine: str = "bf16"
    hidden_size: int = 7168
    top_k: int = 8
    num_experts: int = 256


def row_bytes(recipe: str, hidden_size: int) -> tuple[int, ...]:
    """Return the bytes of a token's row in a format, and of its scales if it has any."""
    return tuple(int(hidden_size * each) for each in FORMATS[recipe] if each)
