"""The cores of a CPU rank, on which the threads of its kernels run.

A framework gives a rank its cores through the OpenMP runtime: it sets GOMP_CPU_AFFINITY or
KMP_AFFINITY (or OMP_PLACES) for each worker. The runtime then binds its first thread, which is the
program's main thread, to the first of these cores. Every thread inherits the binding of the thread
that starts it, so without this module all threads of our kernels would share that one core with the
main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator


@functools.cache
def places() -> tuple[frozenset[int], ...]:
    """Return the sets of cores to which OpenMP binds its threads; none if it binds none. Local."""
    runtime = ctypes.CDLL(None)  # torch has loaded OpenMP, or the linker (LD_PRELOAD)
    found = []
    try:
        if not runtime.omp_get_proc_bind():  # Intel's runtime has places then, too
            return ()
        for place in range(runtime.omp_get_num_places()):
            ids = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
            runtime.omp_get_place_proc_ids(place, ids)
            found.append(frozenset(ids))
    except AttributeError:  # a torch without OpenMP, or an OpenMP older than 4.5
        return ()
    return tuple(found)


def spread() -> None:
    """Let the calling thread, and threads that it will start, use all bound cores. Local.

    A thread whose cores are not a place of OpenMP's keeps them: somebody else has chosen them. So
    does a thread to which Linux refuses the others.
    """
    if os.sched_getaffinity(0) in places():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, frozenset[int]().union(*places()))


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
