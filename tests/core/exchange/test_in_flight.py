"""Verbs that run beside their caller: their bits, the order of calls, misuse, failures."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeStateError, ExchangeTimeoutError, MoeNvlinkError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case
from tests.core.exchange.small_exchange import assert_still_works, config, good, plain
from tests.support import case_list

#: Of 2 and of 4 ranks, of both kinds of kernels, with what an argument can change.
SAMPLE = (
    Case(name="full", tokens=(8, 8), num_channels=2),
    Case(name="ragged", tokens=(0, 3, 8, 5), num_experts=10, top_k=3, num_threads=3),
    Case(name="extras", tokens=(4, 8), extras=((torch.uint8, (3, 5)), (torch.int64, (2,)))),
    Case(name="invalid ids", tokens=(8, 5, 8, 1), top_k=6, routing="invalid"),
    Case(name="add and scale", tokens=(8, 3), add="apart", scale=2.5),
    Case(name="add in place", tokens=(8, 3), add="in place", scale=0.5),
    Case(name="small", tokens=(8, 0, 5, 2), small=True),
    Case(name="local ids", tokens=(6, 8), received_ids="local"),
    Case(name="counts", tokens=(8, 5), num_expert_counts=16),
    Case(name="a rank left out", tokens=(5, 0, 8, 3), left_out=(1,)),
    *(
        cases.with_formats(Case(tokens=tokens, name="recipe", dtype=torch.bfloat16), recipe, back)
        for recipe, back, tokens in (
            ("fp8_block", "bf16", (8, 5)),
            ("fp8_block_pow2", "nvfp4", (8, 5)),
            ("fp8_token", "fp8_block", (8, 5, 0, 3)),
            ("fp8_tensor", "bf16", (3, 8)),
            ("mxfp8", "fp8_block", (3, 8)),
            ("nvfp4", "nvfp4", (3, 8, 1, 7)),
        )
    ),
)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name.replace(" ", "-"))
def test_the_bits_are_those_of_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of odd number call the verbs beside themselves, the others as ever: one round."""
    beside = list[str]()

    def instead(verb: str) -> Callable[..., Any]:
        plain, apart = getattr(MoeAllToAll, verb), getattr(MoeAllToAll, f"{verb}_async")

        def run(self: MoeAllToAll, *given: Any, **more: Any) -> Any:
            if self.config.ep_rank % 2 == 0:
                return plain(self, *given, **more)
            beside.append(verb)
            return apart(self, *given, **more).wait()

        return run

    for verb in ("dispatch", "combine"):
        monkeypatch.setattr(MoeAllToAll, verb, instead(verb))
    case_list.check_case(case)
    odd, num_rounds = case.ep_size // 2, 2
    assert sorted(beside) == ["combine"] * num_rounds * odd + ["dispatch"] * num_rounds * odd


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_both_forms_take_the_same_arguments(verb: str) -> None:
    plain, beside = (
        inspect.signature(getattr(MoeAllToAll, name)).parameters for name in (verb, f"{verb}_async")
    )
    assert list(plain.values()) == list(beside.values())


def test_the_caller_goes_on_while_a_peer_is_late() -> None:
    """Rank 1 begins each verb only after rank 0's call has returned: else both would wait."""
    returned = [threading.Event(), threading.Event()]
    inputs = good()

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        values = {"extra_payload_bytes": (6,), "timeout_s": 20}
        with MoeAllToAll.create(config(2, group.rank, **values), group) as layer:
            if group.rank == 0:
                dispatching = layer.dispatch_async(**inputs)
                returned[0].set()
                received = dispatching.wait()
            else:
                assert returned[0].wait(60)
                received = layer.dispatch(**inputs)
            rows = received.hidden_states.clone()
            if group.rank == 1:
                assert returned[1].wait(60)
                return layer.combine(rows, received.metadata)
            combining = layer.combine_async(rows, received.metadata)
            returned[1].set()
            return combining.wait()

    for combined in run_ranks(2, rank_main):
        assert torch.equal(combined, inputs["hidden_states"])


def test_two_channels_in_flight_in_any_order() -> None:
    """Two micro-batches: rank 1 starts and ends them in the other order than rank 0."""
    case = Case(tokens=(8, 5), num_channels=2, top_k=3)
    batches = [cases.make_inputs(case, seed=seed) for seed in range(2)]

    def rank_main(group: ThreadGroup) -> list[torch.Tensor]:
        order = [0, 1] if group.rank == 0 else [1, 0]
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            mine = [batch[group.rank][:3] for batch in batches]
            for _ in range(3):
                sent = {c: layer.dispatch_async(*mine[c], channel=c) for c in order}
                received = {c: sent[c].wait() for c in reversed(order)}
                rows = {
                    c: cases.expert_rows(
                        layer.config, group.rank, got.hidden_states, got.topk_ids, got.topk_weights
                    )
                    for c, got in received.items()
                }
                combining = {c: layer.combine_async(rows[c], received[c].metadata) for c in order}
                combined = [combining[c].wait() for c in range(2)]
            return combined

    for rank, combined in enumerate(run_ranks(2, rank_main)):
        for batch, got in zip(batches, combined, strict=True):
            expected = compare.expected_combined(case, batch[rank], rank)
            compare.assert_same_bits(compare.one_nan(got), compare.one_nan(expected), f"{rank}")


