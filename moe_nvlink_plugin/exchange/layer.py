"""One layer's exchange on one workspace: checks a call and the order of calls, then launches.

The torch ops run this code. They find the layer by an integer handle, because an op in a compiled
graph can carry an integer but no object.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Iterable

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ExchangeStateError, MoeNvlinkError
from moe_nvlink_plugin.launch.base import Executor, Interrupted
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.tensors import check_device, check_outside
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.recipes import Recipe

from . import checks, rank_masks, survivors
from .channel import Channel
from .formats import Activations, LayerFormat
from .in_flight import Running
from .launches import variant

#: topk_ids, topk_weights, hidden_states, recv_counts, send_slots: what dispatch returns.
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

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


def _word(words: torch.Tensor, index: int) -> ctypes.c_int64:
    # Reads memory directly: to index the tensor would take longer than the rest of a launch.
    if words.dtype is not torch.int64 or words.is_cuda or not 0 <= index < words.numel():
        raise ExchangeStateError(
            f"pending is {words.dtype} {tuple(words.shape)} on {words.device}, not the workspace's "
            "state; call MoeAllToAll.dispatch and .combine"
        )
    return ctypes.c_int64.from_address(words.data_ptr() + 8 * index)


class LayerExchange:
    """Dispatch and combine of one layer. Any thread may call; a lock per channel orders the calls.

    `number` is the layer's number among those created on the workspace, equal on all ranks.

    Attributes:
        config: the layer's configuration.
        recipe: the format that travels.
        format: the rows of the layer.
        rows: name of the region -> row, for every payload.
        quantiser: kQuantiser* of config.h by which dispatch quantises; 0: it does not.
        workspace: symmetric memory that the layer uses.
        rounds: number of dispatches so far, by channel.
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
        self.rounds = [0] * config.num_channels
        self._running: dict[int, Running] = {}  # channel -> what runs beside the caller
        channels = range(config.num_channels)
        self._words = [_word(workspace.pending, index) for index in channels]
        # Loads kernels here and not in the first round: a failure is then an error of `create` on
        # all ranks, and a CUDA graph may capture the first round. The views must not be inference
        # tensors, because callers write to them inside and outside of inference mode.
        with torch.inference_mode(False):
            self._channels = [Channel(self.format, workspace, i, number) for i in channels]
            if workspace.active_ranks is None:
                size, device = config.ep_size, workspace.device
                workspace.active_ranks = rank_masks.rank_mask(range(size), size, device)
        memory = workspace.memory
        self._window = range(memory.base_ptr, memory.base_ptr + memory.rank_stride * config.ep_size)
        family = variant(config, self.quantiser)
        self._meet = survivors.load_meeting(workspace, family, config.num_channels)
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
            for index, running in self._running.items():
                if running.verb == "combine":  # so the round is complete for other layers
                    self._words[index].value = 0
            self._end_verbs()
            self._channels = []
            self.workspace.abandon(self.handle)
            self.workspace.release()

    def _end_verbs(self) -> None:
        """Wait for what runs beside its callers; nobody wants the results. Under the locks."""
        if self.workspace.is_parents:  # its threads are not in this process
            self._running.clear()
        for running in self._running.values():
            try:
                with contextlib.suppress(Exception):
                    running.join()
            except Interrupted as stop:  # the launch still runs, so nothing may be freed
                raise stop.error from None
        self._running.clear()

    def channel(self, index: int) -> Channel:
        """Return the layer's Channel with this number. Local.

        Raises:
            InputError: the configuration has no such channel.
            ExchangeStateError: the layer is closed.
        """
        checks.channel(index, self.config.num_channels)
        self.check_open()
        return self._channels[index]

    def check_open(self) -> None:
        """Check that the layer has not been closed. Local; what `find` also checks.

        Raises:
            ExchangeStateError: it has.
        """
        if self._is_closed:
            raise _closed(self.handle)

    def check_round(self, number: int, channel_index: int) -> None:
        """Check that metadata belongs to the last dispatch of a channel. Local.

        The slots in metadata of an earlier dispatch name other rows.

        Raises:
            InputError: the configuration has no such channel.
            ExchangeStateError: it belongs to another dispatch.
        """
        checks.channel(channel_index, self.config.num_channels)
        if number != self.rounds[channel_index]:
            raise ExchangeStateError(
                f"metadata of dispatch {number} on channel {channel_index}, but the last one was "
                f"{self.rounds[channel_index]}; pass what the last dispatch returned"
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

    def dispatch(
        self,
        pending: torch.Tensor,
        given: Activations,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        extra_payloads: list[torch.Tensor],
        channel_index: int,
        max_tokens: int | None = None,
        *,
        beside: bool = False,
    ) -> Five:
        """Run dispatch as MoeAllToAll.dispatch documents it. Collective; capturable.

        If it runs `beside` the caller, the results are there after `wait`.
        """
        if max_tokens is None:
            max_tokens = self.config.max_tokens_per_rank
        rows, fused = self._rows_to_send(given, max_tokens)
        extra_bytes = checks.dispatch_inputs(
            self.format,
            rows,
            topk_ids,
            topk_weights,
            extra_payloads,
            fused=fused,
            max_tokens=max_tokens,
            window=self._window,
        )
        if given.active_ranks is not None:
            checks.may_be_masked(self.format, given.active_ranks, self.workspace.active_ranks)
            if self._may_look_at(given.active_ranks):
                checks.names_itself(self.format, given.active_ranks)
        ids = checks.ids_as_int32(topk_ids, self.config.num_experts)
        payloads: list[torch.Tensor | None] = [ids, topk_weights, rows.hidden_states]
        if "recv_scales" in self.rows:
            payloads.append(rows.scales)
        payloads += extra_payloads
        num_tokens = rows.hidden_states.shape[0]
        checks.channel(channel_index, self.config.num_channels)
        with self.workspace.channel_lock(channel_index):
            channel = self._usable_channel(channel_index, "dispatch")
            dispatched = self._dispatched(pending, channel_index)
            if dispatched.value != 0:
                raise ExchangeStateError(
                    f"dispatch twice on channel {channel_index}: the dispatch before has not been "
                    "combined; call combine first, or use another channel"
                )
            quantiser = self.quantiser if fused else 0
            try:
                slots = channel.dispatch(
                    payloads,
                    num_tokens,
                    max_tokens,
                    quantiser,
                    rows.global_scale,
                    given.is_padding,
                    extra_bytes,
                    given.active_ranks,
                    given.expert_counts,
                    beside=beside,
                )
            except BaseException as error:
                self._interrupted("dispatch", error)
                raise
            if beside:
                read = [*payloads, slots, rows.global_scale, given.is_padding]
                read += [given.active_ranks, given.expert_counts]
                self._running[channel_index] = Running("dispatch", channel.join, read)
            else:
                self._raise_fault(channel)
            dispatched.value = self.handle
            self.rounds[channel_index] += 1
        num_slots = self.format.slots_of(max_tokens)
        view = channel.view
        counts = channel.recv_counts.detach()
        return view(0, num_slots), view(1, num_slots), view(2, num_slots), counts, slots

    def _rows_to_send(self, given: Activations, max_tokens: int) -> tuple[Activations, bool]:
        """Return what the kernel reads, and whether it quantises that."""
        recipe, scale = self.format.quantising, given.global_scale
        if (
            recipe is None
            or given.scales is not None
            or given.hidden_states.dtype != self.config.dtype
        ):
            checks.global_scale(self.format, scale, needed=False)
            return given, False
        needed, unseen = recipe.needs_global_scale, self._may_look_at(scale)
        checks.global_scale(self.format, scale, needed=needed, read_value=unseen)
        if self.quantiser:
            return given, True
        checks.activations(self.format, given.hidden_states, max_tokens)
        check_outside(self._window, ["hidden_states"], given.hidden_states)
        rows = recipe.quantise(given.hidden_states, scale)
        return given._replace(hidden_states=rows.rows, scales=rows.scales, global_scale=None), False

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
        self,
        pending: torch.Tensor,
        expert_output: torch.Tensor,
        send_slots: torch.Tensor,
        output: torch.Tensor | None,
        channel_index: int,
        hidden_size: int | None = None,
        add: torch.Tensor | None = None,
        scale: float = 1.0,
        *,
        beside: bool = False,
    ) -> torch.Tensor:
        """Run combine as MoeAllToAll.combine documents it; return output.

        Collective; capturable. If it runs `beside` the caller, output is written after `wait`.
        """
        checks.channel(channel_index, self.config.num_channels)
        checks.scale(scale, self.config.combine_scale)
        with self.workspace.channel_lock(channel_index):
            channel = self._usable_channel(channel_index, "combine")
            checks.combine_inputs(
                self.format,
                expert_output,
                send_slots,
                output,
                channel.max_tokens,
                hidden_size,
                self._window,
            )
            if add is not None:
                num_tokens = send_slots.shape[0]
                checks.added_rows(self.format, add, expert_output, num_tokens, output, self._window)
            if output is None:
                output = expert_output.new_empty((send_slots.shape[0], expert_output.shape[1]))
            dispatched = self._dispatched(pending, channel_index)
            if dispatched.value != self.handle:
                raise ExchangeStateError(
                    f"combine without dispatch on channel {channel_index}: this layer has no "
                    "dispatch waiting there; call dispatch first"
                )
            # The peers send the rows of every token that was dispatched.
            checks.all_tokens(send_slots.shape[0], channel.num_tokens)
            is_in_place = checks.rows_in_place(expert_output, channel.combine_bytes)
            try:
                channel.combine(
                    expert_output,
                    send_slots,
                    output,
                    add,
                    scale,
                    is_in_place=is_in_place,
                    beside=beside,
                )
            except BaseException as error:
                self._interrupted("combine", error)
                raise
            if beside:
                read = [expert_output, send_slots, output, add]
                self._running[channel_index] = Running("combine", channel.join, read)
            else:
                self._raise_fault(channel)
                dispatched.value = 0
        return output

    def _interrupted(self, verb: str, error: BaseException) -> None:
        """Count the round as failed if a signal has ended a launch; raise its handler's error."""
        if isinstance(error, Interrupted):
            self.workspace.interrupt(verb, error.error)
            raise error.error from None
        if not isinstance(error, Exception):  # KeyboardInterrupt, before or after the kernel
            self.workspace.interrupt(verb, error)

    def running(self, channel_index: int) -> Running:
        """Return what the last verb of a channel, which runs beside the caller, left. Local."""
        return self._running[channel_index]

    def wait(self, channel_index: int, running: Running) -> None:
        """Wait for a verb that runs beside the caller, as InFlight.wait documents it. Local.

        Capturable.
        """
        with self.workspace.channel_lock(channel_index):
            channel = self.channel(channel_index)
            if self.workspace.is_parents:
                self.workspace.check_usable()
            if self._running.get(channel_index) is not running:
                self.workspace.check_usable()  # the first wait may have failed
                raise ExchangeStateError(
                    f"wait twice for one {running.verb}_async on channel {channel_index}, or after "
                    "mask(): keep what the first wait() returned; mask() has ended the round"
                )
            try:
                running.join()
            except BaseException as error:
                if isinstance(error, Exception):  # else the launch still runs, but not for long
                    del self._running[channel_index]
                self._interrupted(f"{running.verb}_async", error)
                raise
            del self._running[channel_index]
            self._raise_fault(channel)
            if running.verb == "combine":
                self._words[channel_index].value = 0

    def _dispatched(self, pending: torch.Tensor, channel_index: int) -> ctypes.c_int64:
        """Return the channel's word in the state of the workspace."""
        if pending is self.workspace.pending:
            return self._words[channel_index]
        return _word(pending, channel_index)  # a compiled graph has another tensor of this memory

    def _usable_channel(self, index: int, verb: str) -> Channel:
        self.workspace.check_usable()
        channel = self.channel(index)
        if index in self._running:
            raise self._running[index].refuse(verb, index)
        # On a GPU an earlier verb may have failed after its call returned.
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
        find(self.handle)
        layers = [layer for layer in list(_live.values()) if layer.workspace is self.workspace]
        everyones = [[channel.regions for channel in layer._channels] for layer in layers]

        def end_verbs() -> None:
            for layer in layers:
                layer._end_verbs()

        limit_ns = self.workspace.startup.timeout_ns(Timeouts.of(self.config))
        survivors.leave_out(
            self.workspace, ranks, everyones, self._meet, 2 * limit_ns / 1e9, end_verbs
        )

    def failure(self) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. Local; waits for nothing; any thread."""
        if self.workspace.broken is not None:
            return self.workspace.broken
        faults = (channel.fault(ask_device=False) for channel in list(self._channels))
        return next((fault for fault in faults if fault is not None), None)

    def _raise_fault(self, channel: Channel) -> None:
        if not self.workspace.fault(channel.index):
            return  # what each verb asks twice
        fault = channel.fault()
        if fault is not None:
            self.workspace.broken = fault
            raise fault
