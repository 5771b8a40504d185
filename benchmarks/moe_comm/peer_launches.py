"""Say what FlashInfer's one-sided kernels are launched with, as its code of the host does it.

Facts of flashinfer-python 0.7.2.post1, read in csrc/trtllm_moe_alltoall.cu (where things lie in the
workspace), communicationKernels/moeAlltoAllKernels.h (structures) and moeAlltoAllKernels.cu (grids,
blocks, shared memory, which instance of a template). Its default back end is "trtllm", on every
architecture. All launches have programmatic dependent launch, as on every GPU from sm_90 on.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from .terms import row_bytes

MOST_RANKS, MOST_PAYLOADS, MOST_TOP_K = 64, 6, 22
TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
THREADS = 256  # unless an environment variable says otherwise
_COMPACT_RANKS, _COMPACT_BYTES, _COMPACT_THREADS = 4, 1024, 128
_ALIGNMENT = 128
#: What ids of slots without a row become: the caller's choice, and ours is -1.
NO_EXPERT = -1
#: No rank is left out.
EVERY_RANK = 2**64 - 1

_I, _P = ctypes.c_int32, ctypes.c_uint64


class DispatchPointers(ctypes.Structure):
    """DispatchKernelPointers."""

    _fields_ = [
        ("src_data", _P * MOST_PAYLOADS),
        ("recv_buffers", (_P * MOST_PAYLOADS) * MOST_RANKS),
        ("payload_bytes", _I * MOST_PAYLOADS),
        ("completion_flags", _P * MOST_RANKS),
        ("flag_val", _P),
        ("send_counters", _P),
        ("recv_counters", _P * MOST_RANKS),
        ("local_token_counter", _P),
        ("topk_target_ranks", _P),
        ("topk_send_indices", _P),
        ("eplb_local_stats", _P),
        ("eplb_gathered_stats", _P * MOST_RANKS),
        ("active_rank_mask", ctypes.c_uint64),
    ]


class CombinePointers(ctypes.Structure):
    """CombineKernelPointers."""

    _fields_ = [
        ("src_data", _P * MOST_PAYLOADS),
        ("output_scales", _P),
        ("recv_buffers", (_P * MOST_PAYLOADS) * MOST_RANKS),
        ("completion_flags", _P * MOST_RANKS),
        ("flag_val", _P),
        ("topk_target_ranks", _P),
        ("topk_send_indices", _P),
        ("active_rank_mask", ctypes.c_uint64),
    ]


class Launch(NamedTuple):
    """One launch into a rank's stream; kernel: its name in C++, as peer_source takes it."""

    kernel: str
    grid: int
    block: int
    params: bytes
    shared_bytes: int = 0


class Offsets(NamedTuple):
    """Where things lie in one rank's workspace, in bytes from its begin."""

    flag_val: int
    local_token_counter: int
    send_counters: int
    recv_counters: int
    dispatch_flags: int
    combine_flags: int
    topk_target_ranks: int
    topk_send_indices: int
    payloads: tuple[int, ...]
    combine_rows: int
    size: int


class Geometry(NamedTuple):
    """What all ranks of a round have in common; combine's rows are bfloat16.

    Attributes:
        max_tokens: both what the workspace is made for and the call's own maximum.
        recipe: the format of dispatch's rows, which the caller has quantised: a key of FORMATS.
    """

    ep_size: int
    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens: int
    recipe: str = "bf16"

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of one token: hidden state, expert ids, weights, and scales if rows have any."""
        hidden, *scales = row_bytes(self.recipe, self.hidden_size)
        return hidden, 4 * self.top_k, 4 * self.top_k, *scales

    @property
    def is_compact(self) -> bool:
        """Whether dispatch keeps a slot for each of four ranks, not for each of top_k."""
        return self.ep_size == _COMPACT_RANKS < self.top_k

    def kernels(self) -> dict[str, str]:
        """Return the instances that a round launches, by what they do."""
        if self.top_k not in TOP_KS:
            raise ValueError(f"top_k={self.top_k} has no kernel; take one of {TOP_KS}")
        compact = str(self.is_compact).lower()
        return {
            "prepare_dispatch": "moeA2APrepareDispatchKernel",
            "dispatch": f"moeA2ADispatchKernel<{self.top_k}, false, false, {compact}>",
            "sanitize": "moeA2ASanitizeExpertIdsKernel",
            "prepare_combine": "moeA2APrepareCombineKernel<false, __nv_bfloat16>",
            "combine": f"moeA2ACombineKernel<__nv_bfloat16, {self.top_k}, false>",
        }

    def offsets(self) -> Offsets:
        """Return where things lie."""
        words = 4 * self.ep_size
        flags = _aligned(8 + 2 * words)
        combine_flags = _aligned(flags + words)
        targets = _aligned(combine_flags + words)
        slots = _aligned(targets + 4 * MOST_TOP_K * self.max_tokens)
        # What follows is for statistics of experts, which nobody gathers here.
        at = _aligned(slots + 4 * MOST_TOP_K * self.max_tokens)
        payloads = []
        for bytes_per_token in self.payload_bytes:
            payloads.append(at)
            at += self.ep_size * self.max_tokens * bytes_per_token
        rows = _aligned(at)
        size = _aligned(rows + self.ep_size * self.max_tokens * 2 * self.hidden_size)
        return Offsets(
            *(0, 4, 8, 8 + words, flags, combine_flags, targets, slots),
            *(tuple(payloads), rows, size),
        )


class RankMemory(NamedTuple):
    """Addresses of what one rank's call is given.

    Attributes:
        payloads: as Geometry.payload_bytes; the second are the expert ids.
        output: `[num_tokens, hidden_size]` of combine.
    """

    num_tokens: int
    payloads: tuple[int, ...]
    output: int


def packed(types: str, *values: Any) -> bytes:
    """Lay a kernel's parameters out, each at a multiple of its size; types: codes of struct."""
    return struct.pack(f"@{types}", *values)


