"""Calls that must be refused: the error names the value and what is expected, nothing is harmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll, rank_mask
from moe_nvlink_plugin.errors import ConfigError, InputError
from moe_nvlink_plugin.testing import ThreadGroup
from tests.core.exchange.small_exchange import (
    CAPACITY,
    HIDDEN,
    TOP_K,
    assert_still_works,
    config,
    good,
    other_metadata,
)

pytestmark = pytest.mark.timeout(120)


BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "hidden width": (
        {"hidden_states": torch.randn(3, HIDDEN + 1)},
        r"hidden_states has shape \[3, 9\], expected \[3, 8\]",
    ),
    "hidden rank": ({"hidden_states": torch.randn(3)}, r"hidden_states has shape \[3\]"),
    "hidden scalar": ({"hidden_states": torch.tensor(1.0)}, r"hidden_states has shape \[\]"),
    "hidden dtype": (
        {"hidden_states": torch.randn(3, HIDDEN).bfloat16()},
        "hidden_states has dtype torch.bfloat16, expected torch.float32",
    ),
    "hidden strides": (
        {"hidden_states": torch.randn(HIDDEN, 3).T},
        r"hidden_states is not contiguous \(strides \[1, 3\]\); call .contiguous",
    ),
    "hidden device": (
        {"hidden_states": torch.empty(3, HIDDEN, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "ids device": (
        {"topk_ids": torch.empty(3, TOP_K, dtype=torch.int32, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "bound of another type": ({"max_tokens": 3.0}, "max_tokens=3.0 is a float, it must be an int"),
    "too many tokens": (good(CAPACITY + 1), "5 tokens exceed max_tokens_per_rank=4"),
    "ids of fewer tokens": (
        {"topk_ids": torch.zeros(2, TOP_K, dtype=torch.int32)},
        r"topk_ids has shape \[2, 2\], expected \[3, 2\]",
    ),
    "ids top_k": ({"topk_ids": torch.zeros(3, 1, dtype=torch.int32)}, r"expected \[3, 2\]"),
    "ids dtype": (
        {"topk_ids": torch.zeros(3, TOP_K)},
        "topk_ids has dtype torch.float32, expected torch.int32 or torch.int64",
    ),
    "ids strides": (
        {"topk_ids": torch.zeros(3, 2 * TOP_K, dtype=torch.int32)[:, ::2]},
        "topk_ids is not contiguous",
    ),
    "weights dtype": (
        {"topk_weights": torch.rand(3, TOP_K).half()},
        "topk_weights has dtype torch.float16",
    ),
    "weights shape": ({"topk_weights": torch.rand(3, 3)}, r"topk_weights has shape \[3, 3\]"),
    "padding tokens": (
        {"is_padding": torch.zeros(2, dtype=torch.bool)},
        r"is_padding has shape \[2\], expected \[3\]",
    ),
    "padding dtype": (
        {"is_padding": torch.zeros(3, dtype=torch.int32)},
        "is_padding has dtype torch.int32, expected torch.bool",
    ),
    "padding strides": (
        {"is_padding": torch.zeros(6, dtype=torch.bool)[::2]},
        "is_padding is not contiguous",
    ),
    "padding device": (
        {"is_padding": torch.zeros(3, dtype=torch.bool, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "mask of two words": (
        {"active_ranks": torch.ones(2, dtype=torch.int64)},
        r"active_ranks has shape \[2\], expected \[1\]",
    ),
    "mask dtype": (
        {"active_ranks": torch.ones(1, dtype=torch.bool)},
        "active_ranks has dtype torch.bool, expected torch.int64",
    ),
    "mask device": (
        {"active_ranks": torch.ones(1, dtype=torch.int64, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
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
    "channel": ({"channel": 2}, "channel=2 is not below num_channels=2"),
    "channel None": ({"channel": None}, "channel=None is a NoneType, it must be an integer"),
    "channel bool": ({"channel": True}, "channel=True is a bool, it must be an integer"),
    "bound that is a tensor": (
        {"max_tokens": torch.tensor(3)},
        r"max_tokens=tensor\(3\) is a Tensor, it must be an integer",
    ),
    "negative channel": ({"channel": -1}, "channel=-1"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_dispatch_refuses(name: str, layer: MoeAllToAll) -> None:
    changes, message = BAD_DISPATCHES[name]
    with pytest.raises(InputError, match=message):
        layer.dispatch(**{**good(), **changes})
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


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as FSDP leaves it between two layers: it has a shape, its storage has no bytes."""
    left = tensor.clone()
    left.untyped_storage().resize_(0)
    return left


