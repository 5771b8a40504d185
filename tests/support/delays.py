"""The kernel text with sleeps sown into it: the same protocol under another timing. Tests only."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host

#: A sleep of up to 50 us for a warp, one time in 16. %clock differs between CTAs and moments.
_DEVICE_DELAY = """
namespace moe_nvlink {
HD void test_delay() {
  uint32_t state = static_cast<uint32_t>(clock64());
  state ^= ((blockIdx.y * 1024 + blockIdx.x) * 32 + threadIdx.x / 32 + 1) * 2654435761u;
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  if (state % 16 == 0) __nanosleep(state / 16 % 50000);
}
}  // namespace moe_nvlink
"""

_HOST_DELAY = """
#include <time.h>
#include <atomic>
namespace moe_nvlink {
inline void test_delay() {
  static std::atomic<uint32_t> seeds{1};
  thread_local uint32_t state = seeds.fetch_add(1) * 2654435761u | 1u;
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  if (state % 16 == 0) {
    timespec time{0, static_cast<long>(state / 16 % 50000)};
    nanosleep(&time, nullptr);
  } else if (state % 4 == 0) {
    sched_yield();
  }
}
}  // namespace moe_nvlink
"""

#: A GPU that has places for so many CTAs of combine at a time, because other kernels hold the rest.
#: A CTA starts when one of those before it in line has ended.
_FEW_PLACES = """
#include <condition_variable>
#include <mutex>
namespace moe_nvlink {
struct TestGpu {
  std::mutex mutex;
  std::condition_variable freed;
  int ended = 0;  // CTAs of this launch
};
inline TestGpu test_gpus[128];

class TestPlace {
 public:
  TestPlace(int rank, int in_line, int num_blocks)
      : gpu_(test_gpus[rank]), num_blocks_(num_blocks) {
    std::unique_lock lock(gpu_.mutex);
    gpu_.freed.wait(lock, [&] { return in_line < gpu_.ended + PLACES; });
  }
  ~TestPlace() {
    const std::lock_guard lock(gpu_.mutex);
    gpu_.ended = (gpu_.ended + 1) % num_blocks_;
    gpu_.freed.notify_all();
  }

