"""What the demonstrations do with a server: wait until it is up, and send it requests."""

from __future__ import annotations

import random
import shutil
import sys
import time
from typing import NamedTuple

from . import report
from .server import Server

#: SGLang's five processes import for a minute on two idle cores, and other work may share them.
READY_S = 600.0


class Requests(NamedTuple):
    """Prompts and the length of each answer, all ragged."""

    prompts: list[list[int]]
    max_tokens: list[int]


def make_requests(count: int, vocab_size: int, seed: int = 0) -> Requests:
    """`count` random requests: prompts of 1..24 tokens, answers of 16..48."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(vocab_size), k=draw.randint(1, 24)) for _ in range(count)]
    return Requests(prompts, [draw.randint(16, 48) for _ in prompts])


class ProgressLine:
    """Shows that a wait goes on: one line rewritten on a terminal, a line every 10 s elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stdout.isatty()
        self._shown_s = -1e9

    def __call__(self, elapsed_s: float, log_line: str) -> None:
        """Show the seconds and what the server said last."""
        text = f"  {self._what}: {elapsed_s:3.0f} s  {message(log_line)}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            sys.stdout.write(f"\r\033[K{text[: columns - 1]}")
            sys.stdout.flush()
        elif elapsed_s - self._shown_s >= 10:
            self._shown_s = elapsed_s
            print(text, flush=True)

    def close(self, text: str) -> None:
        """Replace the line by its result."""
        print(f"\r\033[K  {text}" if self._terminal else f"  {text}", flush=True)


def message(log_line: str) -> str:
    """A line of a server's log without process, time and source line."""
    head, found, message = log_line.partition("] ")
    return message.strip() if found and "[" in head else log_line.strip()


def wait_for(server: Server) -> None:
    """Wait until the server answers, and show that time passes."""
    progress = ProgressLine(f"starting the {server.name} server")
    ready_s = server.wait_until_ready(timeout_s=READY_S, progress=progress)
    progress.close(f"the {server.name} server is ready after {ready_s:.0f} s")


def ask(server: Server, requests: Requests) -> report.Answers:
    """Send every request at once."""
    # The first request of a server pays for what later ones do not; keep it out of the timing.
    server.complete([[1]], max_tokens=2)
    started = time.monotonic()
    completions = server.complete(requests.prompts, max_tokens=requests.max_tokens)
    seconds = time.monotonic() - started
    answers = report.Answers([completion.token_ids for completion in completions], seconds)
    rate = f"{answers.tokens_per_s:.0f} tokens/s"
    print(f"  {server.name} answered {len(completions)} concurrent requests, {rate}", flush=True)
    return answers
