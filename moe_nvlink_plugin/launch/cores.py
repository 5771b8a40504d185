"""The cores of a CPU rank, on which the threads of its kernels run.

A framework gives a rank its cores through the OpenMP runtime: vLLM sets GOMP_CPU_AFFINITY or
KMP_AFFINITY (or OMP_PLACES) for each worker, as VLLM_CPU_OMP_THREADS_BIND says. The runtime then
binds its first thread, which is the program's main thread, to the first of these cores. Every
thread inherits the binding of the thread that starts it, so without this module all threads of our
kernels would share that one core with the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator


@functools.cache
def bound_cores() -> frozenset[int]:
    """Return the cores to which OpenMP binds its threads; empty if it binds none. Local."""
    runtime = ctypes.CDLL(None)  # torch has loaded OpenMP, or the linker (LD_PRELOAD)
    found = set[int]()
    try:
        for place in range(runtime.omp_get_num_places()):
            ids = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
            runtime.omp_get_place_proc_ids(place, ids)
            found.update(ids)
    except AttributeError:  # a torch without OpenMP, or an OpenMP older than 4.5
        return frozenset()
    return frozenset(found)


def spread() -> None:
    """Let the calling thread, and threads that it will start, use all bound cores. Local.

    If OpenMP binds no thread, or Linux refuses these cores, the thread keeps its binding.
    """
    if cores := bound_cores():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def spreading() -> Iterator[None]:
    """Let threads that the calling thread starts in this block use all bound cores. Local."""
    before = os.sched_getaffinity(0)
    spread()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
