"""Ordinary calls: those that need no further check and no op, as nearly all eager calls do.

What is ordinary is asked in one pass over a call's tensors, because the host pays for each question
in each layer of a model. A call that is not ordinary need not be wrong: checks.py and ops.py then
look at it one thing after another, and they alone raise errors. What a dispatch's tensors must be
is the table by which checks.py judges them too (LayerFormat.expected).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from .calls import Combine, Dispatch, Expected
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
_Tensor, _int32 = torch.Tensor, torch.int32


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


#: Of each tensor of a kind of call: its place there, the sizes of a row, the type, and whether it
#: has a row for each slot; then it may lie in the window. The others have a row for each token.
_Forms = tuple[tuple[int, tuple[int, ...], torch.dtype, bool], ...]


def _forms(expected: Iterable[Expected]) -> _Forms:
    # Of two types of ids the first one is the kernel's; the other one has to be converted.
    tokens = (form for form in expected if form.has_tokens)
    return tuple((form.place, form.sizes, form.dtypes[0], False) for form in tokens)


class OrdinaryCalls:
    """Recogniser of the ordinary calls of one layer. Any thread may ask; it raises nothing.

    A tensor's type comes first: others than torch's own may answer anything. No element type that
    verbs take is complex, so the bytes of a tensor are its numbers unless it is negated, and
    torch's tensors of zeros have no address. Nor has a tensor without rows, so a call without
    tokens is not ordinary.

    Args:
        layer: the layer's rows.
        window: addresses of all ranks' workspaces.
    """

    def __init__(self, layer: LayerFormat, window: range) -> None:
        config = layer.config
        self._device, self._start, self._stop = layer.device, window.start, window.stop
        self._most_tokens, self._dtype = config.max_tokens_per_rank, config.dtype
        self._hidden_size = config.hidden_size
        self._has_scales = "recv_scales" in layer.rows
        travel, made = map(_forms, layer.expected)
        #: Quantiser and forms of rows as they travel, and of activations; None: never ordinary.
        self._as_they_travel: tuple[int, _Forms] | None = (0, travel)
        self._activations: tuple[int, _Forms] | None = (0, travel)
        if layer.quantising is not None:
            in_kernel = layer.quantiser != 0 and not layer.quantising.needs_global_scale
            self._activations = (layer.quantiser, made) if in_kernel else None
        if config.num_expert_counts not in (0, config.num_experts):  # the caller counts
            self._as_they_travel = self._activations = None
        width = (config.hidden_size,)
        slots = (1, (config.top_k,), _int32, False)
        self._combines: dict[torch.dtype, _Forms] = {
            dtype: (
                (0, width, dtype, True),
                slots,
                (2, width, dtype, False),
                (6, width, dtype, False),
            )
            for dtype in layer.combine_dtypes
        }

    def quantiser_of(self, call: Dispatch) -> int | None:
        """Return the quantiser of an ordinary dispatch, as LayerFormat; None: it is another. Local.

        Its max_tokens is an integer.
        """
        hidden, scales, ids, weights, extras, scale, _, _, _, most, mask, counts = call
        if (
            extras
            or not (scale is None and mask is None and counts is None)
            or not (type(hidden) is type(ids) is type(weights) is _Tensor and type(most) is int)
            or is_watched()  # first: a tracer would note the sizes that are asked for
        ):
            return None
        sent = self._as_they_travel
        if scales is None and hidden.dtype is self._dtype:
            sent = self._activations
        elif (scales is None) == self._has_scales:
            return None
        if sent is None or not 1 <= self._num_tokens(call, sent[1]) <= most <= self._most_tokens:
            return None
        return sent[0]

    def is_combine(self, call: Combine) -> bool:
        """Return whether a combine is ordinary, if it has the tokens of its dispatch. Local.

        The caller asks for these, and for the slots, under the channel's lock.
        """
        rows, slots, output, _, _, width, add, _ = call
        if (
            not (type(rows) is type(slots) is _Tensor)
            or not (width is None or (type(width) is int and width == self._hidden_size))
            or is_watched()
        ):
            return False
        forms = self._combines.get(rows.dtype)
        return (
            forms is not None
            and self._num_tokens(call, forms) >= 1
            and (add is None or output is None or _are_apart(add, output))
        )

    def _num_tokens(self, call: Dispatch | Combine, forms: _Forms) -> int:
        """Return how many tokens a call has, if its tensors have these forms; else 0."""
        num_rows, device, start, stop = 0, self._device, self._start, self._stop
        try:
            for place, sizes, dtype, has_slots in forms:
                tensor: Any = call[place]
                if tensor is None:
                    continue
                if type(tensor) is not _Tensor:
                    return 0
                shape = tensor.shape
                num_rows = num_rows or (shape[0] if shape else 0)
                if not (
                    shape == (num_rows, *sizes)
                    and tensor.dtype is dtype
                    and tensor.device == device
                    and tensor.is_contiguous()
                    and not tensor.is_neg()
                    and not (tensor.requires_grad and _records())
                ):
                    return 0
                address = tensor.data_ptr()
                if address == 0 or (start <= address < stop and not has_slots):
                    return 0
                if has_slots:
                    num_rows = 0  # the next tensor tells how many tokens there are
        except RuntimeError:  # torch's, of a tensor that is not dense
            return 0
        return num_rows


def _are_apart(add: torch.Tensor, output: torch.Tensor) -> bool:
    distance = abs(add.data_ptr() - output.data_ptr())
    return distance == 0 or distance >= add.nbytes