# Misuse.


def test_dispatch_and_combine_before_wait(layer: MoeAllToAll) -> None:
    inputs = good()
    earlier = layer.dispatch(**inputs)
    layer.combine(earlier.hidden_states.clone(), earlier.metadata)
    dispatching = layer.dispatch_async(**inputs)
    early = "dispatch on channel 0 before wait.. of its dispatch_async"
    for verb in (layer.dispatch, layer.dispatch_async):
        with pytest.raises(ExchangeStateError, match=early):
            verb(**inputs)
    for combine in (layer.combine, layer.combine_async):
        with pytest.raises(ExchangeStateError, match="of dispatch 1 on channel 0.*one was 2"):
            combine(earlier.hidden_states, earlier.metadata)
        later = earlier.metadata._replace(round=2)
        with pytest.raises(ExchangeStateError, match="combine on channel 0 before wait"):
            combine(earlier.hidden_states, later)
    received = dispatching.wait()
    combining = layer.combine_async(received.hidden_states.clone(), received.metadata)
    with pytest.raises(ExchangeStateError, match="combine on channel 0 before .* combine_async"):
        layer.combine(received.hidden_states, received.metadata)
    with pytest.raises(ExchangeStateError, match="dispatch on channel 0 before .* combine_async"):
        layer.dispatch(**inputs)
    assert torch.equal(combining.wait(), inputs["hidden_states"])
    assert_still_works(layer)


def test_wait_twice(layer: MoeAllToAll) -> None:
    dispatching = layer.dispatch_async(**good())
    received = dispatching.wait()
    with pytest.raises(ExchangeStateError, match="wait twice for one dispatch_async on channel 0"):
        dispatching.wait()
    combining = layer.combine_async(received.hidden_states.clone(), received.metadata)
    combining.wait()
    for one in (combining, dispatching):
        with pytest.raises(ExchangeStateError, match="wait twice"):
            one.wait()
    later = layer.dispatch_async(**good())
    with pytest.raises(ExchangeStateError, match="wait twice"):
        dispatching.wait()  # a verb of another round is in flight, and stays so
    received = later.wait()
    layer.combine(received.hidden_states.clone(), received.metadata)
    assert_still_works(layer)


def test_mask_ends_what_nobody_has_waited_for(layer: MoeAllToAll) -> None:
    """After a death the program may have lost what dispatch_async returned."""
    dispatching = layer.dispatch_async(**good())
    layer.mask()
    with pytest.raises(ExchangeStateError, match=r"after mask\(\)"):
        dispatching.wait()
    assert_still_works(layer)


def test_close_leaves_other_layers_a_complete_round(layer: MoeAllToAll) -> None:
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(config(), group, share_with=layer) as second:
        received = second.dispatch(**plain())
        second.combine_async(received.hidden_states.clone(), received.metadata)
    assert_still_works(layer)


def test_another_layer_may_not_come_between(layer: MoeAllToAll) -> None:
    (group,), inputs = ThreadGroup.ranks(1), plain()
    with MoeAllToAll.create(config(), group, share_with=layer) as second:
        received = layer.dispatch_async(**inputs).wait()
        combining = layer.combine_async(received.hidden_states.clone(), received.metadata)
        with pytest.raises(ExchangeStateError, match="dispatch twice on channel 0"):
            second.dispatch(**inputs)
        combining.wait()
        assert_still_works(layer)


def test_close_waits_for_what_is_in_flight(layer: MoeAllToAll) -> None:
    others = set(threading.enumerate())
    dispatching = layer.dispatch_async(**good())
    layer.close()
    own = set(threading.enumerate()) - others
    assert not [one for one in own if one.name.startswith("moe_nvlink channel")]
    with pytest.raises(ExchangeStateError, match="closed"):
        dispatching.wait()


# Failures.


def test_wait_raises_what_the_kernel_reports() -> None:
    """Rank 1 never dispatches."""

    def rank_main(group: ThreadGroup) -> None:
        made = config(2, group.rank, timeout_s=0.3, first_timeout_s=0.3)
        with MoeAllToAll.create(made, group) as layer:
            if group.rank == 0:
                dispatching = layer.dispatch_async(**plain())
                with pytest.raises(ExchangeTimeoutError, match="in dispatch of epoch 1") as error:
                    dispatching.wait()
                assert error.value.ranks == (1,)
                for verb in (dispatching.wait, lambda: layer.dispatch_async(**plain())):
                    with pytest.raises(MoeNvlinkError, match="unusable since: rank 0 waited"):
                        verb()
            group.all_gather_object(None)

    assert try_ranks(2, rank_main) == [None, None]


def test_a_launch_that_raises_raises_in_wait(
    layer: MoeAllToAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = layer._layer.channel(0)

    def fail(_args: object, *, beside: bool) -> None:
        assert beside
        raise ValueError("no such kernel")

    monkeypatch.setattr(channel._launches, "dispatch", fail)
    with pytest.raises(ValueError, match="no such kernel"):
        layer.dispatch_async(**good()).wait()
