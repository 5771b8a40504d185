"""Ordinary calls: those that need no further check and no op, as nearly all eager calls do.

What is ordinary is asked in one pass over a call's tensors, because the host pays for each question
in each layer of a model. A call that is not ordinary need not be wrong: checks.py and ops.py then
look at it one thing after another, and they alone raise errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .calls import Combine, Dispatch
from .formats import LayerFormat

# Bound here, because each call asks all of them.
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_has_key: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_profiles: Callable[[], bool] = torch._C._autograd._profiler_enabled
_trace: Callable[[], Any] = torch._C._get_tracing_state
_records: Callable[[], bool] = torch.is_grad_enabled
# Modes before autograd include this key. Counting them takes four calls of Python functions.
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_Tensor, _int32, _float32 = torch.Tensor, torch.int32, torch.float32


def is_watched() -> bool:
    """Return whether somebody looks on at all ops of this thread. Local.

    It is a mode, a tracer, a profiler, forward-mode AD or a transform of torch.func. Without a
    profiler, torch.profiler.ExecutionTraceObserver is not noticed.
    """
    return bool(
        forward_ad._current_level >= 0
        or _dispatch_modes()
        or _function_modes()
        or _has_key(_PRE_DISPATCH)
        or _transforms()
        or _profiles()
        or _trace()
    )


class _Rows(NamedTuple):
    """What a dispatch sends: elements and type of a row, quantiser, and scales beside it if any."""

    elements: int
    dtype: torch.dtype
    quantiser: int
    scales: int | None = None
    scales_dtype: torch.dtype | None = None


class OrdinaryCalls:
    """Recogniser of the ordinary calls of one layer. Any thread may ask.

    A tensor's type comes first: others than torch's own may answer anything. No element type that
    verbs take is complex, so the bytes of a tensor are its numbers unless it is negated, and
    torch's tensors of zeros have no address. Nor has a tensor without rows, so a call without
    tokens is not ordinary. The questions are written out for each tensor that a dispatch always
    has: a function for one tensor would cost as much as its answers.

    Args:
        layer: the layer's rows.
        window: addresses of all ranks' workspaces.
    """

    def __init__(self, layer: LayerFormat, window: range) -> None:
        config = layer.config
        self._device, self._start, self._stop = layer.device, window.start, window.stop
        self._most_tokens, self._top_k = config.max_tokens_per_rank, config.top_k
        self._hidden_size, self._dtype = config.hidden_size, config.dtype
        self._combine_dtypes = layer.combine_dtypes
        row, scales = layer.rows["recv_hidden_states"], layer.rows.get("recv_scales")
        counted = config.num_expert_counts in (0, config.num_experts)
        travel = _Rows(row.elements, row.dtype, 0) if counted else None
        if travel is not None and scales is not None:
            travel = travel._replace(scales=scales.elements, scales_dtype=scales.dtype)
        self._as_they_travel = self._activations = travel
        if layer.quantising is not None:
            in_kernel = layer.quantiser != 0 and not layer.quantising.needs_global_scale
            made = _Rows(config.hidden_size, config.dtype, layer.quantiser)
            self._activations = made if in_kernel and counted else None

    def quantiser_of(self, call: Dispatch) -> int | None:
        """Return the quantiser of an ordinary dispatch, as LayerFormat; None: it is another. Local.

        It raises nothing: what torch raises of a tensor that is not dense is the checks' to report.
        """
        hidden, scales, ids, weights, extras, scale, _, _, padding, most, mask, counts = call
        if (
            extras
            or not (scale is None and mask is None and counts is None)
            or not (type(hidden) is type(ids) is type(weights) is _Tensor and type(most) is int)
            or is_watched()  # first: a tracer would note the sizes that are asked for
        ):
            return None
        try:
            rows, device = self._as_they_travel, self._device
            if scales is None and hidden.dtype is self._dtype:
                rows = self._activations
            shape, of_ids = hidden.shape, ids.shape
            if rows is None or len(shape) != 2 or most > self._most_tokens:
                return None
            num_tokens = shape[0]
            if not (
                1 <= num_tokens <= most
                and ids.dtype is _int32
                and shape[1] == rows.elements
                and of_ids == (num_tokens, self._top_k)
                and weights.shape == of_ids
                and hidden.dtype is rows.dtype
                and weights.dtype is _float32
                and hidden.device == device
                and ids.device == device
                and weights.device == device
                and hidden.is_contiguous()
                and ids.is_contiguous()
                and weights.is_contiguous()
                and not (hidden.is_neg() or ids.is_neg() or weights.is_neg())
            ):
                return None
            if _records() and (hidden.requires_grad or weights.requires_grad):
                return None
            start, stop = self._start, self._stop
            places = hidden.data_ptr(), ids.data_ptr(), weights.data_ptr()
            for address in places:
                if start <= address < stop or address == 0:
                    return None
            if not (scales is None and padding is None and rows.scales is None) and not (
                self._are_optional_ordinary(scales, padding, num_tokens, rows)
            ):
                return None
            return rows.quantiser
        except RuntimeError:  # torch's, of a tensor that is not dense
            return None

    def _are_optional_ordinary(
        self, scales: object, padding: object, num_tokens: int, rows: _Rows
    ) -> bool:
        if (scales is None) != (rows.scales is None):
            return False
        of_scales, of_padding = (num_tokens, rows.scales), (num_tokens,)
        return (scales is None or self._is(scales, of_scales, rows.scales_dtype)) and (
            padding is None or self._is(padding, of_padding, torch.bool)
        )

    def is_combine(self, call: Combine) -> bool:
        """Return whether a combine is ordinary, if it has the tokens of its dispatch. Local.

        The caller asks for these under the channel's lock. It raises nothing, as quantiser_of.
        """
        rows, slots, output, _, _, width, add, _ = call
        hidden_size, device = self._hidden_size, self._device
        if (
            not (type(rows) is type(slots) is _Tensor)
            or not (width is None or (type(width) is int and width == hidden_size))
            or is_watched()
        ):
            return False
        try:
            dtype, shape, of_slots = rows.dtype, rows.shape, slots.shape
            if not (
                len(shape) == len(of_slots) == 2
                and of_slots[0] >= 1
                and shape[1] == hidden_size
                and of_slots[1] == self._top_k
                and dtype in self._combine_dtypes
                and slots.dtype is _int32
                and rows.device == device
                and slots.device == device
                and rows.is_contiguous()
                and slots.is_contiguous()
                and not (rows.is_neg() or slots.is_neg())
                and not (rows.requires_grad and _records())
            ):
                return False
            sums, address = (of_slots[0], hidden_size), slots.data_ptr()
            return (
                rows.data_ptr() != 0
                and not self._start <= address < self._stop
                and address != 0
                and (output is None or self._is(output, sums, dtype))
                and (add is None or self._is(add, sums, dtype))
                and (add is None or output is None or _are_apart(add, output))
            )
        except RuntimeError:  # torch's, of a tensor that is not dense
            return False

    def _is(self, tensor: Any, shape: tuple[Any, ...], dtype: torch.dtype | None) -> bool:
        """Return whether an object is such a tensor as a verb takes, outside of the window."""
        if not (
            type(tensor) is _Tensor
            and tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.device == self._device
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not (tensor.requires_grad and _records())
        ):
            return False
        address = tensor.data_ptr()
        return address != 0 and not self._start <= address < self._stop


def _are_apart(add: torch.Tensor, output: torch.Tensor) -> bool:
    distance = abs(add.data_ptr() - output.data_ptr())
    return distance == 0 or distance >= add.nbytes
