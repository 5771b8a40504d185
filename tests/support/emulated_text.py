"""The kernel text for many ranks on one device: entry points that take every rank's arguments, and
a kernel that runs whole rounds without the host. Tests and benchmarks only.

blockIdx.y is the rank. All ranks' arguments are one kernel parameter, so that a body reads them
from the constant bank, as the product's kernels do, and so that nothing has to outlive the launch.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from moe_nvlink_plugin.exchange.kernels import COMBINE, DISPATCH, LAYER
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support import kernel_texts
from tests.support.delays import with_delays

#: Kernel parameters of one launch may take so many bytes (CUDA 12.1 and newer, sm_70 and newer).
MAX_PARAMETER_BYTES = 32764

#: verb -> (struct of its arguments, struct of its shared memory, body)
VERBS = {
    "dispatch": ("DispatchArgs", "DispatchSharedFor<Config>", "dispatch_body"),
    "combine": ("CombineArgs", "SharedOf<Config>", "combine_body"),
    "small_dispatch": ("DispatchArgs", "SmallDispatchSharedFor<Config>", "small_dispatch_body"),
    "small_combine": ("CombineArgs", "SmallCombineShared", "small_combine_body"),
    "meet": ("MeetArgs", "MeetShared", "meet_body"),
    "rounds": ("RoundsArgs", "RoundsShared", "rounds_body"),
    "quantise": ("DispatchArgs", "QuantiseShared", "quantise_body"),
    "head_gather": ("HeadArgs", "HeadShared", "head_gather_body"),
    "head_argmax": ("HeadArgs", "HeadArgmaxShared", "head_argmax_body"),
}


class RoundsArgs(ctypes.Structure):
    """Mirror of the struct in _ROUNDS: many rounds of one rank. Arrays have the round in front."""

    _fields_ = [
        ("dispatch", structs()["DispatchArgs"]),
        ("combine", structs()["CombineArgs"]),
        ("num_tokens", ctypes.c_uint64),  # [rounds] i32
        ("topk_ids", ctypes.c_uint64),  # [rounds, capacity, top_k] i32
        ("topk_weights", ctypes.c_uint64),  # [rounds, capacity, top_k] f32
        ("hidden_states", ctypes.c_uint64),  # [rounds, capacity, hidden_size] elements
        ("outputs", ctypes.c_uint64),  # [rounds, capacity, hidden_size] elements, written
        ("recv_counts", ctypes.c_uint64),  # [rounds, ep_size] i32, written
        ("barrier", ctypes.c_uint64),  # u32, zero
        ("rounds", ctypes.c_uint64),
    ]


_ROUNDS = """
// ---- rounds without the host: dispatch, experts, combine, again and again, in one launch. Between
// two verbs only this rank's CTAs wait for each other, as between two kernels of its stream; so the
// ranks run apart by as much as the protocol lets them.
namespace moe_nvlink {

struct RoundsArgs {
  DispatchArgs dispatch;
  CombineArgs combine;
  uint64_t num_tokens;
  uint64_t topk_ids;
  uint64_t topk_weights;
  uint64_t hidden_states;
  uint64_t outputs;
  uint64_t recv_counts;
  uint64_t barrier;
  uint64_t rounds;
};

struct RoundsShared {
  DispatchArgs dispatch_args;
  CombineArgs combine_args;
  DispatchSharedFor<Config> dispatch;
  SharedOf<Config> combine;
  uint32_t passed;  // arrivals that the next kernel boundary waits for
  uint32_t stop;    // a rank has failed: the launch ends
};

// What a kernel boundary does: all of this rank's CTAs have come, and see what the others did.
// False when they do not come, or a verb has left a fault word.
HD bool end_of_kernel(const RoundsArgs& args, const Cta& cta, RoundsShared& shared) {
  uint32_t* counter = reinterpret_cast<uint32_t*>(args.barrier);
  cta.sync();
  if (cta.thread == 0) {
    const uint32_t passed = shared.passed += static_cast<uint32_t>(cta.num_blocks);
    fetch_add_acq_rel_gpu(counter, 1);
    const uint64_t start = now_ns();
    Backoff backoff;
    while (static_cast<int32_t>(fetch_add_acq_rel_gpu(counter, 0) - passed) < 0) {
      const uint64_t waited = now_ns() - start;
      if (waited > args.dispatch.timeout_ns) {
        shared.stop = 1;
        break;
      }
      backoff.pause(waited);
    }
    if (load_relaxed_sys(&local_control(args.dispatch)->fault) != 0) shared.stop = 1;
  }
  cta.sync();
  return shared.stop == 0;
}

// The threads of all of a rank's CTAs share a range of words.
HD void fill_words(const Cta& cta, char* first, uint64_t bytes, uint32_t value) {
  auto* words = reinterpret_cast<uint32_t*>(first);
  const int64_t step = static_cast<int64_t>(cta.num_blocks) * cta.num_threads;
  const int64_t count = static_cast<int64_t>((bytes + 3) / 4);  // regions are padded to 256 bytes
  for (int64_t i = static_cast<int64_t>(cta.block) * cta.num_threads + cta.thread; i < count;
       i += step) {
    words[i] = value;
  }
}

HD uint64_t slots_of(const Geometry& geometry) {
  return static_cast<uint64_t>(geometry.ep_size) * geometry.max_tokens_per_rank;
}

// Bytes of an activation row, which with a quantiser is not the row that travels.
HD uint64_t activation_bytes(const Geometry& geometry) {
  return static_cast<uint64_t>(geometry.hidden_size) *
         static_cast<uint64_t>(element_bytes(geometry.element));
}

// One activation of a received row; of the quantised ones fp8_block alone.
template <class Element>
HD float activation(const RoundsArgs& args, const char* rows, const float* scales, int64_t index) {
  if (args.dispatch.quantiser == kQuantiserNone) {
    return Element::to_float(reinterpret_cast<const typename Element::Storage*>(rows)[index]);
  }
  const float value = E4m3::to_float(reinterpret_cast<const uint8_t*>(rows)[index]);
  return Element::to_float(Element::from_float(value * scales[index / 128]));
}

// tests/support/cases.py expert_rows, the same operations in the same order: the same bits.
template <class Element>
HD void experts(const RoundsArgs& args, const Cta& cta) {
  const Geometry& geometry = args.dispatch.geometry;
  const auto region = [&](uint32_t block) {
    return region_of(args.dispatch, geometry.ep_rank, block);
  };
  const auto* counts = reinterpret_cast<const int32_t*>(region(args.dispatch.control.recv_counts));
  const auto* ids = reinterpret_cast<const int32_t*>(region(args.dispatch.payloads[0].region));
  const auto* weights = reinterpret_cast<const float*>(region(args.dispatch.payloads[1].region));
  const char* hidden = region(args.dispatch.payloads[2].region);
  const auto* scales = reinterpret_cast<const float*>(region(args.dispatch.payloads[3].region));
  auto* rows = reinterpret_cast<typename Element::Storage*>(region(args.combine.region));
  const int num_slots = static_cast<int>(slots_of(geometry));
  for (int slot = cta.block; slot < num_slots; slot += cta.num_blocks) {
    const int source = slot / geometry.max_tokens_per_rank;
    if (slot % geometry.max_tokens_per_rank >= counts[source]) continue;
    float factor = 0.5f;
    for (int k = 0; k < geometry.top_k; ++k) {
      const int expert = ids[slot * geometry.top_k + k];
      if (target_rank_of(expert, geometry) != geometry.ep_rank) continue;
      const float scale = 1.0f + static_cast<float>(expert) * 0.125f;
      factor += weights[slot * geometry.top_k + k] * scale;
    }
    const float shift = 0.0625f * static_cast<float>(geometry.ep_rank + 1);
    const int64_t first = static_cast<int64_t>(slot) * geometry.hidden_size;
    for (int i = cta.thread; i < geometry.hidden_size; i += cta.num_threads) {
      const float value = activation<Element>(args, hidden, scales, first + i);
      rows[first + i] = Element::from_float((value + shift) * factor);
    }
  }
}

HD void poison_received(const RoundsArgs& args, const Cta& cta) {
  const Geometry& geometry = args.dispatch.geometry;
  for (uint32_t i = 0; i < args.dispatch.num_payloads; ++i) {
    char* first = region_of(args.dispatch, geometry.ep_rank, args.dispatch.payloads[i].region);
    // Ids: an expert everywhere, so that a slot that is not marked empty again is noticed.
    fill_words(cta, first, slots_of(geometry) * args.dispatch.payloads[i].row_bytes,
               i == 0 ? 1u : 0xffffffffu);
  }
}

HD void begin_round(const RoundsArgs& args, const Cta& cta, uint64_t round, RoundsShared& shared) {
  if (cta.thread != 0) return;
  const Geometry& geometry = args.dispatch.geometry;
  const uint64_t capacity = static_cast<uint64_t>(geometry.max_tokens_per_rank);
  const uint64_t first = round * capacity;
  const uint64_t row_bytes = activation_bytes(geometry);
  const uint64_t top_k = static_cast<uint64_t>(geometry.top_k);
  const int num_tokens = reinterpret_cast<const int32_t*>(args.num_tokens)[round];
  shared.dispatch_args = args.dispatch;
  shared.dispatch_args.geometry.num_tokens = num_tokens;
  shared.dispatch_args.payloads[0].source = args.topk_ids + first * top_k * 4;
  shared.dispatch_args.payloads[1].source = args.topk_weights + first * top_k * 4;
  shared.dispatch_args.payloads[2].source = args.hidden_states + first * row_bytes;
  shared.combine_args = args.combine;
  shared.combine_args.geometry.num_tokens = num_tokens;
  shared.combine_args.output = args.outputs + first * row_bytes;
}

template <class Config>
HD void run_experts(const RoundsArgs& args, const Cta& cta) {
  const int element = Config::kElement >= 0 ? Config::kElement : args.combine.geometry.element;
  if (element == kElementBf16) {
    experts<Bf16>(args, cta);
  } else if (element == kElementFp16) {
    experts<Fp16>(args, cta);
  } else {
    experts<Fp32>(args, cta);
  }
}

template <class Config>
HD void rounds_body(const RoundsArgs& args, const Cta& cta, RoundsShared& shared) {
  const Geometry& geometry = args.dispatch.geometry;
  if (cta.thread == 0) shared.passed = shared.stop = 0;
  for (uint64_t round = 0; round < args.rounds; ++round) {
    begin_round(args, cta, round, shared);
    cta.sync();
    dispatch_body<Config>(shared.dispatch_args, cta, shared.dispatch);
    if (!end_of_kernel(args, cta, shared)) return;
    // All ranks have dispatched, so all have finished reading the round before.
    fill_words(cta, region_of(args.combine, geometry.ep_rank, args.combine.region),
               slots_of(geometry) * activation_bytes(geometry), 0xffffffffu);
    if (!end_of_kernel(args, cta, shared)) return;
    run_experts<Config>(args, cta);
    if (cta.block == 0) {
      const auto* counts = reinterpret_cast<const int32_t*>(
          region_of(args.dispatch, geometry.ep_rank, args.dispatch.control.recv_counts));
      auto* record = reinterpret_cast<int32_t*>(args.recv_counts) + round * geometry.ep_size;
      for (int i = cta.thread; i < geometry.ep_size; i += cta.num_threads) record[i] = counts[i];
    }
    if (!end_of_kernel(args, cta, shared)) return;
    poison_received(args, cta);
    if (!end_of_kernel(args, cta, shared)) return;
    combine_body<Config>(shared.combine_args, cta, shared.combine);
    if (!end_of_kernel(args, cta, shared)) return;
  }
}

}  // namespace moe_nvlink
"""

_QUANTISE = """
// ---- the quantiser of dispatch alone: this rank's rows to the front of its own receive buffers,
// and nothing else. What a dispatch that quantises is measured against.
namespace moe_nvlink {

struct QuantiseShared {
  TokenRoute routes[2];
  RowAmax amax[2];
};

// A class as QuantiseAndPutTokens is, and for the same reason.
template <class Config>
struct QuantiseTokens {
  const DispatchArgs& args;
  const Cta& cta;
  QuantiseShared& shared;

