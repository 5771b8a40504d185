"""The values of a round: a call of dispatch or combine, and what dispatch returns.

A field of Dispatch or Combine is the only place that spells an argument of a verb, besides
MoeAllToAll's signature and args.h of the kernels. From the fields come the schemas of the torch ops
(`schema`), what a well-formed tensor is (`expected`), and the fields of the argument structs that
get an address (`addressed`). A call is also the argument list of its op, so the fields have the
order of the schema, which compiled graphs and their caches hold. MoeAllToAll documents them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch


class Given(NamedTuple):
    """What a tensor of a call must be.

    Attributes:
        shape: names of sizes: num_tokens, num_mask_words, and those of AllToAllConfig. None: it
            depends on more than sizes, and checks.py has a function for it.
        dtypes: types that it may have.
        is_addressed: the field of the argument struct with this name gets the tensor's address.
    """

    shape: str | None
    dtypes: tuple[torch.dtype, ...]
    is_addressed: bool = False


class Dispatch(NamedTuple):
    """One call of dispatch. `handle` is the number of the layer (layer.find)."""

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: Annotated[torch.Tensor, Given("num_tokens top_k", (torch.int32, torch.int64))]
    topk_weights: Annotated[torch.Tensor, Given("num_tokens top_k", (torch.float32,))]
    extra_payloads: list[torch.Tensor]
    global_scale: Annotated[torch.Tensor | None, Given(None, (torch.float32,), is_addressed=True)]
    handle: int
    channel: int
    is_padding: Annotated[
        torch.Tensor | None, Given("num_tokens", (torch.bool,), is_addressed=True)
    ] = None
    max_tokens: int | None = None
    active_ranks: Annotated[
        torch.Tensor | None, Given("num_mask_words", (torch.int64,), is_addressed=True)
    ] = None
    expert_counts: Annotated[
        torch.Tensor | None, Given("num_expert_counts", (torch.int32,), is_addressed=True)
    ] = None


class Combine(NamedTuple):
    """One call of combine. `handle` is the number of the layer (layer.find)."""

    expert_output: torch.Tensor
    send_slots: torch.Tensor
    output: torch.Tensor | None
    handle: int
    channel: int
    hidden_size: int | None = None
    add: torch.Tensor | None = None
    scale: float = 1.0


class DispatchMetadata(NamedTuple):
    """Facts about a dispatch that its combine needs. Opaque to the caller; valid for one combine.

    Attributes:
        send_slots: `[num_tokens, top_k]` int32: slot of the row that travelled because of this k;
            -1 if none did.
        channel: number of the channel.
        handle: number of the layer.
        round: number of the layer's dispatch through this channel. -1 from compiled code, where the
            graph ties a combine to its dispatch. An eager combine then goes by the memory of
            send_slots.
        max_tokens: bound of the dispatch: each rank's slice has so many slots.
    """

    send_slots: torch.Tensor
    channel: int
    handle: int
    round: int
    max_tokens: int


class Dispatched(NamedTuple):
    """Rows that this rank received, as views into the workspace; valid until the matching combine.

    `max_tokens` is the bound of the dispatch, by default max_tokens_per_rank. The rows are
    rank-major. Rows `s * max_tokens` up to, but not including, `s * max_tokens + recv_counts[s]`
    came from rank s. If max_tokens is at most config.small_tokens and the rows of all payloads are
    multiples of 4 bytes, they have the order of that rank's tokens; otherwise the order may differ
    from call to call. The remaining rows of each rank's slice are empty. With
    `received_ids="global"`, all `topk_ids` of an empty row are -1, and its other contents are
    arbitrary. Otherwise its `topk_ids` are the absent id, its `topk_weights` are 0, and its other
    contents are arbitrary.

    Under torch.compile, only the experts' output that combine takes may depend on these tensors.
    The compiler may move any other reader after the combine, where the peers' next dispatch may
    have overwritten the rows. torch has no means to forbid that.

    Attributes:
        hidden_states: `[ep_size * max_tokens, elements of the recipe's row]`.
        scales: `[ep_size * max_tokens, scales per row]`, or as AllToAllConfig.scales_layout says;
            None if the recipe has no scales.
        topk_ids: `[ep_size * max_tokens, top_k]` int32, global ids, and -1 for no expert; or as
            AllToAllConfig.received_ids says.
        topk_weights: `[ep_size * max_tokens, top_k] float32`; unless received_ids is "global", 0
            beside absent ids.
        extra_payloads: each `[ep_size * max_tokens, ...]`, in the dtype and row shape that this
            rank sent.
        recv_counts: `[ep_size]` int32, number of rows from each rank.
        metadata: argument of combine.
        expert_counts: `[ep_size, num_expert_counts]` int32: row s is what rank s has counted; zeros
            for a rank that active_ranks leaves out. Unlike the rows, it is valid until this rank's
            next dispatch on the channel, through any layer on the workspace. None if
            config.num_expert_counts is 0.
    """

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    extra_payloads: tuple[torch.Tensor, ...]
    recv_counts: torch.Tensor
    metadata: DispatchMetadata
    expert_counts: torch.Tensor | None = None


#: Python's type of a field -> its type in the schema of an op.
_SCHEMA_TYPES: Mapping[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[torch.Tensor]: "Tensor[]",
    int: "int",
    int | None: "SymInt?",
    float: "float",
}

_Kind = type[Dispatch] | type[Combine]


class _Field(NamedTuple):
    name: str
    type: Any
    given: Given | None


def _read(kind: _Kind) -> tuple[_Field, ...]:
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        plain, given = hint, None
        if typing.get_origin(hint) is Annotated:
            plain, given = typing.get_args(hint)
        found.append(_Field(name, plain, given))
    return tuple(found)


_FIELDS: Mapping[_Kind, tuple[_Field, ...]] = {kind: _read(kind) for kind in (Dispatch, Combine)}

#: Kind of call -> places of its tensors, lists of them apart.
TENSORS: Mapping[_Kind, tuple[int, ...]] = {
    kind: tuple(
        place
        for place, field in enumerate(fields)
        if field.type in (torch.Tensor, torch.Tensor | None)
    )
    for kind, fields in _FIELDS.items()
}

#: Kind of call -> names of the tensors that every call has.
REQUIRED: Mapping[_Kind, frozenset[str]] = {
    kind: frozenset(field.name for field in fields if field.type is torch.Tensor)
    for kind, fields in _FIELDS.items()
}


def schema(kind: _Kind, *, writes: str = "", leaves_out: str = "") -> str:
    """Return the arguments of a call as a part of an op's schema.

    Args:
        kind: Dispatch or Combine.
        writes: a tensor that the op writes to, and which it always gets.
        leaves_out: a field that the op does not have.
    """
    arguments = []
    for field in _FIELDS[kind]:
        name, defaults = field.name, kind._field_defaults
        if name == leaves_out:
            continue
        typed = "Tensor(b!)" if name == writes else _SCHEMA_TYPES[field.type]
        arguments.append(f"{typed} {name}" + (f"={defaults[name]}" if name in defaults else ""))
    return ", ".join(arguments)


def addressed(kind: _Kind) -> tuple[tuple[int, str], ...]:
    """Return place and name of each tensor whose address the argument struct gets by name."""
    return tuple(
        (place, field.name)
        for place, field in enumerate(_FIELDS[kind])
        if field.given is not None and field.given.is_addressed
    )


class Expected(NamedTuple):
    """What one tensor of a layer's calls must be.

    Attributes:
        place: of the field in its call.
        name: of the field.
        is_optional: None is allowed.
        has_tokens: the first size is the number of tokens.
        sizes: the shape, without the tokens.
        dtypes: types that it may have.
    """

    place: int
    name: str
    is_optional: bool
    has_tokens: bool
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def expected(kind: _Kind, sizes: Mapping[str, int]) -> tuple[Expected, ...]:
    """Return what the tensors whose Given has a shape must be in calls of one layer.

    Args:
        kind: Dispatch or Combine.
        sizes: name of a size -> the layer's size.
    """
    found = []
    for place, (name, plain, given) in enumerate(_FIELDS[kind]):
        if given is None or given.shape is None:
            continue
        words = given.shape.split()
        shape = tuple(sizes[word] for word in words if word != "num_tokens")
        is_optional, has_tokens = plain is not torch.Tensor, "num_tokens" in words
        found.append(Expected(place, name, is_optional, has_tokens, shape, given.dtypes))
    return tuple(found)
