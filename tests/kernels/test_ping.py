"""A third kind of kernel: one `.cu` text, one struct, one `Kernel` in a family, one caller.

Each rank writes one word to each peer and waits for theirs. Nothing of the package names it, and
the launch machinery serves it: host library, NVRTC, precompile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.groups import Group
from moe_nvlink_plugin.jit import header, host, nvrtc, source
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.launch.arguments import Window, new_arguments
from moe_nvlink_plugin.launch.base import Budget, Executor
from moe_nvlink_plugin.launch.executors import executor_for
from moe_nvlink_plugin.launch.kernel import PDL, Family, Kernel
from moe_nvlink_plugin.launch.shape import Limits, Shape
from moe_nvlink_plugin.memory.faults import Faults
from moe_nvlink_plugin.memory.layout import WorkspaceLayout
from moe_nvlink_plugin.memory.phases import Phase
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.tools import precompile
from moe_nvlink_plugin.transport.host import HostTransport

# The text, with the struct.

PATH = "ping/ping.cu"
TEXT = """
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

constexpr int kPhasePing = 100;

struct PingRanks {
  int32_t size;
  int32_t rank;  // this one
};

struct PingArgs {
  uint64_t window_base;
  uint64_t rank_stride;
  uint64_t timeout_ns;
  PingRanks geometry;
  ControlRegions control;
  uint32_t words_region;  // [size] u64 {0, word, epoch}; entry s is written by rank s
  uint32_t word;
  uint32_t epoch;
};

HD int rank_in(const PingRanks& ranks) {
  return ranks.rank;
}

struct PingShared {
  int unused;
};

template <class Config>
HD void ping_body(const PingArgs& args, const Cta& cta, PingShared&) {
  if constexpr (Config::kPdl) pdl_wait();
  if (cta.block != 0) return;
  const PingRanks& ranks = args.geometry;
  const uint64_t mine = pack_cell(args.epoch, args.word, 0);
  for (int peer = cta.thread; peer < ranks.size; peer += cta.num_threads) {
    store_release_sys(cell_of(args, peer, args.words_region, ranks.rank), mine);
  }
  Patience patience(args.timeout_ns);
  for (int peer = cta.thread; peer < ranks.size; peer += cta.num_threads) {
    const uint64_t* theirs = cell_of(args, ranks.rank, args.words_region, peer);
    uint64_t seen = 0;
    const int fault = wait_for_epoch(theirs, args.epoch, patience, &seen);
    if (fault != 0) {
      report_fault(args, args.words_region, fault, kPhasePing, peer, args.epoch, patience);
    }
  }
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_ping, PingArgs, PingShared, ping_body)
"""

# The Kernel.


def _one(_args: Any) -> int:
    return 1


def _one_cta(_count: int, num_threads: int, _limits: Limits) -> Shape:
    return Shape(1, num_threads)


PING: Kernel[int] = Kernel(
    name="ping",
    source=PATH,
    struct="PingArgs",
    axes=(PDL,),
    count=_one,
    shape=_one_cta,
    phase=Phase("ping", "kPhasePing", "ping_words", header=PATH),
    header=PATH,
)
PINGS = Family("ping", (PING,))

# The caller.

TIMEOUT_S = 60.0


class Pinger:
    """One rank."""

    def __init__(self, group: Group) -> None:
        cpu = torch.device("cpu")
        self.workspace: Workspace[Executor] = Workspace(
            group, HostTransport(), executor_for("host", cpu), cpu
        )
        sizes = {"ping_words": group.size * 8}
        self.workspace.ensure(lambda alignment: WorkspaceLayout.of(group.size, 1, sizes, alignment))
        memory, self._regions = self.workspace.memory, self.workspace.layout.channel_regions(0)
        window = Window(memory.base_ptr, memory.rank_stride)
        self.args = new_arguments(PING, self._regions, window, TIMEOUT_S)
        self.args.geometry.size, self.args.geometry.rank = group.size, group.rank
        self.args.words_region = self._regions["ping_words"].block
        launcher = self.workspace.executor.launcher(
            PINGS.variant(), Budget(num_threads=2, max_sms=None, num_ranks=group.size)
        )
        self._launch = launcher.load(PING, 32)
        timeouts = Timeouts(TIMEOUT_S, TIMEOUT_S)
        self._faults = Faults(self.workspace, 0, group.rank, group.size, timeouts, PINGS.phases)

    def ping(self, word: int) -> list[int]:
        """The words of all ranks."""
        self.args.word, self.args.epoch = word, self.args.epoch + 1
        self._launch(self.args)
        error = self._faults.error(lambda peer, phase, epoch: f"{phase} {epoch} of rank {peer}")
        assert error is None, error
        region = self._regions["ping_words"]
        cells = self.workspace.words(region, self.args.geometry.size, torch.int64)
        return [cell >> 32 for cell in cells.tolist()]


@pytest.fixture(autouse=True)
def with_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the text lay below kernels/."""
    read = source.read_kernel_file
    monkeypatch.setattr(
        source, "read_kernel_file", lambda path: TEXT if path == PATH else read(path)
    )


def test_cpu_ranks() -> None:
    """Three rounds; in each a rank hears all of them."""

    def rank_main(group: ThreadGroup) -> list[list[int]]:
        rank = Pinger(group)
        heard = []
        for number in range(3):
            heard.append(rank.ping(10 * number + group.rank))
            # Cells are overwritten by the next round.
            group.all_gather_object(None)
        rank.workspace.release()
        return heard

    expected = [[10 * number + rank for rank in range(3)] for number in range(3)]
    assert run_ranks(3, rank_main) == [expected] * 3


def test_a_struct_that_differs_is_refused() -> None:
    library = host.load(PINGS.host_source())
    with pytest.raises(CompileError, match="DispatchArgs has .* bytes in the library"):
        library.kernel(PING.name, header.structs()["DispatchArgs"])


def test_nvrtc_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As precompile asks for it: with and without PDL, which are two builds."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path))
    architecture = nvrtc.ARCHITECTURES[-1]
    tasks = [precompile.Task(architecture, PINGS.variant(), pdl) for pdl in (True, False)]
    first, again = (
        list(precompile.outcomes(tasks, lambda needed: map(precompile.compiled, needed)))
        for _ in range(2)
    )
    assert not any(outcome.was_there or outcome.error for outcome in first)
    assert all(outcome.was_there for outcome in again)
    with_pdl, without = (
        machine_code.cubin_for(PINGS.variant().build(PING, pdl=pdl), architecture, PINGS.variant())
        for pdl in (True, False)
    )
    assert b"moe_nvlink_ping" in with_pdl
    assert with_pdl != without
