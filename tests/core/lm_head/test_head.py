"""sharded_argmax and sharded_logits against torch over the whole head, between CPU ranks."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_nvlink_plugin import (
    HeadConfig,
    HeadGroup,
    HeadStats,
    MoeAllToAll,
    sharded_argmax,
    sharded_logits,
)
from moe_nvlink_plugin.errors import ConfigError, DisagreementError, ExchangeStateError, PeerError
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.lm_head.config import MAX_VOCAB_SIZE
from moe_nvlink_plugin.lm_head.kernels import ARGMAX, GATHER
from moe_nvlink_plugin.lm_head.launches import head_arguments, head_layout
from moe_nvlink_plugin.memory.layout import REGION_ALIGNMENT
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.core.exchange import small_exchange
from tests.support import kernel_texts
from tests.support.small_head import (
    CAPACITY,
    VOCAB,
    Problem,
    check_argmax,
    check_logits,
    config,
    ids_of,
    logits_of,
    problem,
)

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(problems: list[Problem], tp_size: int, *, both: bool = False, **values: Any) -> None:
    """One group, a call for each problem, every rank of it held to torch."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(tp_size, group.rank, full_logits=both, **values)
        with HeadGroup.create(mine, group) as head:
            for one in problems:
                check_argmax(head, one)
                if both:
                    check_logits(head, one)

    run_ranks(tp_size, rank_main)


# Any number of rows, ranks and vocabulary rows.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_ragged_rows(dtype: torch.dtype, num_threads: int) -> None:
    """From no rows at all to the capacity everywhere; 50 ids on 4 ranks are 16, 16, 16 and 2."""
    counts = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [4, 0, 2, 1], [3, 1, 4, 2], [4, 4, 4, 4]]
    mine = config(4, dtype=dtype)
    problems = [problem(mine, each, seed) for seed, each in enumerate(counts)]
    check(problems, 4, both=True, dtype=dtype, num_threads=num_threads)


@pytest.mark.parametrize("tp_size", range(1, 9))
def test_any_number_of_ranks(tp_size: int) -> None:
    """40 ids on 4 ranks are 16, 16, 8 and none; 41 on 8 leave four ranks without any."""
    for vocab_size in (40, 41, 128, 1):
        mine = config(tp_size, vocab_size=vocab_size)
        counts = [(3 * rank + 1) % (CAPACITY + 1) for rank in range(tp_size)]
        check([problem(mine, counts, vocab_size)], tp_size, both=True, vocab_size=vocab_size)


def test_shards() -> None:
    mine = config(4, 3, vocab_size=40)
    assert mine.shard_size == 16
    assert [mine.shard(rank) for rank in range(4)] == [(0, 16), (16, 32), (32, 40), (40, 40)]
    assert config(4, vocab_size=129280).shard_size == 32320
    assert config(8, vocab_size=151936).shard_size == 18992


@given(
    tp_size=st.integers(1, 5),
    vocab_size=st.integers(1, 300),
    hidden_size=st.integers(1, 24),
    capacity=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(0, 20),
    bias=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_shapes(
    tp_size: int,
    vocab_size: int,
    hidden_size: int,
    capacity: int,
    dtype: torch.dtype,
    padding: int,
    bias: bool,
    num_threads: int,
    seed: int,
    data: st.DataObject,
) -> None:
    values: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    values |= {"max_rows_per_rank": capacity, "dtype": dtype}
    counts = data.draw(st.lists(st.integers(0, capacity), min_size=tp_size, max_size=tp_size))
    one = problem(config(tp_size, **values), counts, seed, padding=padding, bias=bias)
    check([one], tp_size, both=True, num_threads=num_threads, **values)


@pytest.mark.parametrize("row_bound", [1, 2, 3])
def test_a_bound_below_the_capacity(row_bound: int) -> None:
    """Slices lie closer together then; calls with other bounds, larger and smaller, follow."""
    mine = config(3)
    one = problem(mine, [row_bound, 0, 1], row_bound)
    full = problem(mine, [CAPACITY] * 3, 9)

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(3, group.rank, full_logits=True), group) as head:
            for _ in range(2):
                check_argmax(head, full)
                check_logits(head, one, row_bound=row_bound)
                check_argmax(head, one, row_bound=row_bound)

    run_ranks(3, rank_main)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_never_wins(dtype: torch.dtype) -> None:
    """Rows of the head behind the vocabulary, NaN and infinity, bias too."""
    mine = config(4, dtype=dtype)
    counts = [4, 3, 2, 1]
    with_bias = problem(mine, counts, 1, padding=14, bias=True)
    check([problem(mine, counts, padding=1), with_bias], 4, both=True, dtype=dtype)


