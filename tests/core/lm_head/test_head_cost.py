"""The rule that decides whether a draft step's vocabulary product is split."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvlink_plugin import HeadConfig, driver
from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.lm_head import cost as head_cost
from moe_nvlink_plugin.lm_head.cost import HeadShape, Rates

#: DeepSeek-R1's head in bf16, and a GPU of the machine that the observation was made on.
DEEPSEEK = HeadShape(129280, 7168, 2)
GB200 = head_cost.rates_of_gpu("NVIDIA GB200")

shapes = st.builds(
    HeadShape, st.integers(1, 300_000), st.integers(1, 20_000), st.sampled_from([2, 4])
)
rate = st.floats(1e6, 1e16)
all_rates = st.builds(Rates, rate, rate, rate, st.floats(0, 1e-2), st.booleans())
sizes = st.integers(2, 16)
few_rows = st.integers(1, 100)


# What the source document reports: 256 rows are about where memory stops being the bound, and 32
# rows a rank in groups of 4 pay.


def test_the_observed_boundary_between_memory_and_arithmetic() -> None:
    bound = max(
        rows
        for rows in range(1, 1024)
        if head_cost.step_seconds(DEEPSEEK, rows, 1, GB200)
        == head_cost.step_seconds(DEEPSEEK, 1, 1, GB200)
    )
    assert 200 < bound < 320


def test_the_observed_gain_of_groups_of_4_at_32_rows() -> None:
    alone, split = (head_cost.step_seconds(DEEPSEEK, 32, size, GB200) for size in (1, 4))
    assert split < alone / 2
    assert head_cost.choose_size(DEEPSEEK, (1, 4), 32, GB200) == 4
    assert 128 < head_cost.crossover_rows(DEEPSEEK, 4, GB200, 1024) <= 256


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"])
def test_larger_groups_pay_on_other_gpus_too(name: str) -> None:
    rates = head_cost.rates_of_gpu(name)
    for size in (2, 4, 8):
        assert head_cost.crossover_rows(DEEPSEEK, size, rates, 1024) >= 32


def test_a_small_head_is_not_worth_an_exchange() -> None:
    small = HeadShape(1024, 256, 2)
    assert head_cost.crossover_rows(small, 4, GB200, 1024) == 0
    assert head_cost.choose_size(small, (2, 4, 8), 1024, GB200) == 1


# The rule itself.


def product_s(read_s: float, multiply_s: float, rates: Rates) -> float:
    return max(read_s, multiply_s) if rates.overlaps else read_s + multiply_s


@settings(deadline=None)
@given(shapes, few_rows, all_rates)
def test_size_1_is_the_whole_head(shape: HeadShape, rows: int, rates: Rates) -> None:
    elements = shape.vocab_size * shape.hidden_size
    read_s = elements * shape.element_bytes / rates.read_bytes_per_s
    expected = product_s(read_s, 2 * rows * elements / rates.flops_per_s, rates)
    assert head_cost.step_seconds(shape, rows, 1, rates) == pytest.approx(expected)
    assert head_cost.exchanged_bytes(shape, rows, 1) == 0


@settings(deadline=None)
@given(few_rows, all_rates)
def test_a_group_reads_its_share_and_multiplies_as_much(rows: int, rates: Rates) -> None:
    elements = 129280 * 7168
    read_s = elements / 4 * 2 / rates.read_bytes_per_s
    work_s = product_s(read_s, 2 * rows * elements / rates.flops_per_s, rates)
    moved = rows * 3 * 7168 * 2 + rows * 3 * 8
    expected = work_s + rates.exchange_s + moved / rates.link_bytes_per_s
    assert head_cost.step_seconds(DEEPSEEK, rows, 4, rates) == pytest.approx(expected)


@settings(deadline=None)
@given(st.integers(1, 300_000), sizes)
def test_the_share_is_that_of_the_first_rank(vocab_size: int, size: int) -> None:
    """And no rank has a larger one. In time: reading one byte a second, the rest for nothing."""
    config = HeadConfig(
        tp_size=size, tp_rank=0, vocab_size=vocab_size, hidden_size=1, max_rows_per_rank=1
    )
    widths = [end - first for first, end in map(config.shard, range(size))]
    rates = Rates(1.0, 1e300, 1e300, 0.0)
    seconds = head_cost.step_seconds(HeadShape(vocab_size, 1, 1), 1, size, rates)
    assert seconds == pytest.approx(max(widths))
    assert widths[0] == max(widths)


@settings(deadline=None)
@given(shapes, few_rows, st.integers(1, 16), all_rates)
def test_more_rows_and_slower_rates_never_take_less(
    shape: HeadShape, rows: int, size: int, rates: Rates
) -> None:
    seconds = head_cost.step_seconds(shape, rows, size, rates)
    assert head_cost.step_seconds(shape, rows + 1, size, rates) >= seconds
    assert head_cost.step_seconds(shape, rows, size, rates._replace(overlaps=False)) >= seconds
    for field, value in rates._asdict().items():
        if field == "overlaps":
            continue
        worse = value * 2 if field == "exchange_s" else value / 2
        other = rates._replace(**{field: worse})
        assert head_cost.step_seconds(shape, rows, size, other) >= seconds


@settings(deadline=None)
@given(shapes, sizes, all_rates, few_rows)
def test_the_crossover_is_where_the_times_cross(
    shape: HeadShape, size: int, rates: Rates, most_rows: int
) -> None:
    crossover = head_cost.crossover_rows(shape, size, rates, most_rows)
    assert 0 <= crossover <= most_rows
    for rows in range(1, most_rows + 1):
        split, alone = (head_cost.step_seconds(shape, rows, n, rates) for n in (size, 1))
        assert (split < alone) == (rows <= crossover)


@settings(deadline=None)
@given(shapes, st.sets(sizes, max_size=4), all_rates, few_rows)
def test_the_chosen_size_pays(
    shape: HeadShape, candidates: set[int], rates: Rates, most_rows: int
) -> None:
    chosen = head_cost.choose_size(shape, candidates, most_rows, rates)
    assert chosen in candidates | {1}
    sampled = [n for n in (2**power for power in range(7)) if n < most_rows] + [most_rows]

    def seconds(size: int) -> float:
        """What a server with groups of this size pays: it splits where that is faster."""
        crossover = head_cost.crossover_rows(shape, size, rates, most_rows)
        return sum(
            head_cost.step_seconds(shape, rows, size if rows <= crossover else 1, rates)
            for rows in sampled
        )

    if chosen > 1:
        assert head_cost.crossover_rows(shape, chosen, rates, most_rows) > 0
        assert seconds(chosen) < seconds(1)
    for candidate in candidates:
        assert seconds(chosen) <= seconds(candidate) * (1 + 1e-9)


def test_of_equal_sizes_the_smaller_is_chosen() -> None:
    """Arithmetic is the bound in either, and the exchange is free."""
    rates = Rates(1e12, 1e12, 1e300, 0.0)
    shape = HeadShape(1024, 64, 8)
    sampled = [head_cost.step_seconds(shape, 1, size, rates) for size in (1, 4, 8)]
    assert sampled[0] > sampled[1] == sampled[2]
    assert head_cost.choose_size(shape, (8, 4), 1, rates) == 4


# Rates.


@pytest.mark.parametrize("name", ["NVIDIA RTX 6000", "unknown", "", "NVIDIA H100 MIG 1g.10gb"])
def test_an_unknown_gpu_splits_no_more_than_any_known_one(name: str) -> None:
    unknown = head_cost.rates_of_gpu(name)
    for words in head_cost.DATA_SHEETS:
        known = head_cost.rates_of_gpu(" ".join(words))
        for size in (2, 4, 8):
            least, other = (
                head_cost.crossover_rows(DEEPSEEK, size, rates, 1024) for rates in (unknown, known)
            )
            assert least <= other


def test_rates_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = mock.Mock()
    device.return_value.name = "NVIDIA H200"
    monkeypatch.setattr(driver, "device", device)
    found = head_cost.rates_of(torch.device("cuda", 3), 4)
    assert found == head_cost.rates_of_gpu("NVIDIA H200", 4)
    assert head_cost.rates_of(torch.device("cuda")) == head_cost.rates_of_gpu("NVIDIA H200")
    assert device.call_args_list == [mock.call(3), mock.call(0)]
    assert head_cost.rates_of(torch.device("cpu"), 4) == head_cost.CPU_RATES[4]


def test_a_gpu_that_no_driver_names_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = mock.Mock(side_effect=UnsupportedError("no CUDA driver"))
    monkeypatch.setattr(driver, "device", missing)
    assert head_cost.rates_of(torch.device("cuda")) == head_cost.rates_of_gpu("unknown")


# What is refused, and what is said.


@pytest.mark.parametrize(
    ("shape", "rows", "size", "what"),
    [
        (DEEPSEEK, 0, 4, "rows=0"),
        (DEEPSEEK, 1, 0, "tp_size=0"),
        (DEEPSEEK, True, 4, "rows=True"),
        (HeadShape(0, 7168, 2), 1, 4, "vocab_size=0"),
        (HeadShape(129280, -1, 2), 1, 4, "hidden_size=-1"),
    ],
)
def test_sizes_that_are_none(shape: HeadShape, rows: int, size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} must be an integer from 1 to"):
        head_cost.step_seconds(shape, rows, size, GB200)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="most_rows=0"):
        head_cost.crossover_rows(DEEPSEEK, 4, GB200, 0)
    with pytest.raises(ConfigError, match="most_rows=-3"):
        head_cost.choose_size(DEEPSEEK, (2, 4), -3, GB200)
    with pytest.raises(ConfigError, match="tp_size=-2"):
        head_cost.choose_size(DEEPSEEK, (-2, 4), 32, GB200)
    for field in ("read_bytes_per_s", "link_bytes_per_s", "flops_per_s"):
        stopped: dict[str, Any] = {field: 0.0}
        with pytest.raises(ConfigError, match=f"{field}=0.*rates_of"):
            head_cost.step_seconds(DEEPSEEK, 1, 4, GB200._replace(**stopped))
    with pytest.raises(ConfigError, match="exchange_s=nan"):
        head_cost.report(DEEPSEEK, 4, 32, GB200._replace(exchange_s=float("nan")))
    with pytest.raises(ConfigError, match="element_bytes=1"):
        head_cost.rates_of(torch.device("cpu"), 1)
