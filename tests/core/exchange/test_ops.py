"""torch.ops.moe_nvlink.*: their registration, and layers compiled around them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, rank_mask
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ExchangeStateError, InputError
from moe_nvlink_plugin.exchange import ops
from moe_nvlink_plugin.exchange.channel import Channel
from moe_nvlink_plugin.exchange.layer import LayerExchange
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs
from tests.core.exchange import small_exchange
from tests.core.exchange.small_exchange import opcheck_dispatch
from tests.support.ranks import run_processes

CAPACITY = 16

SCHEMAS = {
    "dispatch": "Tensor(a!) pending, Tensor hidden_states, Tensor? scales, Tensor topk_ids, "
    "Tensor topk_weights, Tensor[] extra_payloads, Tensor? global_scale, int handle, int channel, "
    "Tensor? is_padding=None, SymInt? max_tokens=None, Tensor? active_ranks=None, "
    "Tensor? expert_counts=None) -> (Tensor topk_ids, Tensor topk_weights, "
    "Tensor hidden_states, Tensor recv_counts, Tensor send_slots)",
    "received_scales": "Tensor recv_counts, int handle, int channel, SymInt? max_tokens=None) "
    "-> Tensor",
    "received": "Tensor recv_counts, Tensor like, int index, int handle, int channel, "
    "SymInt? max_tokens=None) -> Tensor",
    "received_expert_counts": "Tensor recv_counts, int handle, int channel) -> Tensor",
    "combine": "Tensor(a!) pending, Tensor expert_output, Tensor send_slots, int handle, "
    "int channel, SymInt? hidden_size=None, Tensor? add=None, float scale=1.) -> Tensor",
    "combine_out": "Tensor(a!) pending, Tensor expert_output, Tensor send_slots, "
    "Tensor(b!) output, int handle, int channel, SymInt? hidden_size=None, Tensor? add=None, "
    "float scale=1.) -> ()",
}


def config(ep_size: int = 1, ep_rank: int = 0, **values: Any) -> AllToAllConfig:
    sizes = {"num_experts": 6, "top_k": 3, "hidden_size": 24, "max_tokens_per_rank": CAPACITY}
    return small_exchange.config(ep_size, ep_rank, timeout_s=120, **sizes, **values)


def alone(**values: Any) -> MoeAllToAll:
    return MoeAllToAll.create(config(**values), ThreadGroup.ranks(1)[0])


@pytest.fixture
def layer() -> Iterator[MoeAllToAll]:
    with alone(extra_payload_bytes=(5,), num_expert_counts=2) as exchange:
        yield exchange


def inputs(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_inputs(config(), num_tokens, torch.Generator().manual_seed(seed))


def dispatch_arguments(layer: MoeAllToAll) -> tuple[Any, ...]:
    hidden, ids, weights = inputs(7)
    extra = torch.arange(35, dtype=torch.uint8).view(7, 5)
    pending = torch.zeros_like(layer._layer.workspace.pending)
    alone = rank_mask((0,), 1)
    optional = (None, None, alone, torch.tensor([3, 4], dtype=torch.int32))
    return (pending, hidden, None, ids, weights, [extra], None, layer._layer.handle, 0, *optional)


def combine_arguments(layer: MoeAllToAll) -> tuple[Any, ...]:
    received = ops.dispatch(*dispatch_arguments(layer))
    pending = torch.full_like(layer._layer.workspace.pending, layer._layer.handle)
    rows = torch.randn(CAPACITY, 24)
    return (pending, rows, received[-1])


def test_schemas() -> None:
    """Compiled graphs and vLLM's cache of them hold calls in this form: a change breaks them."""
    of = {name: str(getattr(torch.ops.moe_nvlink, name).default._schema) for name in SCHEMAS}
    assert of == {name: f"moe_nvlink::{name}({schema}" for name, schema in SCHEMAS.items()}


def test_opcheck_dispatch(layer: MoeAllToAll) -> None:
    opcheck_dispatch(layer, dispatch_arguments(layer))


