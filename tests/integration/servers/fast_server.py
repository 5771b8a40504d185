"""vLLM's servers, forked from one process that has imported everything.

vLLM's CPU platform insists on "spawn", so that each of the six processes of a two-rank server
imports torch and vLLM again: 15 s of CPU time each. Here a template imports them once, and every
server of the tests is a fork of it. So are the processes that a server starts: in it "spawn" means
Python's own "forkserver", which vLLM offers on its other platforms, itself forked before the server
has threads. What the processes do then is the same. Two tests start processes in vLLM's own way:
that of the demo, where a rank is one process, and a long one in test_vllm_e2e.py, where it is two.

    python tests/integration/servers/fast_server.py [modules] <number of a socket>

If modules are named, the template imports these and nothing of vLLM or of ours. Its forks run
programs that import vLLM and our plugin anew.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.context as contexts
import multiprocessing.forkserver as forkserver
import multiprocessing.resource_tracker as resource_tracker
import multiprocessing.spawn as spawn
import multiprocessing.util as util
import os
import runpy
import select
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

SERVERS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.glm4_moe",
    "vllm.model_executor.models.glm4_moe_mtp",
    "vllm.model_executor.models.qwen3_moe",
)
#: Bytes of a request, more than any has: the environment is in it.
REQUEST_BYTES = 1 << 18

_get_preparation_data = spawn.get_preparation_data
_prepare = spawn.prepare


class Request(NamedTuple):
    """What a fork is to run: what Python's command line would say behind "python"."""

    arguments: list[str]
    environment: dict[str, str]


def preload_servers() -> None:
    """Imports what servers need; nothing that a plugin could still want to change is decided."""
    for name in SERVERS:
        importlib.import_module(name)
    import vllm.plugins
    from vllm.distributed.device_communicators import shm_broadcast

    # It yields for a second after each message. With a core each that is nobody's; here it was a
    # fifth of what the servers' tests cost.
    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.0005)
    assert not vllm.plugins.plugins_loaded


def preload_libraries(names: Sequence[str]) -> None:
    """Imports these; one that this release of vLLM does not bring is left out."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@contextlib.contextmanager
def kept_from_collection() -> Iterator[None]:
    """What is imported inside lives as long as the process: no collector looks at it again.

    Full collections of a server's processes otherwise go through a million objects of modules, and
    copy the pages that hold them: a quarter of a server's CPU time. vLLM's workers freeze their
    heap, too, and thaw all of it when they end. In forks they leave it frozen.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.enable()


def run(arguments: Sequence[str]) -> None:
    """Runs a module (-m NAME ...) or a script."""
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__")
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def spawn_by_forking() -> None:
    """Lets "spawn" mean "forkserver" in this process and in those forked for it."""
    spawn.get_preparation_data = get_preparation_data
    spawn.prepare = prepare
    methods = contexts._concrete_contexts  # type: ignore[attr-defined]
    methods["spawn"] = methods["forkserver"]
    forkserver.set_forkserver_preload([])
    resource_tracker.ensure_running()  # which is a program of its own
    with mock.patch.object(util, "spawnv_passfds", _fork_instead):
        forkserver.ensure_running()


def _fork_instead(_path: str, command: Sequence[str], passed: Sequence[int]) -> int:
    """In the place of starting `python ... -c CODE` with these open files."""
    pid = os.fork()
    if pid:
        return pid
    _close_all_but(passed)
    status = 1
    try:
        exec(command[-1], {})
        status = 0
    except SystemExit:  # how a fork server ends with its parent
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _close_all_but(kept: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the folder's own
                os.close(int(name))


def get_preparation_data(name: str) -> dict[str, Any]:
    """What a parent tells its child, with its environment: spawn's children inherit that."""
    return {**_get_preparation_data(name), "environ": dict(os.environ)}


def prepare(data: Mapping[str, Any]) -> None:
    """In the child, before it runs its target."""
    _set_environment(data["environ"])
    # A child's children come from the same server; Python would start another for them.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    _prepare(data)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def fork_on_request(control: socket.socket) -> Request:
    """The template's life: returns in its forks, with what they are to do.

    A request comes with two open files: where the fork prints, and where the template writes its
    exit code. The answer is its process id. The template ends when `control` is closed.
    """
    running: dict[int, int] = {}  # process id: where its exit code goes
    while True:
        if select.select([control], [], [], 0.1)[0]:
            text, files, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
            if not text:
                sys.exit()
            output, status = files
            pid = os.fork()
            if pid == 0:
                return _become(Request(*json.loads(text)), output)
            os.close(output)
            running[pid] = status
            # Whoever hears of it looks for its session, and a watchdog that finds none goes home.
            while os.getsid(pid) != pid:
                time.sleep(0.001)
            control.send(str(pid).encode())
        _report_the_dead(running)


def _become(request: Request, output: int) -> Request:
    """In a fork: a session, an environment, and the three open files of its own."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _close_all_but(())
    _set_environment(request.environment)
    sys.path[1:1] = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    return request


def _report_the_dead(running: dict[int, int]) -> None:
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = array.array("i", [os.waitstatus_to_exitcode(status)])
            file = running.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(file, code.tobytes())
            os.close(file)


def serve(control: socket.socket) -> None:
    """The life of a template of servers: each fork runs what its request says."""
    request = fork_on_request(control)
    spawn_by_forking()
    run(request.arguments)


def main(libraries: Sequence[str], control: socket.socket) -> None:
    """The life of a template of vLLM's servers, or of the libraries that are named."""
    if libraries:
        with kept_from_collection():
            preload_libraries(libraries)
        run(fork_on_request(control).arguments)
    else:
        with kept_from_collection():
            preload_servers()
        serve(control)


if __name__ == "__main__":
    main(sys.argv[1:-1], socket.socket(fileno=int(sys.argv[-1])))
