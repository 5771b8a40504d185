// What races.h and clock.h have in common with the machine: orders, scopes, sites, accesses.
#pragma once

#include <cstdint>

namespace ptx {

// The mode of a runtime and of the libraries that it runs.
constexpr bool kRaces = PTX_RACES != 0;
constexpr bool kClock = PTX_CLOCK != 0;

enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel, kSc };
enum class Scope : uint8_t { kNone, kCta, kGpu, kSys };
enum class Space : uint8_t { kGlobal, kShared, kParam };
enum class Kind : uint8_t {
  kLoad,
  kStore,
  kAsyncStore,
  kAtomic,
  kFence,
  kBarrier,      // bar.sync
  kWarpBarrier,  // bar.warp.sync
  kWarp,         // shfl, redux, vote, match, elect
  kGridWait,
  kProxyFence,  // fence.proxy.async
};

struct Allocation;

// One instruction that touches memory or meets other threads. Python reads and changes the table
// (tests/support/ptx/build.py, class Site): order, scope and removed are what mutants change.
struct Site {
  const char* text;
  uint32_t line;         // in the PTX
  uint32_t source_line;  // in the text that NVRTC compiled; 0: not known
  Kind kind;
  Order order;
  Scope scope;
  uint8_t removed;
};

// An access that is about to take effect; bounds and alignment have been checked.
struct Access {
  uint64_t address;  // global: the host's address; shared: the offset in the CTA's window
  uint32_t bytes;
  Space space;
  bool reads;
  bool writes;
  Site* site;
  Allocation* where;  // global memory only
};

}  // namespace ptx
