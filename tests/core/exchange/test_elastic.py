"""Ranks that leave, return and join: after each change two rounds equal the reference."""

from __future__ import annotations

import dataclasses
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_nvlink_plugin import (
    AllToAllConfig,
    Dispatched,
    InFlight,
    MoeAllToAll,
    StoreGroup,
    rank_mask,
)
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    MoeNvlinkError,
    PeerError,
    TransportError,
    UnsupportedError,
)
from moe_nvlink_plugin.exchange import elastic
from moe_nvlink_plugin.exchange import layer as layers
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.testing import ThreadGroup
from moe_nvlink_plugin.transport import host
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.support.ranks import run_threads

CASE = Case(name="elastic", tokens=(5, 0, 7, 3), num_experts=8, top_k=3, timeout_s=20.0)

#: One stage after another: the places that have a rank.
STAGES = ((0, 1), (0, 1, 2), (0, 1), (0, 1, 2, 3), (1, 3), (3, 0, 1))
ROUNDS = 2


def config_of(case: Case, place: int, places: Sequence[int] | None) -> AllToAllConfig:
    listed = None if places is None else tuple(places)
    return dataclasses.replace(case.config(place), places=listed, ranks_may_leave=False)


def at_stage(
    case: Case, stage: int, number: int, places: Sequence[int]
) -> tuple[Case, list[Inputs]]:
    """The case without the ranks that are not there, and all inputs of one round."""
    tokens = tuple(
        (place + stage + number) % case.capacity if place in places else 0
        for place in range(case.ep_size)
    )
    absent = tuple(place for place in range(case.ep_size) if place not in places)
    inputs = cases.make_inputs(case, tokens, seed=10 * stage + number)
    return dataclasses.replace(case, tokens=tokens, left_out=absent), inputs


def check_round(case: Case, inputs: list[Inputs], seen: dict[int, Seen]) -> None:
    """What those who were there got of one round."""
    expected = compare.expected_received(case, inputs)
    nothing = torch.empty((0, case.top_k), dtype=torch.int32)
    slots = [seen[r].send_slots if r in seen else nothing for r in range(case.ep_size)]
    among = cases.among_active(case, inputs)
    for rank, of_rank in seen.items():
        compare.check_received_by(case, expected, rank, of_rank, slots)
        sums = compare.expected_combined(case, among[rank], rank)
        compare.assert_same_bits(
            compare.one_nan(of_rank.combined), compare.one_nan(sums), f"rank {rank}: combined"
        )


def rounds(case: Case, layers: Sequence[MoeAllToAll], stage: int, place: int) -> list[Seen]:
    """ROUNDS rounds of each layer, on each channel."""
    seen = []
    for number in range(ROUNDS):
        _case, inputs = at_stage(case, stage, number, layers[0].places)
        for layer in layers:
            for channel in range(case.num_channels):
                seen += [cases.run_round(layer, inputs[place], channel=channel)]
    return seen


def renew(layer: MoeAllToAll, group: ThreadGroup, places: Sequence[int]) -> None:
    """Counters, addresses and the mask's tensor stay; the rows are zeros."""
    before, rows, mask = layer.stats(), layer.combine_input(), layer.active_ranks
    address = rows.data_ptr()
    layer.renew(group, places)
    assert layer.stats() == before
    assert layer.combine_input() is rows
    assert (rows.data_ptr(), bool(rows.any())) == (address, False)
    assert layer.active_ranks is mask


def live(
    case: Case, place: int, groups: list[list[ThreadGroup]], num_layers: int
) -> list[list[Seen] | None]:
    """What one place saw at each stage; None where it has no rank."""
    layers: list[MoeAllToAll] = []
    lived: list[list[Seen] | None] = []
    for stage, places in enumerate(STAGES):
        if place not in places:
            for layer in layers:
                layer.close()
            layers = []
            lived.append(None)
            continue
        group = groups[stage][places.index(place)]
        configs = [config_of(case, place, places)] * num_layers
        if layers:
            renew(layers[0], group, places)
        elif stage == 0:
            layers.append(MoeAllToAll.create(configs[0], group))
            for config in configs[1:]:
                layers.append(MoeAllToAll.create(config, group, share_with=layers[0]))
        else:
            layers = MoeAllToAll.join(configs, group)
        assert layers[-1].places == tuple(sorted(places))
        lived.append(rounds(case, layers, stage, place))
    for layer in layers:
        layer.close()
    return lived


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        dataclasses.replace(CASE, small=True),
        dataclasses.replace(CASE, num_channels=2),
        dataclasses.replace(CASE, num_expert_counts=8),
        cases.with_formats(
            dataclasses.replace(CASE, dtype=torch.bfloat16), "fp8_block", "fp8_block"
        ),
        dataclasses.replace(CASE, received_ids="elsewhere"),
    ],
    ids=["large", "small", "two channels", "counts", "fp8_block both ways", "elsewhere"],
)
def test_ranks_come_and_go(case: Case) -> None:
    num_layers = 2
    groups = [ThreadGroup.ranks(len(places)) for places in STAGES]
    lives = run_threads(case.ep_size, lambda place: live(case, place, groups, num_layers))
    for stage, places in enumerate(STAGES):
        for index in range(ROUNDS * num_layers * case.num_channels):
            number = index // (num_layers * case.num_channels)
            masked, inputs = at_stage(case, stage, number, places)
            seen = {place: (lives[place][stage] or [])[index] for place in sorted(places)}
            check_round(masked, inputs, seen)


