// The bounded wait for one unit (units.h).
#pragma once

#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/units.h"

namespace moe_nvlink {

// Looks at the unit until all of it has arrived; false if the time is over. P10: the data and its
// mark are one word, so nothing is acquired.
template <class Unit>
HD bool see_unit(const char* place, uint32_t mark, Patience& patience, Unit& unit) {
  Backoff backoff;
  while (!(unit = look_at_unit<Unit>(place)).has_arrived(mark)) {
    const uint64_t waited = patience.waited_ns();
    if (waited > patience.timeout_ns) return false;
    backoff.pause(waited);
  }
  return true;
}

}  // namespace moe_nvlink
