// Collect of the shared LM head: fetch this rank's rows of every rank's logits. round.h says how
// the head's three kernels work together.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "round.h"

namespace moe_nvlink {

// Gets the part of each row that each rank has computed.
HD void get_logits(const HeadArgs& args, const Cta& cta, const HeadShared& shared) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t size = static_cast<uint64_t>(element_bytes(geometry.element));
  const int before = args.is_compact != 0 ? sum_of_ranks(shared.counts, geometry.tp_rank)
                                          : geometry.tp_rank * geometry.row_bound;
  for_each_row_and_peer(args, cta, geometry.num_rows, [&](int row, int peer) {
    const uint64_t width = static_cast<uint64_t>(shard_width(geometry, peer));
    const char* source = region_of(args, peer, args.logits_region) +
                         static_cast<uint64_t>(before + row) * width * size;
    const uint64_t place = static_cast<uint64_t>(row) * static_cast<uint64_t>(geometry.vocab_size) +
                           static_cast<uint64_t>(peer) * static_cast<uint64_t>(geometry.shard_size);
    char* target = reinterpret_cast<char*>(args.output) + place * size;
    const uint64_t addresses =
        reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(target);
    const int bytes = static_cast<int>(width * size);
    put_row(cta, cta.thread, source, &target, 1, bytes,
            vector_bytes_for(addresses, static_cast<uint64_t>(bytes)));
  });
}

// Sets all bits of the output: NaN in every element type.
HD void fill_with_nan(const HeadArgs& args, const Cta& cta) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t bytes = static_cast<uint64_t>(geometry.num_rows) *
                         static_cast<uint64_t>(geometry.vocab_size) *
                         static_cast<uint64_t>(element_bytes(geometry.element));
  uint16_t* halves = reinterpret_cast<uint16_t*>(args.output);
  const uint64_t step = static_cast<uint64_t>(cta.num_blocks) * cta.num_threads;
  MOE_NVLINK_ROLLED
  for (uint64_t i = static_cast<uint64_t>(cta.block) * cta.num_threads + cta.thread; i < bytes / 2;
       i += step) {
    store_word(&halves[i], static_cast<uint16_t>(0xffff));
  }
}

template <class Config>
HD void head_collect_body(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  read_round(args, cta, shared);
  cta.sync();
  if (shared.has_failed != 0) {
    fill_with_nan(args, cta);
    return;
  }
  get_logits(args, cta, shared);
  if (cta.block != 0 || cta.thread != 0) return;
  const HeadGeometry& geometry = args.geometry;
  const uint64_t row_bytes = static_cast<uint64_t>(geometry.num_rows) *
                             static_cast<uint64_t>(element_bytes(geometry.element));
  const uint64_t vocabulary = static_cast<uint64_t>(geometry.vocab_size);
  const uint64_t own = static_cast<uint64_t>(shard_width(geometry, geometry.tp_rank));
  ExchangeCounters* totals = exchange_counters(args);
  add_to_total(&totals->bytes_combined, row_bytes * vocabulary);
  add_to_total(&totals->bytes_combined_remote, row_bytes * (vocabulary - own));
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_head_collect, HeadArgs, HeadShared, head_collect_body)