# One change at a time, between ranks that are threads.

PAIR = dataclasses.replace(CASE, tokens=(4, 3, 2), num_experts=6)


class Meetings:
    """A group for each meeting of places, by its name."""

    def __init__(self) -> None:
        self._groups: dict[str, list[ThreadGroup]] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, place: int, places: Sequence[int]) -> ThreadGroup:
        with self._lock:
            groups = self._groups.setdefault(name, ThreadGroup.ranks(len(places)))
        return groups[list(places).index(place)]


def created(meet: Meetings, place: int, places: Sequence[int] = (0, 1), **more: Any) -> MoeAllToAll:
    config = dataclasses.replace(config_of(PAIR, place, places), **more)
    return MoeAllToAll.create(config, meet("create", place, places))


def joined(meet: Meetings, place: int, places: Sequence[int] = (0, 1, 2)) -> MoeAllToAll:
    (layer,) = MoeAllToAll.join([config_of(PAIR, place, places)], meet("join", place, places))
    return layer


def right(layer: MoeAllToAll, stage: int) -> Seen:
    """A round; a test that has the results of all ranks checks them by all_right."""
    return cases.run_round(layer, at_stage(PAIR, stage, 0, layer.places)[1][layer.config.ep_rank])


def all_right(stage: int, places: Sequence[int], seen: Sequence[Any]) -> None:
    masked, inputs = at_stage(PAIR, stage, 0, places)
    check_round(masked, inputs, {place: seen[place] for place in places})


def test_a_renewal_that_has_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer gets no memory: the others cannot go on as they are, but without it."""
    meet, poor, reserve = Meetings(), threading.local(), host._reserve_pages

    def reserve_or_not(fd: int, piece: Any) -> None:
        if getattr(poor, "has_none", False):
            raise TransportError("no room")
        reserve(fd, piece)

    monkeypatch.setattr(host, "_reserve_pages", reserve_or_not)

    def body(place: int) -> Any:
        if place == 2:
            poor.has_none = True
            with pytest.raises(TransportError, match="no room"):
                joined(meet, 2)
            return None
        with created(meet, place) as layer:
            received = cases.dispatch(layer, at_stage(PAIR, 0, 0, (0, 1))[1][place])
            layer.combine(layer.combine_input().zero_(), received.metadata)
            before = layer.stats()
            with pytest.raises(PeerError, match="rank 2: TransportError: no room"):
                layer.renew(meet("join", place, (0, 1, 2)), (0, 1, 2))
            assert layer.stats() == layer.stats(wait=False) == before
            assert not any(map(any, layer.waits()))
            received.hidden_states.sum()  # its content is gone, its addresses are not
            with pytest.raises(ExchangeStateError, match=r"call renew\(\) again"):
                right(layer, 1)
            for call in (layer.mask, layer.fault_words):
                with pytest.raises(ExchangeStateError, match="has no memory"):
                    call()
            layer.renew(meet("again", place, (0, 1)), (0, 1))
            seen = right(layer, 1)
            assert layer.stats().rounds == before.rounds + 1
            assert layer.stats().waited_ns[2] == 0
            return seen

    all_right(1, (0, 1), run_threads(3, body))


def test_a_renewal_that_could_not_end_a_verb_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost but the verb: not the counters, nor the words that tell of faults."""
    meet, gone, really = Meetings(), threading.Event(), layers.end_verbs
    fails = threading.local()

    def end_verbs(workspace: Any) -> None:
        if getattr(fails, "now", False):
            raise UnsupportedError("planted")
        really(workspace)

    monkeypatch.setattr(elastic, "end_verbs", end_verbs)

    def body(place: int) -> Any:
        with created(meet, place, timeout_s=1.0, first_timeout_s=1.0) as layer:
            right(layer, 0)
            before = layer.stats()
            fails.now = place == 1
            with pytest.raises(MoeNvlinkError, match="planted"):
                layer.renew(meet("fails", place, (0, 1)), (0, 1))
            fails.now = False
            with pytest.raises(ExchangeStateError, match=r"call renew\(\) again"):
                right(layer, 1)
            layer.renew(meet("again", place, (0, 1)), (0, 1))
            assert layer.stats() == before
            seen = right(layer, 1)
            if place == 1:
                layer.close()
                gone.set()
                return seen
            gone.wait(60)
            with pytest.raises(ExchangeTimeoutError):
                right(layer, 2)
            return seen

    all_right(1, (0, 1), run_threads(2, body))