 private:
  TestGpu& gpu_;
  const int num_blocks_;
};
}  // namespace moe_nvlink
"""


def replace_once(text: str, old: str, new: str) -> str:
    """The text with `old`, which must stand in it exactly once, replaced."""
    assert text.count(old) == 1, f"{text.count(old)} occurrences of {old!r} in the kernel text"
    return text.replace(old, new)


def _with_prelude(text: str, prelude: str) -> str:
    marker = "// ---- kernels/include/moe_nvlink/memory_order.h\n"
    return replace_once(text, marker, prelude + marker)


_BEFORE = r"^HD \w+ (?:store_release_sys|fetch_add_acq_rel_gpu|load_acquire_sys)\([^{;]*\) \{\n"
_LOOPS = r"for \(int (?:token|item) = [^{]*\{"


def with_delays(text: str, *, on_host: bool) -> str:
    """Random sleeps before every release, arrival and acquire, and between two tokens.

    They stand in the operations themselves, so every use of one gets them.
    """
    text, orders = re.subn(_BEFORE, r"\g<0>  test_delay();\n", text, flags=re.MULTILINE)
    assert orders == 3, f"{orders} ordered operations found in memory_order.h"
    text, loops = re.subn(_LOOPS, r"\g<0> test_delay();", text)
    assert loops >= 2, f"{loops} loops over tokens found"
    return _with_prelude(text, _HOST_DELAY if on_host else _DEVICE_DELAY)


def randomly_delayed() -> host.HostLibrary:
    """A library whose ranks sleep at random."""
    return _built(with_delays(LAYER.host_source(), on_host=True))


def clock_that_goes_back() -> host.HostLibrary:
    """Each look at the clock reads a microsecond less than the look before; test_looks() counts."""
    text = _with_clock(
        "inline std::atomic<uint64_t> looks{0};\n"
        "inline uint64_t now_ns() { return 1000000000u - 1000u * looks.fetch_add(1); }\n"
    )
    count = 'extern "C" unsigned long long test_looks() { return moe_nvlink::looks; }\n'
    return _built(text + count)


def clock_of_looks(nanoseconds: int) -> host.HostLibrary:
    """Each rank has a clock of its own, which its looks at it move.

    A rank's thread, which is the one CTA of its kernels, calls test_enter(rank) first. test_looks
    (rank) counts a rank's looks.
    """
    text = _with_clock(
        "inline std::atomic<uint64_t> looks[128];\n"
        "inline thread_local int clock_of = 127;\n"
        "inline uint64_t now_ns() {\n"
        f"  return {nanoseconds}u * (looks[clock_of].fetch_add(1) + 1);\n}}\n"
    )
    return _built(
        f"{text}\n"
        'extern "C" void test_enter(int rank) { moe_nvlink::clock_of = rank; }\n'
        'extern "C" unsigned long long test_looks(int rank) { return moe_nvlink::looks[rank]; }\n'
    )


def sleeps_of(seconds: int) -> host.HostLibrary:
    """Ranks that sleep until a cell changes sleep so long at most."""
    text = LAYER.host_source()
    return _built(replace_once(text, "longest{0, kLongestCellSleepNs}", f"longest{{{seconds}, 0}}"))


def _with_clock(now_ns: str) -> str:
    """The text of the CPU ranks with another clock."""
    clock = re.compile(r"^inline uint64_t now_ns\(\) \{\n.*?^\}\n", re.MULTILINE | re.DOTALL)
    text, clocks = clock.subn(lambda _: now_ns, LAYER.host_source())
    assert clocks == 1, f"{clocks} clocks of the host"
    return text


def slow_reader(ep_rank: int, milliseconds: float, text: str = "") -> host.HostLibrary:
    """Rank `ep_rank` sleeps in every combine, between the wait for its peers and the first read.

    text: of the kernels, if a test has changed it.
    """
    sleep = (
        f"  if (args.geometry.ep_rank == {ep_rank}) {{\n"
        f"    timespec time{{0, {int(milliseconds * 1e6)}}};\n"
        "    nanosleep(&time, nullptr);\n  }\n"
    )
    line = "  const bool faulted = combine_barrier(args, cta, shared);\n"
    return _built(replace_once(text or LAYER.host_source(), line, line + sleep))


_HELD = """
#include <time.h>
#include <atomic>
namespace moe_nvlink {
inline std::atomic<int> test_holds{0};
inline void test_hold(int milliseconds) {
  const timespec time{0, 1000000};
  for (; milliseconds > 0 && test_holds > 0; --milliseconds) nanosleep(&time, nullptr);
}
}  // namespace moe_nvlink
extern "C" void test_hold(int holds) { moe_nvlink::test_holds += holds; }
"""


def held_reader(ep_rank: int, milliseconds: int) -> tuple[host.HostLibrary, Callable[[int], None]]:
    """Rank `ep_rank` is held in combine between the wait for its peers and the first read.

    The function adds to the number of holds. The rank goes on when it is 0, or after so long.
    """
    line = "  const bool faulted = combine_barrier(args, cta, shared);\n"
    hold = f"  if (args.geometry.ep_rank == {ep_rank}) test_hold({milliseconds});\n"
    text = replace_once(LAYER.host_source(), line, line + hold)
    path = host.build(_with_prelude(text, _HELD), (*host.FLAGS, "-O0"))
    hold_of: Callable[[int], None] = ctypes.CDLL(str(path)).test_hold
    return host.HostLibrary(path), hold_of


def few_places(places: int, *, last_first: bool) -> host.HostLibrary:
    """So many CTAs of a combine run at a time on each rank, the others after them.

    last_first: in falling order of their numbers.
    """
    in_line = "cta.num_blocks - 1 - cta.block" if last_first else "cta.block"
    line = "  if (cta.thread == 0) shared.faulted = 0;\n"
    place = f"  const TestPlace place(args.geometry.ep_rank, {in_line}, cta.num_blocks);\n"
    text = replace_once(LAYER.host_source(), line, place + line)
    return _built(_with_prelude(text, _FEW_PLACES.replace("PLACES", str(places))))


def _built(text: str) -> host.HostLibrary:
    # -O0: seconds less to compile, for kernels that sleep most of the time.
    return host.HostLibrary(host.build(text, (*host.FLAGS, "-O0")))
