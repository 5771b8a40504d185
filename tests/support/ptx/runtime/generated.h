// What a generated library begins with (translate.py).
#pragma once

#include <algorithm>

#include "machine.h"
#include "numeric.h"

using namespace ptx;

// Words of 16 bytes (.b128): registers, and ordered accesses of them.
using uint128_t = unsigned __int128;
using int128_t = __int128;

#define PTX_EXPORT extern "C" __attribute__((visibility("default")))

#if PTX_CLOCK
#define ISSUE(kind, reads, writes, ...)                                             \
  {                                                                                 \
    static constexpr uint16_t numbers[] = {__VA_ARGS__};                            \
    if (!clocks::on_instruction(t.clock, Class::kind, numbers + (reads), writes)) { \
      clocks::on_late(t, Class::kind, numbers, reads);                              \
    }                                                                               \
  }
#define AT_ONCE(...) __VA_ARGS__
#define ONE_BY_ONE(...)
#else
#define ISSUE(...)
#define AT_ONCE(...)
#define ONE_BY_ONE(...) __VA_ARGS__
#endif

// Variables of the module, which every rank's kernels may touch.
struct ModuleMemory {
  const char* name;
  unsigned char* address;
  uint64_t bytes;
};
