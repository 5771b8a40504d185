// The sender's side of combine with a format: the CTAs that run take the experts' rows one after
// another, quantise each and store it where the peers read it.
//
// A CTA takes rows by an atomic, not by its number. Another stream's kernel may occupy the place of
// a CTA on the GPU. If rows belonged to that CTA by number, nobody would quantise them, the signal
// would wait for them, and the other kernel might wait for the peers.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/combine_formats.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/workspace.h"
#include "combine_shared.h"

namespace moe_nvlink {

// Quantises one slot's row from where the experts wrote it to where the peers read it.
template <class Element, int Format>
HD void quantise_slot(const CombineArgs& args, const Cta& cta, int slot, const RowSizes& sizes,
                      bool streamed, RowAmax& amax) {
  const Geometry& geometry = args.geometry;
  const int me = geometry.ep_rank;
  const int hidden_size = geometry.hidden_size;
  const uint64_t row_bytes = static_cast<uint64_t>(hidden_size) * sizeof(typename Element::Storage);
  const char* row =
      reinterpret_cast<const char*>(address_of_row(args, me, args.region, slot, row_bytes));
  const OneTarget target{
      reinterpret_cast<char*>(address_of_row(args, me, args.rows_region, slot, sizes.row)),
      reinterpret_cast<char*>(address_of_row(args, me, args.scales_region, slot, sizes.scales)),
      streamed};
  if constexpr (Format == kCombineFp8Block) {
    quantise_row_of_blocks<Fp8Block, Element>(cta, cta.thread, row, hidden_size, true, 1.0f,
                                              target);
  } else if constexpr (Format == kCombineFp8Tensor) {
    encode_row<Fp8TensorOfRow, Element>(cta, cta.thread, row, hidden_size, true,
                                        Fp8TensorOfRow(args.rows_factor), target);
  } else {
    static_assert(Format == kCombineNvfp4);
    leave_row_amax<Element>(cta, row, hidden_size, true, amax);
    cta.sync();  // the row's amax
    const float scale = nvfp4_row_scale(take_row_amax(cta, amax));
    quantise_row_of_blocks<Nvfp4OfRow, Element>(cta, cta.thread, row, hidden_size, true, scale,
                                                target);
    if (cta.thread == 0) {
      store_word(reinterpret_cast<float*>(
                     address_of_row(args, me, args.row_scales_region, slot, sizes.row_scale)),
                 scale);
    }
  }
}

// Takes the number of a row that no CTA has taken yet, in the order of the slots. Each CTA
// continues until it gets num_rows or a larger number. Thread 0.
HD uint32_t take_row(const CombineArgs& args, const Cta& cta) {
  MOE_NVLINK_HOST_ONLY(if (cta.num_blocks == 1) {
    // No other CTA takes rows. On x86 an atomic addition would wait for the last row's stores.
    uint32_t* taken = &local_control(args)->rows_taken;
    const uint32_t number = load_relaxed_gpu(taken);
    store_relaxed_gpu(taken, number + 1);
    return number;
  })
  // Relaxed: it only hands out numbers. Kernels before this one have written the rows.
  return fetch_add_relaxed_gpu(&local_control(args)->rows_taken, 1);
}

// Resets the counter if `number` is the last one: no CTA takes another before the next combine.
HD void end_taking(const CombineArgs& args, const Cta& cta, uint32_t number, uint32_t num_rows) {
  const uint32_t last = num_rows + static_cast<uint32_t>(cta.num_blocks) - 1;
  if (number == last) store_relaxed_gpu(&local_control(args)->rows_taken, 0);
}

// Quantises rows until all are taken; returns how many this CTA has. Every thread of the CTA.
template <class Element, int Format>
HD uint32_t quantise_received(const CombineArgs& args, const Cta& cta, uint32_t num_rows,
                              const RowSizes& sizes, QuantisedCombineShared& shared) {
  uint32_t quantised = 0;
  int turn = 0;
  RowWalk<uint32_t> source;
  const bool streamed =
      are_streamed(args.rows_region * kRegionAlignment, sizes.row, static_cast<int>(num_rows));
  for (uint32_t row = shared.taken[0]; row < num_rows; row = shared.taken[turn]) {
    // The next row's number is fetched while this row is quantised.
    if (cta.thread == 0) {
      shared.taken[1 - turn] = take_row(args, cta);
      end_taking(args, cta, shared.taken[1 - turn], num_rows);
    }
    source.go_to(row, shared.counts);
    const int slot =
        source.rank * args.geometry.max_tokens_per_rank + static_cast<int>(row - source.before);
    quantise_slot<Element, Format>(args, cta, slot, sizes, streamed, shared.amax);
    ++quantised;
    turn = 1 - turn;
    // P5, release half, per CTA: the barrier orders this row's stores before the arrival of thread
    // 0. It also publishes the next row's number and ends the use of this row's amax.
    cta.sync();
  }
  MOE_NVLINK_HOST_ONLY(if (streamed) {
    end_streams();
    cta.sync();  // every thread's rows are in memory before the arrival
  })
  return quantised;
}

// True in the CTA that completes the rows. That CTA sees all that the other CTAs have quantised.
HD bool completes_rows(const CombineArgs& args, const Cta& cta, uint32_t quantised,
                       uint32_t num_rows, QuantisedCombineShared& shared) {
  if (quantised == 0) {
    // A CTA without rows has nothing to release and does not arrive. If there are no rows at all,
    // the CTA that was the first to ask for one signals.
    return num_rows == 0 && shared.taken[0] == 0;
  }
  if (cta.thread == 0) {
    // P5: release the rows this CTA has quantised, acquire the rows of the CTAs before it. If it
    // were relaxed, the signals of P3 would cover the last CTA's rows only, and a peer could add
    // stale rows of every other CTA.
    const uint32_t before =
        fetch_add_acq_rel_gpu(&local_control(args)->combine_arrivals, quantised);
    shared.completes = before + quantised == num_rows ? 1 : 0;
  }
  cta.sync();
  return shared.completes != 0;
}

// Quantises the rows that this rank has received, and signals the peers (P3) from the CTA that
// completes them. After a failed verb no CTA does either.
template <class Config, class Element, int Format>
HD void send_quantised(const CombineArgs& args, const Cta& cta, const RowSizes& sizes,
                       QuantisedCombineShared& shared) {
  if (cta.thread == 0) shared.taken[0] = take_row(args, cta);
  for_each_peer(args, cta, [&](int peer) {
    // Not from the peer's cell, where a CTA that starts after this rank's signal may find the next
    // round. Not from recv_counts, which the caller has as a tensor and may have written to.
    shared.counts[peer] = load_word(&rows_from(args)[peer]);
  });
  cta.sync();  // all threads see the counts, the first number, epoch and has_failed
  if (shared.has_failed != 0) return;
  const uint32_t num_rows = sum_of_ranks(shared.counts, args.geometry.ep_size);
  if (cta.thread == 0) end_taking(args, cta, shared.taken[0], num_rows);
  const uint32_t quantised = quantise_received<Element, Format>(args, cta, num_rows, sizes, shared);
  if (!completes_rows(args, cta, quantised, num_rows, shared)) return;
  signal_peers<Config>(args, cta, args.control.combine_cells, combine_cell(args, shared.epoch));
  // The last thread: if threads outnumber the ranks, it has no peer to signal.
  if (cta.thread != cta.num_threads - 1) return;
  store_word(&local_control(args)->combine_arrivals, 0u);
  leave_combined(args, shared.epoch, true);
  count_rows(args, sizes);
}

}  // namespace moe_nvlink
