"""Run a server as a child process: start, wait, ask, stop, and leave nothing behind.

The demonstration and the end-to-end tests share this harness. Prompts and answers are token ids, so
no tokenizer is needed. `Server` is what frameworks have in common, `VllmServer` a vLLM OpenAI
server; SGLang's is in `sglang_server`.

    with VllmServer(model=checkpoint, name="one rank", folder=scratch) as server:
        server.wait_until_ready()
        completions = server.complete([[1, 2, 3], [4, 5]], max_tokens=16)
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol

from typing_extensions import Self

from .processes import end_session, processes_of_session, shared_memory_of, start_watchdog

#: Called while waiting with the seconds since the start and the newest line of the server's log.
Progress = Callable[[float, str], None]

#: Two servers of several processes share a few cores, so nobody binds cores or starts many threads.
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
#: float32, because two rounded partial sums of bf16 are not one sum, and greedy tokens show it.
CPU_ARGUMENTS: Sequence[str] = (
    "--dtype=float32",
    f"--kv-cache-memory-bytes={64 << 20}",  # of some 40 000 tokens of a tiny model
    "--skip-tokenizer-init",
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--no-enable-prefix-caching",
)
SERVED_NAME = "tiny"
#: Ports below belong to well-known services.
FIRST_PORT = 10_000
#: SGLang takes further ports, up to 233 above its own.
FURTHER_PORTS = 300
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Names another interpreter than .venv-vllm33's, for vLLM 0.33.
VLLM33_VARIABLE = "MOE_NVLINK_VLLM33_PYTHON"
#: What Python runs to start a server.
API_SERVER: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server")
#: How a traceback ends: a class name and its message, behind vLLM's prefix or not.
_EXCEPTION_LINE = re.compile(r"(^|\] )[\w.]*(Error|Exception|Refused|Exit)\b.*: ")


_RUNNING: list[Server] = []


class ServerError(RuntimeError):
    """The server did not start, died, answered with an error, or could not be ended."""


class Completion(NamedTuple):
    """One answer: its token ids, and the seconds it took from request to reply."""

    token_ids: list[int]
    seconds: float


class ServerProcess(Protocol):
    """What is needed of a server's first process; subprocess.Popen has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def wait(self) -> int:
        """Its exit code, once it has one."""