# Values that compare in their own ways. hidden_size 1: a logit is the product of two numbers.


def given_logits(
    logits: list[float], dtype: torch.dtype = torch.float32, *, rows: int = 2, **function: float
) -> Problem:
    """Rows of these logits on rank 0 alone."""
    hidden = [torch.ones(rows, 1, dtype=dtype)] + [torch.ones(0, 1, dtype=dtype)] * 2
    return Problem(hidden, torch.tensor(logits, dtype=dtype)[:, None], None, function)


def found(one: Problem, **values: Any) -> list[int]:
    """The token ids that three ranks find for rank 0's rows; held to torch's too."""
    values = {"hidden_size": 1, "vocab_size": len(one.weight), "dtype": one.weight.dtype} | values

    def rank_main(group: ThreadGroup) -> list[int]:
        with HeadGroup.create(config(3, group.rank, **values), group) as head:
            check_argmax(head, one)
            rows = one.rows[group.rank]
            return sharded_argmax(rows, one.weight, group=head, **one.options()).tolist()

    return run_ranks(3, rank_main)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_of_equal_values_the_lowest_id_wins(dtype: torch.dtype, num_threads: int) -> None:
    """Within a shard (of 16), within a vector, across shards, at both ends."""
    for places in ([47, 16, 15], [31, 30], [0, 47], [5, 6, 7], list(range(48)), [33]):
        logits = [-1.0] * 48
        for place in places:
            logits[place] = 2.0
        one = given_logits(logits, dtype)
        assert found(one, num_threads=num_threads) == [min(places)] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_larger_than_everything(dtype: torch.dtype) -> None:
    """As torch's argmax has it: the first NaN, whatever its sign, above infinity too."""
    logits = [0.0] * 48
    logits[3], logits[40] = INF, NAN
    assert found(given_logits(logits, dtype)) == [40, 40]
    logits[20] = -NAN
    assert found(given_logits(logits, dtype)) == [20, 20]
    assert found(given_logits([NAN] * 48, dtype)) == [0, 0]
    # What soft cap and scale make of infinity.
    assert found(given_logits([0.0] * 20 + [-INF] * 28, dtype, scale=0.0)) == [20, 20]


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities(dtype: torch.dtype) -> None:
    assert found(given_logits([-INF] * 48, dtype)) == [0, 0]
    assert found(given_logits([-INF] * 47 + [-60000.0], dtype)) == [47, 47]
    two = [INF if i in (17, 35) else 9.0 for i in range(48)]
    assert found(given_logits(two, dtype)) == [17, 17]
    assert found(given_logits([INF] * 48, dtype, scale=-1.0)) == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_equal(dtype: torch.dtype) -> None:
    """Negative zero is not below zero, nor zero above it."""
    assert found(given_logits([-1.0] * 5 + [-0.0] * 20 + [0.0] * 23, dtype)) == [5, 5]
    assert found(given_logits([-1.0] * 5 + [0.0] * 20 + [-0.0] * 23, dtype)) == [5, 5]
    tiny = torch.finfo(dtype).smallest_normal
    assert found(given_logits([-tiny] * 5 + [-0.0] * 20 + [tiny] * 23, dtype)) == [25, 25]


# Bias, soft cap and scale.


@pytest.mark.parametrize("scale", [1.0, 0.25, -1.0, -3.5, 0.0, 1e-30])
@pytest.mark.parametrize("soft_cap", [None, 30.0, 1e6])
def test_soft_cap_and_scale(soft_cap: float | None, scale: float) -> None:
    mine = config(3)
    function = {"scale": scale} | ({} if soft_cap is None else {"soft_cap": soft_cap})
    one = problem(mine, [4, 0, 3], 5, bias=True)._replace(function=function)
    check([one], 3)