def test_what_was_prepared_before_serves_newcomers() -> None:
    """As a CUDA graph does: arguments of before the join, launched again after it."""
    meet = Meetings()

    def body(place: int) -> Any:
        inputs = at_stage(PAIR, 7, 0, (0, 1, 2))[1][place]
        if place == 2:
            with joined(meet, 2) as layer:
                return cases.run_round(layer, inputs).combined
        with created(meet, place) as layer:
            channel = layer._layer.channel(0)
            kept, launch = [], channel._launches
            for verb in ("dispatch", "combine"):
                original = getattr(launch, verb)

                def keep(args: Any, original: Any = original) -> None:
                    kept.append((original, type(args).from_buffer_copy(args)))
                    original(args)

                setattr(launch, verb, keep)
            received = cases.dispatch(layer, inputs)
            rows = layer.combine_input()
            output = torch.empty_like(inputs.hidden_states)
            layer.combine(rows.zero_(), received.metadata, output=output)
            layer.renew(meet("join", place, (0, 1, 2)), (0, 1, 2))
            (dispatch, dispatch_args), (combine, combine_args) = kept
            dispatch(dispatch_args)
            ids, weights, hidden, _counts = channel.rows_and_counts()
            rows.copy_(cases.expert_rows(layer.config, place, hidden, ids, weights))
            combine(combine_args)
            return output

    combined = run_threads(3, body)
    masked, inputs = at_stage(PAIR, 7, 0, (0, 1, 2))
    for place in range(3):
        expected = compare.expected_combined(masked, inputs[place], place)
        compare.assert_same_bits(
            compare.one_nan(combined[place]), compare.one_nan(expected), f"rank {place}"
        )


def test_layers_of_places_that_were_outgrown() -> None:
    """A newcomer finds each layer's rows where the others have them."""
    meet = Meetings()
    capacity = 40 * PAIR.capacity

    def body(place: int) -> Any:
        places = (0, 1, 2)
        if place == 2:
            config = config_of(PAIR, 2, places)
            configs = [config, dataclasses.replace(config, max_tokens_per_rank=capacity)]
            layers = MoeAllToAll.join(configs, meet("join", 2, places))
        else:
            layers = [created(meet, place)]
            closed = MoeAllToAll.create(
                layers[0].config, meet("closed", place, (0, 1)), share_with=layers[0]
            )
            config = dataclasses.replace(
                config_of(PAIR, place, (0, 1)), max_tokens_per_rank=capacity
            )
            group = meet("large", place, (0, 1))
            layers.append(MoeAllToAll.create(config, group, share_with=layers[0]))
            closed.close()
            layers[1].renew(meet("join", place, places), places)
        seen = [right(layers[0], 1), right(layers[1], 2).combined]
        again = right(layers[0], 3)
        for layer in layers:
            layer.close()
        return *seen, again

    lived = run_threads(3, body)
    all_right(1, (0, 1, 2), [seen[0] for seen in lived])
    all_right(3, (0, 1, 2), [seen[2] for seen in lived])


def test_a_rank_that_has_died_returns_to_an_exchange_without_places() -> None:
    meet, case = Meetings(), dataclasses.replace(PAIR, tokens=(4, 3), timeout_s=1.0)
    has_gone = threading.Event()

    def body(place: int) -> Any:
        if place == 2:  # in the place of rank 1
            has_gone.wait(60)
            (layer,) = MoeAllToAll.join([case.config(1)], meet("join", 1, (0, 1)))
        else:
            layer = MoeAllToAll.create(case.config(place), meet("create", place, (0, 1)))
            cases.run_round(layer, cases.make_inputs(case)[place])
        if place == 1:
            layer.close()
            has_gone.set()
            return None
        if place == 0:
            has_gone.wait(60)
            layer.mask(1)
            with pytest.raises(ExchangeStateError, match="created without places"):
                layer.renew(ThreadGroup.ranks(1)[0], (0,))
            layer.renew(meet("join", 0, (0, 1)), (0, 1))
        with layer:
            assert layer.places == (0, 1)
            return cases.run_round(layer, cases.make_inputs(case, seed=1)[layer.config.ep_rank])

    lived = run_threads(3, body)
    check_round(case, cases.make_inputs(case, seed=1), {0: lived[0], 1: lived[2]})


