"""Experts' rows that travel back quantised: the kernel against combine_formats.py bit for bit, and
the error of a sum against its bound.

Rank k of these exchanges owns expert k, and every token of rank 0 goes to all of them: so the rows
that are added up are whatever a test wants them to be. On CPU ranks, which run the kernels' text;
what a GPU makes of it is in test_sass.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, reference
from moe_nvlink_plugin.config import COMBINE_FORMATS
from moe_nvlink_plugin.exchange.calls import Combine, Dispatch
from moe_nvlink_plugin.jit import header, host
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.recipes import combine_formats
from moe_nvlink_plugin.recipes.combine_formats import (
    FORMATS,
    Fp8TensorFormat,
    QuantisedPartialRows,
    error_bound,
)
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from moe_nvlink_plugin.verify.compare import assert_same_bits, one_nan, unsigned_nan
from tests.kernels.formats.test_quantisers import on_host
from tests.kernels.test_specialised import AS_ON_THE_GPU
from tests.support import case_list, delays, kernel_texts
from tests.support.delays import replace_once

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

each_format = pytest.mark.parametrize("name", FORMATS)


class Outcome(NamedTuple):
    """What one exchange left."""

    combined: torch.Tensor  # [n, H]
    quantised: list[QuantisedPartialRows]  # by rank, rows in the tokens' order
    untouched: bool  # no byte of a slot that was not filled was written
    bytes_combined: int


def config(
    partial_rows: torch.Tensor, name: str, rank: int, num_threads: int, scale: float = 1.0
) -> AllToAllConfig:
    num_tokens, top_k, hidden_size = partial_rows.shape
    return AllToAllConfig(
        ep_size=top_k,
        ep_rank=rank,
        num_experts=top_k,
        top_k=top_k,
        hidden_size=hidden_size,
        max_tokens_per_rank=num_tokens + 3,
        dtype=partial_rows.dtype,
        combine=name,
        combine_scale=scale,
        num_threads=num_threads,
        timeout_s=60.0,
    )


def exchange(
    partial_rows: torch.Tensor,
    name: str,
    num_threads: int = 2,
    hidden_splits: int = 1,
    *,
    scale: float = 1.0,
) -> Outcome:
    """`partial_rows[token, k]` is what rank k's expert makes of rank 0's token."""
    num_tokens, top_k, hidden_size = partial_rows.shape

    def rank_main(group: ThreadGroup) -> Outcome:
        mine = config(partial_rows, name, group.rank, num_threads, scale)
        count = num_tokens if group.rank == 0 else 0
        ids = torch.arange(top_k, dtype=torch.int32).repeat(count, 1)
        numbers = torch.arange(count, dtype=FP32)[:, None].repeat(1, top_k)
        with MoeAllToAll.create(mine, group) as layer:
            layer._layer.channel(0)._combine_args.hidden_splits = hidden_splits
            regions = quantised_regions(layer)
            for region in regions.values():
                region.fill_(0xA5)
            received = layer.dispatch(
                torch.zeros(count, hidden_size, dtype=mine.dtype), ids, numbers
            )
            rows = layer.combine_input()
            rows.fill_(math.nan)  # of slots that are not filled: nobody may look
            tokens = received.topk_weights[:num_tokens, 0].long()
            rows[:num_tokens] = partial_rows[tokens, group.rank]
            combined = layer.combine(rows, received.metadata)
            places = tokens.argsort()
            read = {key: region[places].clone() for key, region in regions.items()}
            untouched = all(bool((one[num_tokens:] == 0xA5).all()) for one in regions.values())
            total = layer.stats().bytes_combined
            return Outcome(combined, [as_rows(read, name, hidden_size)], untouched, total)

    outcomes = run_ranks(top_k, rank_main)
    quantised = [one.quantised[0] for one in outcomes]
    untouched = all(one.untouched for one in outcomes)
    return Outcome(outcomes[0].combined, quantised, untouched, outcomes[0].bytes_combined)


def quantised_regions(layer: MoeAllToAll) -> dict[str, torch.Tensor]:
    """The regions of combine's quantised rows as bytes, `[slots, row_bytes]`."""
    channel = layer._layer.channel(0)
    slots = channel.combine_region.shape[0]
    rows = combine_formats.combine_rows(layer.config.combine, layer.config.hidden_size)
    return {
        key: channel._workspace.region_bytes(channel.regions[key], slots * row.row_bytes).view(
            slots, row.row_bytes
        )
        for key, row in rows.items()
    }


