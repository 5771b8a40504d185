"""Servers of the end-to-end tests: forks of a template, one rank, and several with our backend."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import Self

from moe_nvlink_plugin.integration.demo import processes
from moe_nvlink_plugin.integration.demo.server import (
    CPU_ENVIRONMENT,
    Server,
    ServerError,
    ServerProcess,
    VllmServer,
)
from moe_nvlink_plugin.tools import top
from tests.integration.servers import stop_on_order
from tests.support.ranks import LIBRARIES_OF_VLLM

_FAST_SERVER = str(Path(__file__).parent / "fast_server.py")
#: Programs of templates; what each imports stands in fast_server.py.
OF_VLLM_SERVERS = (sys.executable, _FAST_SERVER)
OF_VLLM_LIBRARIES = (*OF_VLLM_SERVERS, *LIBRARIES_OF_VLLM)
#: Long enough for a slow machine between two MoE layers. Ranks that compile need more than others.
TIMEOUT_S = 20
#: What vLLM and SGLang say of a checkpoint that has no weights.
NO_WEIGHTS = "Cannot find any model weights"


class Forked:
    """A process that a template forked, with what its users need of subprocess.Popen."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # file to which the template writes its exit code
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._read()
        return self.returncode

    def _read(self) -> int:
        code = os.read(self._status, 16)
        os.close(self._status)
        assert code, "the template that was to report this process has died"
        return array.array("i", code)[0]


