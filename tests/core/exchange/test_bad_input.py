"""Calls that must be refused: the error names the value and what is expected, nothing is harmed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_nvlink_plugin import Dispatched, MoeAllToAll, rank_mask
from moe_nvlink_plugin.errors import ConfigError, InputError
from moe_nvlink_plugin.testing import ThreadGroup
from tests.core.exchange.small_exchange import (
    CAPACITY,
    HIDDEN,
    TOP_K,
    alone,
    assert_still_works,
    config,
    freed,
    good,
    plain,
)

#: A good value of each tensor of dispatch, of three tokens.
TENSORS = {
    "hidden_states": torch.ones(3, HIDDEN),
    "topk_ids": torch.zeros(3, TOP_K, dtype=torch.int32),
    "topk_weights": torch.ones(3, TOP_K),
    "is_padding": torch.zeros(3, dtype=torch.bool),
    "active_ranks": torch.ones(1, dtype=torch.int64),
}

BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} {wrong}": ({name: bad}, f"{name} {said}")
        for name, good in TENSORS.items()
        for wrong, bad, said in (
            ("shape", torch.cat([good] * 2, -1), rf"has shape .*, expected \{[*good.shape]}"),
            ("dtype", good.double(), f"has dtype torch.float64, expected {good.dtype}"),
            ("strides", torch.stack([good] * 2, -1)[..., 0], r"is not contiguous \(strides .*\);"),
            ("device", good.to("meta"), "is on meta, this exchange works on cpu"),
        )
        if wrong != "strides" or len(good) > 1
    },
    "hidden rank": ({"hidden_states": torch.randn(3)}, r"hidden_states has shape \[3\]"),
    "hidden scalar": ({"hidden_states": torch.tensor(1.0)}, r"hidden_states has shape \[\]"),
    "ids of fewer tokens": (
        {"topk_ids": TENSORS["topk_ids"][1:]},
        r"topk_ids has shape \[2, 2\], expected \[3, 2\]",
    ),
    "bound of another type": ({"max_tokens": 3.0}, "max_tokens=3.0 is a float, it must be an int"),
    **{
        f"bound {bound}": (
            {"max_tokens": bound},
            f"max_tokens={bound} is not between 1 and max_tokens_per_rank=4; pass",
        )
        for bound in (0, -1, CAPACITY + 1)
    },
    "too many tokens": (good(CAPACITY + 1), "5 tokens exceed max_tokens_per_rank=4"),
    "more tokens than the bound": ({"max_tokens": 2}, "3 tokens exceed max_tokens=2 of this call;"),
    "mask without oneself": (
        {"active_ranks": torch.zeros(1, dtype=torch.int64)},
        r"active_ranks names ranks \[\] of 0 to 0, but this is rank 0; a rank that dispatches",
    ),
    "two extra payloads": (
        {"extra_payloads": [torch.zeros(3, 6, dtype=torch.uint8)] * 2},
        r"2 extra payloads given, the configuration has room for 1 \(extra_payload_bytes=\(6,\)\)",
    ),
    "extra row bytes": (
        {"extra_payloads": [torch.zeros(3, 7, dtype=torch.uint8)]},
        r"extra_payloads\[0\] has rows of 7 bytes, not 1 to 6",
    ),
    "extra tokens": (
        {"extra_payloads": [torch.zeros(2, 6, dtype=torch.uint8)]},
        r"extra_payloads\[0\] has shape \[2, 6\], expected \[3, 6\]",
    ),
    "unexpected scales": ({"scales": torch.ones(3, 1)}, "has no scales"),
    "ids that are no tensor": (
        {"topk_ids": [[0, 1]] * 3},
        r"topk_ids=\[\[0, 1\], .* is a list, not a tensor",
    ),
    "no ids": ({"topk_ids": None}, "topk_ids=None is a NoneType, not a tensor"),
    "no hidden states": ({"hidden_states": None}, "hidden_states=None is a NoneType, not a tensor"),
    "mask that is no tensor": (
        {"active_ranks": 3},
        r"active_ranks=3 is a int, not a tensor; rank_mask\(ranks, ep_size\) makes one",
    ),
    "one extra payload alone": (
        {"extra_payloads": torch.zeros(3, 6, dtype=torch.uint8)},
        r"extra_payloads is a Tensor, it must be a list or tuple of tensors; pass \[tensor\]",
    ),
    "extra that is no tensor": (
        {"extra_payloads": [b"123456"]},
        "an extra payload=b'123456' is a bytes, not a tensor",
    ),
    "channel": ({"channel": 2}, "channel=2 is not from 0 to 1; raise num_channels=2"),
    "channel None": ({"channel": None}, "channel=None is a NoneType, it must be an integer"),
    "channel bool": ({"channel": True}, "channel=True is a bool, it must be an integer"),
    "bound that is a tensor": (
        {"max_tokens": torch.tensor(3)},
        r"max_tokens=tensor\(3\) is a Tensor, it must be an integer",
    ),
    "negative channel": ({"channel": -1}, "channel=-1"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_async"])
def test_dispatch_refuses(name: str, verb: str, layer: MoeAllToAll) -> None:
    changes, message = BAD_DISPATCHES[name]
    with pytest.raises(InputError, match=message):
        getattr(layer, verb)(**{**good(), **changes})
    assert_still_works(layer)


#: What the kernels would read there, and where it lies in the workspace.
IN_THE_WORKSPACE: dict[str, Callable[[Dispatched, torch.Tensor], dict[str, Any]]] = {
    "hidden_states": lambda r, rows: {"hidden_states": r.hidden_states[:3]},
    "topk_ids": lambda r, rows: {"topk_ids": r.topk_ids[:3]},
    "topk_weights": lambda r, rows: {"topk_weights": r.topk_weights[:3]},
    "an extra payload": lambda r, rows: {"extra_payloads": [r.extra_payloads[0][:3]]},
    "active_ranks": lambda r, rows: {"active_ranks": rows.view(torch.int64).view(-1)[:1].fill_(1)},
    "is_padding": lambda r, rows: {"is_padding": rows.view(torch.bool).view(-1)[:3].fill_(False)},
}


@pytest.mark.parametrize("name", IN_THE_WORKSPACE)
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_async"])
def test_dispatch_reads_no_workspace(name: str, verb: str, layer: MoeAllToAll) -> None:
    """A peer may overwrite what an earlier round brought before this rank has sent it on."""
    received = layer.dispatch(**good())
    layer.combine(received.hidden_states, received.metadata)
    changes = IN_THE_WORKSPACE[name](received, layer.combine_input())
    with pytest.raises(InputError, match=f"^{name} lies at 0x[0-9a-f]+, in the exchange's works"):
        getattr(layer, verb)(**{**good(), **changes})
    assert_still_works(layer)


@pytest.mark.parametrize("verb", ["combine", "combine_async"])
def test_combine_writes_to_no_workspace(verb: str, layer: MoeAllToAll) -> None:
    """The peers read there until the next dispatch."""
    inputs = good()
    received = layer.dispatch(**inputs)
    rows = layer.combine_input().copy_(received.hidden_states)
    for output in (rows[:3], received.hidden_states[:3]):
        with pytest.raises(InputError, match="output lies at 0x.*; pass a copy"):
            getattr(layer, verb)(rows, received.metadata, output=output)
    assert torch.equal(layer.combine(rows, received.metadata), inputs["hidden_states"])


def test_a_tensor_without_rows_needs_no_memory(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good(0))
    assert layer.combine(received.hidden_states, received.metadata).shape == (0, HIDDEN)
    assert_still_works(layer)


def test_rows_that_begin_elsewhere_in_their_own_memory(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good(2), max_tokens=2)
    everything = layer.combine_input()
    with pytest.raises(InputError, match="expert_output begins 32 bytes after combine_input()"):
        layer.combine(everything[1:3], received.metadata)
    layer.combine(everything[:2], received.metadata)
    assert_still_works(layer)


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_lazy_views(view: str) -> None:
    """Dispatch has an op that resolves them, dispatch_async has none."""
    number = torch.complex(torch.ones(3), torch.full((3,), 5.0)).conj()
    lazy = (number if view == "conj" else number.imag).view(3, 1)
    with alone(extra_payload_bytes=(8,)) as wide:
        with pytest.raises(InputError, match=r"an extra payload is a lazily .*resolve_conj\(\)"):
            wide.dispatch_async(**{**good(), "extra_payloads": [lazy]})
        received = wide.dispatch(**{**good(), "extra_payloads": [lazy]})
        assert torch.equal(received.extra_payloads[0][:3], lazy)
        rows = received.hidden_states.clone()
        with pytest.raises(InputError, match="output is a lazily .*its memory holds other numbers"):
            wide.combine(rows, received.metadata, output=torch._neg_view(torch.zeros(3, HIDDEN)))
        wide.combine(rows, received.metadata)


def test_results_without_memory(layer: MoeAllToAll, environment: None) -> None:
    """Dispatch has an op that knows of fake tensors; beside the caller nothing does."""
    refused = pytest.raises(InputError, match="tensors without memory .*leave the mode")
    given = good()
    with refused, FakeTensorMode(allow_non_fake_inputs=True):
        layer.dispatch_async(**given)
    received = layer.dispatch(**given)
    rows = torch.zeros_like(received.hidden_states)
    refused = pytest.raises(InputError, match="tensors without memory .*leave the mode")
    with refused, FakeTensorMode(allow_non_fake_inputs=True):
        layer.combine_async(rows, received.metadata)
    layer.combine(rows, received.metadata)
    assert_still_works(layer)


#: What may be wrong with a tensor of rows that has the right shape, and what the error says of it.
NO_ROWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nested": (
        lambda rows: torch.nested.nested_tensor([rows]),
        r"is a nested tensor, a verb reads one dense tensor; pass torch\.cat\({name}\.unbind\(\)\)",
    ),
    "jagged": (
        lambda rows: torch.nested.nested_tensor([rows], layout=torch.jagged),
        r"is a nested tensor",
    ),
    "sparse": (
        torch.Tensor.to_sparse,
        r"has layout torch.sparse_coo, a verb reads torch.strided; pass {name}\.to_dense\(\)",
    ),
    "sparse rows": (torch.Tensor.to_sparse_csr, "has layout torch.sparse_csr"),
    "mkldnn": (torch.Tensor.to_mkldnn, "has layout torch._mkldnn"),
    "freed": (freed, "of shape .* has no memory: its storage was"),
    "gradient": (torch.Tensor.requires_grad_, "requires a gradient, .*inference_mode"),
}
quiet = pytest.mark.filterwarnings("ignore:.*nested tensors|Sparse.*in beta state:UserWarning")


def spoiled(form: str, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The tensor in this form, and the error that must follow."""
    change, message = NO_ROWS[form]
    return change(tensor), pytest.raises(InputError, match=f"^{name} " + message.format(name=name))


