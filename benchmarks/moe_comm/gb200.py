"""Published figures of one-sided dispatch and combine on GB200, as data.

Nobody of this project has measured any of them. DeepSeek-V3's shape (hidden size 7168, top_k 8, 256
experts) where nothing else is said, the same number of tokens on every rank. Times in microseconds,
of the kernels (no host), bandwidths in GB/s by the tables' own formula:

    tokens * min(ep_size, top_k) * bytes of a row / time

which counts a rank's own share of the rows and leaves out ids and weights.

Sources:
    TABLES, RECIPES: NVIDIA, "Optimizing MoE Communication with One-Sided AlltoAll Over NVLink",
        TensorRT-LLM's technical blog, section on performance. GB200 NVL72, NVLINK_ONE_SIDED,
        perfect router, BF16 where nothing else is said, --kernel_breakdown. Whether programmatic
        dependent launch was on is not said.
    WITHOUT_SYNC: the same kernels built without their flags and waits. A figure that this project's
        design notes hold and for which no public text was found again: the weakest data here.
    ELSEWHERE: flashinfer-ai/flashinfer, pull request 3697, comment of 2026-07-14; columns of
        TensorRT-LLM 1.3.0rc20. GB200, 32 ranks, no programmatic dependent launch. Random or perfect
        routing is not said. Of the combine tables the batches above 16 were not at hand.
    SMALL_LAYER: the same project, pull request 3846. GB200, 4 ranks, hidden size 2048, top_k 22,
        4 tokens, graph replay. Combine's is the pair's time less dispatch's.
"""

from __future__ import annotations

from typing import NamedTuple

HIDDEN_SIZE = 7168
TOP_K = 8
NUM_EXPERTS = 256
LINK_GB_S = 900.0  # one way, as the blog and the data sheet have it

