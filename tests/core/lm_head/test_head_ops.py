"""torch.ops.moe_nvlink.head_argmax and head_logits: registration, compiled code, torch's modes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from moe_nvlink_plugin import HeadGroup, sharded_argmax, sharded_logits
from moe_nvlink_plugin.errors import ExchangeStateError, InputError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.support import small_head
from tests.support.small_head import check_argmax, check_logits, config, ids_of, logits_of, problem

OPS = [torch.ops.moe_nvlink.head_argmax.default, torch.ops.moe_nvlink.head_logits.default]


@pytest.fixture
def head() -> Iterator[HeadGroup]:
    torch._dynamo.reset()
    (group,) = ThreadGroup.ranks(1)
    with HeadGroup.create(config(full_logits=True), group) as mine:
        yield mine


def arguments(head: HeadGroup, **changes: Any) -> tuple[Any, ...]:
    one = problem(head.config, [3] * head.config.tp_size, bias=True)
    usual: dict[str, Any] = {
        "pending": torch.zeros_like(head._head.workspace.pending),
        "hidden": one.rows[head.config.tp_rank],
        "head_weight": one.weight,
        "bias": one.bias,
        "soft_cap": 30.0,
        "scale": 0.5,
        "row_bound": small_head.CAPACITY,
        "handle": head._handle,
    }
    return tuple((usual | changes).values())


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: Any, head: HeadGroup) -> None:
    torch.library.opcheck(op, arguments(head))
    torch.library.opcheck(op, arguments(head, bias=None, soft_cap=None, scale=1.0))
    torch.library.opcheck(op, arguments(head, hidden=torch.empty(0, small_head.HIDDEN)))


@pytest.mark.parametrize("op", OPS)
def test_fakes(op: Any, head: HeadGroup) -> None:
    """Shapes without an exchange; a tensor elsewhere is refused as by the op itself."""
    real = op(*arguments(head))
    rounds = head.stats().rounds
    given = arguments(head)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given))
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert head.stats().rounds == rounds
    with pytest.raises(InputError, match="hidden is on meta, this exchange works on cpu"):
        op(*arguments(head, hidden=torch.empty(3, small_head.HIDDEN, device="meta")))
    with pytest.raises(ExchangeStateError, match="head group 999999 is closed"):
        op(*arguments(head, handle=999999))


# Compiled code.


def step(head: HeadGroup, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As a drafter's: something in front, the verb, something behind."""
    ids = sharded_argmax(torch.relu(hidden), weight, group=head)
    return ids * 2 + 1


def test_compiled_whole_with_any_number_of_rows(head: HeadGroup) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    weight = problem(config(), []).weight
    graphs = []
    with torch.no_grad():
        for count in (2, 4, 3, 2):
            (rows,) = problem(config(), [count], count).rows
            assert torch.equal(compiled(head, rows, weight), step(head, rows, weight))
            graphs.append(counter.frame_count)
    assert graphs == [graphs[0]] * 4, "compiled anew for another number of rows"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_calls_are_neither_dropped_nor_put_in_another_order(backend: str, head: HeadGroup) -> None:
    """Peers take part in each, so even a call whose result nobody uses must be made; and equal
    calls must not become one.
    """
    one = problem(config(), [3])
    seen: list[str] = []

    def recorded(name: str, really: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(given: Any) -> torch.Tensor:
            seen.append(f"{name} of {len(given.hidden)}")
            return really(given)

        return call

    for name in ("argmax", "logits"):
        setattr(head._head, name, recorded(name, getattr(head._head, name)))

    def several(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Nothing pointwise: Inductor needs no compiler for it.
        sharded_logits(hidden[:2], weight, group=head)
        ids = sharded_argmax(hidden, weight, group=head)
        sharded_argmax(hidden, weight, group=head)
        sharded_argmax(hidden[:1], weight, group=head)
        return sharded_logits(hidden, weight, group=head), ids

    expected = several(one.rows[0], one.weight)
    eager = list(seen)
    seen.clear()
    compiled = torch.compile(several, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(one.rows[0], one.weight), expected)
    assert seen == eager
    assert len(eager) == 5


# Modes.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes(mode: Callable[[], Any], head: HeadGroup) -> None:
    """In turns with calls outside of them, on one group."""
    one = problem(config(), [3], bias=True)
    for _ in range(2):
        with mode():
            check_argmax(head, one)
            check_logits(head, one)
        check_argmax(head, one)
        check_logits(head, one)


def test_a_group_made_in_inference_mode() -> None:
    (group,) = ThreadGroup.ranks(1)
    one = problem(config(), [3])
    with torch.inference_mode():
        head = HeadGroup.create(config(full_logits=True), group)
        check_argmax(head, one)
    check_logits(head, one)
    head.close()


def test_a_head_that_is_a_parameter(head: HeadGroup) -> None:
    """Served as it is; there is nothing to differentiate."""
    one = problem(config(), [3], bias=True)
    assert one.bias is not None
    weight, bias = torch.nn.Parameter(one.weight), torch.nn.Parameter(one.bias)
    given = one._replace(weight=weight, bias=bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = one.rows[0]
        ids = sharded_argmax(rows, weight, group=head, bias=bias)
        logits = sharded_logits(rows, weight, group=head, bias=bias, soft_cap=30.0)
    assert torch.equal(ids, ids_of(head.config, one, 0))
    expected = 30.0 * torch.tanh(logits_of(head.config, one, 0) / 30.0)
    torch.testing.assert_close(logits.detach(), expected)
    with torch.no_grad():
        check_argmax(head, given)
        check_logits(head, given)


# Two ranks.


def test_a_compiled_rank_beside_one_that_is_not() -> None:
    """Each against torch, with ragged counts, none among them."""
    torch._dynamo.reset()
    weight = problem(config(), []).weight
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)

    def rank_main(group: ThreadGroup) -> None:
        call = compiled if group.rank == 0 else step
        with HeadGroup.create(config(2, group.rank, timeout_s=100), group) as head:
            for number in range(6):
                one = problem(config(2), [(number + 2 * rank) % 5 for rank in range(2)], number)
                rows = one.rows[group.rank]
                alone = one._replace(rows=[rows.relu()], weight=weight)
                expected = ids_of(config(), alone, 0) * 2 + 1
                assert torch.equal(call(head, rows, weight), expected)

    run_ranks(2, rank_main)
