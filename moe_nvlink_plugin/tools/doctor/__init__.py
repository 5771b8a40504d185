"""moe-nvlink doctor: says what a machine has, and whether this package will work on it.

inquiry.py asks the machine: sockets.py for its NUMA nodes, gpu.py for the driver in a child
process. verdict.py judges. report.py writes the report, and together.py collects the ranks of a
launcher into one report. memory.py answers --memory, and looks at no machine.
"""

from __future__ import annotations

from .inquiry import Facts, facts
from .together import main
from .verdict import Verdict, judge_cpu_ranks, judge_gpu_ranks

__all__ = ["Facts", "Verdict", "facts", "judge_cpu_ranks", "judge_gpu_ranks", "main"]
