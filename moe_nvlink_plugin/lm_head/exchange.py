"""A shared LM head on its workspace: checks a call, gathers rows, multiplies, compares or collects.

torch computes the product. On CPU ranks it gets a copy of the filled rows. On a GPU the host does
not know how many rows are filled, so torch gets all slots.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.errors import (
    ExchangeStateError,
    InputError,
    MoeNvlinkError,
    UnsupportedError,
)
from moe_nvlink_plugin.groups import Group, all_or_none, tell
from moe_nvlink_plugin.launch.base import Executor, Interrupted, Launch
from moe_nvlink_plugin.memory.faults import Faults
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.tensors import check_device, check_memory, check_tensor
from moe_nvlink_plugin.memory.workspace import Workspace

from .config import HeadConfig
from .kernels import HEAD
from .launches import HeadLaunches, head_arguments


class HeadCall(NamedTuple):
    """Arguments of one call of a verb: see sharded_argmax."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    soft_cap: float | None
    scale: float
    row_bound: int


def head_inputs(config: HeadConfig, device: torch.device, call: HeadCall) -> None:
    """Check all arguments of one call. sharded_argmax documents their shapes.

    Raises:
        InputError: an argument has another shape, dtype, device or value. The message names both.
            Or a tensor has no memory.
    """
    bound = call.row_bound
    if not 0 < bound <= config.max_rows_per_rank:
        raise InputError(
            f"row_bound={bound} must be from 1 to max_rows_per_rank={config.max_rows_per_rank}; "
            "create the group with a larger capacity"
        )
    num_rows = call.hidden.shape[0] if call.hidden.dim() else 0
    check_tensor("hidden", call.hidden, (num_rows, config.hidden_size), (config.dtype,), device)
    if num_rows > bound:
        raise InputError(
            f"{num_rows} rows exceed row_bound={bound} (max_rows_per_rank="
            f"{config.max_rows_per_rank}); call in parts, on all ranks, or raise the bound"
        )
    weight = call.weight
    rows = weight.shape[0] if weight.dim() else 0
    check_tensor(
        "head_weight",
        weight,
        (max(rows, config.vocab_size), config.hidden_size),
        (config.dtype,),
        device,
    )
    if call.bias is not None:
        rows = call.bias.shape[0] if call.bias.dim() else 0
        check_tensor("bias", call.bias, (max(rows, config.vocab_size),), (config.dtype,), device)
        check_memory("bias", call.bias)
    check_memory("hidden", call.hidden)
    check_memory("head_weight", weight)
    _head_function(call)


def _head_function(call: HeadCall) -> None:
    # The kernel takes both as float32. There a smaller cap would become 0, which means no cap.
    numbers = torch.finfo(torch.float32)
    if call.soft_cap is not None and not numbers.tiny <= call.soft_cap <= numbers.max:
        raise InputError(
            f"soft_cap={call.soft_cap} must be from {numbers.tiny} to {numbers.max}; None is no cap"
        )
    if not abs(call.scale) <= numbers.max:
        raise InputError(f"scale={call.scale} must be from {numbers.min} to {numbers.max}")


_handles = itertools.count(1)
_live: weakref.WeakValueDictionary[int, HeadExchange] = weakref.WeakValueDictionary()


def find(handle: int) -> HeadExchange:
    """Return the group with this handle. Local.

    Raises:
        ExchangeStateError: the group is closed.
    """
    head = _live.get(handle)
    if head is None:
        raise ExchangeStateError(f"head group {handle} is closed; create a new HeadGroup")
    return head