  template <class Kind>
  HD void operator()(const Kind& quantising) const {
    const uint64_t rank = static_cast<uint64_t>(args.geometry.ep_rank);
    int turn = 0;
    for (int token = cta.block; token < args.geometry.num_tokens; token += cta.num_blocks) {
      TokenRoute& route = shared.routes[turn];
      if (cta.thread == 0) {
        for (int k = 0; k < top_k_of<Config>(args.geometry); ++k) route.rows[k] = kNoSlot;
        route.rows[0] = token;
        route.windows[0] = args.window_base + rank * args.rank_stride;
      }
      quantising.prepare(token, shared.amax[turn]);
      cta.sync();
      quantising.put(token, route, shared.amax[turn]);
      turn = 1 - turn;
    }
  }
};

template <class Config>
HD void quantise_body(const DispatchArgs& args, const Cta& cta, QuantiseShared& shared) {
  float scale = 1.0f;
  if (args.global_scale != 0) scale = load_word(reinterpret_cast<const float*>(args.global_scale));
  with_quantiser<Config>(args, cta, scale, QuantiseTokens<Config>{args, cta, shared});
}

}  // namespace moe_nvlink
"""

#: Threads of a CTA that the tests' entry points are compiled for; room for what the delays need.
THREADS = 256

#: Per verb, on the GPU. `{count}` ranks at most; gridDim.y of them run.
_DEVICE_ENTRY = """
namespace moe_nvlink {{
struct Emulated_{verb} {{
  {args} of[{count}];
}};
}}  // namespace moe_nvlink

