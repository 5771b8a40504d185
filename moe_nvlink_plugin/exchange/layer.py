"""One layer's exchange on one workspace: checks a call and the order of calls, then launches.

The torch ops run this code. They find the layer by an integer handle, because an op in a compiled
graph can carry an integer but no object.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch.autograd.graph import increment_version

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ExchangeStateError, InputError, MoeNvlinkError
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch.base import Executor, Interrupted
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.tensors import check_device
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.recipes import Recipe

from . import checks, rank_masks, survivors
from .calls import Combine, Dispatch, Dispatched, DispatchMetadata
from .channel import Channel
from .formats import LayerFormat
from .in_flight import InFlight, Running
from .launches import variant
from .ordinary import OrdinaryCalls

T = TypeVar("T")

_handles = itertools.count(1)
_live: weakref.WeakValueDictionary[int, LayerExchange] = weakref.WeakValueDictionary()


def find(handle: int) -> LayerExchange:
    """Return the layer with this handle. Local.

    Raises:
        ExchangeStateError: the layer is closed.
    """
    layer = _live.get(handle)
    if layer is None:
        raise _closed(handle)
    return layer


def _closed(handle: int) -> ExchangeStateError:
    return ExchangeStateError(
        f"exchange {handle} is closed; create a new MoeAllToAll before dispatching"
    )


class LayerExchange:
    """Dispatch and combine of one layer. Any thread may call; a lock per channel orders the calls.

    Attributes:
        config: the layer's configuration.
        recipe: the format that travels.
        format: the rows of the layer.
        rows: name of the region -> row, for every payload.
        quantiser: kQuantiser* of config.h by which dispatch quantises; 0: it does not.
        workspace: symmetric memory that the layer uses.
        ordinary: recogniser of calls that need no further check.
        layout: what the layer has where; the workspace's may have grown since.
        number: the layer's number among those created on the workspace, equal on all ranks.
        handle: number by which `find` finds the layer.
    """

    def __init__(
        self,
        config: AllToAllConfig,
        recipe: Recipe,
        workspace: Workspace[Executor],
        number: int,
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.format = LayerFormat.of(config, recipe, workspace.device)
        self.rows = self.format.rows
        self.quantiser = self.format.quantiser
        self._checked_scales: set[tuple[int, int]] = set()
        self.workspace = workspace
        self.layout, self.number = workspace.layout, number
        self._largest_scale = checks.largest_scale(config.combine_scale)
        channels = range(config.num_channels)
        # Loads kernels here and not in the first round: a failure is then an error of `create` on
        # all ranks, and a CUDA graph may capture the first round. The views must not be inference
        # tensors, because callers write to them inside and outside of inference mode.
        with torch.inference_mode(False):
            self._channels = [Channel(self.format, workspace, i, number) for i in channels]
            if workspace.active_ranks is None:
                size, device = config.ep_size, workspace.device
                present = [rank for rank in range(size) if rank not in workspace.left_out]
                workspace.active_ranks = rank_masks.rank_mask(present, size, device)
        memory = workspace.memory
        self._window = range(memory.base_ptr, memory.base_ptr + memory.rank_stride * config.ep_size)
        self.ordinary = OrdinaryCalls(self.format, self._window)
        family = variant(config, self.quantiser)
        self._meeting = survivors.load_meeting(
            workspace, family, config.num_channels, pdl=config.choices.pdl
        )
        self._is_closed = False
        self.handle = next(_handles)
        _live[self.handle] = self

    def close(self) -> None:
        """Drop the handle, wait until no verb runs, release the workspace. Local; idempotent."""
        all_locks = [self.workspace.channel_lock(n) for n in range(self.config.num_channels)]
        if _live.pop(self.handle, None) is None:
            return
        self._is_closed = True
        with contextlib.ExitStack() as locks:
            for lock in all_locks:
                locks.enter_context(lock)
            for channel in self._channels:
                running = channel.running
                if running is not None and running.verb == "combine":
                    channel.state.value = 0  # so the round is complete for other layers
            self.end_verbs()
            self._channels = []
            self.workspace.abandon(self.handle)
            self.workspace.release()

    def end_verbs(self) -> None:
        """Wait for what runs beside its callers; nobody wants the results. Under the locks."""
        for channel in self._channels:
            if channel.running is not None:
                _end(channel.running, self.workspace)
                channel.set_running(None)

    def channel(self, index: int) -> Channel:
        """Return the layer's Channel with this number. Local.

        Raises:
            InputError: the configuration has no such channel.
            ExchangeStateError: the layer is closed.
        """
        if type(index) is not int or not 0 <= index < self.config.num_channels:
            checks.channel(index, self.config.num_channels)
        if self._is_closed:
            raise _closed(self.handle)
        return self._channels[index]

    def check_open(self) -> None:
        """Check that the layer has not been closed. Local; what `find` also checks.

        Raises:
            ExchangeStateError: it has.
        """
        if self._is_closed:
            raise _closed(self.handle)

    def check_metadata(self, metadata: DispatchMetadata, *, any_round: bool = False) -> None:
        """Check that metadata belongs to the last dispatch of this layer on its channel. Local.

        The slots in metadata of an earlier dispatch name other rows.

        Args:
            metadata: what the caller passed.
            any_round: do not ask of which dispatch it is. Compiled code cannot: there the graph
                ties a combine to its dispatch. Metadata that leaves compiled code has no round;
                it is known by the memory of its slots, which the last dispatch wrote.

        Raises:
            InputError: it is no metadata, or another layer's, or names no channel of this one.
            ExchangeStateError: it belongs to another dispatch, or the layer is closed.
        """
        if not isinstance(metadata, DispatchMetadata):
            raise InputError(
                f"metadata is a {type(metadata).__name__}; pass the metadata that dispatch returned"
            )
        if metadata.handle != self.handle:
            raise InputError(
                f"metadata belongs to exchange {metadata.handle}, this is {self.handle}; pass "
                "what this layer's dispatch returned"
            )
        if any_round:
            return
        channel = self.channel(metadata.channel)
        if metadata.round < 0:
            if not channel.wrote(metadata.send_slots):
                raise ExchangeStateError(
                    f"metadata of a compiled dispatch on channel {channel.index} that was not the "
                    "last one, or a copy of its tensors; pass what the last dispatch returned"
                )
        elif metadata.round != channel.rounds:
            raise ExchangeStateError(
                f"metadata of dispatch {metadata.round} on channel {channel.index}, but the last "
                f"one was {channel.rounds}; pass what the last dispatch returned"
            )

    def slots_of(self, max_tokens: int | None) -> int:
        """Return the number of slots of a call with this bound; None: the capacity. Local."""
        return self.format.num_slots if max_tokens is None else self.format.slots_of(max_tokens)

    def check_device(self, *tensors: torch.Tensor) -> None:
        """Check the device of tensors. The fakes of the ops call this. Local.

        If a tensor is on `meta`, torch runs the fake without notice.

        Raises:
            InputError: a tensor is not on the exchange's device.
        """
        for tensor in tensors:
            check_device("a tensor", tensor, self.workspace.device)

    def dispatch(self, call: Dispatch, quantiser: int | None = None) -> Dispatched:
        """Run dispatch as MoeAllToAll.dispatch documents it. Collective; capturable.

        Args:
            call: the call.
            quantiser: what OrdinaryCalls says of the call; None: it is not known to be ordinary.
        """
        channel, slots = self.start_dispatch(call, quantiser=quantiser)
        return channel.received(call, slots)

    def dispatch_async(self, call: Dispatch) -> InFlight[Dispatched]:
        """Start dispatch as MoeAllToAll.dispatch_async documents it. Collective; capturable."""
        checks.plain_tensors(call)
        channel, slots = self.start_dispatch(call, beside=True)
        return self._in_flight(channel, lambda: channel.received(call, slots))

    def start_dispatch(
        self,
        call: Dispatch,
        pending: torch.Tensor | None = None,
        *,
        beside: bool = False,
        quantiser: int | None = None,
    ) -> tuple[Channel, torch.Tensor]:
        """Check a dispatch and launch it. Collective; capturable.

        Args:
            call: the call.
            pending: the workspace's state, if a compiled graph has another tensor of its memory.
            beside: whether it runs beside the caller. Then the results are there after `wait`.
            quantiser: as for `dispatch`.

        Returns:
            The channel, and send_slots `[num_tokens, top_k]` int32.
        """
        max_tokens = call.max_tokens
        if max_tokens is None:
            max_tokens = self.config.max_tokens_per_rank
        index = call.channel
        self.channel(index)
        extra_bytes: tuple[int, ...] = ()
        if quantiser is None:
            call, quantiser, extra_bytes = self._checked(call, max_tokens)
        with self.workspace.channel_lock(index):
            channel = self._usable_channel(index, "dispatch")
            dispatched = channel.state if pending is None else channel.word(pending)
            if dispatched.value != 0:
                raise ExchangeStateError(
                    f"dispatch twice on channel {index}: the dispatch before has not been "
                    "combined; call combine first, or use another channel"
                )
            try:
                slots = channel.dispatch(call, max_tokens, quantiser, extra_bytes, beside=beside)
            except BaseException as error:
                self._interrupted("dispatch", error)
                raise
            if not beside and self.workspace.fault(index):
                self._raise_fault(channel)
            dispatched.value = self.handle
            channel.rounds += 1
        return channel, slots

    def _checked(self, call: Dispatch, max_tokens: int) -> tuple[Dispatch, int, tuple[int, ...]]:
        """Check a dispatch; return the call as the kernel takes it, quantiser and extra bytes."""
        call, quantiser = self._rows_to_send(call, max_tokens)
        fused = quantiser != 0
        extra_bytes = checks.dispatch(self.format, call, max_tokens, self._window, fused=fused)
        if call.active_ranks is not None:
            checks.may_be_masked(self.format, call.active_ranks, self.workspace)
            if self._may_look_at(call.active_ranks):
                checks.names_itself(self.format, call.active_ranks)
        if call.topk_ids.dtype != torch.int32:
            ids = checks.ids_as_int32(call.topk_ids, self.config.num_experts)
            call = call._replace(topk_ids=ids)
        return call, quantiser, extra_bytes

    def _rows_to_send(self, call: Dispatch, max_tokens: int) -> tuple[Dispatch, int]:
        """Return the call with the rows that the kernel reads, and its quantiser."""
        recipe, scale = self.format.quantising, call.global_scale
        if not isinstance(call.hidden_states, torch.Tensor):
            raise checks.no_tensor("hidden_states", call.hidden_states)
        if (
            recipe is None
            or call.scales is not None
            or call.hidden_states.dtype != self.config.dtype
        ):
            if scale is not None:
                checks.global_scale(self.format, scale, needed=False)
            return call, 0
        needed, unseen = recipe.needs_global_scale, self._may_look_at(scale)
        checks.global_scale(self.format, scale, needed=needed, read_value=unseen)
        if self.quantiser:
            return call, self.quantiser
        # The recipe's own function comes first, and it gets what the kernel would take.
        checks.dispatch(self.format, call, max_tokens, self._window, fused=True)
        rows = recipe.quantise(call.hidden_states, scale)
        return call._replace(hidden_states=rows.rows, scales=rows.scales, global_scale=None), 0

    def _may_look_at(self, scale: torch.Tensor | None) -> bool:
        """Return whether to check the values of a scale or a mask in this call."""
        executor = self.workspace.executor
        if not executor.asynchronous:
            return True
        # To read a number on a GPU means to wait for the GPU, which a capture forbids.
        return scale is not None and not executor.is_capturing() and self.first_sight(scale)

    def first_sight(self, scale: torch.Tensor) -> bool:
        """Return whether this is the first call for this tensor and its content. Local."""
        # torch counts no writes to tensors made in inference mode.
        version = 0 if scale.is_inference() else scale._version
        key = (scale.data_ptr(), version)
        if key in self._checked_scales:
            return False
        self._checked_scales.add(key)
        return True

    def combine(
        self, call: Combine, pending: torch.Tensor | None = None, *, is_ordinary: bool = False
    ) -> torch.Tensor:
        """Run combine as MoeAllToAll.combine documents it; return output. Collective; capturable.

        Args:
            call: the call.
            pending: the workspace's state, if a compiled graph has another tensor of its memory.
            is_ordinary: what OrdinaryCalls has said of the call.
        """
        output = self._start_combine(call, pending, is_ordinary=is_ordinary)[1]
        if call.output is not None and pending is None:  # who calls the op tells autograd
            increment_version(output)
        return output

    def combine_async(self, call: Combine) -> InFlight[torch.Tensor]:
        """Start combine as MoeAllToAll.combine_async documents it. Collective; capturable."""
        checks.plain_tensors(call)
        channel, output = self._start_combine(call, beside=True)
        increment_version(output)
        return self._in_flight(channel, lambda: output)

    def _start_combine(
        self,
        call: Combine,
        pending: torch.Tensor | None = None,
        *,
        beside: bool = False,
        is_ordinary: bool = False,
    ) -> tuple[Channel, torch.Tensor]:
        """Check a combine and launch it, as start_dispatch; return the channel and output."""
        index = call.channel
        self.channel(index)
        if type(call.scale) not in (float, int) or not abs(call.scale) <= self._largest_scale:
            checks.scale(call.scale, self._largest_scale)
        with self.workspace.channel_lock(index):
            channel = self._usable_channel(index, "combine")
            output, slots = call.output, call.send_slots
            num_tokens = slots.shape[0] if is_ordinary else -1
            if (
                num_tokens != channel.num_tokens
                or call.expert_output.shape[0] != channel.slots_of_round
            ):
                checks.combine(self.format, call, channel.max_tokens, self._window)
                num_tokens = slots.shape[0]
            if output is None:
                output = call.expert_output.new_empty((num_tokens, call.expert_output.shape[1]))
            dispatched = channel.state if pending is None else channel.word(pending)
            if dispatched.value != self.handle:
                raise ExchangeStateError(
                    f"combine without dispatch on channel {index}: this layer has no "
                    "dispatch waiting there; call dispatch first"
                )
            if num_tokens != channel.num_tokens:
                checks.all_tokens(num_tokens, channel.num_tokens)
            is_in_place = call.expert_output.data_ptr() == channel.combine_ptr
            if not is_in_place:
                checks.rows_elsewhere(call.expert_output, channel.combine_bytes)
            try:
                channel.combine(call, output, is_in_place=is_in_place, beside=beside)
            except BaseException as error:
                self._interrupted("combine", error)
                raise
            if not beside:
                if self.workspace.fault(index):
                    self._raise_fault(channel)
                dispatched.value = 0
        return channel, output

    def _in_flight(self, channel: Channel, result: Callable[[], T]) -> InFlight[T]:
        """Return what ends the verb that the channel has just started beside its caller."""
        running = channel.running
        assert running is not None

        def wait() -> T:
            self._wait(channel.index, running)
            return result()

        return InFlight(wait)

    def _interrupted(self, verb: str, error: BaseException) -> None:
        """Count the round as failed if a signal has ended a launch; raise its handler's error."""
        if isinstance(error, Interrupted):
            self.workspace.interrupt(verb, error.error)
            raise error.error from None
        if not isinstance(error, Exception):  # KeyboardInterrupt, before or after the kernel
            self.workspace.interrupt(verb, error)

    def _wait(self, index: int, running: Running) -> None:
        """Wait for a verb that runs beside the caller, as InFlight.wait documents it. Local.

        Capturable.
        """
        with self.workspace.channel_lock(index):
            channel = self.channel(index)
            if self.workspace.is_parents:
                self.workspace.check_usable()
            if channel.running is not running:
                self.workspace.check_usable()  # the first wait may have failed
                raise ExchangeStateError(
                    f"wait twice for one {running.verb}_async on channel {index}, or after "
                    "mask() or renew(), which end the round: keep what the first wait() returned"
                )
            try:
                running.join()
            except BaseException as error:
                if isinstance(error, Exception):  # else the launch still runs, but not for long
                    channel.set_running(None)
                self._interrupted(f"{running.verb}_async", error)
                raise
            channel.set_running(None)
            if self.workspace.broken is not None:  # a signal has ended it, and its fault says less
                self.workspace.check_usable()
            self._raise_fault(channel)
            if running.verb == "combine":
                channel.state.value = 0

    def _usable_channel(self, index: int, verb: str) -> Channel:
        if self.workspace.broken is not None or self.workspace.is_parents:
            self.workspace.check_usable()
        if self._is_closed:
            raise _closed(self.handle)
        channel = self._channels[index]
        if channel.running is not None:
            raise channel.running.refuse(verb, index)
        # On a GPU an earlier verb may have failed after its call returned.
        if self.workspace.fault(index):
            self._raise_fault(channel)
        return channel

    def synchronize(self) -> None:
        """Wait for this thread's stream and raise the error of a verb that failed. Local.

        Not capturable.

        Raises:
            ExchangeTimeoutError, DisagreementError, PeerError, InputError: a verb failed. The
                workspace is unusable from now on.
        """
        self.workspace.executor.synchronize()
        for channel in self._channels:
            self._raise_fault(channel)

    def mask(self, ranks: Iterable[int]) -> None:
        """Go on without ranks that have died, as MoeAllToAll.mask documents it."""
        self._meet(survivors.leave_out, ranks)

    def leave(self, ranks: Iterable[int]) -> None:
        """Let ranks that live go, as MoeAllToAll.leave documents it."""
        self.check_open()
        self.synchronize()
        self._meet(survivors.let_go, ranks)

    def _meet(self, body: Callable[..., None], ranks: Iterable[int]) -> None:
        find(self.handle)
        layers = layers_on(self.workspace)
        everyones = [[channel.regions for channel in layer._channels] for layer in layers]
        limit_ns = self.workspace.startup.timeout_ns(Timeouts.of(self.config))
        end = functools.partial(end_verbs, self.workspace)
        body(self.workspace, ranks, everyones, self._meeting, 2 * limit_ns / 1e9, end)

    def failure(self) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. Local; waits for nothing; any thread."""
        if (broken := self.workspace.failure) is not None or self.workspace.is_away:
            return broken
        faults = (channel.fault(ask_device=False) for channel in list(self._channels))
        return next((fault for fault in faults if fault is not None), None)

    def fault_words(self) -> list[torch.Tensor]:
        """Return the channels' fault words on the device, as MoeAllToAll.fault_words documents."""
        self.check_open()
        self.workspace.check_mapped()
        offset = structs()["LocalControl"].fault.offset
        words = []
        for channel in self._channels:
            region = channel.regions["local"]
            control = self.workspace.region_bytes(region)
            words.append(control[offset : offset + 8].view(torch.int64))
        return words

    def _raise_fault(self, channel: Channel) -> None:
        if not self.workspace.fault(channel.index):
            return  # what each verb asks twice
        fault = channel.fault()
        if fault is not None:
            self.workspace.broken = fault
            raise fault


def layers_on(workspace: Workspace[Executor]) -> list[LayerExchange]:
    """Return the open layers on a workspace, in the order of their creation. Local."""
    layers = [layer for layer in list(_live.values()) if layer.workspace is workspace]
    return sorted(layers, key=lambda layer: layer.number)


def end_verbs(workspace: Workspace[Executor]) -> None:
    """Wait for what runs beside its callers on a workspace. Local; under the locks of its channels.

    What dropped layers have left behind too: it would write into memory of the next round.
    """
    for layer in layers_on(workspace):
        layer.end_verbs()
    for channel, running in enumerate(workspace.running):
        if running is not None:
            _end(running, workspace)
            workspace.running[channel] = None


def _end(running: Running, workspace: Workspace[Executor]) -> None:
    if workspace.is_parents:  # a parent's threads are not in this process
        return
    try:
        with contextlib.suppress(Exception):
            running.join()
    except Interrupted as stop:  # the launch still runs, so nothing may be freed
        raise stop.error from None