def test_a_saturated_cap_makes_ties() -> None:
    """tanh is 1 for all of them in float32, so the lowest id wins and not the largest logit."""
    logits = [0.0] * 20 + [float(100 + i) for i in range(28)]
    assert found(given_logits(logits, soft_cap=1.0)) == [20, 20]
    assert found(given_logits(logits, soft_cap=1000.0)) == [47, 47]


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_and_scale_of_all_logits(dtype: torch.dtype) -> None:
    """torch's own operations in the head's type; its vector code may differ by the rank's shape."""
    mine = config(2, dtype=dtype)
    one = problem(mine, [3, 1], 6)
    function: dict[str, Any] = {"soft_cap": 30.0, "scale": -0.5}

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(2, group.rank, dtype=dtype, full_logits=True), group) as head:
            rows = one.rows[group.rank]
            logits = sharded_logits(rows, one.weight, group=head, **function)
            expected = 30.0 * torch.tanh(logits_of(mine, one, group.rank) / 30.0) * -0.5
            torch.testing.assert_close(logits, expected)

    run_ranks(2, rank_main)


# Products that are not exact.


def test_logits_of_real_numbers() -> None:
    """Each is a sum of 64 products in some order: within the bound of any order's rounding."""
    mine = config(3, hidden_size=64, max_rows_per_rank=8)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(n, 64, generator=generator) for n in (8, 0, 5)]
    weight = torch.randn(VOCAB, 64, generator=generator)

    def rank_main(group: ThreadGroup) -> None:
        values: dict[str, Any] = {"hidden_size": 64, "max_rows_per_rank": 8, "full_logits": True}
        with HeadGroup.create(config(3, group.rank, **values), group) as head:
            hidden = rows[group.rank]
            logits = sharded_logits(hidden, weight, group=head)
            ids = sharded_argmax(hidden, weight, group=head)
        exact = hidden.double() @ weight.double().T
        # |error| <= n u / (1 - n u) * sum |x w|, for n = 64 additions and products each rounded.
        unit = 2.0**-24
        bound = 64 * unit / (1 - 64 * unit) * (hidden.abs().double() @ weight.abs().double().T)
        assert bool(((logits.double() - exact).abs() <= bound).all())
        # The same product once more, so the ids are of these logits unless two are that close.
        best = exact.gather(1, ids[:, None])[:, 0]
        assert bool((best >= exact.amax(1) - 2 * bound.amax(1)).all()) or not len(ids)

    assert mine.shard_size == 32
    run_ranks(3, rank_main)


# Ids near 2^31, without the memory of such a head: the kernels alone, on one rank's memory.


class LastRank:
    """The last of 128 ranks of the largest vocabulary. All ranks' workspaces lie in one place,
    where the others' cells are already.
    """

    def __init__(self) -> None:
        sizes = {"vocab_size": MAX_VOCAB_SIZE, "hidden_size": 1, "max_rows_per_rank": 1}
        self.config = config(128, 127, dtype=torch.float16, timeout_s=0.05, num_threads=1, **sizes)
        layout = head_layout(self.config)
        self._regions = layout.channel_regions(0)
        self.memory = torch.zeros(layout.total_bytes + REGION_ALIGNMENT, dtype=torch.uint8)
        base = -(-self.memory.data_ptr() // REGION_ALIGNMENT) * REGION_ALIGNMENT
        self._offset = base - self.memory.data_ptr()
        self.args: Any = head_arguments(self.config, self._regions, base, 0)
        self.args.geometry.row_bound = self.args.geometry.num_rows = 1
        self.args.is_compact, self.args.scale = 1, 1.0

    def words(self, region: str) -> torch.Tensor:
        """A region's words of 8 bytes."""
        mine = self._regions[region]
        start = self._offset + mine.offset
        return self.memory[start : start + mine.size_bytes].view(torch.int64)

    def run(self, logits: torch.Tensor) -> int:
        """The id of the largest logit of this rank's vocabulary."""
        library = host.load(kernel_texts.host_source())
        hidden, ids = torch.ones(1).half(), torch.full((1,), -1)
        gather, argmax = (
            library.kernel(kernel.name, kernel.args_type()) for kernel in (GATHER, ARGMAX)
        )
        grid = library.create_grid(1)
        try:
            self.args.hidden, self.args.logits = hidden.data_ptr(), logits.data_ptr()
            self.args.output = ids.data_ptr()
            # Alone it waits in vain, but its own cell tells the tag of this geometry.
            gather(self.args, grid)
            tag = int(self.words("dispatch_cells")[127]) >> (32 + constants()["kCountBits"])
            self.memory.zero_()
            no_rows = tag << (32 + constants()["kCountBits"]) | 1
            for cells in ("dispatch_cells", "combine_cells"):
                self.words(cells)[:127] = ctypes.c_int64(no_rows).value
            gather(self.args, grid)
            argmax(self.args, grid)
        finally:
            library.destroy_grid(grid)
        control: Any = structs()["LocalControl"]
        assert control.from_address(self.words("local").data_ptr()).fault == 0
        return int(ids)


def test_the_largest_token_ids() -> None:
    rank = LastRank()
    first, end = rank.config.shard(127)
    assert end == MAX_VOCAB_SIZE == 2**31 - 2048
    logits = torch.zeros(end - first, dtype=torch.float16)
    assert rank.run(logits) == first
    logits[-1] = 1.0
    assert rank.run(logits) == end - 1
    logits[-2] = NAN
    assert rank.run(logits) == end - 2


# Rounds of both kinds, neighbours, ends.


def test_ranks_may_take_different_verbs() -> None:
    """Whoever wants all logits gets them, whoever wants ids gets those, in any order of rounds."""
    mine = config(3)
    problems = [problem(mine, [seed % 5, 2, (3 * seed) % 5], seed) for seed in range(12)]

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(3, group.rank, full_logits=True), group) as head:
            for number, one in enumerate(problems):
                wanted = check_logits if number >> group.rank & 1 else check_argmax
                wanted(head, one)

    run_ranks(3, rank_main)


