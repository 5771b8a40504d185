// Which ranks take part in a round. A rank that the mask leaves out gets nothing, is waited for by
// nobody, and its experts count as no experts. Its slices and cells in this rank's workspace may
// change at any time, because it may only be late and not dead: no kernel reads them.
#pragma once

#include "args.h"
#include "config.h"
#include "copy.h"
#include "epoch_flags.h"
#include "platform.h"
#include "workspace.h"

namespace moe_nvlink {

HD bool has_rank(const uint64_t* mask, int rank) {
  return (load_word(mask + rank / 64) >> (rank % 64) & 1) != 0;
}

// Whether a rank takes part in the round. The mask is in device memory: a replayed launch reads what
// is there then, after pdl_wait().
HD bool is_active(const DispatchArgs& args, int rank) {
  return args.active_ranks == 0 ||
         has_rank(reinterpret_cast<const uint64_t*>(args.active_ranks), rank);
}

// The mask of the round's dispatch, which may no longer be in the caller's tensor.
HD bool is_active(const CombineArgs& args, int rank) {
  return args.is_masked == 0 || has_rank(local_control(args)->active_ranks, rank);
}

// The shared LM head has no mask.
HD bool is_active(const HeadArgs& /*args*/, int /*rank*/) {
  return true;
}

// Stands for the mask in a cell's tag; 0 without a mask and for a mask of all ranks. Masks that
// differ in one or two ranks have different tags, ranks 0 and 127 apart.
HD uint32_t mask_tag(const DispatchArgs& args) {
  uint32_t tag = 0;
  if (args.active_ranks == 0) return tag;
  const uint64_t* words = reinterpret_cast<const uint64_t*>(args.active_ranks);
  uint64_t left_out = 0;
  MOE_NVLINK_ROLLED
  for (int rank = 0; rank < args.geometry.ep_size; ++rank) {
    left_out = rank % 64 == 0 ? ~load_word(words + rank / 64) : left_out >> 1;
    if ((left_out & 1) != 0) tag ^= static_cast<uint32_t>(rank % 127 + 1);
  }
  return tag;
}

// What all ranks of a round must agree on.
HD uint32_t round_tag(const DispatchArgs& args) {
  return geometry_tag(args.geometry) ^ mask_tag(args);
}

// What says whether this rank may send nothing: an earlier verb of it has failed, or its mask leaves
// it out. The words as they have been loaded, because the first use of a word waits for it: a thread
// that finds out only where it must know has its other loads on their way before.
struct Exclusion {
  uint64_t fault = 0;
  uint64_t mask = ~uint64_t{0};  // the word that has this rank's bit

  HD bool holds(const DispatchArgs& args) const {
    return fault != 0 || (mask >> (args.geometry.ep_rank % 64) & 1) == 0;
  }
};

HD Exclusion load_exclusion(const DispatchArgs& args) {
  Exclusion exclusion;
  exclusion.fault = load_fault(args);
  if (args.active_ranks != 0) {
    const uint64_t* words = reinterpret_cast<const uint64_t*>(args.active_ranks);
    exclusion.mask = load_word(words + args.geometry.ep_rank / 64);
  }
  return exclusion;
}

// Leaves a fault word if the mask leaves this rank out. One CTA. Nobody has been signalled, so it
// waits for nothing.
HD void report_left_out(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  const int me = args.geometry.ep_rank;
  if (cta.thread != 0 || is_active(args, me)) return;
  leave_fault(args, pack_fault(kFaultLeftOut, kPhaseDispatch, me, epoch));
}

// Leaves the mask of round `epoch` for the kernels after this one. One thread of the launch.
HD void leave_mask(const DispatchArgs& args, uint32_t epoch) {
  if (args.active_ranks == 0) return;
  const uint64_t* words = reinterpret_cast<const uint64_t*>(args.active_ranks);
  LocalControl* local = local_control(args);
  store_word(&local->masked_epoch, static_cast<uint64_t>(epoch));
  MOE_NVLINK_ROLLED
  for (int word = 0; word * 64 < args.geometry.ep_size; ++word) {
    store_word(&local->active_ranks[word], load_word(words + word));
  }
}

}  // namespace moe_nvlink