def as_rows(read: dict[str, torch.Tensor], name: str, hidden_size: int) -> QuantisedPartialRows:
    rows = combine_formats.combine_rows(name, hidden_size)
    typed = {key: bytes_.view(rows[key].dtype) for key, bytes_ in read.items()}
    empty = torch.empty(0)
    return QuantisedPartialRows(
        typed.get("combine_rows", empty),
        typed.get("combine_scales", empty),
        typed.get("combine_row_scales"),
    )


def sum_of(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pairwise tree over `[n, k, H]` fp32, rounded once."""
    total = reference.pairwise_tree(list(terms.unbind(1)))
    assert total is not None
    return total.to(dtype)


def expected(partial_rows: torch.Tensor, name: str) -> torch.Tensor:
    terms = partial_rows.flatten(0, 1).float()
    found = combine_formats.combine_format(name)
    if found is not None:
        terms = found.dequantise(found.quantise(partial_rows.flatten(0, 1)))
    return sum_of(terms.view(partial_rows.shape), partial_rows.dtype)


# ---- Rows.


def gaussian(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Student's t with two degrees of freedom: no variance, in every row some very large values."""
    normal = torch.randn((3, *shape), generator=generator)
    return normal[0] / (normal[1:].square().sum(0) / 2).sqrt()


def outlier_channels(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A few channels, the same in every row, a thousand times as large as the others."""
    rows = torch.randn(shape, generator=generator)
    rows[..., 5::256] *= 1000.0
    return rows


DISTRIBUTIONS = {one.__name__: one for one in (gaussian, heavy_tailed, outlier_channels)}
each_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS)


def draw(
    distribution: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1
) -> torch.Tensor:
    make: Callable[..., torch.Tensor] = DISTRIBUTIONS[distribution]
    return make(shape, torch.Generator().manual_seed(seed)).to(dtype)


def special_rows(hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows on which a quantiser may go wrong, `[n, H]`."""
    g = torch.Generator().manual_seed(3)
    rows = torch.randn((24, hidden_size), generator=g)
    rows[0] = 0.0
    rows[1] = -0.0
    for row, value in enumerate((math.nan, math.inf, -math.inf), 2):
        rows[row, hidden_size // 3] = value
    rows[5, ::17] = math.nan
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    rows[6] *= smallest
    rows[7] *= smallest / 64  # subnormal numbers
    rows[8] = rows[8].clamp(-1, 1) * largest
    rows[9, 1] = largest  # and nothing else of that size
    rows[10, :16] = 0.0
    rows[11, 16:] = 0.0
    rows[12] *= 1e-9  # below the least amax of fp8_block
    # Blocks of all sizes in one row: scales that are subnormal or zero in e4m3.
    sizes = torch.exp2(-torch.arange(hidden_size // 16) % 40).float()
    rows[13:17] *= sizes.repeat_interleave(16)
    # Ties of e2m1 and e4m3 under a scale of 1.
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 0.0, -0.0])
    rows[17] = ties.repeat(hidden_size)[:hidden_size]
    rows[17, 0] = 2688.0
    e4m3_ties = torch.tensor([448.0, 17.0, 19.0, 0.5 * 2**-9, 1.5 * 2**-9, -432.0, 440.0, 1.0625])
    rows[18] = e4m3_ties.repeat(hidden_size)[:hidden_size]
    return rows.to(dtype)


def all_patterns(hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return patterns.view(-1, hidden_size)


# ---- Bits.


def check_bits(
    partial_rows: torch.Tensor, name: str, num_threads: int = 2, hidden_splits: int = 1
) -> Outcome:
    outcome = exchange(partial_rows, name, num_threads, hidden_splits)
    found = combine_formats.combine_format(name)
    assert found is not None
    for rank, quantised in enumerate(outcome.quantised):
        wanted = found.quantise(partial_rows[:, rank])
        for part, actual, reference_ in zip(wanted._fields, quantised, wanted, strict=True):
            if reference_ is not None:
                assert actual is not None
                what = f"{name}: {part} of rank {rank}"
                assert_same_bits(plain(actual), plain(reference_), what)
    assert outcome.untouched, "a slot that nobody filled was written"
    total = expected(partial_rows, name)
    assert_same_bits(one_nan(outcome.combined), one_nan(total), f"{name}: combined")
    return outcome


def plain(rows: torch.Tensor) -> torch.Tensor:
    """Without the sign of a NaN, which is the machine's business."""
    return one_nan(rows) if rows.dtype == FP32 else unsigned_nan(rows)


@each_format
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("hidden_size", [128, 2304])
def test_special_rows(name: str, dtype: torch.dtype, hidden_size: int) -> None:
    """Three ranks, each with the rows in another order."""
    rows = special_rows(hidden_size, dtype)
    check_bits(torch.stack([rows, rows.flip(0), rows.roll(5, 0)], 1), name)


@each_format
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_pattern(name: str, dtype: torch.dtype) -> None:
    """Rows of neighbours, and rows in which the patterns are spread over all magnitudes."""
    rows = all_patterns(512, dtype)
    spread = rows.flatten()[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    check_bits(torch.cat([rows, spread.view(-1, 128).repeat(1, 4)[::4]])[:, None], name)


def every_code_and_scale(name: str) -> QuantisedPartialRows:
    """Three rows in which each code meets each scale of a block, at other places in each row.

    Of e4m3 a scale is any number up to a 448th of fp32's largest, infinity, or NaN.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "nvfp4":  # two codes to a byte, so 32 blocks have them all
        rows, scales = codes.repeat(256), codes.repeat_interleave(32).view(torch.float8_e4m3fn)
        row_scales = torch.tensor([[2.0**-100], [math.inf], [0.7]])
        turned = torch.stack([rows.roll(places) for places in (0, 40, 104)])
        return QuantisedPartialRows(turned, turned_alike(scales), row_scales)
    if name == "fp8_tensor":
        turned = torch.stack([codes.roll(places) for places in (0, 77, 130)])
        return QuantisedPartialRows(turned.view(torch.float8_e4m3fn), None, None)
    drawn = torch.exp2(torch.linspace(-60, 118, 56)) * 1.37
    others = [1e-10 / 448, 2.0**-126, 2.0**119, 1.0, 0.0, math.inf, math.nan]
    scales = torch.cat([drawn, torch.tensor(others)])
    rows = codes.repeat(len(scales))
    turned = torch.stack([rows.roll(places) for places in (0, 77, 130)])
    scales = turned_alike(scales.repeat_interleave(2))
    return QuantisedPartialRows(turned.view(torch.float8_e4m3fn), scales, None)


def turned_alike(scales: torch.Tensor) -> torch.Tensor:
    raw = scales.view(torch.uint8 if scales.itemsize == 1 else torch.int32)
    return torch.stack([raw, raw.roll(3), raw.flip(0)]).view(scales.dtype)


@each_format
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_code_and_scale(name: str, dtype: torch.dtype) -> None:
    check_every_code_and_scale(name, dtype, on_host, torch.Tensor.data_ptr)


def check_every_code_and_scale(
    name: str,
    dtype: torch.dtype,
    call: Callable[..., None],
    address_of: Callable[[torch.Tensor], int],
) -> None:
    """Of one row and of three, without a quantiser, which would not make all of them."""
    quantised = every_code_and_scale(name)
    found = combine_formats.combine_format(name)
    assert found is not None
    terms = found.dequantise(quantised)
    hidden_size = terms.shape[1]
    codes = header.combine_formats()[name], element_code(dtype)
    for ks in ([0], [1], [2], [0, 1, 2]):
        parts = [[0 if one is None else address_of(one[k]) for one in quantised] for k in ks]
        rows, combined = torch.tensor(parts), torch.empty(hidden_size, dtype=dtype)
        call("sum_quantised_rows", *codes, rows, combined, len(ks), hidden_size)
        wanted = sum_of(terms[None, ks], dtype)[0]
        assert_same_bits(one_nan(combined), one_nan(wanted), f"{name}: rows {ks}")


def test_sizes_that_no_wide_step_divides() -> None:
    """nvfp4 and fp8_tensor take every multiple of 16."""
    for hidden_size in (16, 48, 80, 144, 208):
        rows = draw("heavy_tailed", (5, 2, hidden_size), BF16)
        for name in ("nvfp4", "fp8_tensor"):
            check_bits(rows, name, hidden_splits=3)


@each_format
@each_distribution
def test_sums_over_many_ranks(name: str, distribution: str) -> None:
    rows = draw(distribution, (9, 7, 256), BF16)
    outcome = check_bits(rows, name, num_threads=3, hidden_splits=2)
    row_bytes = {"fp8_block": 256 + 2 * 4, "nvfp4": 128 + 16 + 4, "fp8_tensor": 256}[name]
    assert outcome.bytes_combined == 9 * 7 * row_bytes


def test_without_a_format_the_rows_travel_as_they_are() -> None:
    """The same bits as ever: partial rows widened, added by the tree, rounded once."""
    for dtype in (BF16, FP16, FP32):
        rows = torch.stack([special_rows(640, dtype), special_rows(640, dtype).roll(1, 0)], 1)
        outcome = exchange(rows, "bf16")
        assert_same_bits(one_nan(outcome.combined), one_nan(expected(rows, "bf16")), str(dtype))
        assert outcome.bytes_combined == rows.nbytes


@pytest.mark.long
def test_with_the_constants_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow parts, absent rows as -0.0, four threads a CTA: the branches the host leaves out."""
    text = kernel_texts.host_source()
    for host_line, gpu_line in AS_ON_THE_GPU.items():
        text = replace_once(text, host_line, gpu_line)
    flags = (*("-O1" if flag == "-O3" else flag for flag in host.FLAGS),)
    library = host.HostLibrary(host.build(text, (*flags, "-DMOE_NVLINK_CTA_THREADS=4")))
    monkeypatch.setattr(host, "load", lambda _text: library)
    for name in FORMATS:
        for dtype in (BF16, FP32):
            rows = special_rows(640, dtype)
            check_bits(torch.stack([rows, rows.flip(0)], 1), name, hidden_splits=3)
        case = cases.Case(
            name=name,
            tokens=(8, 4),
            top_k=6,
            num_experts=9,
            hidden_size=256,
            routing="invalid",
            combine=name,
        )
        case_list.check_case(case)


# ---- What a NaN, an infinity or nothing at all becomes.


@each_format
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_visible_and_with_its_token(name: str, bad: float) -> None:
    rows = draw("gaussian", (4, 2, 256), BF16)
    clean = exchange(rows, name).combined
    rows[1, 0, 200] = bad
    combined = exchange(rows, name).combined
    # Its block, or with a scale for the row all of it; itself under a scale that nothing changes.
    lost = {"fp8_block": slice(128, 256), "nvfp4": slice(256), "fp8_tensor": slice(200, 201)}[name]
    assert bool(combined[1, lost].isnan().all())
    combined[1, lost] = clean[1, lost]
    assert_same_bits(combined[1], clean[1], "other blocks")
    assert_same_bits(combined[[0, 2, 3]], clean[[0, 2, 3]], "other tokens")


@each_format
def test_zeros_and_tiny_rows(name: str) -> None:
    rows = torch.zeros(3, 2, 128)
    rows[1] = 1e-40
    rows[2, :, ::2] = 1e-30
    combined = exchange(rows, name).combined
    assert bool((combined[0] == 0).all())
    bound = error_bound(rows, name)
    assert bool(((combined.double() - rows.double().sum(1)).abs() <= bound).all())
    assert float(bound.max()) < 1e-29, "of tiny rows nothing but themselves may be lost"


# ---- The error.


def errors(rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(|combine's result - the exact sum|, the bound on it), fp64."""
    combined = exchange(rows, name).combined
    return (combined.double() - rows.double().sum(1)).abs(), error_bound(rows, name)


#: What a sum reaches of its bound. With one row the bound is that of the row's blocks, and some
#: element comes as close to a tie as numbers do; with several they would all have to at once.
SHARES = {(FP32, 1): 0.999, (FP16, 5): 0.85, (BF16, 8): 0.7}


@each_format
@each_distribution
@pytest.mark.parametrize(("dtype", "top_k"), SHARES)
def test_error_is_within_its_bound(
    name: str, distribution: str, dtype: torch.dtype, top_k: int
) -> None:
    error, bound = errors(draw(distribution, (24, top_k, 1024), dtype), name)
    assert bool((error <= bound).all())
    # Nor is the bound empty talk.
    assert float((error / bound).max()) > SHARES[dtype, top_k]


@each_distribution
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("scale", [0.0123, 2.0**-20, 3e5, 2.0**100])
def test_a_scale_of_the_caller(distribution: str, dtype: torch.dtype, scale: float) -> None:
    """Saturation and all that rounds to zero included. The codes are added up, then scaled."""
    rows = draw(distribution, (24, 3, 272), dtype)
    outcome = exchange(rows, "fp8_tensor", scale=scale)
    codes = Fp8TensorFormat(scale).quantise(rows.flatten(0, 1)).rows.view(rows.shape)
    for rank, quantised in enumerate(outcome.quantised):
        assert torch.equal(quantised.rows.view(torch.uint8), codes[:, rank].view(torch.uint8))
    wanted = (sum_of(codes.float(), FP32) * torch.tensor(scale)).to(dtype)
    assert_same_bits(one_nan(outcome.combined), one_nan(wanted), "combined")
    error = (outcome.combined.double() - rows.double().sum(1)).abs()
    assert bool((error <= error_bound(rows, "fp8_tensor", scale=scale)).all())


def test_without_a_scale_the_rows_are_cast() -> None:
    """As FlashInfer and TensorRT-LLM cast them, which saturates."""
    rows = draw("outlier_channels", (32, 8, 1024), BF16)
    cast = rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    combined = exchange(rows, "fp8_tensor").combined
    assert_same_bits(combined, sum_of(cast, BF16), "a sum of casts")


# ---- Names, sizes, failures.


@pytest.mark.parametrize("name", COMBINE_FORMATS)
def test_one_place_on_the_gpu_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream's kernel holds all places but one, and waits for what follows this combine.

    The CTAs of a combine then run one after another. Those that run must not wait for the others.
    With a format any CTA may be the first; without one it is CTA 0, as on GPUs.
    """
    case = Case(
        name=f"one place, {name}",
        tokens=(8, 0, 5),
        num_experts=7,
        top_k=3,
        hidden_size=256,
        num_threads=4,
        combine=name,
        timeout_s=15.0,
    )
    library = delays.few_places(1, last_first=name != "bf16")
    monkeypatch.setattr(host, "load", lambda _text: library)
    case_list.check_case(case)


def test_a_failed_rank_quantises_and_signals_nothing() -> None:
    """Rank 1 does not come to combine. Rank 0 has quantised its rows by then and told rank 1; in a
    round that it goes on with, as a graph would, it does neither.
    """
    rows = draw("gaussian", (4, 2, 128), BF16)

    def rank_main(group: ThreadGroup) -> tuple[list[bool], list[bool], list[int]]:
        mine = dataclasses.replace(config(rows, "nvfp4", group.rank, 2), timeout_s=0.5)
        with MoeAllToAll.create(mine, group) as layer:
            channel, regions = layer._layer.channel(0), quantised_regions(layer)
            ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32)
            hidden, handle = rows[:, 0].contiguous(), layer._layer.handle
            call = Dispatch(hidden, None, ids, torch.ones(4, 2), [], None, handle, 0)
            cells = channel._workspace.words(channel.regions["combine_cells"], 4, torch.int32)
            is_nan, quantised, signalled = [], [], []
            for number in range(2):
                for region in regions.values():
                    region.fill_(0xA5)
                output = torch.zeros(4, 128, dtype=BF16)
                if group.rank == 0 or number == 0:
                    slots = channel.dispatch(call, 4, 0, ())
                if group.rank == 0:
                    sums = Combine(channel.combine_region, slots, output, handle, 0)
                    channel.combine(sums, output)
                group.all_gather_object(None)
                is_nan.append(bool(output.isnan().all()))
                quantised.append(any(bool((one != 0xA5).any()) for one in regions.values()))
                signalled.append(int(cells[0]))  # the epoch in rank 0's cell
                group.all_gather_object(None)
            return is_nan, quantised, signalled

    (is_nan, quantised, _), (_, other_quantised, signalled) = run_ranks(2, rank_main)
    assert is_nan == [True, True]
    assert quantised == [True, False]
    assert signalled == [1, 1]
    assert other_quantised == [False, False]
