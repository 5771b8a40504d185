"""Read the published figures of one-sided dispatch and combine on GB200 (gb200.csv).

This project has measured none of them. DeepSeek-V3's shape (hidden size 7168, top_k 8, 256 experts)
where a row says no other, the same number of tokens on every rank. Times in microseconds, of the
kernels (no host), bandwidths in GB/s by the tables' own formula:

    tokens * min(ep_size, top_k) * bytes of a row / time

The formula counts a rank's own share of the rows and leaves out ids and weights.

Sources, the first column:
    tables: NVIDIA, "Optimizing MoE Communication with One-Sided AlltoAll Over NVLink",
        TensorRT-LLM's technical blog, section on performance. GB200 NVL72, NVLINK_ONE_SIDED,
        perfect router, BF16 where a row says no other, --kernel_breakdown. Whether programmatic
        dependent launch was on is not said.
    without sync: the same kernels built without their flags and waits, 8 ranks: the same blog as of
        2026-04-26 (commit b9ce4b6), section on future work. The blog's later text has the table no
        more; its times with sync are the same in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

FILE = Path(__file__).with_suffix(".csv")
HIDDEN_SIZE, TOP_K = 7168, 8


class Published(NamedTuple):
    """One figure.

    Attributes:
        recipe: what travels: a key of terms.FORMATS.
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


def published(*sources: str) -> list[Published]:
    """Return the figures of these sources."""
    rows = pd.read_csv(FILE).astype({"has_sync": bool})
    rows = rows[rows.source.isin(sources)]
    return [Published(**figure) for figure in rows.to_dict("records")]
