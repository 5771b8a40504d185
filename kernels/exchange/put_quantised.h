// Dispatch's rows quantised on the way: a row is loaded, quantised in registers and stored with its
// scales.
//
// To make one scale for a whole row (fp8_token), the kernel needs the row's largest magnitude
// before the first code. Every thread finds the largest magnitude of its part before the barrier
// that ends the token's routing, so that barrier also publishes the parts. After it, the thread
// loads its part again, from L1.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/routing.h"
#include "dispatch_shared.h"
#include "put_rows.h"

namespace moe_nvlink {

// The targets of a token's quantised row and scales: each target of its route. Each store computes
// its address from words in shared memory. Kept as pointers, two for each k, the addresses would
// take the registers that hold the elements.
template <class Config>
struct RouteTargets {
  const TokenRoute& route;
  const Payload& rows;
  const Payload& scales;
  int top_k;

  template <int Bytes>
  HD void store_to(const Payload& payload, int offset, const Vector<Bytes>& vector) const {
    const uint64_t region = static_cast<uint64_t>(payload.region) * kRegionAlignment;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      const int row = route.rows[k];
      if (row == kNoSlot) continue;
      store_vector(reinterpret_cast<char*>(route.windows[k] + region +
                                           static_cast<uint64_t>(row) * payload.row_bytes) +
                       offset,
                   vector);
    }
  }
  template <int Bytes>
  HD void store(int offset, const Vector<Bytes>& vector) const {
    store_to(rows, offset, vector);
  }
  template <int Bytes>
  HD void store_scales(int offset, const Vector<Bytes>& vector) const {
    store_to(scales, offset, vector);
  }
};

// The same on the host, which keeps the addresses, and streams long rows.
template <class Config>
struct ListedTargets {
  Targets<Config> rows;
  Targets<Config> scales;
  bool streamed;

  HD ListedTargets(const DispatchArgs& args, const TokenRoute& route, const Payload& row,
                   const Payload& scale)
      : rows(args, route, row),
        scales(args, route, scale),
        streamed(
            are_streamed(row.region * kRegionAlignment, row.row_bytes, args.geometry.num_tokens)) {}

  template <int Bytes>
  HD void store(int offset, const Vector<Bytes>& vector) const {
    for (int i = 0; i < rows.present; ++i) store_part(rows.rows[i] + offset, vector, streamed);
  }
  template <int Bytes>
  HD void store_scales(int offset, const Vector<Bytes>& vector) const {
    for (int i = 0; i < scales.present; ++i) store_vector(scales.rows[i] + offset, vector);
  }
};

// How one launch quantises its activations.
template <class Config, int Quantiser, class Element>
struct Quantising {
  using Format = typename FormatOf<Quantiser>::Type;
  const DispatchArgs& args;
  const Cta& cta;
  bool wide;
  float global_scale;

  HD Quantising(const DispatchArgs& the_args, const Cta& the_cta, float scale)
      : args(the_args),
        cta(the_cta),
        wide(loads_are_wide<Element>(the_args.payloads[kFirstCallerPayload].source,
                                     the_args.geometry.hidden_size)),
        global_scale(scale) {}

  HD const char* row_of(int token) const {
    const uint64_t row_bytes =
        static_cast<uint64_t>(args.geometry.hidden_size) * sizeof(typename Element::Storage);
    return reinterpret_cast<const char*>(args.payloads[kFirstCallerPayload].source) +
           static_cast<uint64_t>(token) * row_bytes;
  }

  // Runs before the route is whole; a barrier of the CTA stands between this and put(). A row
  // without a target is not read.
  HD void prepare(int token, RowAmax& amax) const {
    if constexpr (Format::kHasRowScale) {
      if (!has_expert(token)) return;
      leave_row_amax<Element>(cta, row_of(token), args.geometry.hidden_size, wide, amax);
    }
  }

  // Whether the token may have a target. Each thread reads the ids itself, because the route is not
  // whole yet.
  HD bool has_expert(int token) const {
    const bool padding = is_padding(args, token);
    const int top_k = top_k_of<Config>(args.geometry);
    const int32_t* ids = reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source) +
                         static_cast<int64_t>(token) * top_k;
    bool any = false;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      const int32_t id = load_word(ids + k);
      any = any || (id >= 0 && id < args.geometry.num_experts);
    }
    return any && !padding;
  }

  HD void put(int token, const TokenRoute& route, const RowAmax& amax) const {
    if (!has_target<Config>(args, route)) return;
    uint32_t row_amax = 0;
    if constexpr (Format::kHasRowScale) row_amax = take_row_amax(cta, amax);
    const Payload& rows = args.payloads[kFirstCallerPayload];
    const Payload& scales = args.payloads[kFirstCallerPayload + 1];
    if constexpr (kSkipAbsentRows) {
      quantise_to(token, row_amax, ListedTargets<Config>(args, route, rows, scales));
    } else {
      quantise_to(token, row_amax,
                  RouteTargets<Config>{route, rows, scales, top_k_of<Config>(args.geometry)});
    }
  }

  template <class Target>
  HD void quantise_to(int token, uint32_t row_amax, const Target& targets) const {
    quantise_row<Quantiser, Element>(cta, cta.thread, row_of(token), args.geometry.hidden_size,
                                     wide, row_amax, global_scale, targets);
  }
};