@quiet
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *itertools.product(NO_ROWS, ["hidden_states", "topk_weights"]),
        *itertools.product(["freed"], ["topk_ids", "is_padding", r"extra_payloads\[0\]"]),
    ],
)
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_async"])
def test_dispatch_reads_no_other_tensors(
    verb: str, form: str, name: str, layer: MoeAllToAll
) -> None:
    """Of some torch itself raises errors, such as "Internal error: ... file an issue"."""
    inputs = good() | {"is_padding": torch.zeros(3, dtype=torch.bool)}
    if name.startswith("extra_payloads"):
        payload, refused = spoiled(form, name, *inputs["extra_payloads"])
        inputs["extra_payloads"] = [payload]
    else:
        inputs[name], refused = spoiled(form, name, inputs[name])
    with refused:
        getattr(layer, verb)(**inputs)
    assert_still_works(layer)


@quiet
@pytest.mark.parametrize(
    ("form", "name"),
    [
        pair
        for pair in itertools.product(NO_ROWS, ["expert_output", "output", "add"])
        if pair != ("gradient", "output")
    ]
    + [("freed", "send_slots")],
)
@pytest.mark.parametrize("verb", ["combine", "combine_async"])
def test_combine_reads_no_other_tensors(
    verb: str, form: str, name: str, layer: MoeAllToAll
) -> None:
    """To the kernel, `add` without an address is a call without `add`."""
    received = layer.dispatch(**good())
    given: dict[str, Any] = {"expert_output": torch.zeros(CAPACITY, HIDDEN)}
    metadata = received.metadata
    if name == "send_slots":
        slots, refused = spoiled(form, f"metadata.{name}", metadata.send_slots)
        metadata = metadata._replace(send_slots=slots)
    else:
        given[name], refused = spoiled(form, name, given.get(name, torch.zeros(3, HIDDEN)))
    with refused:
        getattr(layer, verb)(metadata=metadata, **given)
    layer.combine(received.hidden_states, received.metadata)
    assert_still_works(layer)


