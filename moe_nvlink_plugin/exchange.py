"""One layer's exchange on one workspace: checks a call's tensors, fills the arguments, launches.

This is what the torch ops run. It is found by an integer handle, because that is what an op in a
compiled graph can carry.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from typing import Any

import torch

from . import checks
from .config import AllToAllConfig
from .errors import ExchangeStateError, ExchangeTimeoutError, MoeNvlinkError, PeerError
from .jit import host as host_executor
from .jit.header import constants, structs
from .layout import combine_row, payload_rows
from .recipes import Recipe
from .workspace import Workspace

_handles = itertools.count(1)
_live: weakref.WeakValueDictionary[int, LayerExchange] = weakref.WeakValueDictionary()

_ELEMENTS = {
    torch.bfloat16: "kElementBf16",
    torch.float16: "kElementFp16",
    torch.float32: "kElementFp32",
}


def find(handle: int) -> LayerExchange:
    """The layer a handle stands for.

    Raises:
        ExchangeStateError: it has been closed.
    """
    layer = _live.get(handle)
    if layer is None:
        raise ExchangeStateError(
            f"exchange {handle} is closed; create a new MoeAllToAll before dispatching"
        )
    return layer


class LayerExchange:
    """Dispatch and combine of one geometry. A lock per channel lets one thread at a time use it."""

    def __init__(self, config: AllToAllConfig, recipe: Recipe, workspace: Workspace) -> None:
        self.config = config
        self.rows = payload_rows(config, recipe)
        self.combine_row = combine_row(config)
        self.num_slots = config.ep_size * config.max_tokens_per_rank
        self.workspace = workspace
        self.library = host_executor.load()
        self._channels: dict[int, _Channel] = {}
        self.rounds = [0] * config.num_channels  # dispatches so far, by channel
        self.handle = next(_handles)
        _live[self.handle] = self
        for index in range(config.num_channels):
            self.channel(index)  # threads that cannot be had are an error of create, not of a round

    def close(self) -> None:
        """Forgets the handle, gives the workspace back once no verb is running. Local."""
        if _live.pop(self.handle, None) is None:
            return
        with contextlib.ExitStack() as locks:
            for index in range(self.config.num_channels):
                locks.enter_context(self.workspace.channel_lock(index))
            self._channels = {}
            self.workspace.abandon(self.handle)
            self.workspace.release()

    def channel(self, index: int) -> _Channel:
        """Views and arguments of one channel, made again after the workspace has moved."""
        checks.channel(index, self.config.num_channels)
        found = self._channels.get(index)
        if found is None or found.generation != self.workspace.generation:
            # Not inference tensors, whatever the caller is in: they are written to in either mode.
            with torch.inference_mode(False):
                found = self._channels[index] = _Channel(self, index)
        return found

    def check_round(self, number: int, channel_index: int) -> None:
        """For metadata kept from an earlier dispatch, whose slots would name the wrong rows.

        Raises:
            ExchangeStateError: there has been another dispatch since.
        """
        checks.channel(channel_index, self.config.num_channels)
        if number != self.rounds[channel_index]:
            raise ExchangeStateError(
                f"metadata of dispatch {number} on channel {channel_index}, but the last one was "
                f"{self.rounds[channel_index]}; pass what the last dispatch returned"
            )

    def check_device(self, *tensors: torch.Tensor) -> None:
        """For the ops' fakes, which torch also runs, without a word, for tensors on `meta`.

        Raises:
            InputError: a tensor is not where this exchange works.
        """
        for tensor in tensors:
            checks.on_device("a tensor", tensor, self.workspace.device)

    def dispatch(
        self,
        pending: torch.Tensor,
        hidden_states: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        extra_payloads: list[torch.Tensor],
        channel_index: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ops.py. Collective."""
        checks.dispatch_inputs(self, hidden_states, scales, topk_ids, topk_weights, extra_payloads)
        ids = checks.ids_as_int32(topk_ids, self.config.num_experts)
        scales_list = [] if scales is None else [scales]
        payloads = [ids, topk_weights, hidden_states, *scales_list, *extra_payloads]
        checks.channel(channel_index, self.config.num_channels)
        with self.workspace.channel_lock(channel_index):
            self._check_usable()
            channel = self.channel(channel_index)
            if int(pending[channel_index]) != 0:
                raise ExchangeStateError(
                    f"dispatch twice on channel {channel_index}: the dispatch before has not been "
                    "combined; call combine first, or use another channel"
                )
            slots = channel.dispatch(payloads, hidden_states.shape[0])
            self._raise_fault(channel)
            pending[channel_index] = self.handle
            self.rounds[channel_index] += 1
        ids, weights, hidden = (channel.view(index) for index in range(3))
        return ids, weights, hidden, channel.recv_counts.view(-1), slots

    def combine(
        self,
        pending: torch.Tensor,
        expert_output: torch.Tensor,
        send_slots: torch.Tensor,
        output: torch.Tensor | None,
        channel_index: int,
    ) -> torch.Tensor:
        """See ops.py. Collective."""
        checks.combine_inputs(self, expert_output, send_slots, output)
        if output is None:
            shape = (send_slots.shape[0], self.config.hidden_size)
            output = torch.empty(shape, dtype=self.config.dtype, device=expert_output.device)
        checks.channel(channel_index, self.config.num_channels)
        with self.workspace.channel_lock(channel_index):
            self._check_usable()
            channel = self.channel(channel_index)
            if int(pending[channel_index]) != self.handle:
                raise ExchangeStateError(
                    f"combine without dispatch on channel {channel_index}: this layer has no "
                    "dispatch waiting there; call dispatch first"
                )
            channel.combine(expert_output, send_slots, output)
            self._raise_fault(channel)
            pending[channel_index] = 0
        return output

    def _check_usable(self) -> None:
        find(self.handle)
        self.workspace.check_usable()

    def _raise_fault(self, channel: _Channel) -> None:
        word = int(channel.local_control.fault)
        if word:
            self.workspace.broken = channel.fault_error(word)
            raise self.workspace.broken


