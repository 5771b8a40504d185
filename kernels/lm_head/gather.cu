// Gather of the shared LM head: put this rank's rows into its slice of every rank's rows. round.h
// says how the head's three kernels work together.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "round.h"

namespace moe_nvlink {

HD void put_head_rows(const HeadArgs& args, const Cta& cta) {
  const HeadGeometry& geometry = args.geometry;
  const int row_bytes = geometry.hidden_size * element_bytes(geometry.element);
  const uint64_t slice = static_cast<uint64_t>(geometry.tp_rank) *
                         static_cast<uint64_t>(geometry.row_bound) *
                         static_cast<uint64_t>(row_bytes);
  for_each_row_and_peer(args, cta, geometry.num_rows, [&](int row, int peer) {
    const uint64_t offset = static_cast<uint64_t>(row) * static_cast<uint64_t>(row_bytes);
    char* target = region_of(args, peer, args.rows_region) + slice + offset;
    // The vector width is computed for each row: if it is known before the loop, NVRTC writes the
    // loop seven times.
    const char* source = reinterpret_cast<const char*>(args.hidden) + offset;
    put_row(cta, cta.thread, source, &target, 1, row_bytes,
            vector_bytes_for(reinterpret_cast<uint64_t>(source), static_cast<uint64_t>(row_bytes)));
  });
}

// Adds this round to the totals. One thread.
HD void count_gather(const HeadArgs& args) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t rows = static_cast<uint64_t>(geometry.num_rows);
  const uint64_t ranks = static_cast<uint64_t>(geometry.tp_size);
  const uint64_t row_bytes = static_cast<uint64_t>(geometry.hidden_size) *
                             static_cast<uint64_t>(element_bytes(geometry.element));
  ExchangeCounters* totals = exchange_counters(args);
  add_to_total(&totals->rounds, 1);
  add_to_total(&totals->tokens, rows);
  add_to_total(&totals->destinations, rows * ranks);
  add_to_total(&totals->remote_destinations, rows * (ranks - 1));
  add_to_total(&totals->bytes_dispatched, rows * ranks * row_bytes);
  add_to_total(&totals->bytes_dispatched_remote, rows * (ranks - 1) * row_bytes);
}

template <class Config>
HD void head_gather_body(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  const HeadGeometry& geometry = args.geometry;
  LocalControl* local = local_control(args);
  const bool failed = has_failed(args);
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = load_word(&local->epoch) + 1;
    shared.has_failed = failed ? 1 : 0;
    shared.faulted = 0;
  }
  if (!failed) put_head_rows(args, cta);
  cta.sync();  // P7, release half, per CTA: all threads' stores come before the arrival of thread 0
  if (!arrive_last(cta, &local->arrivals, shared) || shared.has_failed != 0) return;
  signal_round(args, cta, args.control.dispatch_cells, static_cast<uint32_t>(geometry.num_rows),
               shared);
  // The last thread: if threads outnumber the ranks, it has no peer to wait for.
  if (cta.thread == cta.num_threads - 1) {
    store_word(&local->epoch, shared.epoch);
    count_gather(args);
  }
  wait_for_counts(args, cta, args.control.dispatch_cells, kPhaseHeadGather,
                  static_cast<uint32_t>(geometry.row_bound), shared.counts, shared);
  for_each_peer(args, cta,
                [&](int peer) { store_word(&head_counts(args)[peer], shared.counts[peer]); });
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_head_gather, HeadArgs, HeadShared, head_gather_body)
