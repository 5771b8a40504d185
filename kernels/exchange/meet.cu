// Meet: a barrier of the ranks that go on after another rank has died. The host clears what the
// broken round has left between two meetings (moe_nvlink_plugin/exchange/survivors.py).
//
//   P13         one CTA: thread t stores this rank's mask into its entry in rank t's workspace, then
//               the meeting's number (release); then it waits for rank t's number (acquire). What
//               rank t did before it came to this meeting, in kernels before this one too, is
//               visible to the kernels after it.
//
// A later number ends the wait too. Then the peer's host has begun anew, and this rank's host comes to
// that meeting instead. The entries of even and of odd meetings lie apart, so a rank that has gone on
// to the next meeting does not overwrite what a peer looks at. A rank that has called again may. So it
// takes its number away before it writes another mask, and a peer that takes the entry looks at the
// number before and after. The host reads what this kernel has taken.
//
// The lower half of a number counts meetings, the upper half is 1 for a rank that has called again.
#include "../include/moe_nvlink/active_ranks.h"
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "await_combine.h"

namespace moe_nvlink {

struct MeetShared {
  int unused;
};

HD bool is_active(const MeetArgs& args, int rank) {
  return (args.active_ranks[rank / 64] >> (rank % 64) & 1) != 0;
}

// {mask, number} of `source` in `owner`'s workspace.
HD uint64_t* meeting_entry(const MeetArgs& args, int owner, int source) {
  const int place = static_cast<int>(args.number % 2) * args.geometry.ep_size + source;
  return reinterpret_cast<uint64_t*>(region_of(args, owner, args.control.meeting)) +
         place * kMeetingWords;
}

// What this rank has taken of `source`: {fault, mask, number}.
HD uint64_t* taken_entry(const MeetArgs& args, int source) {
  const int entries = 2 * args.geometry.ep_size * kMeetingWords;
  return reinterpret_cast<uint64_t*>(region_of(args, args.geometry.ep_rank, args.control.meeting)) +
         entries + source * (kMeetingWords + 1);
}

// Brings this rank's mask and number to a peer.
HD void leave_entry(const MeetArgs& args, uint64_t* entry) {
  store_relaxed_sys(entry + kRankMaskWords, 0);
  for (int word = 0; word < kRankMaskWords; ++word) {
    // Release: who takes this mask knows that the number before has gone.
    store_release_sys(entry + word, args.active_ranks[word]);
  }
  // P13, release half: also what this rank has stored to its peers before, and its zeros.
  store_release_sys(entry + kRankMaskWords, args.number);
}

// Waits for a peer's entry and takes it, mask and number of one call.
HD int take_entry(const MeetArgs& args, const uint64_t* entry, Patience& patience,
                  uint64_t* taken) {
  const uint64_t* cell = entry + kRankMaskWords;
  uint64_t seen = 0;
  do {
    // P13, acquire half: in wait_until_reached().
    const int fault = wait_until_reached(cell, static_cast<uint32_t>(args.number), patience, seen);
    if (fault != 0) return fault;
    for (int word = 0; word < kRankMaskWords; ++word) {
      store_word(taken + word, load_acquire_sys(entry + word));
    }
    store_word(taken + kRankMaskWords, seen);
  } while (load_relaxed_sys(cell) != seen);
  return 0;
}

template <class Config>
HD void meet_body(const MeetArgs& args, const Cta& cta, MeetShared& /*shared*/) {
  if constexpr (Config::kPdl) pdl_wait();
  if (cta.block != 0) return;
  const int me = args.geometry.ep_rank;
  for_each_peer(args, cta, [&](int peer) {
    if (!is_active(args, peer)) return;
    leave_entry(args, meeting_entry(args, peer, me));
  });
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    uint64_t* taken = taken_entry(args, peer);
    int fault = 0;
    if (is_active(args, peer)) {
      fault = take_entry(args, meeting_entry(args, me, peer), patience, taken + 1);
    }
    store_word(taken, static_cast<uint64_t>(fault));
  });
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_meet, MeetArgs, MeetShared, meet_body)