class _Channel:
    """Prebuilt arguments and views of one layer on one channel."""

    def __init__(self, layer: LayerExchange, index: int) -> None:
        config, workspace = layer.config, layer.workspace
        self._layer = weakref.proxy(layer)
        self._regions = workspace.layout.channel_regions(index)
        self.generation = workspace.generation
        self._library, self._workspace = layer.library, workspace
        assert config.num_threads is not None
        # Threads of its own: two channels may be in flight at the same time.
        self._grid = self._library.create_grid(config.num_threads)
        weakref.finalize(self, self._library.destroy_grid, self._grid)
        self._views = [
            self._view(name, row.dtype, row.elements) for name, row in layer.rows.items()
        ]
        self.combine_region = self._view("combine", config.dtype, config.hidden_size)
        ep_size = config.ep_size
        self.recv_counts = workspace.words(self._regions["recv_counts"], ep_size, torch.int32)
        local = workspace.region_bytes(self._regions["local"])
        self._local = local
        self.local_control: Any = structs()["LocalControl"].from_address(local.data_ptr())
        self._dispatch_args = self._make_args("DispatchArgs", config)
        self._fill_payloads(layer)
        self._combine_args = self._make_args("CombineArgs", config)
        self._combine_args.region = self._regions["combine"].block
        self._combine_args.hidden_splits = 1

    def _view(self, name: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        num_slots = self._layer.num_slots
        size = num_slots * elements * dtype.itemsize
        return (
            self._workspace.region_bytes(self._regions[name], size)
            .view(dtype)
            .view(num_slots, elements)
        )

    def _make_args(self, struct: str, config: AllToAllConfig) -> Any:
        args: Any = structs()[struct]()
        memory = self._workspace.memory
        args.window_base, args.rank_stride = memory.base_ptr, memory.rank_stride
        assert config.timeout_s is not None
        args.timeout_ns = int(config.timeout_s * 1e9)
        geometry = args.geometry
        for name in ("ep_size", "ep_rank", "num_experts", "top_k", "hidden_size"):
            setattr(geometry, name, getattr(config, name))
        geometry.max_tokens_per_rank = config.max_tokens_per_rank
        geometry.element = constants()[_ELEMENTS[config.dtype]]
        for name, _type in structs()["ControlRegions"]._fields_:  # type: ignore[misc]
            setattr(args.control, name, self._regions[name].block)
        return args

    def _fill_payloads(self, layer: LayerExchange) -> None:
        args = self._dispatch_args
        args.num_payloads = len(layer.rows)
        args.combine_row_bytes = layer.combine_row.row_bytes
        for payload, (name, row) in zip(args.payloads, layer.rows.items(), strict=False):
            payload.region, payload.row_bytes = self._regions[name].block, row.row_bytes

    def dispatch(self, payloads: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Launches dispatch; returns send_slots `[num_tokens, top_k] int32`."""
        args = self._dispatch_args
        top_k = args.geometry.top_k
        slots = torch.empty((num_tokens, top_k), dtype=torch.int32, device=payloads[0].device)
        args.geometry.num_tokens = num_tokens
        args.send_slots = slots.data_ptr()
        for entry, tensor in zip(args.payloads, payloads, strict=False):
            entry.source = tensor.data_ptr()
        self._library.dispatch(args, self._grid)
        return slots

    def combine(
        self, expert_output: torch.Tensor, send_slots: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Launches combine; copies expert_output's rows first where they lie elsewhere."""
        if expert_output.data_ptr() != self.combine_region.data_ptr():
            self._copy_filled_rows(expert_output)
        args = self._combine_args
        args.geometry.num_tokens = send_slots.shape[0]
        args.send_slots, args.output = send_slots.data_ptr(), output.data_ptr()
        self._library.combine(args, self._grid)

    def _copy_filled_rows(self, expert_output: torch.Tensor) -> None:
        # Empty slots, mostly the many, are read by nobody.
        capacity = self._dispatch_args.geometry.max_tokens_per_rank
        for source, count in enumerate(self.recv_counts.tolist()):
            rows = slice(source * capacity, source * capacity + count)
            self.combine_region[rows].copy_(expert_output[rows])

    def view(self, index: int) -> torch.Tensor:
        """A fresh view of what arrived of a payload, counted in order of the regions."""
        return self._views[index].view(self._layer.num_slots, -1)

    def received(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """What arrived of a payload behind the hidden states, in `like`'s dtype and row shape."""
        rows = self.view(index + 3).view(like.dtype)
        return rows.view(rows.shape[0], *like.shape[1:])

    def fault_error(self, word: int) -> MoeNvlinkError:
        """The error for a fault word: names phase, ranks and epoch."""
        code, phase_code = word >> 56, word >> 48 & 0xFF
        peer, epoch = word >> 32 & 0xFFFF, word & 0xFFFFFFFF
        phase = "dispatch" if phase_code == constants()["kPhaseDispatch"] else "combine"
        me = self._dispatch_args.geometry.ep_rank
        if code != constants()["kFaultTimeout"]:
            return PeerError(
                f"rank {peer} announced more rows than its slice holds in {phase} of epoch "
                f"{epoch}: somebody wrote into the exchange's memory; end all ranks"
            )
        late = self._late_ranks(phase, epoch) or (peer,)
        seconds = self._dispatch_args.timeout_ns / 1e9
        return ExchangeTimeoutError(
            f"rank {me} waited {seconds:g} s in {phase} of epoch {epoch} for rank(s) "
            f"{', '.join(map(str, late))}; look at those ranks' logs, and raise timeout_s "
            "(MOE_NVLINK_TIMEOUT_S) if they were only slow",
            phase=phase,
            ranks=late,
            epoch=epoch,
        )

    def _late_ranks(self, phase: str, epoch: int) -> tuple[int, ...]:
        ep_size = self._dispatch_args.geometry.ep_size
        cells = self._workspace.words(self._regions[f"{phase}_cells"], ep_size, torch.int64)
        epochs = [cell & 0xFFFFFFFF for cell in cells.tolist()]
        behind = [ctypes.c_int32(seen - epoch).value < 0 for seen in epochs]
        return tuple(rank for rank, is_behind in enumerate(behind) if is_behind)
