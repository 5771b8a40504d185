// The rank that owns an expert, without a division.
#pragma once

#include "args.h"
#include "config.h"
#include "platform.h"

namespace moe_nvlink {

// How experts lie on the ranks, with what takes a division: computed before pdl_wait().
struct ExpertOwners {
  int32_t fewest;            // experts of a rank; each of the first num_larger has one more
  int32_t num_larger;        // ranks
  int32_t first_of_smaller;  // expert
  float larger_factor;       // 1 / (fewest + 1)
  float smaller_factor;      // 1 / fewest, or 0
};

HD ExpertOwners expert_owners(const Geometry& geometry) {
  const int fewest = geometry.num_experts / geometry.ep_size;
  const int num_larger = geometry.num_experts % geometry.ep_size;
  return ExpertOwners{fewest, num_larger, num_larger * (fewest + 1),
                      1.0f / static_cast<float>(fewest + 1),
                      fewest > 0 ? 1.0f / static_cast<float>(fewest) : 0.0f};
}

// As target_rank_of(), without a division. The product may be off by one rank, because it is
// rounded: ids have up to 24 bits, ranks 7.
HD int owner_of(int32_t id, const ExpertOwners& owners, const Geometry& geometry) {
  if (id < 0 || id >= geometry.num_experts) return kNoSlot;
  const bool is_larger = id < owners.first_of_smaller;
  const int size = is_larger ? owners.fewest + 1 : owners.fewest;
  const int place = is_larger ? id : id - owners.first_of_smaller;
  const float factor = is_larger ? owners.larger_factor : owners.smaller_factor;
  int rank = static_cast<int>(static_cast<float>(place) * factor);
  if (rank * size > place) --rank;
  if ((rank + 1) * size <= place) ++rank;
  return is_larger ? rank : rank + owners.num_larger;
}

}  // namespace moe_nvlink