@pytest.mark.parametrize(
    "name", ["hidden_states", "topk_ids", "topk_weights", "is_padding", "extra"]
)
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_async"])
def test_dispatch_reads_no_address_of_nothing(verb: str, name: str, layer: MoeAllToAll) -> None:
    inputs = good() | {"is_padding": torch.zeros(3, dtype=torch.bool)}
    if name == "extra":
        inputs["extra_payloads"] = [without_memory(*inputs["extra_payloads"])]
    else:
        inputs[name] = without_memory(inputs[name])
    with pytest.raises(InputError, match=f"{name}.* of shape .* has no memory: its storage was"):
        getattr(layer, verb)(**inputs)
    assert_still_works(layer)


@pytest.mark.parametrize("name", ["expert_output", "output", "add", "send_slots"])
@pytest.mark.parametrize("verb", ["combine", "combine_async"])
def test_combine_reads_no_address_of_nothing(verb: str, name: str, layer: MoeAllToAll) -> None:
    """To the kernel, `add` without an address is a call without `add`."""
    received = layer.dispatch(**good())
    given: dict[str, Any] = {"expert_output": torch.zeros(CAPACITY, HIDDEN)}
    metadata = received.metadata
    if name == "send_slots":
        metadata = other_metadata(received, send_slots=without_memory(metadata.send_slots))
    else:
        given[name] = without_memory(given.get(name, torch.zeros(3, HIDDEN)))
    with pytest.raises(InputError, match=f"{name} of shape .* has no memory"):
        getattr(layer, verb)(metadata=metadata, **given)
    layer.combine(received.hidden_states, received.metadata)
    assert_still_works(layer)


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
    with MoeAllToAll.create(config(extra_payload_bytes=(8,)), ThreadGroup.ranks(1)[0]) as wide:
        with pytest.raises(InputError, match=r"an extra payload is a lazily .*resolve_conj\(\)"):
            wide.dispatch_async(**{**good(), "extra_payloads": [lazy]})
        received = wide.dispatch(**{**good(), "extra_payloads": [lazy]})
        assert torch.equal(received.extra_payloads[0][:3], lazy)
        wide.combine(received.hidden_states, received.metadata)


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


#: A dense tensor of rows in another form, and what the error says of it.
NOT_DENSE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
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
}
each_form = pytest.mark.parametrize("form", NOT_DENSE)


@each_form
@pytest.mark.parametrize("name", ["hidden_states", "topk_weights"])
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_async"])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse.*in beta state:UserWarning")
def test_dispatch_reads_dense_tensors(verb: str, name: str, form: str, layer: MoeAllToAll) -> None:
    """Of others torch itself raises errors, such as "Internal error: ... file an issue"."""
    inputs = good()
    change, message = NOT_DENSE[form]
    inputs[name] = change(inputs[name])
    with pytest.raises(InputError, match=f"^{name} {message.replace('{name}', name)}"):
        getattr(layer, verb)(**inputs)
    assert_still_works(layer)