def test_rows_are_the_callers_own() -> None:
    """Results of a round stay as they are in the next ones."""
    mine = config(2)
    first, second = problem(mine, [4, 4], 1), problem(mine, [4, 4], 2)

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(2, group.rank, full_logits=True), group) as head:
            logits = sharded_logits(first.rows[group.rank], first.weight, group=head)
            ids = sharded_argmax(first.rows[group.rank], first.weight, group=head)
            check_logits(head, second)
            assert torch.equal(logits, logits_of(mine, first, group.rank))
            assert torch.equal(ids, ids_of(mine, first, group.rank))

    run_ranks(2, rank_main)


def test_two_groups_and_an_exchange_in_one_process() -> None:
    """Each has its own memory, epochs and counters."""
    of_two, of_four = config(2, dtype=torch.bfloat16), config(4)
    small, large = problem(of_two, [1, 3], 1), problem(of_four, [4, 0, 2, 1], 2)
    halves = [ThreadGroup.ranks(2), ThreadGroup.ranks(2)]

    def rank_main(group: ThreadGroup) -> None:
        half = halves[group.rank // 2][group.rank % 2]
        moe = small_exchange.config(4, group.rank)
        tokens = {**small_exchange.good(), "extra_payloads": ()}
        with (
            HeadGroup.create(config(4, group.rank), group) as wide,
            HeadGroup.create(config(2, half.rank, dtype=torch.bfloat16), half) as narrow,
            MoeAllToAll.create(moe, group) as exchange,
        ):
            for _ in range(3):
                check_argmax(wide, large)
                received = exchange.dispatch(**tokens)
                check_argmax(narrow, small)
                rows = received.hidden_states.clone()
                combined = exchange.combine(rows, received.metadata)
                assert torch.equal(combined, tokens["hidden_states"])
            assert (wide.stats().rounds, narrow.stats().rounds) == (3, 3)
            narrow.close()
            check_argmax(wide, large)

    run_ranks(4, rank_main)


def test_memory_that_is_released_comes_back_in_its_place() -> None:
    mine = config(2, full_logits=True)
    first, second = problem(mine, [1, 3], 1), problem(mine, [4, 2], 2)

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(2, group.rank, full_logits=True), group) as head:
            check_argmax(head, first)
            before, rows = head.stats(), head._head._rows
            for _ in range(2):
                head.release()
                head.release()
                assert head.failure() is None
                assert head.stats() == head.stats(wait=False) == before
                with pytest.raises(ExchangeStateError, match=r"given it back; call renew\(\)"):
                    check_argmax(head, first)
                with pytest.raises((ConfigError, PeerError), match="tp_size=2"):
                    head.renew(ThreadGroup.ranks(1)[0])
                head.renew(group)
                assert not rows.any()
                group.all_gather_object(None)  # from here on the other rank writes there
            check_argmax(head, second)
            check_logits(head, first)
            assert head.stats().rounds == before.rounds + 2

    run_ranks(2, rank_main)


