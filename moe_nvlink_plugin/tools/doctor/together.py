"""moe-nvlink doctor, as one process or as one of several ranks that a launcher has started."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import threading

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import ConfigError, PeerError

from . import report
from .inquiry import Facts, facts, from_json, to_json
from .verdict import judge_cpu_ranks, judge_gpu_ranks

#: Ranks that a launcher has started together need less, as a rule, to find each other.
_SILENT_S = 5.0
_ALONE = "to look at this machine alone: env -u RANK -u WORLD_SIZE moe-nvlink doctor"


def main(*, as_json: bool = False) -> int:
    """Ask, judge and print; among several ranks rank 0 prints for all. Collective among them.

    Args:
        as_json: whether to print JSON instead of text.

    Returns:
        0 if GPU ranks or CPU ranks will work, else 1; equal on every rank that meets the others.
    """
    mine = facts()
    lost = ""
    try:
        ranks = gather(mine)
    except PeerError as error:
        ranks, lost = [mine], f"rank {mine.rank} speaks for itself only: {error}"
    verdicts = [judge_gpu_ranks(ranks), judge_cpu_ranks(ranks)]
    if lost:
        verdicts = [dataclasses.replace(v, reasons=(lost, *v.reasons)) for v in verdicts]
    if not mine.rank:
        print((report.as_json if as_json else report.as_text)(ranks, verdicts), flush=True)
    elif lost:  # rank 0 may be the missing rank
        print("\n".join(map(str, verdicts)), file=sys.stderr, flush=True)
    return 0 if any(verdict.works for verdict in verdicts) else 1


def gather(mine: Facts) -> list[Facts]:
    """Return every rank's facts, in rank order; without a launcher, this process's. Collective.

    Raises:
        PeerError: a rank did not arrive in time, or the ranks cannot reach each other.
    """
    if mine.rank is None or mine.world_size in (None, 1):
        return [mine]
    if mine.software.torch_error:
        raise PeerError("ranks meet through torch.distributed, and torch cannot be imported")
    if mine.software.numpy_error:
        raise PeerError("ranks meet through torch.distributed, and torch cannot use numpy")
    import torch.distributed

    from moe_nvlink_plugin.groups import as_group

    try:
        timeout_s = env.timeout_s()
    except ConfigError:  # bad_variables has it
        timeout_s = 60.0
    waiting = threading.Timer(
        min(_SILENT_S, timeout_s / 2), _say_what_is_missing, [mine, timeout_s]
    )
    waiting.daemon = True
    waiting.start()
    try:
        torch.distributed.init_process_group(
            "gloo",
            rank=mine.rank,
            world_size=mine.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        group = as_group(torch.distributed.group.WORLD, timeout_s)
        return [from_json(text) for text in group.all_gather_object(to_json(mine))]
    except (RuntimeError, ValueError) as error:  # torch raises these for every failure
        raise PeerError(
            f"the ranks did not meet: {str(error).rstrip('.')}; start all {mine.world_size}; "
            f"{_ALONE}"
        ) from error
    finally:
        waiting.cancel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _say_what_is_missing(mine: Facts, timeout_s: float) -> None:
    """Tell somebody whose shell has a launcher's variables left why nothing happens."""
    print(
        f"rank {mine.rank} of {mine.world_size} waits for the other ranks, at most {timeout_s:g} s "
        f"(RANK, WORLD_SIZE and MASTER_ADDR are set); {_ALONE}",
        file=sys.stderr,
        flush=True,
    )
