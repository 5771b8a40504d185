"""What exchange/ordinary.py lets pass: nothing that the checks refuse, nothing that an op sees.

The checks themselves are the oracle: whatever is made of a good call, by one change or several, an
ordinary call passes them, and needs no op.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeStateError, InputError, MoeNvlinkError
from moe_nvlink_plugin.exchange import checks, ops
from moe_nvlink_plugin.exchange.calls import Combine, Dispatch
from moe_nvlink_plugin.exchange.ordinary import OrdinaryCalls, is_watched
from tests.core.exchange.small_exchange import (
    CAPACITY,
    HIDDEN,
    TOP_K,
    alone,
    assert_still_works,
    freed,
    good,
    plain,
)
from tests.core.exchange.test_bad_input import BAD_DISPATCHES

Change = Callable[[torch.Tensor], Any]


#: Counts that the caller counts: another number than that of the experts.
COUNTING = {"num_expert_counts": 3}
QUANTISING: dict[str, Any] = {"recipe": "fp8_block", "hidden_size": 128, "dtype": torch.bfloat16}


class Subclass(torch.Tensor):
    pass


def resized(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().resize_(tensor.shape[0], tensor.shape[1] * 2)


def put_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same object with the memory of another tensor, whose rows are not dense."""
    other = torch.zeros(2 * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
    found = tensor.clone()
    half = other[::2]
    return found.set_(other.untyped_storage(), 0, half.shape, half.stride())


#: What may be wrong with a tensor, or only look so.
CHANGES: dict[str, Change] = {
    "the same": lambda tensor: tensor,
    "a copy": lambda tensor: tensor.clone(),
    "a part": lambda tensor: torch.cat([tensor, tensor])[1 : 1 + tensor.shape[0]],
    "fewer rows": lambda tensor: tensor[1:],
    "no rows": lambda tensor: tensor[:0],
    "more columns": lambda tensor: torch.cat([tensor, tensor], -1),
    "another rank": lambda tensor: tensor[None],
    "flat": lambda tensor: tensor.flatten(),
    "a scalar": lambda tensor: tensor.flatten()[0],
    "transposed": lambda tensor: tensor.T.contiguous().T,
    "strided": lambda tensor: torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]],
    "one row, odd stride": lambda tensor: tensor.new_zeros(3, 5 * tensor.shape[-1])[
        :1, : tensor.shape[-1]
    ],
    "float64": lambda tensor: tensor.double(),
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "int32": lambda tensor: tensor.int(),
    "int64": lambda tensor: tensor.long(),
    "bool": lambda tensor: tensor.bool(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "conjugated": lambda tensor: tensor.to(torch.complex64).conj(),
    "negated": torch._neg_view,
    "zeros without memory": lambda tensor: torch._efficientzerotensor(
        tensor.shape, dtype=tensor.dtype
    ),
    "on meta": lambda tensor: tensor.to("meta"),
    "no rows on meta": lambda tensor: tensor[:0].to("meta"),
    "a subclass": lambda tensor: tensor.as_subclass(Subclass),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "wants a gradient": lambda tensor: tensor.double().float().requires_grad_(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "resized": resized,
    "freed": freed,
    "put elsewhere": put_elsewhere,
    "a list": lambda tensor: tensor.tolist(),
    "missing": lambda _tensor: None,
}


#: Those of which a second change may read the result.
SAFE = [name for name in CHANGES if name != "freed"]


def in_workspace(layer: MoeAllToAll, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this form where peers write."""
    region = layer._layer.channel(0).combine_bytes
    return region[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def changed(layer: MoeAllToAll, tensor: torch.Tensor, name: str) -> Any:
    return in_workspace(layer, tensor) if name == "in the workspace" else CHANGES[name](tensor)


@pytest.fixture(params=["plain", "fp8_block", "counting"])
def layer(request: pytest.FixtureRequest) -> Iterator[MoeAllToAll]:
    forms = {"plain": {}, "fp8_block": QUANTISING, "counting": COUNTING}
    with alone(**forms[request.param]) as made:
        yield made


@pytest.fixture
def simple() -> Iterator[MoeAllToAll]:
    with alone() as made:
        yield made


def dispatch_of(layer: MoeAllToAll, num_tokens: int = 3) -> dict[str, Any]:
    hidden = torch.randn(num_tokens, layer.config.hidden_size, dtype=layer.config.dtype)
    fields: dict[str, Any] = good(num_tokens) | {"hidden_states": hidden, "extra_payloads": []}
    if layer.config.num_expert_counts:
        fields["expert_counts"] = torch.zeros(3, dtype=torch.int32)
    rest = {"scales": None, "global_scale": None, "handle": layer._layer.handle, "channel": 0}
    return {**rest, **fields, "max_tokens": CAPACITY}


def quantised(layer: MoeAllToAll, fields: dict[str, Any]) -> dict[str, Any]:
    """The same with rows that the caller has quantised."""
    rows: Any = layer.recipe
    made = rows.quantise(fields["hidden_states"], None)
    return fields | {"hidden_states": made.rows, "scales": made.scales}


def assert_agrees_on_dispatch(layer: MoeAllToAll, fields: dict[str, Any]) -> bool:
    """Whether the call is ordinary; if it is, what it skips must let it pass."""
    call = Dispatch(**fields)
    quantiser = layer._layer.ordinary.quantiser_of(call)
    if quantiser is None:
        return False
    assert not ops.are_seen(call)
    checks.no_gradient(call)
    same, with_quantiser, extra_bytes = layer._layer._checked(call, call.max_tokens or -1)
    assert all(a is b for a, b in zip(same, call, strict=True))
    assert (with_quantiser, extra_bytes) == (quantiser, ())
    return True


TENSORS = ("hidden_states", "scales", "topk_ids", "topk_weights", "is_padding")
COMBINED = ("expert_output", "send_slots", "output", "add")


def change_some(
    layer: MoeAllToAll, fields: dict[str, Any], places: tuple[str, ...], generator: random.Random
) -> None:
    """None, one or two of these tensors, or one of them twice."""
    for _ in range(generator.randrange(3)):
        place, name = generator.choice(places), generator.choice([*SAFE, "in the workspace"])
        tensor = fields.get(place)
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        try:
            fields[place] = changed(layer, tensor, name)
        except (RuntimeError, IndexError, TypeError):  # not of this type, or of no rows
            continue


@pytest.mark.parametrize("seed", range(3))
def test_an_ordinary_dispatch_passes_all_checks(layer: MoeAllToAll, seed: int) -> None:
    generator, outcomes = random.Random(seed), []
    for number in range(300):
        fields = dispatch_of(layer, generator.randrange(CAPACITY + 2))
        if layer.config.recipe == "fp8_block" and number % 2:
            fields = quantised(layer, fields)
        if generator.random() < 0.3:
            fields["is_padding"] = torch.zeros(len(fields["hidden_states"]), dtype=torch.bool)
        change_some(layer, fields, TENSORS, generator)
        if generator.random() < 0.2:
            fields["max_tokens"] = generator.choice([0, 1, CAPACITY, CAPACITY + 1, 3.0, True, None])
        with torch.set_grad_enabled(generator.random() < 0.5):
            outcomes.append(assert_agrees_on_dispatch(layer, fields))
    is_counting = bool(layer.config.num_expert_counts)  # counts of the caller: looked at each time
    assert any(outcomes) != is_counting
    assert not all(outcomes)


#: Changes that leave an argument as good as it was: of any, and of some.
SAME = {"the same", "a copy", "a part"}
MORE_SAME = {"topk_ids": "int32", "expert_output": "in the workspace", "send_slots": "int32"}
MORE_SAME |= {"output": "missing", "add": "missing"}


def ordinary_changes(
    layer: MoeAllToAll, place: str, usual: dict[str, Any], agrees: Callable[[dict[str, Any]], bool]
) -> set[str]:
    """Those after which a call is ordinary: none but these, so that no question is idle."""
    found = set()
    for name in [*CHANGES, "in the workspace"]:
        try:
            fields = usual | {place: changed(layer, usual[place].clone(), name)}
        except (RuntimeError, TypeError):
            continue
        if agrees(fields):
            found.add(name)
    return found


@pytest.mark.parametrize("place", ["hidden_states", "topk_ids", "topk_weights"])
def test_each_change_of_one_tensor(place: str, simple: MoeAllToAll) -> None:
    usual = dispatch_of(simple)
    agrees = functools.partial(assert_agrees_on_dispatch, simple)
    found = ordinary_changes(simple, place, usual, agrees)
    assert found == SAME | {MORE_SAME.get(place, "the same")}


def test_an_ordinary_call_has_no_more_than_that(layer: MoeAllToAll) -> None:
    usual = dispatch_of(layer)
    if layer.config.num_expert_counts:  # then no call is
        assert not assert_agrees_on_dispatch(layer, usual)
        return
    assert assert_agrees_on_dispatch(layer, usual)
    more: dict[str, Any] = {
        "extra_payloads": [torch.zeros(3, 2)],
        "global_scale": torch.ones(1),
        "active_ranks": torch.ones(1, dtype=torch.int64),
        "expert_counts": torch.zeros(3, dtype=torch.int32),
    }
    for name, value in more.items():
        assert layer._layer.ordinary.quantiser_of(Dispatch(**usual | {name: value})) is None, name


def test_quantised_rows_and_activations_are_told_apart() -> None:
    with alone(**QUANTISING) as layer:
        fields = dispatch_of(layer)
        made = quantised(layer, fields)
        ask = layer._layer.ordinary.quantiser_of
        assert ask(Dispatch(**fields)) == layer._layer.quantiser != 0
        assert ask(Dispatch(**made)) == 0
        assert ask(Dispatch(**made | {"scales": None})) is None
        assert ask(Dispatch(**fields | {"scales": made["scales"]})) is None
        # A recipe of which the kernels have no quantiser has to quantise first.
        itself = OrdinaryCalls(layer._layer.format._replace(quantiser=0), range(0))
        assert itself.quantiser_of(Dispatch(**fields)) is None
        assert itself.quantiser_of(Dispatch(**made)) == 0


def test_what_a_dispatch_lacks_is_looked_at() -> None:
    """A scale that the recipe needs, and counts that the configuration asks for."""
    for values in (QUANTISING | {"recipe": "fp8_tensor"}, QUANTISING | COUNTING, COUNTING):
        with alone(**values) as layer:
            call = Dispatch(**dispatch_of(layer) | {"expert_counts": None})
            assert layer._layer.ordinary.quantiser_of(call) is None, values


def test_tensors_of_another_device_are_not_ordinary(simple: MoeAllToAll) -> None:
    inner = simple._layer
    calls = Dispatch(**dispatch_of(simple)), combine_of(simple)
    there = inner.format._replace(device=torch.device("cuda:0"))
    for ordinary, expected in (
        (inner.ordinary, (0, True)),
        (OrdinaryCalls(there, range(0)), (None, False)),
    ):
        assert (ordinary.quantiser_of(calls[0]), ordinary.is_combine(calls[1])) == expected


@pytest.mark.parametrize("place", COMBINED)
def test_each_change_of_one_tensor_of_combine(place: str, simple: MoeAllToAll) -> None:
    usual = combine_of(simple, output=torch.zeros(3, HIDDEN), add=torch.zeros(3, HIDDEN))

    def agrees(fields: dict[str, Any]) -> bool:
        return agrees_on_combine(simple, Combine(**fields), CAPACITY)

    found = ordinary_changes(simple, place, usual._asdict(), agrees)
    assert found == SAME | {MORE_SAME[place]}


def test_sums_that_are_added_to_in_place_are_ordinary(simple: MoeAllToAll) -> None:
    sums = torch.zeros(4, HIDDEN)
    for add, expected in ((sums[:3], True), (sums[1:], False)):
        call = combine_of(simple, output=sums[:3], add=add)
        assert simple._layer.ordinary.is_combine(call) == expected


def combine_of(layer: MoeAllToAll, **values: Any) -> Combine:
    slots = torch.zeros(3, TOP_K, dtype=torch.int32)
    usual = {"expert_output": torch.zeros(CAPACITY, HIDDEN), "send_slots": slots, "output": None}
    return Combine(handle=layer._layer.handle, channel=0, **{**usual, **values})


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_bad_dispatches_without_extra_payloads(name: str) -> None:
    """As test_bad_input.py, where an extra payload keeps each call from being ordinary."""
    values, message = BAD_DISPATCHES[name]
    with alone(extra_payload_bytes=(6,), num_channels=2) as layer:
        assert_still_works(layer, plain())
        if "extra_payloads" in values and "hidden_states" in values:
            values = values | {"extra_payloads": []}
        with pytest.raises(MoeNvlinkError, match=message):
            layer.dispatch(**plain() | values)
        assert_still_works(layer, plain())


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_what_torch_refuses_to_tell_hides_no_other_error(simple: MoeAllToAll) -> None:
    """Of a nested tensor torch tells no shape; the checks come to channel and scale first."""
    tensors = plain()
    nested = torch.nested.nested_tensor(list(tensors["hidden_states"]))
    with pytest.raises(InputError, match="channel=7 is not from 0 to"):
        simple.dispatch(**tensors | {"hidden_states": nested}, channel=7)
    received = simple.dispatch(**tensors)
    rows = received.hidden_states.clone()
    with pytest.raises(InputError, match="scale=nan is no finite"):
        simple.combine(rows, received.metadata, output=nested, scale=float("nan"))
    assert torch.equal(simple.combine(rows, received.metadata), tensors["hidden_states"])


@pytest.mark.parametrize("seed", range(3))
def test_an_ordinary_combine_passes_all_checks(seed: int) -> None:
    generator, outcomes = random.Random(seed), []
    with alone(combine_dtypes=(torch.bfloat16,)) as layer:
        channel = layer._layer.channel(0)
        for _ in range(500):
            num_tokens = generator.randrange(CAPACITY + 1)
            dtype = generator.choice([torch.float32, torch.bfloat16])
            sums = torch.zeros(2 * num_tokens + 2, HIDDEN, dtype=dtype)
            fields: dict[str, Any] = {
                "expert_output": torch.zeros(CAPACITY, HIDDEN, dtype=dtype),
                "send_slots": torch.zeros(num_tokens, TOP_K, dtype=torch.int32),
                "output": generator.choice([None, sums[:num_tokens]]),
                "add": generator.choice([None, sums[:num_tokens], sums[1 : num_tokens + 1]]),
                "hidden_size": generator.choice([None, HIDDEN, HIDDEN - 1, True, 8.0]),
            }
            change_some(layer, fields, COMBINED, generator)
            call = Combine(handle=layer._layer.handle, channel=0, **fields)
            with torch.set_grad_enabled(generator.random() < 0.5):
                outcomes.append(agrees_on_combine(layer, call, channel.max_tokens))
    assert any(outcomes)
    assert not all(outcomes)


def agrees_on_combine(layer: MoeAllToAll, call: Combine, max_tokens: int) -> bool:
    is_ordinary = layer._layer.ordinary.is_combine(call)
    # The rest of the question is the layer's, under the lock.
    if not is_ordinary or call.expert_output.shape[0] != CAPACITY:
        return False
    assert not ops.are_seen(call)
    checks.no_gradient(call)
    checks.combine(layer._layer.format, call, max_tokens, layer._layer._window)
    return True


def test_a_combine_of_other_tokens_or_slots_is_refused(simple: MoeAllToAll) -> None:
    """The tensors are good each for itself; only the round tells that they are another's."""
    tensors = plain()
    received = simple.dispatch(**tensors, max_tokens=3)
    rows, metadata = received.hidden_states.clone(), received.metadata
    with pytest.raises(InputError, match=r"shape \[4, 8\], expected \[3, 8\]"):
        simple.combine(torch.zeros(CAPACITY, HIDDEN), metadata)
    for slots in (metadata.send_slots[:2], metadata.send_slots.repeat(2, 1)):
        with pytest.raises(InputError, match=f"metadata of {len(slots)} tokens"):
            simple.combine(rows, metadata._replace(send_slots=slots.contiguous()))
    assert torch.equal(simple.combine(rows, metadata), tensors["hidden_states"])
    with pytest.raises(ExchangeStateError, match="combine without dispatch"):
        simple.combine(rows, metadata)


class Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def test_who_looks_on(simple: MoeAllToAll) -> None:
    """Each of them sees the op, though no tensor tells of it."""
    calls = Dispatch(**dispatch_of(simple)), combine_of(simple)
    found: dict[str, Any] = {}

    def ask(name: str) -> Any:
        ordinary = simple._layer.ordinary
        answers = ordinary.quantiser_of(calls[0]), ordinary.is_combine(calls[1])
        found[name] = (is_watched(), *answers)
        return torch.zeros(())

    ask("nobody")
    watchers: dict[str, Any] = {
        "mode": Nothing(),  # type: ignore[no-untyped-call]
        "function mode": torch.overrides.BaseTorchFunctionMode(),
        "before autograd": torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.PreDispatch),
        "profiler": torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        "forward AD": torch.autograd.forward_ad.dual_level(),
    }
    for name, watching in watchers.items():
        with watching:
            ask(name)
    torch.vmap(lambda _row: ask("vmap"))(torch.zeros(2))
    torch.func.functionalize(lambda _row: ask("functionalize"))(torch.zeros(2))
    trace: Callable[..., Any] = torch.jit.trace
    trace(lambda row: row + ask("trace"), torch.zeros(()), check_trace=False)
    assert found.pop("nobody") == (False, 0, True)
    assert len(found) == 8
    assert set(found.values()) == {(True, None, False)}


@torch.inference_mode()
def test_results_are_new_tensors_each_time(simple: MoeAllToAll) -> None:
    """What a caller does to the form of one must not reach the next round's."""
    tensors = plain()
    for _ in range(3):
        received = simple.dispatch(**tensors)
        rows = received.hidden_states.clone()
        views = (received.hidden_states, received.topk_ids, received.topk_weights)
        assert [tuple(view.shape) for view in views] == [(4, 8), (4, 2), (4, 2)]
        assert not any(view.is_inference() for view in views)
        for view in (*views, received.recv_counts):
            view.unsqueeze_(0)
        assert torch.equal(simple.combine(rows, received.metadata), tensors["hidden_states"])