def test_a_fault_shows_on_the_device_until_the_mask() -> None:
    """As a framework asks that waits for no verb."""
    meet, gone = Meetings(), threading.Event()

    def body(place: int) -> None:
        layer = created(meet, place, timeout_s=1.0, first_timeout_s=1.0)
        inputs = at_stage(PAIR, 0, 0, (0, 1))[1][place]
        if place == 1:
            layer.close()
            gone.set()
            return
        gone.wait(60)
        words = layer.fault_words()
        assert [int(word) for word in words] == [0]
        with pytest.raises(ExchangeTimeoutError):
            cases.dispatch(layer, inputs)
        assert [bool(word) for word in words] == [True]
        layer.mask(1)
        assert [int(word) for word in words] == [0]
        layer.close()

    run_threads(2, body)


def test_who_waits_at_another_meeting_is_not_late() -> None:
    """Ranks 0 and 1 wait for rank 2: the second one sees the first, and takes a larger number."""
    meet, three, gone = Meetings(), (0, 1, 2), threading.Event()
    both_have_waited = threading.Barrier(2)

    def wait_until_rank_0_has_come(layer: MoeAllToAll) -> None:
        workspace = layer._layer.workspace
        region = workspace.layout.channel_regions(0)["meeting"]
        of_odd_numbers = 3 * constants()["kMeetingWords"]
        for _ in range(2000):
            words = workspace.words(region, 2 * of_odd_numbers, torch.int64)
            if int(words[of_odd_numbers:][constants()["kRankMaskWords"]]) == 1:
                return
            time.sleep(0.005)
        raise AssertionError("rank 0 does not come")

    def body(place: int) -> Any:
        layer = created(meet, place, three, timeout_s=1.0, first_timeout_s=1.0)
        if place == 2:
            layer.close()
            gone.set()
            return None
        gone.wait(60)
        if place == 1:
            wait_until_rank_0_has_come(layer)
        with pytest.raises(ExchangeTimeoutError) as caught:
            layer.mask()
        meeting = caught.value.epoch
        both_have_waited.wait(60)  # a rank that called again meanwhile would be in time
        assert caught.value.ranks == (2,), caught.value
        layer.mask(2)
        seen = right(layer, 1)
        layer.close()
        return meeting, seen

    lived = run_threads(3, body)
    assert [lived[0][0], lived[1][0]] == [1, 3]
    all_right(1, (0, 1), [lived[0][1], lived[1][1]])


def test_leaving_waits_for_the_last_combine() -> None:
    meet = Meetings()

    def body(place: int) -> Any:
        layer = created(meet, place, (0, 1, 2))
        inputs = at_stage(PAIR, 0, 0, (0, 1, 2))[1][place]
        received = cases.dispatch(layer, inputs)
        with pytest.raises(ExchangeStateError, match="between a dispatch and its combine"):
            layer.leave(1)
        layer.combine(layer.combine_input().zero_(), received.metadata)
        for ranks in ((0, 1, 2), (), (3,), (True,), ("1",)):
            with pytest.raises(InputError):
                layer.leave(*ranks)
        layer.leave(1)
        if place == 1:
            with pytest.raises(ExchangeStateError, match="rank 1 has left"):
                right(layer, 1)
            layer.close()
            return None
        with pytest.raises(InputError, match="rank 1 cannot leave"):
            layer.leave(1)
        seen = right(layer, 1)
        layer.close()
        return seen

    all_right(1, (0, 2), run_threads(3, body))


