"""Read the published figures of one-sided dispatch and combine on GB200 (gb200.csv).

This project has measured none of them. DeepSeek-V3's shape (hidden size 7168, top_k 8, 256 experts)
where a row says no other, the same number of tokens on every rank. Times in microseconds, of the
kernels (no host), bandwidths in GB/s by the tables' own formula:

    tokens * min(ep_size, top_k) * bytes of a row / time

The formula counts a rank's own share of the rows and leaves out ids and weights.

Sources, the first column:
    tables, recipes: NVIDIA, "Optimizing MoE Communication with One-Sided AlltoAll Over NVLink",
        TensorRT-LLM's technical blog, section on performance. GB200 NVL72, NVLINK_ONE_SIDED,
        perfect router, BF16 where a row says no other, --kernel_breakdown. Whether programmatic
        dependent launch was on is not said. Recipes: dispatch, 8 ranks, 2048 tokens.
    without sync: the same kernels built without their flags and waits, 8 ranks: the same blog as of
        2026-04-26 (commit b9ce4b6), section on future work. The blog's later text has the table no
        more; its times with sync are the same in both.
    elsewhere: flashinfer-ai/flashinfer, pull request 3697, comment of 2026-07-14; columns of
        TensorRT-LLM 1.3.0rc20. GB200, 32 ranks, no programmatic dependent launch. Random or perfect
        routing is not said. Of the combine tables the batches above 16 were not at hand.
    small layer: the same project, pull request 3846. GB200, 4 ranks, hidden size 2048, top_k 22,
        4 tokens, graph replay. Combine's is the pair's time less dispatch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from .terms import FORMATS

FILE = Path(__file__).with_suffix(".csv")
HIDDEN_SIZE, TOP_K, NUM_EXPERTS = 7168, 8, 256
LINK_GB_S = 900.0  # one way, as the blog and the data sheet have it

#: Of the tables: ranks, and tokens per rank.
EP_SIZES = (8, 16, 32, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Published(NamedTuple):
    """One figure.

    Attributes:
        recipe: what travels: a key of terms.FORMATS; "fp8" has no scales.
        us: time.
        gb_s: logical bandwidth as published; 0 if none was.
        has_sync: the flags and waits were compiled in.
    """

    source: str
    verb: str
    ep_size: int
    tokens: int
    recipe: str
    us: float
    gb_s: float = 0.0
    has_sync: bool = True
    hidden_size: int = HIDDEN_SIZE
    top_k: int = TOP_K

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, scales included."""
        return round(self.hidden_size * sum(FORMATS[self.recipe]))


def published(*sources: str) -> list[Published]:
    """Return the figures of these sources."""
    rows = pd.read_csv(FILE).astype({"has_sync": bool})
    rows = rows[rows.source.isin(sources)]
    return [Published(**figure) for figure in rows.to_dict("records")]


def tables() -> list[Published]:
    """Return the 96 figures of the four BF16 tables."""
    return published("tables")


def held_out() -> list[Published]:
    """Return the figures that no fit sees: quantised rows, and third parties' timings."""
    return published("recipes", "elsewhere", "small layer")