class Template:
    """A process that has imported a framework, or its libraries; servers and programs fork from it.

    Args:
        control: Our end of its socket. The process ends when nobody holds our end any more.
        process: None if another process has started it.
    """

    def __init__(
        self, control: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.control = control
        self._process = process

    @classmethod
    def started(
        cls, environment: Mapping[str, str], program: Sequence[str] = OF_VLLM_SERVERS
    ) -> Template:
        """Starts one with these variables over this process's.

        Args:
            program: The command line, but for the number of a socket, its last argument.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                env={**os.environ, **CPU_ENVIRONMENT, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(ours, process)

    def fork(self, arguments: list[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        """`python *arguments` in a session of its own, printing to `log`."""
        status, theirs = os.pipe()
        try:
            request = json.dumps([arguments, dict(environment)]).encode()
            socket.send_fds(self.control, [request], [log.fileno(), theirs])
        finally:
            os.close(theirs)
        pid = int(self.control.recv(16) or 0)
        assert pid, "the template has ended"
        return Forked(pid, status)

    def run(
        self, code: str, *arguments: str, folder: Path, environment: Mapping[str, str]
    ) -> tuple[int, str]:
        """Runs a program; returns its exit code and what it printed, errors among it.

        Args:
            folder: An empty one.
        """
        program, log = folder / "program.py", folder / "log"
        program.write_text(code, "utf-8")
        with log.open("wb") as file:
            forked = self.fork([str(program), *arguments], environment, file)
        try:
            code_of_exit = forked.wait(timeout=600)
        finally:
            processes.end_session(forked.pid)
        return code_of_exit, log.read_text("utf-8")

    def close(self) -> None:
        """Ends the process. What has been forked lives on."""
        self.control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Templates(NamedTuple):
    """vLLM chooses its platform by importing: ours, or its own in servers without our plugin."""

    with_ours: Template
    without: Template


@functools.cache
def templates() -> Templates:
    """Both of this run; the second imports while the first server is at work."""
    return Templates(Template.started({}), Template.started({"VLLM_PLUGINS": ""}))


class ForkedServer(VllmServer):
    """A server that starts without an import."""

    def _start(self, variables: Mapping[str, str], log: IO[bytes]) -> ServerProcess:
        ours = "VLLM_PLUGINS" not in variables
        template = templates().with_ours if ours else templates().without
        return template.fork(self.command[1:], variables, log)


class Requests(NamedTuple):
    """Ragged prompts, ragged answers, and the tokens of the one-rank server."""

    checkpoint: Path
    prompts: list[list[int]]
    lengths: list[int]
    expected: list[list[int]]

    @classmethod
    def drawn(
        cls,
        checkpoint: Path,
        vocab_size: int,
        number: int,
        *,
        seed: int = 7,
        longest: tuple[int, int] = (60, 24),
    ) -> Requests:
        """Prompts of at most `longest[0]` tokens, answers of at most `longest[1]`; none given."""
        draw = random.Random(seed)
        vocab = range(vocab_size)
        prompts = [draw.choices(vocab, k=draw.randint(1, longest[0])) for _ in range(number)]
        lengths = [draw.randint(4, longest[1]) for _ in prompts]
        return cls(checkpoint, prompts, lengths, [])

    def ask(self, server: Server, concurrency: int = 8) -> list[list[int]]:
        """The tokens that a server answers with."""
        answers = server.complete(self.prompts, max_tokens=self.lengths, concurrency=concurrency)
        return [answer.token_ids for answer in answers]

    def num_tokens(self, count: int) -> int:
        """Tokens that pass every layer in the first `count` requests: all but the last answered."""
        return sum(map(len, self.prompts[:count])) + sum(self.lengths[:count]) - count


def metrics(server: Server) -> dict[str, float]:
    """A server's metrics by name, summed over engines and labels."""
    _status, text = server._request("GET", "/metrics", None, 30.0)
    found: dict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


class EpServer:
    """A server with our backend, its workers' counters, and comparisons with the one-rank one.

    Args:
        server: how its processes start; None: as forks.
        ready_s: seconds that it may take to start.
    """

    forked: type[Any] = ForkedServer
    flags: tuple[str, ...] = ("--enable-expert-parallel", "--all2all-backend=moe_nvlink")
    timeout_s = TIMEOUT_S

    def __init__(
        self,
        requests: Requests,
        folder: Path,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        server: type[VllmServer] | None = None,
        ready_s: float = 300.0,
    ) -> None:
        self.requests = requests
        self._ready_s = ready_s
        self.stats_folder = folder / f"stats {name}"
        self.server: Server = (server or self.forked)(
            model=requests.checkpoint,
            name=name,
            folder=folder,
            arguments=[*self.flags, *arguments],
            environment={
                "MOE_NVLINK_STATS_DIR": str(self.stats_folder),
                "MOE_NVLINK_TIMEOUT_S": str(self.timeout_s),
                **(environment or {}),
            },
        )

    def __enter__(self) -> Self:
        try:
            self.server.wait_until_ready(timeout_s=self._ready_s)
            if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
                log = self.server.log_path.read_text("utf-8", errors="replace")
                assert "Using V2 Model Runner" in log
        except BaseException:
            self.server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def differing(self, numbers: range, concurrency: int, rank: int | None = None) -> list[int]:
        """The requests among `numbers` whose tokens are not the one-rank server's.

        Args:
            rank: the data-parallel rank that is to answer; None: the server chooses.
        """
        answers = self.server.complete(
            [self.requests.prompts[n] for n in numbers],
            max_tokens=[self.requests.lengths[n] for n in numbers],
            concurrency=concurrency,
            rank=rank,
        )
        expected = [self.requests.expected[n] for n in numbers]
        pairs = zip(numbers, answers, expected, strict=True)
        return [number for number, answer, tokens in pairs if answer.token_ids != tokens]

    def stats(self, ep_size: int) -> list[dict[str, Any]]:
        """The counters of all workers, once they have come to rest."""
        paths = [self.stats_folder / f"rank{rank}.json" for rank in range(ep_size)]
        deadline = time.monotonic() + 60
        before: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            now = [json.loads(p.read_text("utf-8")) for p in paths if p.exists()]
            if len(now) == ep_size and now == before and len({s["rounds"] for s in now}) == 1:
                return now
            before = now
            time.sleep(1.5)
        raise AssertionError(f"the counters of {ep_size} workers did not settle: {before}")

    def check_metrics(self, ep_size: int) -> None:
        """The server shows what its workers have counted."""
        stats = self.stats(ep_size)
        look = top.parse([top.fetch(f"http://127.0.0.1:{self.server.port}")], 0.0)
        assert sorted(look.ranks) == list(range(ep_size))
        for counted in stats:
            rank = counted["ep_rank"]
            shown = look.ranks[rank]
            waited = sum(ns for peer, ns in enumerate(counted["waited_ns"]) if peer != rank)
            of_peers = [value for (name, _), value in shown.items() if name == "wait_seconds"]
            assert len(of_peers) == ep_size - 1
            assert abs(sum(of_peers) - waited / 1e9) < 1e-6
            assert waited > 0, "in all of these rounds a rank has waited once"
            assert shown["rounds", ""] == counted["rounds"] > 0
            assert shown["tokens", ""] == counted["tokens"]
            moved = counted["bytes_dispatched"] + counted["bytes_combined"]
            assert shown["bytes", ""] == moved
            assert shown["faults", ""] == counted["faults"] == 0

    def wait_for_rounds(self, rank: int, more_than: int) -> None:
        """Returns when a worker has counted more rounds than these."""
        path = self.stats_folder / f"rank{rank}.json"
        deadline = time.monotonic() + 60
        while json.loads(path.read_text("utf-8"))["rounds"] <= more_than:
            assert time.monotonic() < deadline, f"rank {rank} is still at round {more_than}"
            time.sleep(0.05)

    def check_traffic(self, ep_size: int, num_sequences: int, num_moe_layers: int) -> None:
        """Every token of the requests went through the exchange, in every MoE layer."""
        stats = self.stats(ep_size)
        assert [s["ep_rank"] for s in stats] == list(range(ep_size))
        assert stats[0]["rounds"] % num_moe_layers == 0
        tokens = sum(s["tokens"] for s in stats)
        assert tokens >= num_moe_layers * self.requests.num_tokens(num_sequences)
        for counters in stats:
            assert counters["rounds"] > 0
            assert 0 < counters["bytes_dispatched_remote"] < counters["bytes_dispatched"]
            assert 0 < counters["bytes_combined_remote"] < counters["bytes_combined"]


class Asking:
    """Long requests on their way, which the server will not be able to finish."""

    def __init__(self, server: EpServer) -> None:
        self._server = server
        self._outcome: list[Exception] = []
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        requests = self._server.requests
        try:
            self._server.server.complete(requests.prompts[:8], max_tokens=400, timeout_s=120)
        except ServerError as error:
            self._outcome.append(error)

    def end(self) -> None:
        """The server does not let the client wait."""
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()

    def check_refused(self) -> None:
        """It has told the client so, too; a fault-tolerant one cuts answers off, with HTTP 200."""
        self.end()
        assert len(self._outcome) == 1


class Stops(NamedTuple):
    """The plugin that stops or ends a rank of a server, and the file that tells it to."""

    folder: Path
    server: str

    @property
    def order(self) -> Path:
        """The file."""
        return self.folder / f"stop {self.server}"

    def install(self) -> dict[str, str]:
        """Writes the plugin; returns variables for the server."""
        plugin = write_plugin(
            self.folder / f"plugin {self.server}", "stops_on_order", stop_on_order
        )
        return {"PYTHONPATH": str(plugin), stop_on_order.ORDER_VARIABLE: str(self.order)}

    def tell(self, place: str, rank: int, number: int) -> None:
        """The next time that this rank comes to the place, it gets the signal."""
        draft = self.order.with_suffix(".new")
        draft.write_text(f"{place} {rank} {number}", "utf-8")
        draft.rename(self.order)


def check_stopped_rank_is_named(server: EpServer, stops: Stops, place: str, told: str) -> None:
    """Rank 1 stops at the place: rank 0 says what is to be `told`, and the client is told, too."""
    stats = server.stats(2)
    asking = Asking(server)
    stops.tell(place, 1, signal.SIGSTOP)
    log = server.server.log_path
    try:
        assert wait_for_text(log, "ExchangeTimeoutError", 60)
    finally:
        send_signal(stats[1]["pid"], signal.SIGCONT)
    text = log.read_text("utf-8", errors="replace")
    assert told in text
    assert "rank(s) 1;" in text
    asking.check_refused()
    assert our_files(stats) == []


def our_files(stats: list[dict[str, Any]]) -> list[Path]:
    """Shared memory of these workers that still has a name; other tests may run beside this one."""
    patterns = [f"moe_nvlink-*-{counters['pid']}-*" for counters in stats]
    return [path for pattern in patterns for path in processes.SHARED_MEMORY.glob(pattern)]


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process that may be gone: vLLM ends workers when one of them fails."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_for_text(path: Path, text: str, timeout_s: float) -> bool:
    """Whether a server's log has the text, or gets it in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if text in path.read_text("utf-8", errors="replace"):
            return True
        time.sleep(0.5)
    return False


def write_plugin(
    folder: Path,
    name: str,
    module: ModuleType,
    groups: Sequence[str] = ("vllm.general_plugins",),
) -> Path:
    """An installed distribution, as far as a framework looks for one: `register` of our module.

    Args:
        folder: where it goes; a new one.
        name: of the distribution, and of its module.
        module: what is copied.
        groups: the framework's groups of plugins that call `register`.
    """
    about = folder / f"{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entries = (f"[{group}]\n{name} = {name}:register\n" for group in groups)
    (about / "entry_points.txt").write_text("".join(entries))
    shutil.copy(str(module.__file__), folder / f"{name}.py")
    return folder


def without_weights(checkpoint: Path) -> Path:
    """Whoever loads its weights ends with an error of the framework's own."""
    (checkpoint / "model.safetensors").unlink()
    return checkpoint
