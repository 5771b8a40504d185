"""Say what "cake" launches: FlashInfer's other back end, for sm_100a and sm_103a, on request.

Facts of flashinfer-python 0.7.2.post1, read in communicationKernels/moeAlltoAllFusedKernels.cu. Its
kernels find every address from the begin of all ranks' workspaces, which lie one behind the other;
where things lie in a workspace is as in peer_launches.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from .peer_launches import (
    EVERY_RANK,
    MOST_PAYLOADS,
    THREADS,
    Geometry,
    Launch,
    RankMemory,
    packed,
    sanitize,
)

_PREFIX = "kernel_flashinfer_mnnvl_moe_alltoall_"
KERNELS = {
    "prepare_dispatch": f"{_PREFIX}prepare_dispatch",
    "dispatch": f"{_PREFIX}dispatch",
    "sanitize": f"{_PREFIX}sanitize_expert_ids",
    "stage_combine": f"{_PREFIX}stage_combine",
    "publish_combine": f"{_PREFIX}publish_combine",
    "combine": f"{_PREFIX}combine_bf16_topk8",
}
#: What its combine for bfloat16 rows is made for; other values have kernels of other forms.
TOP_K, ROW_MULTIPLE = 8, 8
_SHARED_BYTES, _PUBLISHING_THREADS = 256, 64
_BF16_BYTES, _BF16_CODE = 2, 0


def dispatch(of: Geometry, rank: int, bases: Sequence[int], memory: RankMemory) -> list[Launch]:
    """Return what a rank's dispatch launches, marking the ids of empty slots included."""
    at, base = of.offsets(), bases[rank]
    given = len(at.payloads)
    unused = MOST_PAYLOADS - given
    counters = (base + at.send_counters, base + at.local_token_counter)
    before = packed("PPiP?", *counters, of.ep_size, base + at.flag_val, True)
    dispatched = packed(
        f"{MOST_PAYLOADS + 3}P{9 + MOST_PAYLOADS}Q{MOST_PAYLOADS + 8}i???Q",
        memory.payloads[1],
        *(*memory.payloads, *[bases[0]] * unused, bases[0], base + at.send_counters),
        *(_stride(bases, of), at.flag_val, at.local_token_counter, at.send_counters),
        *(at.recv_counters, at.dispatch_flags, at.topk_target_ranks, at.topk_send_indices, 0),
        *(*at.payloads, *[0] * unused),
        *(*of.payload_bytes, *[0] * unused),
        *(given, of.max_tokens, memory.num_tokens, rank, of.ep_size, of.num_experts, of.top_k, 0),
        *(True, False, False, EVERY_RANK),
    )
    grid = max(memory.num_tokens, 1)
    return [
        Launch(KERNELS["prepare_dispatch"], 1, of.ep_size, before),
        Launch(KERNELS["dispatch"], grid, THREADS, dispatched, _SHARED_BYTES),
        sanitize(of, base, KERNELS["sanitize"], "i"),
    ]


def combine(of: Geometry, rank: int, bases: Sequence[int], memory: RankMemory) -> list[Launch]:
    """Return what a rank's combine launches if the experts wrote their rows into the workspace."""
    at, stride = of.offsets(), _stride(bases, of)
    nothing_to_copy = (0, bases[0])
    rows = bases[rank] - bases[0] + at.combine_rows
    staged = packed("PPQQQQ?i?", *nothing_to_copy, stride, at.flag_val, rows, 0, True, rank, True)
    published = packed(
        "PQQQ?ii??Q",
        *(bases[0], stride, at.flag_val, at.combine_flags, False),
        *(rank, of.ep_size, True, False, EVERY_RANK),
    )
    formats = (_BF16_BYTES, _BF16_CODE, _BF16_CODE)
    combined = packed(
        "PPQQQQ7i??",
        *(bases[0], memory.output, stride),
        *(at.topk_target_ranks, at.topk_send_indices, at.combine_rows),
        *(of.max_tokens, memory.num_tokens, of.hidden_size, *formats, rank, False, True),
    )
    return [
        Launch(KERNELS["stage_combine"], 1, THREADS, staged),
        Launch(KERNELS["publish_combine"], 1, _PUBLISHING_THREADS, published),
        Launch(KERNELS["combine"], max(memory.num_tokens, 1), THREADS, combined),
    ]


def _stride(bases: Sequence[int], of: Geometry) -> int:
    return bases[1] - bases[0] if len(bases) > 1 else of.offsets().size