def test_gradients_that_nobody_records_pass(layer: MoeAllToAll) -> None:
    inputs = good()
    for name in ("hidden_states", "topk_weights"):
        inputs[name].requires_grad_()
    with torch.no_grad():
        metadata = layer.dispatch(**inputs).metadata
    rows = torch.zeros(CAPACITY, HIDDEN, requires_grad=True)
    with torch.inference_mode():
        layer.combine(rows, metadata, add=torch.zeros(3, HIDDEN, requires_grad=True))


def test_torchs_errors_about_dense_tensors_stay(
    layer: MoeAllToAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object, **_named: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(layer._layer), "start_dispatch", fails)
        for verb in (layer.dispatch, layer.dispatch_async):
            with pytest.raises(RuntimeError, match="^out of memory$"):
                verb(**good())
    assert_still_works(layer)


def always(given: dict[str, Any]) -> Callable[[MoeAllToAll, Dispatched], dict[str, Any]]:
    return lambda _layer, _received: given


#: A good value of each tensor of combine, for which shape, type and place are asked.
ROWS = {"expert_output": torch.zeros(CAPACITY, HIDDEN)}
ROWS |= dict.fromkeys(("output", "add"), torch.zeros(3, HIDDEN))

#: What is given to combine instead of good arguments, by the layer and what a dispatch returned.
BAD_COMBINES: dict[str, tuple[Callable[[MoeAllToAll, Dispatched], dict[str, Any]], str]] = {
    **{
        f"{name} {wrong}": (always({name: bad}), f"{name} {said}")
        for name, good in ROWS.items()
        for wrong, bad, said in (
            ("shape", good[1:], rf"has shape \[{len(good) - 1}, 8\], expected \[{len(good)}, 8\]"),
            ("dtype", good.half(), "has dtype torch.float16, expected torch.float32; convert it"),
            ("strides", good.T.contiguous().T, r"is not contiguous \(strides .*; call .contiguous"),
            ("device", good.to("meta"), "is on meta, this exchange works on cpu"),
        )
    },
    "another layer's metadata": (
        lambda layer, r: {"metadata": r.metadata._replace(handle=10**6)},
        "metadata belongs to exchange 1000000",
    ),
    "metadata without top_k": (
        lambda layer, r: {"metadata": with_slots(r, r.metadata.send_slots[:, :1])},
        r"metadata.send_slots has shape \[3, 1\]",
    ),
    "metadata of too many tokens": (
        lambda layer, r: {"metadata": with_slots(r, torch.zeros(9, TOP_K, dtype=torch.int32))},
        "metadata of 9 tokens exceeds max_tokens=4 of the dispatch",
    ),
    "no metadata": (
        lambda layer, r: {"metadata": None},
        "metadata is a NoneType; pass the metadata that dispatch returned",
    ),
    "metadata channel": (
        lambda layer, r: {"metadata": r.metadata._replace(channel=7)},
        "channel=7 is not from 0 to 1; raise num_channels=2",
    ),
    "rows that are no tensor": (
        lambda layer, r: {"expert_output": [[0.0] * HIDDEN] * CAPACITY},
        "expert_output=.* is a list, not a tensor",
    ),
    "no rows": (
        lambda layer, r: {"expert_output": None},
        "expert_output=None is a NoneType, not a tensor",
    ),
    "add in the combine region": (
        lambda layer, r: {"add": layer.combine_input()[:3]},
        "add lies at 0x[0-9a-f]+, in the exchange's workspace .*; pass a copy",
    ),
    "add across the output": (
        lambda layer, r: overlapping("add", "output"),
        "add overlaps output, which begins 32 bytes after it; pass the same memory or",
    ),
    "output before add": (
        lambda layer, r: overlapping("output", "add"),
        "add overlaps output, which begins -32 bytes after it",
    ),
    **{
        f"{name}={value!r}": (always({name: value}), said)
        for name, value, said in (
            ("scale", "2", "scale='2' is a str, it must be a real number"),
            ("scale", None, "scale=None is a NoneType"),
            ("scale", True, "scale=True is a bool"),
            ("scale", torch.tensor(2.0), r"scale=tensor\(2.\) is a Tensor, .*pass scale.item\(\)"),
            ("scale", float("nan"), "scale=nan is no finite number of float"),
            ("scale", float("-inf"), "scale=-inf is no finite number"),
            (
                "scale",
                3.5e38,
                r"3.5e\+38 is no .* float32 \(at most 3.4028.*e\+38 in magnitude\); ",
            ),
            ("hidden_size", "4", "hidden_size='4' is a str"),
            ("add", 1.0, "add=1.0 is a float, not a tensor"),
        )
    },
}