def test_opcheck_what_was_received(layer: MoeAllToAll) -> None:
    arguments, handle = dispatch_arguments(layer), layer._layer.handle
    counts, (like,) = ops.dispatch(*arguments)[3], arguments[5]
    assert ops.received_expert_counts(counts, handle, 0).tolist() == [[3, 4]]
    registered = torch.ops.moe_nvlink
    torch.library.opcheck(registered.received.default, (counts, like, 0, handle, 0))
    torch.library.opcheck(registered.received_expert_counts.default, (counts, handle, 0))


@pytest.mark.parametrize("finish", [{}, {"add": torch.randn(7, 24), "scale": -0.5}])
@pytest.mark.parametrize(("op", "output"), [("combine", []), ("combine_out", [torch.empty(7, 24)])])
def test_opcheck_combine(
    op: str, output: list[torch.Tensor], finish: dict[str, Any], layer: MoeAllToAll
) -> None:
    arguments = (*combine_arguments(layer), *output, layer._layer.handle, 0)
    torch.library.opcheck(getattr(torch.ops.moe_nvlink, op).default, arguments, finish)


def test_fakes_refuse_another_device(layer: MoeAllToAll) -> None:
    """On meta torch runs the fake instead of the op."""
    elsewhere = torch.empty(7, 24, device="meta")
    arguments = combine_arguments(layer)
    with pytest.raises(InputError, match="is on meta"):
        ops.combine(*arguments, layer._layer.handle, 0, add=elsewhere)
    with pytest.raises(InputError, match="is on meta"):
        ops.combine_out(*arguments, torch.empty(7, 24), layer._layer.handle, 0, add=elsewhere)


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of our ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "moe_nvlink":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_ops_run_where_somebody_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager verb that nobody sees (test_ordinary.py) takes a short way to the same."""
    called = mock.Mock()
    for name in ("dispatch", "combine"):
        called.attach_mock(mock.Mock(side_effect=getattr(ops, name)), name)
        monkeypatch.setattr(ops, name, getattr(called, name))

    def names() -> list[str]:
        found = [call[0] for call in called.mock_calls]
        called.reset_mock()
        return found

    def verbs(hidden: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        received = exchange.dispatch(hidden, ids, weights)
        output = exchange.combine(received.hidden_states.detach().clone(), received.metadata)
        return names(), output

    hidden, ids, weights = inputs(7)
    with alone() as exchange:
        nobody, expected = verbs(hidden)
        with Names() as seen:
            by_mode, output = verbs(hidden)
        with torch.profiler.profile() as profile:
            by_profiler, _ = verbs(hidden)
        with pytest.raises(InputError, match="hidden_states requires a gradient"):
            exchange.dispatch(hidden.clone().requires_grad_(), ids, weights)
        by_autograd = names()
        by_subclass, _ = verbs(torch.nn.Parameter(hidden, requires_grad=False))
        with torch.no_grad():
            unrecorded, _ = verbs(hidden.clone().requires_grad_())
        by_negative, negated = verbs(torch._neg_view(-hidden))
    assert by_negative[0] == "dispatch"
    assert torch.equal(negated, expected)
    assert (nobody, unrecorded) == ([], [])
    assert by_mode == by_profiler == seen.names == ["dispatch", "combine"]
    assert by_autograd[0] == by_subclass[0] == "dispatch"
    assert {"moe_nvlink::dispatch", "moe_nvlink::combine"} <= {
        e.name for e in profile.events() or ()
    }
    assert torch.equal(output, expected)


def test_derivatives_are_refused() -> None:
    """Neither forward-mode AD nor torch.func.grad can pass the exchange, and would get zeros."""
    hidden, ids, weights = inputs(7)
    with alone() as layer:

        def loss(rows: torch.Tensor) -> torch.Tensor:
            return layer.dispatch(rows, ids, weights).hidden_states.sum()

        with pytest.raises(InputError, match="a derivative of hidden_states"):
            torch.func.grad(loss)(hidden)
        with forward_ad.dual_level():
            make_dual: Callable[..., torch.Tensor] = forward_ad.make_dual
            dual = make_dual(hidden, torch.ones_like(hidden))
            for verb in (layer.dispatch, layer.dispatch_async):
                with pytest.raises(InputError, match="a derivative of hidden_states"):
                    verb(dual, ids, weights)
            received = layer.dispatch(hidden, ids, weights)
            rows = make_dual(torch.zeros(CAPACITY, 24), torch.ones(CAPACITY, 24))
            with pytest.raises(InputError, match="a derivative of expert_output"):
                layer.combine(rows, received.metadata)


def frames_of(verb: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many Python functions a call enters, and what it returns."""
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    try:
        result = verb()
    finally:
        sys.setprofile(None)
    return events.count("call") - 1, result  # without the lambda