class Server(ABC):
    """One server process tree on a free port of this machine; a context manager.

    name: for messages and the log file. folder: where the log goes. environment: variables over
    those of this process. Creating a server starts the process, without waiting.
    """

    def __init__(
        self, command: Sequence[str], *, name: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / f"{name.replace(' ', '-')}.log"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._started = time.monotonic()
        self._ready = False
        self._held: set[Path] = set()
        self._process: ServerProcess | None = None
        # A Ctrl-C between fork and assignment would leave a server that nobody knows.
        with _interrupts_deferred(), self.log_path.open("wb") as log:
            self._process = self._start({**os.environ, **environment}, log)
            self._session = self._process.pid
            self._watchdog = start_watchdog(self._session)
            _RUNNING.append(self)

    @abstractmethod
    def logprobs(self, sequence: Sequence[int], *, timeout_s: float = 120.0) -> list[float]:
        """Log-probability of every token but the first, after those before it.

        Raises ServerError as `complete` does.
        """

    @abstractmethod
    def _ask(
        self, prompt: Sequence[int], length: int, timeout_s: float, rank: int | None
    ) -> list[int]:
        """The `length` tokens that follow a prompt."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The living processes of this server."""
        return processes_of_session(self._session)

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def uptime_s(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of what the server printed."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait_until_ready(
        self, *, timeout_s: float = 300.0, progress: Progress | None = None
    ) -> float:
        """Wait until the server answers /health, and return its start-up time in seconds.

        Raises ServerError with the log's tail as soon as the process ends, or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            self._check_alive("before it was ready")
            if time.monotonic() > deadline:
                raise self._error(f"was not ready within {timeout_s:.0f} s")
            if progress is not None:
                progress(self.uptime_s, self.log_tail(1))
            time.sleep(0.5)
        self._ready = True
        # Whoever kills a worker later takes away the trace of what it held.
        self._held = shared_memory_of(self.pids)
        return self.uptime_s

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int],
        concurrency: int | None = None,
        timeout_s: float = 120.0,
        rank: int | None = None,
    ) -> list[Completion]:
        """Greedy completions of token-id prompts, `concurrency` requests at a time (None: all).

        max_tokens: one length for all, or one for each prompt; each answer is exactly that long.
        rank: the data-parallel rank that answers all of them; None lets the server choose for each.
        Raises ServerError when the server refuses, dies, or stays silent for `timeout_s`.
        """
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        pool = ThreadPoolExecutor(max_workers=concurrency or len(prompts))
        try:
            ask = [
                pool.submit(self._complete_one, prompt, length, timeout_s, rank)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            return [answer.result() for answer in ask]
        finally:
            # No waiting: a Ctrl-C must not hang on requests that a stuck server never answers.
            pool.shutdown(wait=False, cancel_futures=True)

    def get(self, path: str) -> Any:
        """The JSON that the server has there; raises ServerError."""
        try:
            return self._checked(*self._request("GET", path, None, 10.0))
        except OSError as error:
            raise self._error(f"gave no answer within 10 s ({error})") from error

    def stop(self) -> None:
        """End every process of the server and remove the shared memory they leave; idempotent.

        Ctrl-C waits until this is done: usually a second, at most about half a minute. Raises
        ServerError if a process stays.
        """
        if self._process is None:
            return
        with _interrupts_deferred():
            reaper = threading.Thread(target=self._process.wait, daemon=True)
            reaper.start()
            # While it starts, a server does not act on SIGTERM; there is nothing to wait for.
            stay = end_session(
                self._session, grace_s=15.0 if self._ready else 2.0, also_held=self._held
            )
            reaper.join(timeout=5.0)
            self._watchdog.communicate(timeout=30.0)
            self._process = None
            _RUNNING.remove(self)
        if stay:
            raise ServerError(f"processes {stay} of the {self.name} server survived SIGKILL")

    def _start(self, variables: Mapping[str, str], log: IO[bytes]) -> ServerProcess:
        """Start `command` as the leader of a session of its own."""
        return subprocess.Popen(
            self.command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _complete_one(
        self, prompt: Sequence[int], length: int, timeout_s: float, rank: int | None
    ) -> Completion:
        started = time.monotonic()
        token_ids = self._ask(prompt, length, timeout_s, rank)
        if len(token_ids) != length:
            raise self._error(f"answered {len(token_ids)} tokens instead of {length}")
        return Completion(token_ids, time.monotonic() - started)

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        try:
            status, text = self._request("POST", path, json.dumps(body), timeout_s, headers)
        except OSError as error:
            self._check_alive("while it was answering")
            raise self._error(f"gave no answer within {timeout_s:.0f} s ({error})") from error
        return self._checked(status, text)

    def _checked(self, status: int, text: str) -> Any:
        if status != http.client.OK:
            raise self._error(f"answered HTTP {status}: {text[:500]}")
        return json.loads(text)

    def _healthy(self) -> bool:
        try:
            return self._request("GET", "/health", None, 5.0)[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def _request(
        self,
        method: str,
        path: str,
        body: str | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode("utf-8", errors="replace")
        finally:
            connection.close()

    def _check_alive(self, when: str) -> None:
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise self._error(f"ended with exit code {code} {when}")

    def _error(self, what: str) -> ServerError:
        return ServerError(
            f"the {self.name} server {what}.\n"
            f"The last lines of {self.log_path}:\n{self.log_tail()}\n"
            f"Its first error:\n{self._first_error()}"
        )

    def _first_error(self) -> str:
        """The line that started it: servers report a worker's death again from every parent."""
        for line in self.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
            if _EXCEPTION_LINE.search(line):
                return line
        return "(no exception in the log)"


class VllmServer(Server):
    """One vLLM OpenAI server.

    model: checkpoint folder. arguments: vLLM flags after ours. environment: variables over ours.
    with_plugins: False starts vLLM with no plugin at all, ours included.
    """

    #: What Python runs.
    program = API_SERVER

    def __init__(
        self,
        *,
        model: Path,
        name: str,
        folder: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        with_plugins: bool = True,
    ) -> None:
        variables = {**CPU_ENVIRONMENT, **(environment or {})}
        if not with_plugins:
            variables["VLLM_PLUGINS"] = ""
        command = (
            *(self.interpreter(), *self.program),
            *("--model", str(model), "--served-model-name", SERVED_NAME),
            *CPU_ARGUMENTS,
            *arguments,
        )
        super().__init__(command, name=name, folder=folder, environment=variables)

    @staticmethod
    def interpreter() -> str:
        """Python of the environment that has vLLM."""
        return sys.executable

    def logprobs(self, sequence: Sequence[int], *, timeout_s: float = 120.0) -> list[float]:
        """Log-probability of every token but the first, after those before it."""
        reply = self._post(
            "/v1/completions", _request_body(sequence, 1) | {"prompt_logprobs": 0}, timeout_s
        )
        given = reply["choices"][0]["prompt_logprobs"]
        pairs = zip(sequence[1:], given[1:], strict=True)
        return [found[str(token)]["logprob"] for token, found in pairs]

    def _ask(
        self, prompt: Sequence[int], length: int, timeout_s: float, rank: int | None
    ) -> list[int]:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = _request_body(prompt, length)
        reply = self._post("/v1/completions", body, timeout_s, headers)
        token_ids: list[int] = reply["choices"][0]["token_ids"]
        return token_ids


class Vllm33Server(VllmServer):
    """The same in the environment of `make vllm33-env`, with the model runner of GPUs."""

    def __init__(self, *, environment: Mapping[str, str] | None = None, **given: Any) -> None:
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
        super().__init__(environment={**runner, **(environment or {})}, **given)

    @staticmethod
    def interpreter() -> str:
        """Python of that environment. Raises ServerError if there is none."""
        path = Path(os.environ.get(VLLM33_VARIABLE) or ".venv-vllm33/bin/python").absolute()
        if not path.is_file():
            raise ServerError(
                f"no environment of vLLM 0.33: {path} does not exist. Run `make vllm33-env`, or "
                f"set {VLLM33_VARIABLE} to the interpreter of an environment that has it."
            )
        return str(path)


def _request_body(prompt: Sequence[int], length: int) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": length,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }


def stop_all() -> None:
    """Stop every server of this process; for the end of a program, however it was reached."""
    while _RUNNING:
        _RUNNING[-1].stop()


atexit.register(stop_all)


def free_port() -> int:
    """A free port below those that Linux gives to outgoing connections.

    SGLang binds its port after its workers have connected to each other, and one of their
    connections may have got a port of the range meanwhile.
    """
    first_outgoing = int(OUTGOING_PORTS.read_text("utf-8").split()[0])
    last = max(first_outgoing - FURTHER_PORTS, FIRST_PORT + 1000)
    for port in random.sample(range(FIRST_PORT, last), k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"none of 100 ports from {FIRST_PORT} to {last} is free")


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the block ends; a no-op off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(n, lambda number, _frame: arrived.append(number)) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for arrival in dict.fromkeys(arrived):
            signal.raise_signal(arrival)
