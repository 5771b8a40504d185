"""One layer on one channel of the workspace: views, arguments, launches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_nvlink_plugin.errors import ExchangeStateError, MoeNvlinkError
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.base import Executor
from moe_nvlink_plugin.memory.faults import Faults
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.recipes import PayloadRow

from . import calls, rank_masks, scales_layout
from .arguments import combine_arguments, dispatch_arguments, set_extra_payloads
from .calls import Combine, Dispatch, Dispatched, DispatchMetadata
from .formats import LayerFormat
from .in_flight import Running
from .kernels import COMBINE, LAYER
from .launches import LayerLaunches
from .sizes import widest_combine_row

_new = tuple.__new__

#: Place in a call, and name in the argument struct, of tensors whose addresses the kernel gets.
_ADDRESSED = calls.addressed(Dispatch)


def _word(words: torch.Tensor, index: int) -> ctypes.c_int64:
    # Reads memory directly: to index the tensor would take longer than the rest of a launch.
    if words.dtype is not torch.int64 or words.is_cuda or not 0 <= index < words.numel():
        raise ExchangeStateError(
            f"pending is {words.dtype} {tuple(words.shape)} on {words.device}, not the workspace's "
            "state; call MoeAllToAll.dispatch and .combine"
        )
    return ctypes.c_int64.from_address(words.data_ptr() + 8 * index)


class Channel:
    """Arguments and views of one layer on one channel, made in advance.

    Callers hold the workspace's lock of the channel, so one thread at a time uses a Channel.
    `number` is the layer's number on the workspace.
    """

    def __init__(
        self, layer: LayerFormat, workspace: Workspace[Executor], index: int, number: int
    ) -> None:
        config = layer.config
        self._number = number
        self._layer = layer
        self.index = index
        self._num_slots = layer.num_slots
        self.regions = workspace.layout.channel_regions(index)
        self._workspace = workspace
        row_bytes = {name: row.row_bytes for name, row in layer.rows.items()}
        ranks_on_device = workspace.memory.ranks_on_device
        self._launches = LayerLaunches(
            workspace.executor, config, row_bytes, layer.quantiser, ranks_on_device
        )
        self._views = [
            self._view(name, row.dtype, row.elements) for name, row in layer.rows.items()
        ]
        if "recv_scales" in layer.rows:
            self._scales = self._scales_view(layer.rows["recv_scales"])
        self.combine_region = self._view("combine", config.dtype, config.hidden_size)
        #: Memory of combine_input(), for rows of the widest type.
        self.combine_bytes = workspace.region_bytes(
            self.regions["combine"], layer.num_slots * widest_combine_row(config)
        )
        self.combine_ptr = self.combine_bytes.data_ptr()
        self._combine_input = self.combine_region
        self._combine_row = (config.dtype, config.hidden_size)
        self._extra_bytes = config.extra_payload_bytes
        #: Bound, slots and tokens of the last dispatch.
        self.max_tokens, self.slots_of_round = config.max_tokens_per_rank, self._num_slots
        self.num_tokens = 0
        ep_size = self._ep_size = config.ep_size
        self.recv_counts = workspace.words(self.regions["recv_counts"], ep_size, torch.int32)
        if config.num_expert_counts:
            num_words = ep_size * config.num_expert_counts
            counts = workspace.words(self.regions["expert_counts"], num_words, torch.int32)
            #: Counts per expert of all ranks.
            self.expert_counts = counts.view(ep_size, config.num_expert_counts)
        window = (workspace.memory.base_ptr, workspace.memory.rank_stride)
        self._dispatch_args = dispatch_arguments(config, layer.rows, self.regions, *window, number)
        self._combine_args = combine_arguments(config, self.regions, *window)
        # ctypes makes a new object of a field that is a struct at each access.
        self._sources = list(self._dispatch_args.payloads)
        self._has_scales = "recv_scales" in layer.rows
        self._counts_experts = config.num_expert_counts != 0
        self._capacity, self._combine_scale = config.max_tokens_per_rank, config.combine_scale
        self._dispatch_geometry = self._dispatch_args.geometry
        self._combine_geometry = self._combine_args.geometry
        self._active_ranks: torch.Tensor | None = None  # of the last dispatch
        self._last_call: list[int] = []  # fields of the last dispatch that seldom change
        #: Handle of the layer whose dispatch waits for its combine, else 0.
        self.state = _word(workspace.pending, index)
        #: Number of dispatches so far.
        self.rounds = 0
        #: What runs beside its caller.
        self.running: Running | None = None
        self._timeouts = Timeouts.of(config)
        self._faults = Faults(
            workspace, index, config.ep_rank, ep_size, self._timeouts, LAYER.phases
        )

    def _view(self, name: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        num_slots = self._layer.num_slots
        size = num_slots * elements * dtype.itemsize
        return (
            self._workspace.region_bytes(self.regions[name], size)
            .view(dtype)
            .view(num_slots, elements)
        )

    def _scales_view(self, row: PayloadRow) -> torch.Tensor:
        """Return the scales of all slots, flat."""
        config = self._layer.config
        if config.scales_layout == "linear":
            return self._view("recv_scales", row.dtype, row.elements).view(-1)
        size = scales_layout.laid_out_bytes(config, row, self._layer.num_slots)
        region = self._workspace.region_bytes(self.regions[scales_layout.LAID_OUT], size)
        return region.view(scales_layout.dtype_of(config, row))

    def word(self, pending: torch.Tensor) -> ctypes.c_int64:
        """Return `state` as a word of a tensor that a compiled graph has of its memory."""
        return self.state if pending is self._workspace.pending else _word(pending, self.index)

    def dispatch(
        self,
        call: Dispatch,
        max_tokens: int,
        quantiser: int,
        extra_bytes: tuple[int, ...],
        *,
        beside: bool = False,
    ) -> torch.Tensor:
        """Launch dispatch; return send_slots `[num_tokens, top_k]` int32. Collective; capturable.

        Args:
            call: checked, with int32 ids.
            max_tokens: bound of this call, equal on all ranks.
            quantiser: kQuantiser* of config.h; 0 sends the rows as they are.
            extra_bytes: bytes of a row of each extra payload.
            beside: whether the kernel runs beside the caller; then `running` waits for it.
        """
        args = self._dispatch_args
        if extra_bytes != self._extra_bytes:
            layer = self._layer
            set_extra_payloads(args, layer.config, len(layer.rows), extra_bytes, self._number)
            self._extra_bytes = extra_bytes
        ids = call.topk_ids
        slots = torch.empty_like(ids)  # half the time of a torch.empty that is told all
        if call.active_ranks is None and (self._workspace.left_out or self._workspace.is_elastic):
            call = call._replace(active_ranks=self._workspace.active_ranks)
        self._active_ranks = call.active_ranks
        args.send_slots = slots.data_ptr()
        self._set_seldom(call, ids.shape[0], max_tokens, quantiser)
        sources = self._sources
        sources[0].source = ids.data_ptr()
        sources[1].source = call.topk_weights.data_ptr()
        sources[2].source = call.hidden_states.data_ptr()
        if self._has_scales:
            # A quantiser writes the payload that the call does not have.
            sources[3].source = 0 if call.scales is None else call.scales.data_ptr()
        if call.extra_payloads:
            first = 4 if self._has_scales else 3
            for entry, tensor in zip(sources[first:], call.extra_payloads, strict=False):
                entry.source = tensor.data_ptr()
        args.timeout_ns = self._workspace.startup.begin_round(self.index, self._timeouts)
        if beside:
            launch = functools.partial(self._launches.dispatch, beside=True)
            self._launch_beside("dispatch", launch, args, (call, slots))
        else:
            self._launches.dispatch(args)
        return slots

    def _set_seldom(self, call: Dispatch, num_tokens: int, max_tokens: int, quantiser: int) -> None:
        """Set the fields that seldom change; to set one takes as long as to compare them all."""
        values = [num_tokens, max_tokens, quantiser]
        for place, _name in _ADDRESSED:
            tensor: Any = call[place]
            values.append(0 if tensor is None else tensor.data_ptr())
        if values == self._last_call:
            return
        args, geometry = self._dispatch_args, self._dispatch_geometry
        self._last_call = []  # until all fields are set
        geometry.num_tokens = self.num_tokens = num_tokens
        geometry.max_tokens_per_rank = self.max_tokens = max_tokens
        self.slots_of_round = self._ep_size * max_tokens
        args.quantiser = quantiser
        for (_place, name), address in zip(_ADDRESSED, values[3:], strict=True):
            setattr(args, name, address)
        self._last_call = values

    def _launch_beside(
        self, verb: str, launch: Callable[[Any], None], args: Any, touched: tuple[Any, ...]
    ) -> None:
        # On CPU ranks the thread keeps what the kernel touches, also if the layer is dropped.
        run = functools.partial(self._run, launch, args, touched)
        join = self._workspace.executor.beside(self.index, run)
        self.set_running(Running(verb, join, touched))

    def set_running(self, running: Running | None) -> None:
        """Record what runs beside its caller, here and for the workspace."""
        self.running = self._workspace.running[self.index] = running

    def _run(self, launch: Callable[[Any], None], args: Any, _touched: tuple[Any, ...]) -> None:
        launch(args)

    def combine(
        self,
        call: Combine,
        output: torch.Tensor,
        *,
        is_in_place: bool = True,
        beside: bool = False,
    ) -> None:
        """Launch combine; first copy expert_output if it is not in place, in combine_bytes.

        Collective; capturable. The call has been checked; `beside` as for `dispatch`.
        """
        rows, add = call.expert_output, call.add
        if not is_in_place:
            self._copy_rows(rows)
        args, geometry = self._combine_args, self._combine_geometry
        row = (rows.dtype, rows.shape[1])
        if row != self._combine_row:
            geometry.element, geometry.hidden_size = element_code(row[0]), row[1]
            self._combine_row = row
        geometry.num_tokens = call.send_slots.shape[0]
        geometry.max_tokens_per_rank = self.max_tokens
        args.is_masked = 0 if self._active_ranks is None else 1
        args.send_slots, args.output = call.send_slots.data_ptr(), output.data_ptr()
        args.add = 0 if add is None else add.data_ptr()
        args.scale = call.scale * self._combine_scale
        startup = self._workspace.startup
        args.timeout_ns = startup.timeout_ns(self._timeouts)
        if beside:
            launch = functools.partial(self._launches.combine, beside=True)
            self._launch_beside("combine", launch, args, (call, output))
        else:
            self._launches.combine(args)
        startup.complete_round()

    def _copy_rows(self, expert_output: torch.Tensor) -> None:
        region = self.combine_input(self.max_tokens, expert_output.dtype, expert_output.shape[1])
        if self._workspace.executor.asynchronous:
            # Only the GPU knows how many rows are filled, and to ask means to wait for it.
            region.copy_(expert_output)
            return
        # Nobody reads empty slots, and most slots are empty. The counts come from rows_from: the
        # caller may have written to recv_counts.
        ep_size = self._layer.config.ep_size
        counts = self._workspace.words(self.regions["rows_from"], ep_size, torch.int32)
        for source, count in enumerate(counts.tolist()):
            rows = slice(source * self.max_tokens, source * self.max_tokens + count)
            region[rows].copy_(expert_output[rows])

    def combine_input(self, max_tokens: int, dtype: torch.dtype, hidden_size: int) -> torch.Tensor:
        """Return the combine region in the slots of a call with this bound, for such rows.

        Until a call has another bound or other rows, it is the same tensor, so callers may compare
        with `is`.
        """
        shape = (self._layer.slots_of(max_tokens), hidden_size)
        last = self._combine_input
        if last.shape != shape or last.dtype != dtype:
            size = shape[0] * hidden_size * dtype.itemsize
            with torch.inference_mode(False):  # callers write to it inside and outside of it
                region = self.combine_bytes.narrow(0, 0, size).view(dtype).view(shape)
            if type(region) is not torch.Tensor:  # of a mode that traces: without our memory
                return region
            last = self._combine_input = region
        return last

    def wrote(self, slots: torch.Tensor) -> bool:
        """Return whether the last dispatch wrote these send_slots. Local."""
        return slots.data_ptr() == (self._dispatch_args.send_slots or 0)

    def received(self, call: Dispatch, slots: torch.Tensor) -> Dispatched:
        """Return what the last dispatch has received, as new views of the workspace."""
        ids, weights, hidden, counts = self.rows_and_counts()
        num_slots = self.slots_of_round
        scales = expert_counts = None
        if self._has_scales:
            scales = self.received_scales(num_slots)
        extras: tuple[torch.Tensor, ...] = ()
        for index, like in enumerate(call.extra_payloads):
            extras += (self.received_payload(index, like, num_slots),)
        if self._counts_experts:
            expert_counts = self.expert_counts.detach()
        # As DispatchMetadata(...) and Dispatched(...), whose __new__ is a Python function each.
        facts = (slots, self.index, call.handle, self.rounds, self.max_tokens)
        metadata = _new(DispatchMetadata, facts)
        rows = (hidden, scales, ids, weights, extras, counts, metadata, expert_counts)
        return _new(Dispatched, rows)

    def rows_and_counts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return new views of topk_ids, topk_weights, hidden_states and recv_counts."""
        ids, weights, hidden = self._views[:3]
        # The cheapest new view: as detach(), but it asks nobody, and nobody looks on here.
        counts = self.recv_counts.data
        if self.max_tokens == self._capacity:
            return ids.data, weights.data, hidden.data, counts
        num_slots = self.slots_of_round
        return (
            ids.narrow(0, 0, num_slots),
            weights.narrow(0, 0, num_slots),
            hidden.narrow(0, 0, num_slots),
            counts,
        )

    def received_scales(self, num_slots: int) -> torch.Tensor:
        """Return a new view of the received scales, in the layout of the configuration."""
        config, row = self._layer.config, self._layer.rows["recv_scales"]
        return self._scales.as_strided(*scales_layout.strides(config, row, num_slots))

    def received_payload(self, index: int, like: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Return a new view of a received extra payload, in the dtype and row shape of `like`."""
        first = len(self._views) - len(self._layer.config.extra_payload_bytes)
        row_bytes = like.dtype.itemsize * like.shape[1:].numel()
        region = self._views[first + index].view(-1)  # with room for wider rows, maybe
        rows = region.narrow(0, 0, num_slots * row_bytes).view(like.dtype)
        return rows.view(num_slots, *like.shape[1:])

    def fault(self, *, ask_device: bool = True) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. See Faults.error."""
        return self._faults.error(
            self._disagreement, ask_device=ask_device, takes_part=self._takes_part
        )

    def _takes_part(self) -> list[int]:
        """Return the ranks of the last round; on a GPU it waits for the device if it had a mask."""
        ep_size = self._layer.config.ep_size
        if self._active_ranks is None:
            return list(range(ep_size))
        return rank_masks.ranks_in(self._active_ranks, ep_size)

    def _disagreement(self, peer: int, phase: str, epoch: int) -> str:
        config = self._layer.config
        if phase == COMBINE.name:
            dtype, width = self._combine_row
            return (
                f"in {phase} of epoch {epoch} rank {peer} combined rows of another type or width "
                f"than rank {config.ep_rank} (dtype={dtype}, hidden_size={width}, "
                f"combine={config.combine}, if that combine was this layer's: a dispatch finds "
                "out for the layer before it); pass expert_output of the same dtype, and the "
                "same hidden_size, on all ranks"
            )
        names = ("max_tokens_per_rank", "hidden_size", "top_k", "num_experts")
        values = [f"layer number {self._number} of its workspace, max_tokens={self.max_tokens}"]
        values += [f"{name}={getattr(config, name)}" for name in names]
        if self._active_ranks is not None:
            values.append("active_ranks given")
        if self._extra_bytes:
            values.append(f"extra payloads of {self._extra_bytes} bytes")
        values += [f"recipe={self._layer.recipe.name}", f"combine={config.combine}"]
        values += [f"received_ids={config.received_ids}", f"scales_layout={config.scales_layout}"]
        values.append(f"num_expert_counts={config.num_expert_counts}")
        return (
            f"in {phase} of epoch {epoch} rank {peer} passed another max_tokens or active_ranks or "
            "other extra payloads, or used another layer, maybe of another geometry, than rank "
            f"{config.ep_rank} ({', '.join(values)}); all ranks must call the same layers in the "
            "same order, with the same max_tokens, active_ranks and extra payloads"
        )