@pytest.mark.parametrize("more", [False, True])
def test_eager_verbs_enter_few_functions(more: bool) -> None:
    """On the host an eager call costs about what the functions cost that it enters."""
    values: dict[str, Any] = {"extra_payload_bytes": (4,), "num_expert_counts": 6} if more else {}
    extras = [torch.zeros(7, dtype=torch.int32)] if more else []
    tokens = inputs(7)
    with alone(**values) as layer, torch.inference_mode():
        region = layer.combine_input()
        for _ in range(3):  # start-up lasts for two rounds
            sent, received = frames_of(lambda: layer.dispatch(*tokens, extras))
            summed, _ = frames_of(lambda: layer.combine(region, received.metadata))  # noqa: B023
    assert sent <= (31 if more else 22)
    assert summed <= 21


@pytest.mark.parametrize("verb", ["combine", "combine, seen", "combine_async"])
def test_autograd_knows_that_output_is_overwritten(verb: str) -> None:
    """A profiler sees the op."""
    verb, *seen = verb.split(", ")
    hidden, ids, weights = inputs(3)
    weight, output = torch.ones_like(hidden, requires_grad=True), torch.zeros_like(hidden)
    loss = (weight * output).sum()
    with alone() as layer:
        received = layer.dispatch(hidden, ids, weights)
        rows = received.hidden_states.clone()
        combine = getattr(layer, verb)
        with torch.profiler.profile() if seen else contextlib.nullcontext():
            result = combine(expert_output=rows, metadata=received.metadata, output=output)
        if verb == "combine_async":
            result.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


# Compiled layers.


def moe_layer(
    exchange: MoeAllToAll,
    experts: torch.Tensor,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    region: torch.Tensor | None = None,
) -> torch.Tensor:
    """Router weights times expert matrices, over this rank's experts."""
    received = exchange.dispatch(torch.relu(hidden), ids, weights)
    first, end = local_expert_range(
        exchange.config.num_experts, exchange.config.ep_size, exchange.config.ep_rank
    )
    rows = torch.zeros_like(received.hidden_states)
    for expert in range(first, end):
        weight = (received.topk_weights * (received.topk_ids == expert)).sum(1)
        partial = received.hidden_states @ experts[expert]
        rows = rows + torch.where(weight[:, None] != 0, weight[:, None] * partial, 0.0)
    if region is not None:
        rows = region.copy_(rows)
    return exchange.combine(rows, received.metadata) * 2.0


@pytest.fixture
def plain_layer() -> Iterator[MoeAllToAll]:
    torch._dynamo.reset()
    with alone() as exchange:
        yield exchange


EXPERTS = torch.randn(6, 24, 24, generator=torch.Generator().manual_seed(9))