def with_slots(received: Dispatched, slots: torch.Tensor) -> Any:
    return received.metadata._replace(send_slots=slots)


def overlapping(first: str, second: str) -> dict[str, Any]:
    """Rows of three tokens in memory of four; the second name's begin one later."""
    memory = torch.zeros(4, HIDDEN)
    return {first: memory[:3], second: memory[1:]}


@pytest.mark.parametrize("name", BAD_COMBINES)
@pytest.mark.parametrize("verb", ["combine", "combine_async"])
def test_combine_refuses(name: str, verb: str, layer: MoeAllToAll) -> None:
    """The dispatch before stays to be combined."""
    changes, message = BAD_COMBINES[name]
    inputs = good()
    received = layer.dispatch(**inputs)
    usual: dict[str, Any] = {"expert_output": received.hidden_states, "metadata": received.metadata}
    with pytest.raises(InputError, match=message):
        getattr(layer, verb)(**usual | changes(layer, received))
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


def test_the_largest_scale(layer: MoeAllToAll) -> None:
    inputs, largest = good(), torch.finfo(torch.float32).max
    received = layer.dispatch(**inputs)
    rows = torch.full((CAPACITY, HIDDEN), 0.5)
    combined = layer.combine(rows, received.metadata, scale=largest)
    assert bool((combined == torch.tensor(largest) * 0.5).all())