def test_who_calls_something_else_is_named() -> None:
    """Nothing has changed then: the ranks that were there go on."""
    meet = Meetings()
    three = (0, 1, 2)

    def body(place: int) -> Any:
        config = config_of(PAIR, 2, three)
        others = dataclasses.replace(config, top_k=2)
        if place == 2:
            said = []
            calls: dict[str, Callable[[Any], object]] = {
                "other verb": lambda group: MoeAllToAll.create(config, group),
                "top_k": lambda group: MoeAllToAll.join([others], group),
                "layers": lambda group: MoeAllToAll.join([config, config], group),
                "place": lambda group: MoeAllToAll.join([config_of(PAIR, 2, (2, 0))], group),
            }
            for name, call in calls.items():
                with pytest.raises(MoeNvlinkError) as caught:
                    call(meet(name, 2, three))
                said.append(caught.value)
            return said
        with created(meet, place) as layer:
            said = []
            for name in ("other verb", "top_k", "layers", "place"):
                with pytest.raises(MoeNvlinkError) as caught:
                    layer.renew(meet(name, place, three), three)
                said.append(caught.value)
                all_equal = right(layer, 1)
            assert all_equal.combined.shape
            return said

    kinds = (DisagreementError, DisagreementError, DisagreementError, ConfigError)
    words = ("the call", "top_k of layer 0", "number of values", "places")
    for said in run_threads(3, body):
        for error, kind, word in zip(said, kinds, words, strict=True):
            assert isinstance(error, kind) or (kind is ConfigError and isinstance(error, PeerError))
            assert word in str(error)


@pytest.mark.parametrize("in_flight", ["dispatch", "combine"])
def test_a_refused_renewal_ends_nothing(in_flight: str) -> None:
    """The newcomer has another top_k; the others get what runs beside them, and go on."""
    meet, three = Meetings(), (0, 1, 2)

    def body(place: int) -> None:
        if place == 2:
            others = dataclasses.replace(config_of(PAIR, 2, three), top_k=2)
            with pytest.raises(DisagreementError, match="top_k"):
                MoeAllToAll.join([others], meet("join", 2, three))
            return
        with created(meet, place) as layer:
            inputs = at_stage(PAIR, 1, 0, layer.places)[1][place]

            def combining(dispatched: Dispatched) -> InFlight[torch.Tensor]:
                return layer.combine_async(
                    metadata=dispatched.metadata, expert_output=dispatched.hidden_states.clone()
                )

            alike = combining(layer.dispatch(*inputs)).wait()
            sending = layer.dispatch_async(*inputs)
            under_way = combining(sending.wait()) if in_flight == "combine" else None
            with pytest.raises(DisagreementError, match="top_k"):
                layer.renew(meet("join", place, three), three)
            combined = (under_way or combining(sending.wait())).wait()
            compare.assert_same_bits(combined, alike, "what was under way")
            right(layer, 1)

    run_threads(3, body)


def test_a_store_keeps_one_group_of_a_name() -> None:
    store = HashStore()
    group = StoreGroup(store, "first", 0, 1)
    assert group.all_gather_object(7) == [7]
    with pytest.raises(InputError, match="has made a group 'first' on this store before"):
        StoreGroup(store, "first", 0, 1)
    with pytest.raises(InputError, match="rank=1 is not from 0 to 0"):
        StoreGroup(store, "second", 1, 1)
    store.set_timeout(datetime.timedelta(seconds=0.1))
    lonely = StoreGroup(store, "third", 0, 2)
    for _ in range(2):
        with pytest.raises(PeerError, match=r"rank 1 of group|has failed before"):
            lonely.all_gather_object(None)


def test_what_cannot_be_asked_of_places() -> None:
    meet = Meetings()
    with pytest.raises(ConfigError, match="each place once"):
        config_of(PAIR, 0, (1, 2))
    with pytest.raises(ConfigError, match="each place once"):
        config_of(PAIR, 0, (0, 0))
    with pytest.raises(ConfigError, match="places=3"):
        config_of(PAIR, 0, (0, 3))
    with pytest.raises(InputError, match="configs is empty"):
        MoeAllToAll.join([], ThreadGroup.ranks(1)[0])
    with pytest.raises(InputError, match="no rank of the group has the exchange"):
        MoeAllToAll.join([config_of(PAIR, 0, (0,))], ThreadGroup.ranks(1)[0])

    def body(place: int) -> None:
        with created(meet, place, ranks_may_leave=True) as layer:
            inputs = at_stage(PAIR, 0, 0, (0, 1))[1][place]
            for mask in ([0, 1], [0, 1, 2]):
                with pytest.raises(InputError, match="has places"):
                    cases.dispatch(layer, inputs, active_ranks=rank_mask(mask, 3))
            cases.run_round(layer, inputs, active_ranks=layer.active_ranks)
            other = dataclasses.replace(layer.config, places=(1, 0))
            group = meet("other", place, (1, 0))
            with pytest.raises(ConfigError, match="in their order"):
                MoeAllToAll.create(other, group, share_with=layer)

    run_threads(2, body)