@each_form
@pytest.mark.parametrize("name", ["expert_output", "output", "add"])
@pytest.mark.parametrize("verb", ["combine", "combine_async"])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse.*in beta state:UserWarning")
def test_combine_reads_dense_tensors(verb: str, name: str, form: str, layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    given = {"expert_output": torch.zeros(CAPACITY, HIDDEN)}
    change, message = NOT_DENSE[form]
    given[name] = change(given.get(name, torch.zeros(3, HIDDEN)))
    with pytest.raises(InputError, match=f"^{name} {message.replace('{name}', name)}"):
        getattr(layer, verb)(metadata=received.metadata, **given)
    layer.combine(received.hidden_states, received.metadata)
    assert_still_works(layer)


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


@pytest.mark.parametrize("name", ["hidden_states", "topk_weights"])
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_async"])
def test_no_gradient_passes_dispatch(name: str, verb: str, layer: MoeAllToAll) -> None:
    inputs = good()
    inputs[name].requires_grad_()
    with pytest.raises(InputError, match=f"{name} requires a gradient, .*inference_mode"):
        getattr(layer, verb)(**inputs)
    with torch.no_grad():
        received = layer.dispatch(**inputs)
        layer.combine(received.hidden_states, received.metadata)


@pytest.mark.parametrize("name", ["expert_output", "add"])
@pytest.mark.parametrize("verb", ["combine", "combine_async"])
def test_no_gradient_passes_combine(name: str, verb: str, layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    given: dict[str, Any] = {
        "expert_output": torch.zeros(CAPACITY, HIDDEN),
        "add": torch.zeros(3, HIDDEN),
    }
    given[name].requires_grad_()
    with pytest.raises(InputError, match=f"{name} requires a gradient"):
        getattr(layer, verb)(metadata=received.metadata, **given)
    with torch.inference_mode():
        layer.combine(metadata=received.metadata, **given)


SLOTS = CAPACITY
BAD_COMBINES: dict[str, tuple[Callable[[Dispatched], tuple[Any, ...]], str]] = {
    "rows": (
        lambda r: (torch.randn(SLOTS - 1, HIDDEN), r.metadata),
        r"expert_output has shape \[3, 8\], expected \[4, 8\]",
    ),
    "dtype": (
        lambda r: (torch.randn(SLOTS, HIDDEN).half(), r.metadata),
        "expert_output has dtype torch.float16",
    ),
    "strides": (
        lambda r: (torch.randn(HIDDEN, SLOTS).T, r.metadata),
        "expert_output is not contiguous",
    ),
    "device": (
        lambda r: (torch.empty(SLOTS, HIDDEN, device="meta"), r.metadata),
        "is on meta, this exchange works on cpu",
    ),
    "output shape": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(2, HIDDEN)),
        r"output has shape \[2, 8\], expected \[3, 8\]",
    ),
    "output dtype": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(3, HIDDEN).double()),
        "output has dtype torch.float64",
    ),
    "output strides": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(HIDDEN, 3).T),
        "output is not contiguous",
    ),
    "another layer's metadata": (
        lambda r: (r.hidden_states, other_metadata(r, handle=10**6)),
        "metadata belongs to exchange 1000000",
    ),
    "metadata without top_k": (
        lambda r: (r.hidden_states, other_metadata(r, send_slots=r.metadata.send_slots[:, :1])),
        r"metadata.send_slots has shape \[3, 1\]",
    ),
    "metadata of too many tokens": (
        lambda r: (
            r.hidden_states,
            other_metadata(r, send_slots=torch.zeros(9, TOP_K, dtype=torch.int32)),
        ),
        "metadata of 9 tokens exceeds max_tokens=4 of the dispatch",
    ),
    "no metadata": (
        lambda r: (r.hidden_states, None),
        "metadata is a NoneType; pass the metadata that dispatch returned",
    ),
    "rows that are no tensor": (
        lambda r: ([[0.0] * HIDDEN] * SLOTS, r.metadata),
        "expert_output=.* is a list, not a tensor",
    ),
    "no rows": (lambda r: (None, r.metadata), "expert_output=None is a NoneType, not a tensor"),
    "metadata channel": (
        lambda r: (r.hidden_states, other_metadata(r, channel=7)),
        "channel=7 is not below num_channels=2",
    ),
}


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_combine_refuses(name: str, layer: MoeAllToAll) -> None:
    """The dispatch before stays to be combined."""
    arguments, message = BAD_COMBINES[name]
    inputs = good()
    received = layer.dispatch(**inputs)
    rows, metadata, *output = arguments(received)
    with pytest.raises(InputError, match=message):
        layer.combine(rows, metadata, output=output[0] if output else None)
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


