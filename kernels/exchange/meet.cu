// Meet: a barrier of the ranks that go on after another rank has died. The host clears what the
// broken round has left between two meetings (moe_nvlink_plugin/exchange/survivors.py).
//
//   P13         one CTA: thread t stores this rank's mask into its entry in rank t's workspace, then
//               the meeting's number (release); then it waits for rank t's number (acquire). What
//               rank t did before it came to this meeting, in kernels before this one too, is
//               visible to the kernels after it.
//
// The entries of even and of odd meetings lie apart, so a rank that has gone on to the next meeting
// does not overwrite what the host of a peer reads. A later number ends the wait too. Then the
// peer's host has begun anew, and this rank's host comes to that meeting instead.
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

// {mask, number of the meeting} of `source` in `owner`'s workspace.
HD uint64_t* meeting_entry(const MeetArgs& args, int owner, int source) {
  const int place = static_cast<int>(args.number % 2) * args.geometry.ep_size + source;
  return reinterpret_cast<uint64_t*>(region_of(args, owner, args.control.meeting)) +
         place * kMeetingWords;
}

template <class Config>
HD void meet_body(const MeetArgs& args, const Cta& cta, MeetShared& /*shared*/) {
  if constexpr (Config::kPdl) pdl_wait();
  if (cta.block != 0) return;
  const int me = args.geometry.ep_rank;
  for_each_peer(args, cta, [&](int peer) {
    if (!is_active(args, peer)) return;
    uint64_t* entry = meeting_entry(args, peer, me);
    for (int word = 0; word < kRankMaskWords; ++word) {
      store_word(entry + word, args.active_ranks[word]);
    }
    // P13, release half: also what this rank has stored to its peers before, and its zeros.
    store_release_sys(entry + kRankMaskWords, args.number);
  });
  uint64_t* outcomes = reinterpret_cast<uint64_t*>(region_of(args, me, args.control.meeting)) +
                       2 * args.geometry.ep_size * kMeetingWords;
  Patience patience(args.timeout_ns);
  // P13, acquire half: in wait_until_reached().
  for_each_peer(args, cta, [&](int peer) {
    int fault = 0;
    if (is_active(args, peer)) {
      const uint64_t* cell = meeting_entry(args, me, peer) + kRankMaskWords;
      uint64_t seen = 0;
      fault = wait_until_reached(cell, static_cast<uint32_t>(args.number), patience, seen);
    }
    store_word(outcomes + peer, static_cast<uint64_t>(fault));
  });
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_meet, MeetArgs, MeetShared, meet_body)