class HeadExchange:
    """Both verbs of one group. Any thread may call; a lock orders the calls."""

    def __init__(self, config: HeadConfig, workspace: Workspace[Executor]) -> None:
        self.config = config
        self.workspace = workspace
        regions = workspace.layout.channel_regions(0)
        self._regions = regions
        slots = config.tp_size * config.max_rows_per_rank
        # Not inference tensors: torch writes to them inside and outside of inference mode.
        with torch.inference_mode(False):
            self._rows = self._view("head_rows", slots * config.hidden_size)
            self._logits = (
                self._view("head_logits", slots * config.shard_size) if config.full_logits else None
            )
            self._counts = workspace.words(regions["recv_counts"], config.tp_size, torch.int32)
        window = (workspace.memory.base_ptr, workspace.memory.rank_stride)
        self._args = head_arguments(config, regions, *window)
        ranks_on_device = workspace.memory.ranks_on_device
        self._launches = HeadLaunches(workspace.executor, config, ranks_on_device)
        self._timeouts = Timeouts.of(config)
        self._faults = Faults(
            workspace, 0, config.tp_rank, config.tp_size, self._timeouts, HEAD.phases
        )
        self.handle = next(_handles)
        _live[self.handle] = self

    def _view(self, name: str, elements: int) -> torch.Tensor:
        size = elements * self.config.dtype.itemsize
        return self.workspace.region_bytes(self._regions[name], size).view(self.config.dtype)

    def close(self) -> None:
        """Drop the handle, wait until no verb runs, release the workspace. Local; idempotent."""
        lock = self.workspace.channel_lock(0)
        if _live.pop(self.handle, None) is None:
            return
        with lock:
            self._rows = self._counts = torch.empty(0)
            self._logits = None
            self.workspace.release()

    def release(self) -> None:
        """Give the memory back, as HeadGroup.release documents it."""
        find(self.handle)

        def stop() -> None:
            self.workspace.executor.synchronize_device()  # a verb of any stream may have failed
            self.synchronize()

        # With its name: several heads may have one configuration.
        self.workspace.give_back(f"release {self.workspace.name}", self._told(), stop)

    def renew(self, group: Group, check: Callable[[], None]) -> None:
        """Map memory anew, as HeadGroup.renew documents it; `check` checks the group."""
        find(self.handle)
        workspace = self.workspace
        if workspace.is_parents:
            workspace.check_usable()

        def stop() -> None:
            check()
            workspace.check_no_capture("renew()")
            if not hasattr(workspace.memory, "renew"):
                raise UnsupportedError(
                    f"memory of {type(workspace.memory).__name__} cannot be renewed; use the "
                    "transport host or nvlink, or create the group anew"
                )
            locks.enter_context(workspace.channel_lock(0))
            workspace.executor.synchronize_device()
            workspace.keep_totals()

        with contextlib.ExitStack() as locks:
            all_or_none(group, "preparing the renewal", stop)
            tell(group, f"renew {workspace.name}", self._told(), None)
            with workspace.renewing():
                workspace.renew(group, workspace.extents)
                workspace.recover(with_newcomers=True)

    def _told(self) -> dict[str, str]:
        names = ("vocab_size", "hidden_size", "max_rows_per_rank", "dtype")
        return {name: str(getattr(self.config, name)) for name in names}

    def check_device(
        self, hidden: torch.Tensor, head_weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Check the device of tensors. The fakes of the ops call this. Local.

        If a tensor is on `meta`, torch runs the fake without notice.

        Raises:
            InputError: a tensor is not on the group's device.
        """
        tensors = {"hidden": hidden, "head_weight": head_weight, "bias": bias}
        for name, tensor in tensors.items():
            if tensor is not None:
                check_device(name, tensor, self.workspace.device)

    def argmax(self, call: HeadCall) -> torch.Tensor:
        """See sharded_argmax. Collective; capturable."""
        head_inputs(self.config, self.workspace.device, call)
        with self.workspace.channel_lock(0):
            return self._run(call)

    def logits(self, call: HeadCall) -> torch.Tensor:
        """See sharded_logits. Collective; capturable."""
        if self._logits is None:
            raise InputError(
                "sharded_logits needs a group created with full_logits=True: the peers read the "
                "logits in symmetric memory"
            )
        head_inputs(self.config, self.workspace.device, call)
        shape = (call.hidden.shape[0], self.config.vocab_size)
        output = torch.empty(shape, dtype=self.config.dtype, device=call.hidden.device)
        with self.workspace.channel_lock(0):
            self._run(call)
            self._args.output = output.data_ptr()
            self._launch(self._launches.collect)
            self._raise_fault()
        if call.soft_cap is not None:
            output.div_(call.soft_cap).tanh_().mul_(call.soft_cap)
        return output if call.scale == 1.0 else output.mul_(call.scale)

    def _run(self, call: HeadCall) -> torch.Tensor:
        self.workspace.check_usable()
        find(self.handle)
        # On a GPU an earlier verb may have failed after its call returned.
        self._raise_fault()
        args: Any = self._args
        num_rows = call.hidden.shape[0]
        args.geometry.num_rows, args.geometry.row_bound = num_rows, call.row_bound
        args.hidden = call.hidden.data_ptr()
        args.soft_cap, args.scale = call.soft_cap or 0.0, call.scale
        startup = self.workspace.startup
        args.timeout_ns = startup.begin_round(0, self._timeouts)
        self._launch(self._launches.gather)
        self._raise_fault()
        try:
            logits = self._product(call)
            ids = torch.empty(num_rows, dtype=torch.int64, device=call.hidden.device)
            args.logits, args.output = logits.data_ptr(), ids.data_ptr()
            args.timeout_ns = startup.timeout_ns(self._timeouts)
            self._launch(self._launches.argmax)
            startup.complete_round()
        except BaseException as error:
            # The peers wait for this rank's words. This rank must not start a next round, because
            # its rows would mix with those of this round.
            self.workspace.broken = ExchangeStateError(
                f"a product failed on this rank: {error!r}; end all ranks"
            )
            raise
        self._raise_fault()
        return ids

    def _launch(self, launch: Launch) -> None:
        try:
            launch(self._args)
        except Interrupted as stop:
            self.workspace.interrupt("the shared LM head", stop.error)
            raise stop.error from None

    def _product(self, call: HeadCall) -> torch.Tensor:
        """Return the logits of all ranks' rows for this rank's vocabulary, `[rows, width]`."""
        rows = self._gathered(call.row_bound)
        first, end = self.config.shard(self.config.tp_rank)
        shape = (rows.shape[0], end - first)
        if self._logits is not None:
            logits = self._logits[: shape[0] * shape[1]].view(shape)
        else:
            logits = torch.empty(shape, dtype=self.config.dtype, device=rows.device)
        if logits.numel():
            with torch.no_grad():
                shard = call.weight[first:end].t()
                if call.bias is None:
                    torch.mm(rows, shard, out=logits)
                else:
                    torch.addmm(call.bias[first:end], rows, shard, out=logits)
        return logits

    def _gathered(self, row_bound: int) -> torch.Tensor:
        slots = self._rows.view(-1, self.config.hidden_size)[: self.config.tp_size * row_bound]
        if self.workspace.executor.asynchronous:
            self._args.is_compact = 0
            return slots
        self._args.is_compact = 1
        counts = self._counts.tolist()
        if min(counts) == row_bound:
            return slots
        starts = range(0, len(counts) * row_bound, row_bound)
        return torch.cat([slots[at : at + n] for at, n in zip(starts, counts, strict=True)])

    def _raise_fault(self) -> None:
        fault = self._faults.error(self._disagreement)
        if fault is not None:
            self.workspace.broken = fault
            raise fault

    def synchronize(self) -> None:
        """Wait for this thread's stream and raise the error of a verb that failed. Local.

        Not capturable.

        Raises:
            ExchangeTimeoutError, DisagreementError, PeerError: a verb failed. The group is unusable
                from now on.
        """
        self.workspace.executor.synchronize()
        self._raise_fault()

    def failure(self) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. Local; waits for nothing; any thread."""
        if (broken := self.workspace.failure) is not None or self.workspace.is_away:
            return broken
        return self._faults.error(self._disagreement, ask_device=False)

    def _disagreement(self, peer: int, phase: str, epoch: int) -> str:
        mine = self._args.geometry
        names = ("vocab_size", "hidden_size", "max_rows_per_rank", "row_bound")
        values = ", ".join(f"{name}={getattr(mine, name)}" for name in names)
        return (
            f"in {phase} of epoch {epoch} rank {peer} called with another row_bound, or a group of "
            f"another geometry, than rank {mine.tp_rank} ({values}, dtype={self.config.dtype}); "
            "all ranks must make the same calls in the same order"
        )