// Calls function(Quantising<..>) for the launch's element type.
template <class Config, int Quantiser, class Function>
HD void with_element(const DispatchArgs& args, const Cta& cta, float scale,
                     const Function& function) {
  static_assert(kNumElements == 3);
  constexpr int kElement = Config::kElement;
  const int element = kElement >= 0 ? kElement : args.geometry.element;
  if constexpr (kElement < 0 || kElement == kElementBf16) {
    if (element == kElementBf16) function(Quantising<Config, Quantiser, Bf16>(args, cta, scale));
  }
  if constexpr (kElement < 0 || kElement == kElementFp16) {
    if (element == kElementFp16) function(Quantising<Config, Quantiser, Fp16>(args, cta, scale));
  }
  if constexpr (kElement < 0 || kElement == kElementFp32) {
    if (element == kElementFp32) function(Quantising<Config, Quantiser, Fp32>(args, cta, scale));
  }
}

// The same for the launch's quantiser: on the GPU that of the build, on the host that of the
// arguments.
template <class Config, class Function>
HD void with_quantiser(const DispatchArgs& args, const Cta& cta, float scale,
                       const Function& function) {
  if constexpr (Config::kQuantiser >= 0) {
    with_element<Config, Config::kQuantiser>(args, cta, scale, function);
  } else {
    switch (static_cast<QuantiserCode>(args.quantiser)) {
      case kQuantiserNone:
        return;
      case kQuantiserFp8Block:
        return with_element<Config, kQuantiserFp8Block>(args, cta, scale, function);
      case kQuantiserFp8Token:
        return with_element<Config, kQuantiserFp8Token>(args, cta, scale, function);
      case kQuantiserFp8Tensor:
        return with_element<Config, kQuantiserFp8Tensor>(args, cta, scale, function);
      case kQuantiserMxfp8:
        return with_element<Config, kQuantiserMxfp8>(args, cta, scale, function);
      case kQuantiserNvfp4:
        return with_element<Config, kQuantiserNvfp4>(args, cta, scale, function);
      case kQuantiserFp8BlockPow2:
        return with_element<Config, kQuantiserFp8BlockPow2>(args, cta, scale, function);
    }
  }
}

// put_tokens() that quantises the activations. One barrier publishes a row's route and the parts of
// its amax. There are two of each for the reason that put_tokens() gives.
template <class Config, class Kind>
HD void put_quantised_tokens(const DispatchArgs& args, const Cta& cta, uint32_t* send_counters,
                             QuantisingDispatchShared& shared, const Kind& quantising) {
  Exclusion exclusion;
  TokensBefore<Config> tokens(args, cta, shared.sent);
  int turn = 0;
  for (int token = cta.block; token < args.geometry.num_tokens; token += cta.num_blocks) {
    tokens.count_to(token);
    TokenRoute& route = shared.routes[turn];
    if (cta.thread < Cta::kWarpThreads) {
      route_in_warp<Config>(args, cta, token, send_counters, tokens.before, exclusion, route);
    }
    quantising.prepare(token, shared.amax[turn]);
    if (token == cta.block) await_small_combine(args, cta, &shared.has_failed);
    cta.sync();  // the route and the parts of the row's amax are whole
    if (shared.has_failed == 0) {
      put_token<Config>(args, cta, shared, route, token);
      quantising.put(token, route, shared.amax[turn]);
    }
    turn = 1 - turn;
  }
}

// For with_quantiser(). A class, not a generic lambda: NVRTC 13.0 and 13.1 take a generic lambda
// for a function of the host, which device code may not call.
template <class Config>
struct QuantiseAndPutTokens {
  const DispatchArgs& args;
  const Cta& cta;
  uint32_t* send_counters;
  QuantisingDispatchShared& shared;

  template <class Kind>
  HD void operator()(const Kind& quantising) const {
    put_quantised_tokens<Config>(args, cta, send_counters, shared, quantising);
  }
};

template <class Config>
HD void quantise_and_put_tokens(const DispatchArgs& args, const Cta& cta, uint32_t* send_counters,
                                QuantisingDispatchShared& shared) {
  float scale = 1.0f;
  if (args.global_scale != 0) scale = load_word(reinterpret_cast<const float*>(args.global_scale));
  with_quantiser<Config>(args, cta, scale,
                         QuantiseAndPutTokens<Config>{args, cta, send_counters, shared});
}

// Routes and puts this CTA's tokens.
template <class Config>
HD void put_all_tokens(const DispatchArgs& args, const Cta& cta, uint32_t* send_counters,
                       DispatchSharedFor<Config>& shared) {
  if constexpr (Config::kQuantiser == kQuantiserNone) {
    put_tokens<Config>(args, cta, send_counters, shared);
  } else {
    if (quantiser_of<Config>(args) == kQuantiserNone) {
      put_tokens<Config>(args, cta, send_counters, shared);
    } else {
      quantise_and_put_tokens<Config>(args, cta, send_counters, shared);
    }
  }
}

}  // namespace moe_nvlink
