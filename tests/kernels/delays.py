"""The kernel text with sleeps sown into it: the same protocol under another timing. Tests only."""

from __future__ import annotations

import re

from moe_nvlink_plugin.jit import host, source

#: Sleeps now and then, each thread after its own random sequence.
_RANDOM_DELAY = """
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
    timespec time{0, static_cast<long>(state / 16 % 100000)};
    nanosleep(&time, nullptr);
  } else if (state % 2 == 0) {
    sched_yield();
  }
}
}  // namespace moe_nvlink
"""


def replace_once(text: str, old: str, new: str) -> str:
    """The text with `old`, which must stand in it exactly once, replaced."""
    assert text.count(old) == 1, f"{text.count(old)} occurrences of {old!r} in the kernel text"
    return text.replace(old, new)


def _with_prelude(text: str, prelude: str) -> str:
    marker = "// ---- kernels/include/moe_nvlink/memory_order.h\n"
    return replace_once(text, marker, prelude + marker)


def randomly_delayed() -> host.HostLibrary:
    """A sleep, at random, before every release and arrival, after every wait, between tokens."""
    text = source.host_source()
    before = re.compile(
        r"(?<=[\n])( *)(store_release_sys\(cell_of|const uint32_t before = fetch_add_acq)"
    )
    text, releases = before.subn(r"\1test_delay();\n\1\2", text)
    assert releases == 6, f"{releases} places before a release or an arrival"
    text = replace_once(
        text,
        "  *seen = load_acquire_sys(cell);",
        "  *seen = load_acquire_sys(cell);\n  test_delay();",
    )
    text, loops = re.subn(
        r"(for \(int (?:token|item) = cta\.block;[^{]*\{)", r"\1 test_delay();", text
    )
    assert loops >= 2, f"{loops} loops over tokens"
    return _built(_with_prelude(text, _RANDOM_DELAY))


def slow_reader(ep_rank: int, milliseconds: float) -> host.HostLibrary:
    """Rank `ep_rank` sleeps in every combine, between the wait for its peers and the first read."""
    sleep = (
        f"  if (args.geometry.ep_rank == {ep_rank}) {{\n"
        f"    timespec time{{0, {int(milliseconds * 1e6)}}};\n"
        "    nanosleep(&time, nullptr);\n  }\n"
    )
    line = "  const bool faulted = combine_barrier(args, cta, shared);\n"
    return _built(replace_once(source.host_source(), line, line + sleep))


def _built(text: str) -> host.HostLibrary:
    # -O1: seconds less to compile, for kernels that sleep most of the time.
    return host.HostLibrary(host.build(text, (*host.FLAGS, "-O1")))