extern "C" __global__ void {bounds} moe_nvlink_emulated_{verb}(
    const __grid_constant__ moe_nvlink::Emulated_{verb} args) {{
  __shared__ moe_nvlink::{shared} shared;
  moe_nvlink::{body}<Config>(args.of[blockIdx.y], moe_nvlink::this_cta(), shared);
}}
"""

_HOST_ENTRIES = """
MOE_NVLINK_KERNEL(emulated_rounds, RoundsArgs, RoundsShared, rounds_body)
MOE_NVLINK_KERNEL(emulated_quantise, DispatchArgs, QuantiseShared, quantise_body)
"""

#: Per verb, for tests/support/fake_cuda: what it runs in the place of the GPU's entry point.
#: As many ranks as have arguments, each a thread with a grid of two CTAs.
_STAND_IN_ENTRY = """
extern "C" int moe_nvlink_sizeof_emulated_{verb}_args() {{
  return {count} * static_cast<int>(sizeof(moe_nvlink::{args}));
}}
extern "C" void moe_nvlink_emulated_{verb}(const moe_nvlink::{args}* of, void*) {{
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < {count} && of[rank]{window} != 0; ++rank) {{
    ranks.emplace_back([=] {{
      moe_nvlink::host::Grid grid(2);
      {function}(&of[rank], &grid);
    }});
  }}
  for (std::thread& rank : ranks) rank.join();
}}
"""


def most_ranks(struct: type[ctypes.Structure]) -> int:
    """Ranks whose arguments fit into one launch."""
    return MAX_PARAMETER_BYTES // ctypes.sizeof(struct)


def struct_of(verb: str) -> type[ctypes.Structure]:
    """ctypes mirror of a verb's arguments."""
    name = VERBS[verb][0]
    return RoundsArgs if name == "RoundsArgs" else structs()[name]