def test_heads_that_ranks_release_in_different_order() -> None:
    """Of equal configuration, also beside an exchange; nothing has changed then."""
    one = problem(config(2), [1, 3], 1)

    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank, timeout_s=20.0)
        exchange = MoeAllToAll.create(small_exchange.config(2, group.rank), group)
        heads = [HeadGroup.create(mine, group) for _ in range(2)]
        other = heads[group.rank]
        for verb, call in (("release", other.release), ("renew", lambda: other.renew(group))):
            with pytest.raises(DisagreementError) as caught:
                call()
            named = re.findall(f"has {verb} head group (\\d+) of rank 0's", str(caught.value))
            assert len({*named}) == 2
        with pytest.raises(DisagreementError, match="rank 0 has release, rank 1 has release head"):
            (exchange, other)[group.rank].release()
        for head in heads:
            check_argmax(head, one)
        for head in heads:
            head.release()
        with pytest.raises(DisagreementError, match="make the same on all"):
            other.renew(group)
        for head in heads[::-1]:
            head.renew(group)
        for head in heads:
            check_argmax(head, one)
            head.close()
        exchange.close()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_stats(num_threads: int) -> None:
    """Bytes of rows of 8 numbers of 4 bytes; a word of 8 bytes for each row of a peer."""
    mine = config(3)
    one = problem(mine, [4, 0, 2])

    def rank_main(group: ThreadGroup) -> tuple[HeadStats, HeadStats]:
        values = {"full_logits": True, "num_threads": num_threads}
        with HeadGroup.create(config(3, group.rank, **values), group) as head:
            assert head.stats() == HeadStats(0, 0, 0, 0)
            check_argmax(head, one)
            check_argmax(head, one)
            before = head.stats()
            check_logits(head, one)
            return before, head.stats()

    # 50 ids: 32 on rank 0, 18 on rank 1, none on rank 2, which therefore puts no words.
    outcomes = run_ranks(3, rank_main)
    assert [before for before, _after in outcomes] == [
        HeadStats(2, 8, 8 * 2 * 32, 2 * 2 * 8),
        HeadStats(2, 0, 0, 2 * 6 * 8),
        HeadStats(2, 4, 4 * 2 * 32, 0),
    ]
    fetched = [
        after.bytes_returned_remote - before.bytes_returned_remote for before, after in outcomes
    ]
    assert fetched == [2 * 8 + 4 * 18 * 4, 6 * 8, 2 * 50 * 4]


def test_memory() -> None:
    """Rows and words are small; room for all logits is asked for by name."""
    (group,) = ThreadGroup.ranks(1)
    values: dict[str, Any] = {"vocab_size": 4096, "max_rows_per_rank": 32}
    with HeadGroup.create(config(**values), group) as head:
        without = head.workspace_bytes
    with HeadGroup.create(config(full_logits=True, **values), group) as head:
        assert head.workspace_bytes >= without + 32 * 4096 * 4
    assert without < 64 * 1024


def test_close() -> None:
    (group,) = ThreadGroup.ranks(1)
    one = problem(config(), [2])
    with HeadGroup.create(config(full_logits=True), group) as head:
        check_argmax(head, one)
        assert head.failure() is None
        head.synchronize()
    head.close()  # once more is nothing
    for check_of in (check_argmax, check_logits):
        with pytest.raises(ExchangeStateError, match=r"head group \d+ is closed; create a new"):
            check_of(head, one)


def test_the_readmes_example() -> None:
    """As it stands there, of a smaller head."""
    readme = Path(__file__).parents[3] / "moe_nvlink_plugin" / "README.md"
    text = readme.read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "Head" in each)
    assert "129280" in block
    assert "7168" in block
    small = block.replace("129280", "1003").replace("7168", "16")
    mine = config(4, vocab_size=1003, hidden_size=16, dtype=torch.bfloat16)
    one = problem(mine, [3, 0, 1, 2])

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        names: dict[str, Any] = {"HeadConfig": HeadConfig, "HeadGroup": HeadGroup}
        names |= {"sharded_argmax": sharded_argmax, "group": group, "rank": group.rank}
        names |= {"hidden": one.rows[group.rank], "lm_head": one.weight}
        exec(small, names)
        tokens: torch.Tensor = names["tokens"]
        return tokens

    for rank, tokens in enumerate(run_ranks(4, rank_main)):
        assert torch.equal(tokens, ids_of(mine, one, rank))