def dispatch(of: Geometry, rank: int, bases: Sequence[int], memory: RankMemory) -> list[Launch]:
    """Return what a rank's dispatch launches, marking the ids of empty slots included.

    Args:
        bases: the address of every rank's workspace.
    """
    at, kernels = of.offsets(), of.kernels()
    before = packed("PPiP?", *_counters(at, bases[rank]), of.ep_size, bases[rank] + at.flag_val, 1)
    pointers = bytes(_dispatch_pointers(of, rank, bases, memory))
    sizes = (memory.num_tokens, rank, of.ep_size, of.num_experts, 0)
    given = packed(
        f"P{len(pointers)}s7i?",
        *(memory.payloads[1], pointers, len(at.payloads), of.max_tokens, *sizes, True),
    )
    small = of.is_compact and max(of.payload_bytes) <= _COMPACT_BYTES
    slots = _COMPACT_RANKS if of.is_compact else 2 * of.top_k
    threads = _COMPACT_THREADS if small else THREADS
    return [
        Launch(kernels["prepare_dispatch"], 1, of.ep_size, before),
        Launch(kernels["dispatch"], max(memory.num_tokens, 1), threads, given, 4 * slots),
        sanitize(of, bases[rank], kernels["sanitize"], "?"),
    ]


def sanitize(of: Geometry, base: int, kernel: str, flag: str) -> Launch:
    """Return the launch that marks the ids of a rank's empty slots; flag: the type of its last."""
    at, slots = of.offsets(), of.ep_size * of.max_tokens
    sizes = (of.ep_size, of.max_tokens, of.top_k, NO_EXPERT)
    given = packed(f"PP4i{flag}", base + at.payloads[1], base + at.recv_counters, *sizes, 1)
    return Launch(kernel, -(-slots // THREADS), THREADS, given)


def combine(of: Geometry, rank: int, bases: Sequence[int], memory: RankMemory) -> list[Launch]:
    """Return what a rank's combine launches if the experts wrote their rows into the workspace."""
    at, base, kernels = of.offsets(), bases[rank], of.kernels()
    row_bytes = 2 * of.hidden_size
    sizes = (of.hidden_size, of.ep_size, of.max_tokens)
    nothing_to_copy = 0
    before = packed(
        "PP3iPPi?",
        *(base + at.combine_rows, nothing_to_copy, *sizes),
        *(base + at.flag_val, base + at.recv_counters, row_bytes, True),
    )
    pointers = bytes(_combine_pointers(of, rank, bases, memory))
    given = packed(
        f"{len(pointers)}s6i?f",
        *(pointers, of.max_tokens, of.hidden_size, row_bytes),
        *(memory.num_tokens, rank, of.ep_size, True, 1.0),
    )
    return [
        Launch(kernels["prepare_combine"], 1, THREADS, before),
        Launch(kernels["combine"], max(memory.num_tokens, 1), THREADS, given),
    ]


def _counters(at: Offsets, base: int) -> tuple[int, int]:
    return base + at.send_counters, base + at.local_token_counter


def _dispatch_pointers(
    of: Geometry, rank: int, bases: Sequence[int], memory: RankMemory
) -> DispatchPointers:
    at, base = of.offsets(), bases[rank]
    send_counters, local_token_counter = _counters(at, base)
    made = DispatchPointers(
        src_data=(_P * MOST_PAYLOADS)(*memory.payloads),
        payload_bytes=(_I * MOST_PAYLOADS)(*of.payload_bytes),
        completion_flags=(_P * MOST_RANKS)(*[each + at.dispatch_flags for each in bases]),
        flag_val=base + at.flag_val,
        send_counters=send_counters,
        recv_counters=(_P * MOST_RANKS)(*[each + at.recv_counters for each in bases]),
        local_token_counter=local_token_counter,
        topk_target_ranks=base + at.topk_target_ranks,
        topk_send_indices=base + at.topk_send_indices,
        active_rank_mask=EVERY_RANK,
    )
    for target, each in enumerate(bases):
        made.recv_buffers[target][: len(at.payloads)] = [each + start for start in at.payloads]
    return made


def _combine_pointers(
    of: Geometry, rank: int, bases: Sequence[int], memory: RankMemory
) -> CombinePointers:
    at, base = of.offsets(), bases[rank]
    made = CombinePointers(
        src_data=(_P * MOST_PAYLOADS)(memory.output),
        completion_flags=(_P * MOST_RANKS)(*[each + at.combine_flags for each in bases]),
        flag_val=base + at.flag_val,
        topk_target_ranks=base + at.topk_target_ranks,
        topk_send_indices=base + at.topk_send_indices,
        active_rank_mask=EVERY_RANK,
    )
    for target, each in enumerate(bases):
        made.recv_buffers[target][0] = each + at.combine_rows
    return made


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