BAD_ADDS: dict[str, tuple[Callable[[MoeAllToAll], dict[str, Any]], str]] = {
    "add shape": (
        lambda layer: {"add": torch.zeros(2, HIDDEN)},
        r"add has shape \[2, 8\], expected \[3, 8\]",
    ),
    "add dtype": (
        lambda layer: {"add": torch.zeros(3, HIDDEN).half()},
        "add has dtype torch.float16, expected torch.float32; convert it first",
    ),
    "add strides": (
        lambda layer: {"add": torch.zeros(HIDDEN, 3).T},
        r"add is not contiguous \(strides \[1, 3\]\); call .contiguous",
    ),
    "add device": (
        lambda layer: {"add": torch.empty(3, HIDDEN, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "add in the combine region": (
        lambda layer: {"add": layer.combine_input()[:3]},
        "add lies at 0x[0-9a-f]+, in the exchange's workspace .*; pass a copy",
    ),
    "add across the output": (
        lambda layer: overlapping(torch.zeros(4, HIDDEN)),
        "add overlaps output, which begins 32 bytes after it; pass the same memory or",
    ),
    "output before add": (
        lambda layer: overlapping(torch.zeros(4, HIDDEN), names=("output", "add")),
        "add overlaps output, which begins -32 bytes after it",
    ),
    "scale text": (lambda layer: {"scale": "2"}, "scale='2' is a str, it must be a real number"),
    "scale None": (lambda layer: {"scale": None}, "scale=None is a NoneType"),
    "scale bool": (lambda layer: {"scale": True}, "scale=True is a bool"),
    "scale tensor": (
        lambda layer: {"scale": torch.tensor(2.0)},
        r"scale=tensor\(2.\) is a Tensor, .*pass scale.item\(\)",
    ),
    "width text": (lambda layer: {"hidden_size": "4"}, "hidden_size='4' is a str"),
    "add that is no tensor": (lambda layer: {"add": 1.0}, "add=1.0 is a float, not a tensor"),
    "scale NaN": (lambda layer: {"scale": float("nan")}, "scale=nan is no finite number of float"),
    "scale infinity": (lambda layer: {"scale": float("-inf")}, "scale=-inf is no finite number"),
    "scale beyond float32": (
        lambda layer: {"scale": 3.5e38},
        r"scale=3.5e\+38 is no finite number of float32 \(at most 3.4028.*e\+38 in magnitude\); ",
    ),
}


def overlapping(memory: torch.Tensor, names: tuple[str, str] = ("add", "output")) -> dict[str, Any]:
    """Rows of three tokens in memory of four; the second name's begin one later."""
    return dict(zip(names, (memory[:3], memory[1:]), strict=True))


@pytest.mark.parametrize("name", BAD_ADDS)
def test_combine_refuses_what_it_cannot_add(name: str, layer: MoeAllToAll) -> None:
    """The dispatch before stays to be combined."""
    changes, message = BAD_ADDS[name]
    inputs = good()
    received = layer.dispatch(**inputs)
    with pytest.raises(InputError, match=message):
        layer.combine(received.hidden_states, received.metadata, **changes(layer))
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
    slots = torch.tensor([[-5, 10**6], [2**31 - 1, -(2**31)], [SLOTS, -1]], dtype=torch.int32)
    combined = layer.combine(received.hidden_states, other_metadata(received, send_slots=slots))
    assert not bool(combined.any())


def test_combine_input_of_another_type(layer: MoeAllToAll) -> None:
    with pytest.raises(InputError, match=r"torch.float16 was asked for, combine reduces torch.fl"):
        layer.combine_input(torch.float16)
    assert layer.combine_input(torch.float32).dtype is torch.float32
    with pytest.raises(InputError, match="channel=2"):
        layer.combine_input(channel=2)


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
    config = AllToAllConfig(
        ep_size=1, ep_rank=0, num_experts=2, top_k=1, hidden_size=4, max_tokens_per_rank=2
    )
    with MoeAllToAll.create(config, group, torch.device("cpu", 0)) as exchange:
        ids = torch.zeros((1, 1), dtype=torch.int32)
        rows = torch.ones((1, 4), dtype=torch.bfloat16)
        assert exchange.dispatch(rows, ids, torch.ones((1, 1))).recv_counts.tolist() == [1]
