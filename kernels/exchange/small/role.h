// How the CTAs of a kernel for small batches share its work: by roles, and by parts of rows.
#pragma once

#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/platform.h"

namespace moe_nvlink {

// What a CTA does. Senders are CTAs [0, senders), receivers are the others. If there is no such
// split, all CTAs do all.
struct SmallRole {
  int sender;  // number among the senders; not less than num_senders: it sends nothing
  int num_senders;
  int receiver;  // number among the receivers; negative: it receives nothing
  int num_receivers;

  HD bool sends() const { return sender < num_senders; }
  HD bool receives() const { return receiver >= 0; }
  HD bool publishes() const { return receiver == 0; }
};

HD SmallRole small_role(uint32_t senders, const Cta& cta) {
  const int split = static_cast<int>(senders);
  const bool is_split = split > 0 && split < cta.num_blocks;
  const int first_receiver = is_split ? split : 0;
  return SmallRole{cta.block, is_split ? split : cta.num_blocks, cta.block - first_receiver,
                   cta.num_blocks - first_receiver};
}

}  // namespace moe_nvlink