#: Bytes of a token's row for each element, scales included.
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Published(NamedTuple):
    """One figure.

    Attributes:
        source: which table: "tables", "recipes", "without sync", "elsewhere", "small layer".
        verb: "dispatch" or "combine".
        recipe: what travels: a key of ELEMENT_BYTES; "fp8" has no scales.
        us: time; gb_s: logical bandwidth as published, 0 where none was.
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
        """Of one token, scales included."""
        return round(self.hidden_size * ELEMENT_BYTES[self.recipe])


class TableError(ValueError):
    """A figure that contradicts itself: copied wrongly, or changed."""


#: ep_size -> (tokens per rank, dispatch us, its GB/s, combine us, its GB/s)
TABLES: dict[int, tuple[tuple[int, float, float, float, float], ...]] = {
    8: (
        (1, 18.9, 6.07, 31.0, 3.7),
        (2, 18.4, 12.47, 31.1, 7.36),
        (4, 18.1, 25.34, 31.4, 14.59),
        (8, 17.6, 52.22, 31.4, 29.23),
        (16, 18.5, 99.34, 32.6, 56.31),
        (32, 18.2, 201.72, 32.7, 112.25),
        (64, 22.3, 328.68, 34.1, 215.18),
        (128, 31.7, 462.4, 38.1, 384.96),
        (256, 50.8, 578.18, 53.0, 554.44),
        (512, 89.5, 656.24, 91.7, 640.56),
        (1024, 166.3, 706.34, 175.6, 668.62),
        (2048, 311.8, 753.28, 322.6, 728.2),
    ),
    16: (
        (1, 18.8, 6.1, 30.8, 3.72),
        (2, 19.1, 12.02, 31.4, 7.31),
        (4, 18.5, 24.84, 31.6, 14.54),
        (8, 18.9, 48.62, 31.8, 28.86),
        (16, 18.4, 99.5, 33.0, 55.61),
        (32, 20.2, 181.98, 34.2, 107.46),
        (64, 24.1, 304.9, 35.6, 206.35),
        (128, 34.6, 424.1, 39.9, 367.72),
        (256, 54.8, 535.84, 57.0, 514.83),
        (512, 97.1, 604.54, 98.2, 597.79),
        (1024, 181.2, 648.0, 188.2, 624.15),
        (2048, 343.3, 684.1, 348.4, 674.15),
    ),
    32: (
        (1, 19.8, 5.78, 31.4, 3.65),
        (2, 19.7, 11.64, 31.3, 7.34),
        (4, 19.6, 23.44, 31.4, 14.6),
        (8, 19.4, 47.28, 32.2, 28.53),
        (16, 18.9, 97.16, 33.4, 54.89),
        (32, 21.1, 173.58, 34.6, 105.95),
        (64, 26.2, 279.66, 36.4, 201.45),
        (128, 37.8, 387.86, 41.1, 356.77),
        (256, 61.5, 477.1, 59.7, 492.0),
        (512, 109.6, 535.94, 102.5, 572.9),
        (1024, 197.5, 594.74, 197.5, 594.69),
        (2048, 373.7, 628.54, 369.5, 635.66),
    ),
    64: (
        (1, 27.8, 4.12, 32.6, 3.52),
        (2, 24.8, 9.24, 32.2, 7.13),
        (4, 29.1, 15.74, 33.0, 13.92),
        (8, 20.4, 45.02, 33.3, 27.53),
        (16, 20.6, 89.14, 35.0, 52.46),
        (32, 23.1, 159.2, 36.1, 101.68),
        (64, 28.8, 255.24, 37.7, 194.7),
        (128, 41.6, 352.7, 44.5, 330.08),
        (256, 65.3, 449.76, 62.9, 466.65),
        (512, 115.7, 507.34, 106.7, 550.16),
        (1024, 209.4, 560.76, 199.2, 589.48),
        (2048, 399.2, 588.34, 372.1, 631.18),
    ),
}

#: Dispatch, 8 ranks, 2048 tokens: recipe -> us, GB/s.
RECIPES = {"bf16": (311.8, 753.3), "mxfp8": (172.2, 703.4), "nvfp4": (101.7, 649.3)}

#: 8 ranks, BF16: verb, tokens -> us.
WITHOUT_SYNC = {("dispatch", 1): 11.3, ("combine", 1): 28.1, ("combine", 2048): 278.5}

#: 32 ranks: verb, recipe -> us at the first of BATCHES.
ELSEWHERE = {
    ("dispatch", "nvfp4"): (
        *(23.70, 24.94, 23.79, 25.22, 24.67, 24.93),
        *(24.86, 28.56, 35.28, 49.65, 75.73, 125.71),
    ),
    ("combine", "bf16"): (28.46, 28.70, 28.74, 29.46, 31.09),
    ("combine", "fp8"): (18.11, 22.40, 22.38, 22.43, 23.10),
}

#: verb -> recipe, us.
SMALL_LAYER = {"dispatch": ("nvfp4", 13.8), "combine": ("bf16", 12.0)}


def tables() -> list[Published]:
    """The 96 figures of the four BF16 tables.

    Raises:
        TableError: a row's time and bandwidth contradict each other, or a row is missing.
    """
    found = []
    for ep_size, rows in TABLES.items():
        if tuple(row[0] for row in rows) != BATCHES:
            raise TableError(f"ep_size={ep_size}: the batches are not {BATCHES}; compare the table")
        for tokens, dispatch_us, dispatch_gb_s, combine_us, combine_gb_s in rows:
            for verb, us, gb_s in (
                ("dispatch", dispatch_us, dispatch_gb_s),
                ("combine", combine_us, combine_gb_s),
            ):
                found.append(Published("tables", verb, ep_size, tokens, "bf16", us, gb_s))
    return [checked(one) for one in found]


def without_sync() -> list[Published]:
    """Figures of kernels without flags and waits."""
    return [
        Published("without sync", verb, 8, tokens, "bf16", us, has_sync=False)
        for (verb, tokens), us in WITHOUT_SYNC.items()
    ]


def recipes() -> list[Published]:
    """Dispatch of quantised rows. Raises TableError as tables() does."""
    return [
        checked(Published("recipes", "dispatch", 8, 2048, recipe, us, gb_s))
        for recipe, (us, gb_s) in RECIPES.items()
        if recipe != "bf16"
    ]


def elsewhere() -> list[Published]:
    """The same kernels as somebody else timed them."""
    timed = [
        Published("elsewhere", verb, 32, tokens, recipe, us)
        for (verb, recipe), times in ELSEWHERE.items()
        for tokens, us in zip(BATCHES, times, strict=False)
    ]
    small = [
        Published("small layer", verb, 4, 4, recipe, us, hidden_size=2048, top_k=22)
        for verb, (recipe, us) in SMALL_LAYER.items()
    ]
    return timed + small


def checked(one: Published) -> Published:
    """`one`, whose bandwidth must be what its time and bytes make it.

    Raises:
        TableError: it is not, by more than what times of three digits and medians of their own
            (of times, of bandwidths) leave open.
    """
    rows = one.tokens * min(one.ep_size, one.top_k)
    derived = rows * one.row_bytes / one.us / 1e3
    if abs(derived / one.gb_s - 1.0) > TOLERANCE:
        raise TableError(
            f"{one.verb}, ep_size={one.ep_size}, {one.tokens} tokens: {one.us} us make "
            f"{derived:.1f} GB/s and the table says {one.gb_s}; compare it with the source"
        )
    return one


#: Of a bandwidth against its time: 17.6 us may stand for 17.56, and so on.
TOLERANCE = 0.003