def check_compiled(
    layer: Callable[..., torch.Tensor],
    all_num_tokens: tuple[int, ...],
    *,
    graphs: int = 1,
    unbacked: bool = False,
    backend: str = "aot_eager",
    rtol: float | None = 0,
    **options: Any,
) -> None:
    """Compiled whole, into so many graphs for all these batches, it returns the same."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, **options)
    for number, num_tokens in enumerate(all_num_tokens):
        arguments = inputs(num_tokens, number)
        expected = layer(*arguments)
        if unbacked:
            for tensor in arguments:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
        torch.testing.assert_close(compiled(*arguments), expected, rtol=rtol, atol=rtol)
    assert counter.frame_count == graphs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("num_tokens", [7, 1, 0])
def test_metadata_that_leaves_compiled_code(
    plain_layer: MoeAllToAll, num_tokens: int, backend: str
) -> None:
    given = inputs(num_tokens)
    dispatch = torch.compile(plain_layer.dispatch, fullgraph=True, backend=backend)
    earlier = dispatch(*given)
    expected = plain_layer.combine(earlier.hidden_states.clone(), earlier.metadata)
    for again in (dispatch, plain_layer.dispatch):
        last = again(*given)
        if num_tokens:
            with pytest.raises(ExchangeStateError, match="a compiled dispatch on channel 0"):
                plain_layer.combine(last.hidden_states, earlier.metadata)
        found = plain_layer.combine(last.hidden_states.clone(), last.metadata)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_compiled_whole_with_any_number_of_tokens(
    plain_layer: MoeAllToAll, zero_copy: bool
) -> None:
    """One graph without breaks serves every token count; recompiling per value would fail here."""
    region = plain_layer.combine_input() if zero_copy else None
    check_compiled(
        lambda rows, ids, weights: moe_layer(plain_layer, EXPERTS, rows, ids, weights, region),
        (7, 16, 2, 9, 3, 15, 8),
        dynamic=True,
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_no_token_one_and_many(plain_layer: MoeAllToAll, backend: str) -> None:
    """Of sizes that dynamo may not look at; with dynamic=True alone 0 and 1 have a graph each."""
    check_compiled(
        lambda *tensors: moe_layer(plain_layer, EXPERTS, *tensors),
        (7, 0, 1, 16, 2),
        unbacked=True,
        backend=backend,
        rtol=None,
    )


def test_compiled_with_automatic_dynamic_shapes(plain_layer: MoeAllToAll) -> None:
    """Without dynamic=True: the first graph is for one size, the second for all the others."""
    check_compiled(
        lambda *tensors: moe_layer(plain_layer, EXPERTS, *tensors), (7, 16, 2, 9, 3), graphs=2
    )


def test_two_layers_in_one_graph_keep_their_order(plain_layer: MoeAllToAll) -> None:
    """Nothing but the op's own arguments tells the compiler that the second comes second."""

    def both(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        middle = moe_layer(plain_layer, EXPERTS, hidden, ids, weights)
        # Independent of the first, but for the exchange they share.
        return moe_layer(plain_layer, EXPERTS, hidden + 1.0, ids, weights) + middle

    check_compiled(both, (5, 11), dynamic=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_with_shared_experts(plain_layer: MoeAllToAll, in_place: bool) -> None:
    """What is added is computed in the graph; with a buffer for both it is overwritten there."""
    shared = torch.randn(24, 24, generator=torch.Generator().manual_seed(4))

    def layer(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = plain_layer.dispatch(hidden, ids, weights)
        add = torch.relu(hidden @ shared)
        output = add if in_place else None
        return plain_layer.combine(
            received.hidden_states * 2.0, received.metadata, output=output, add=add, scale=2.5
        )

    check_compiled(layer, (7, 16, 2), dynamic=True)
    hidden, ids, weights = inputs(7)
    expected = hidden * 2.0 * 2.5 + torch.relu(hidden @ shared)
    torch.testing.assert_close(layer(hidden, ids, weights), expected)


# Inductor must not take the receive buffers for memory of its own, and keeps no copy of rows.


@pytest.fixture
def uncached() -> Iterator[MoeAllToAll]:
    """Code compiled before must not answer for what is compiled now."""
    torch._dynamo.reset()
    uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    with alone(extra_payload_bytes=(24 * 4,)) as exchange, uncached:
        yield exchange


def test_received_rows_are_not_overwritten(uncached: MoeAllToAll) -> None:
    """All that arrived is dead after one pointwise use of its shape: it invites an in-place one."""

    def double(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = uncached.dispatch(hidden, ids, weights, [hidden])
        rows = received.hidden_states * 2.0 + received.extra_payloads[0]
        return uncached.combine(rows, received.metadata)

    hidden, ids, weights = inputs(5)
    kept = uncached.dispatch(hidden, ids, weights, [hidden])
    uncached.combine(kept.hidden_states, kept.metadata)
    torch.compile(double, fullgraph=True)(hidden + 1.0, ids, weights)
    # `kept` looks at the same buffers, which hold what the compiled dispatch received.
    assert torch.equal(kept.hidden_states[:5], hidden + 1.0)
    assert torch.equal(kept.extra_payloads[0][:5], hidden + 1.0)


_seen: list[tuple[int, int]] = []


@torch.library.custom_op("moe_nvlink_tests::experts", mutates_args={"out"})
def experts(hidden: torch.Tensor, out: torch.Tensor) -> None:
    """Experts that Inductor cannot fuse, which say where they read and write."""
    _seen.append((hidden.data_ptr(), out.data_ptr()))
    torch.mul(hidden, 2.0, out=out)


@pytest.mark.parametrize("given", [False, True], ids=["new output", "output given"])
def test_no_row_is_copied(
    uncached: MoeAllToAll, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts read where the peers have written; combine reads where experts wrote, and returns."""

    def block(
        hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, output: torch.Tensor | None
    ) -> torch.Tensor:
        received = uncached.dispatch(hidden, ids, weights, [hidden])
        rows = uncached.combine_input(metadata=received.metadata)
        experts(received.hidden_states, rows)
        return uncached.combine(rows, received.metadata, output=output)

    def uncopied(_channel: Channel, _rows: torch.Tensor) -> None:
        raise AssertionError("combine copies the experts' rows")

    results: list[int] = []
    combine = LayerExchange.combine

    def noted(self: LayerExchange, *arguments: Any) -> torch.Tensor:
        result = combine(self, *arguments)
        results.append(result.data_ptr())
        return result

    hidden, ids, weights = inputs(5)
    output = torch.empty_like(hidden) if given else None
    kept = uncached.dispatch(hidden, ids, weights, [hidden])
    places = (kept.hidden_states.data_ptr(), uncached.combine_input().data_ptr())
    uncached.combine(kept.hidden_states, kept.metadata)
    monkeypatch.setattr(Channel, "_copy_rows", uncopied)
    monkeypatch.setattr(LayerExchange, "combine", noted)
    _seen.clear()
    compiled = torch.compile(block, fullgraph=True)
    with torch.no_grad():
        found, (code,) = run_and_get_code(compiled, hidden, ids, weights, output)
        again = compiled(hidden, ids, weights, output)
    torch.testing.assert_close(found, 2.0 * hidden)
    torch.testing.assert_close(again, 2.0 * hidden)
    assert _seen == [places] * 2
    assert results == [found.data_ptr(), again.data_ptr()]
    if output is not None:
        assert found.data_ptr() == again.data_ptr() == output.data_ptr()
    assert "moe_nvlink.combine" in code
    # Without a kernel of its own, nor a copy by torch, no call of this code moves a row.
    for mover in ("copy_", "clone", "cpp_fused", "empty_strided_cpu(("):
        assert mover not in code, code


# Two ranks.


def _in_step(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, and a barrier behind it.

    opcheck repeats one verb with copies of its arguments. The other verb is missing, which keeps
    ranks within a round of each other, and so is the refusal, which reads an argument.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        result = verb(*arguments, **named)
        dist.barrier()
        return result

    return call


def _compiled_rank(ep_rank: int, ep_size: int) -> list[bool]:
    """opcheck of both verbs, then the compiled layer against the eager one, with ragged counts."""
    mine = config(ep_size, ep_rank)
    equal = []
    with (
        MoeAllToAll.create(mine, dist.group.WORLD) as exchange,
        pytest.MonkeyPatch.context() as patch,
    ):
        for verb in ("start_dispatch", "combine"):
            patch.setattr(exchange._layer, verb, _in_step(getattr(exchange._layer, verb)))
        hidden, ids, weights = inputs(4 + ep_rank, ep_rank)
        pending, handle = torch.zeros(1, dtype=torch.int64), exchange._layer.handle
        opcheck_dispatch(exchange, (pending, hidden, None, ids, weights, [], None, handle, 0))
        rows = torch.randn(ep_size * CAPACITY, 24)
        slots = exchange.dispatch(hidden, ids, weights).metadata.send_slots
        arguments = (torch.full_like(pending, handle), rows, slots, handle, 0)
        torch.library.opcheck(torch.ops.moe_nvlink.combine.default, arguments)
        exchange._layer.workspace.pending.zero_()
        patch.undo()

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            return moe_layer(exchange, EXPERTS, *tensors)

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        for number in range(4):
            tensors = inputs((5 * number + 3 * ep_rank) % CAPACITY + 1, 10 * number + ep_rank)
            equal.append(torch.equal(compiled(*tensors), layer(*tensors)))
    return equal


def test_two_ranks(tmp_path: Path) -> None:
    assert run_processes(2, _compiled_rank, tmp_path) == [[True] * 4] * 2