def verbs(
    *,
    fused: bool = False,
    alone: bool = False,
    head: bool = False,
    small: bool = False,
    **_options: int,
) -> tuple[str, ...]:
    """Verbs that device_source makes with these options."""
    if head:
        return ("head_gather", "head_argmax")
    if alone:
        return ("quantise",)
    if fused:
        return ("rounds",)
    return tuple(each.name for each in LAYER.kernels) if small else ("dispatch", "combine")


def device_source(
    top_k: int,
    element: int,
    count: int,
    *,
    pdl: bool = False,
    delays: bool = False,
    fused: bool = False,
    alone: bool = False,
    head: bool = False,
    as_product: bool = False,
    quantiser: int = 0,
    combine: int = 0,
    expert_counts: int = 0,
    ordered_slots: int = 0,
    units: int = 14,
    async_release: int = 0,
    small: bool = False,
) -> str:
    """moe_nvlink_emulated_dispatch and _combine for up to `count` ranks, nothing else.

    Args:
        quantiser, combine, expert_counts, ordered_slots, units, async_release: as for
            specialised_source.
        delays: sleeps sown in.
        fused: moe_nvlink_emulated_rounds instead.
        alone: moe_nvlink_emulated_quantise instead; needs a quantiser.
        head: moe_nvlink_emulated_head_gather and _head_argmax instead; top_k is of no account.
        small: moe_nvlink_emulated_small_dispatch, _small_combine and _meet too.
        as_product: for CTAs of any size, as the product's kernels are.
    """
    text = kernel_texts.specialised_source(
        top_k,
        element,
        pdl=pdl,
        quantiser=quantiser,
        combine=combine,
        expert_counts=expert_counts,
        ordered_slots=ordered_slots,
        units=units,
        async_release=async_release,
        small=small,
    )
    if head:
        text = kernel_texts.head_source(element, pdl=pdl)
    text, entries = re.subn(r"^MOE_NVLINK_KERNEL\([^)]*\)\n", "", text, flags=re.MULTILINE)
    made = HEAD.kernels if head else LAYER.kernels if small else (DISPATCH, COMBINE)
    assert entries == len(made), f"{entries} entry points of the product"
    if fused:
        text += _ROUNDS
    if alone:
        text += _QUANTISE
    if delays:
        text = with_delays(text, on_host=False)
    for verb in verbs(fused=fused, alone=alone, head=head, small=small):
        args, shared, body = VERBS[verb]
        fields: dict[str, Any] = {"args": args, "shared": shared, "body": body}
        fields["bounds"] = "" if as_product else f"__launch_bounds__({THREADS})"
        text += _DEVICE_ENTRY.format(verb=verb, count=count, **fields)
    return text


def host_source(*, delays: bool = False) -> str:
    """The host library with emulated_rounds in it; every geometry, chosen by the arguments."""
    text = kernel_texts.host_source() + _ROUNDS + _QUANTISE + _HOST_ENTRIES
    return with_delays(text, on_host=True) if delays else text


def stand_in_source(count: int) -> str:
    """The host library that tests/support/fake_cuda runs when emulated kernels are launched."""
    text = host_source(delays=True)
    of_product = {kernel.name for kernel in (*LAYER.kernels, *HEAD.kernels)}
    for verb, (args, _shared, _body) in VERBS.items():
        function = f"{'moe_nvlink' if verb in of_product else 'emulated'}_{verb}"
        window = ".dispatch.window_base" if verb == "rounds" else ".window_base"
        fields = {"args": args, "function": function, "window": window}
        text += _STAND_IN_ENTRY.format(verb=verb, count=count, **fields)
    return text
