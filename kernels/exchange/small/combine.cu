// Combine of small batches: the experts' rows go to the ranks of their tokens as units that carry
// their own flags (units.h), so no row waits for a fence, a cell or an acknowledgement.
//
//   senders     CTAs [0, senders): each takes parts of the rows that this rank has received, and
//               stores them as units into the staging of the tokens' ranks (P10). The first part of
//               a CTA depends on arguments only. So its row and the count that says whether there
//               is such a row are loaded together, and the units follow after one wait for memory.
//   P12         CTA `senders` signals every rank: what this rank has read and cleared may be
//               written again from the next dispatch on
//   receivers   the CTAs from there on: for each unit of a token's row, load the units of all k
//               together, look again at those that have not arrived, clear them, add them up in
//               fp32 as ../combine.cu does, with the caller's scale and row, round once and store
//
// Units of rounds of even and of odd epochs lie in two stagings. Combine n clears its units; its
// rank says so by the signal of combine n + 1, which every rank has acquired before dispatch n + 2
// ends, and the next units of the same parity are those of combine n + 2.
//
// Senders wait for nobody. Receivers start after them, because GPUs start CTAs in order (CUDA does
// not promise it). So a round ends if the GPU has room for one CTA at a time. If senders is 0, as on
// the host, every CTA has both roles, and all CTAs run at the same time.
//
// The bits of a sum are those of ../combine.cu: the same tree over k, in which a k without a row of its
// own stands as -0.0.
#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/combine_formats.h"
#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/epoch_flags.h"
#include "../../include/moe_nvlink/number_formats.h"
#include "../../include/moe_nvlink/peers.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/workspace.h"
#include "../combine_shared.h"
#include "combine_receive.h"
#include "combine_send.h"
#include "combine_shared.h"

namespace moe_nvlink {

// Ends this rank's part of the round. One CTA.
template <class Config>
HD void publish_combined(const CombineArgs& args, const Cta& cta, uint32_t epoch, int element) {
  // P12, release: the experts of this rank have read its receive buffers, and the kernels before
  // this one have cleared what they have read of its stagings. If it were relaxed, a peer's next
  // units could come before these zeros, which would then take their place.
  signal_peers<Config>(args, cta, args.control.combine_cells, combine_cell(args, epoch));
  // The last thread: if threads outnumber the ranks, it has no peer to signal.
  if (cta.thread != cta.num_threads - 1) return;
  leave_combined(args, epoch, false);
  const uint64_t bytes = static_cast<uint64_t>(element_bytes(element));
  count_rows(args, row_sizes<kCombineUnquantised>(bytes, args.geometry.hidden_size));
}

template <class Config, class Element>
HD void small_combine_of(const CombineArgs& args, const Cta& cta, int element,
                         SmallCombineShared& shared) {
  using Unit = SumUnit<Config, Element>;
  const SmallPlan plan = small_plan<Unit>(args, cta, element);
  const SmallRole& role = plan.role;
  // The last share is the publishing CTA's: its wait for the fence delays it, and if there are fewer
  // items than receivers, it has none.
  const int share = (role.publishes() ? role.num_receivers : role.receiver) - 1;
  const SentPart first = sent_part(args, plan, cta.block);
  const char* first_row = sent_row(args, plan, first);
  // A store needs the address, so it is computed before the wait: ptxas moves arithmetic behind it.
  if (cta.thread == 0) shared.first_row = first_row;
  // Slots, rows and the epoch come from kernels before this one. ../dispatch.cu explains both calls.
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  if (role.sends()) send_rows<Unit>(args, cta, plan, first, first_row, shared);
  if (!role.receives()) return;
  const Round round = this_round(args);
  if (share / plan.parts < args.geometry.num_tokens) {
    find_staged_rows<Config>(args, cta, plan, share / plan.parts, shared.rows[0]);
  }
  if (role.publishes() && !round.has_failed) {
    publish_combined<Config>(args, cta, round.epoch, element);
  }
  receive_rows<Config, Element>(args, cta, plan, share, round, shared);
}

template <class Config>
HD void small_combine_body(const CombineArgs& args, const Cta& cta, SmallCombineShared& shared) {
  const int element = Config::kElement >= 0 ? Config::kElement : args.geometry.element;
  static_assert(kNumElements == 3);
  if (element == kElementBf16) small_combine_of<Config, Bf16>(args, cta, element, shared);
  if (element == kElementFp16) small_combine_of<Config, Fp16>(args, cta, element, shared);
  if (element == kElementFp32) small_combine_of<Config, Fp32>(args, cta, element, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_small_combine, CombineArgs, SmallCombineShared, small_combine_body)