def test_slots_outside_the_buffers_are_no_rows(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    slots = torch.tensor([[-5, 10**6], [2**31 - 1, -(2**31)], [CAPACITY, -1]], dtype=torch.int32)
    combined = layer.combine(received.hidden_states, with_slots(received, slots))
    assert not bool(combined.any())


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, "ranks=3 is no sequence of ranks"),
        ([0, 4], r"rank 4 is not in 0\.\.3"),
        ([-1], r"rank -1 is not in 0\.\.3"),
        (["1"], "rank '1' is a str, it must be an integer"),
        ([True, False, True, True], "rank True is a bool, .* of bools the places of True"),
        (torch.tensor([0, 2]), r"rank tensor\(0\) is a Tensor, .* pass \.tolist\(\)"),
    ],
)
def test_masks_of_what_are_no_ranks(ranks: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rank_mask(ranks, 4)


def test_share_with_what_is_no_layer() -> None:
    (group,) = ThreadGroup.ranks(1)
    with pytest.raises(InputError, match="share_with is a AllToAllConfig; pass another layer"):
        MoeAllToAll.create(config(), group, share_with=config())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ep_size": 1}, r"config={'ep_size': 1} is a dict, .*; pass AllToAllConfig\(\*\*config\)"),
        (None, "config=None is a NoneType, not of class AllToAllConfig"),
    ],
)
def test_configurations_of_another_class(given: Any, message: str) -> None:
    (group,) = ThreadGroup.ranks(1)
    for refuse in (lambda: MoeAllToAll.create(given, group), lambda: MoeAllToAll.check(given)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_the_cpu_with_a_number_is_the_cpu() -> None:
    """torch's tensors are on "cpu", whatever number was asked for."""
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(config(), group, torch.device("cpu", 0)) as exchange:
        assert exchange.dispatch(**plain()).recv_counts.tolist() == [3]
