"""Send streaming requests to a vLLM server and note when each token arrives.

Two ways: requests that arrive at given times, as users' do; or a wave, all of which the scheduler
sees in the same iteration, in order. Of a wave the schedule does not depend on any clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from moe_nvlink_plugin.integration.demo.server import SERVED_NAME


class Request(NamedTuple):
    """One request.

    after_s: when it is sent, seconds after the first; a wave ignores it. more: fields over those
    of `body`. hangs_up_after: number of tokens after which the client goes; None: it stays.
    """

    prompt: list[int]
    max_tokens: int
    after_s: float = 0.0
    more: Mapping[str, Any] = {}
    hangs_up_after: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """What /v1/completions is sent."""
        return {
            "model": SERVED_NAME,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "stream": True,
            **self.more,
        }


class Answer(NamedTuple):
    """Tokens, and when the request was sent and each token arrived: seconds of one clock."""

    token_ids: list[int]
    sent_s: float
    arrived_s: list[float]

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.arrived_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in zip(self.arrived_s, self.arrived_s[1:], strict=False)]


class StreamError(RuntimeError):
    """The server refused a request, or ended it without tokens."""


def arriving(port: int, requests: Sequence[Request], timeout_s: float) -> list[Answer]:
    """Send each request at its time; return answers in the order of the requests.

    Raises:
        StreamError: the server refused one.
        TimeoutError: after `timeout_s`.
    """

    async def run() -> list[Answer]:
        async with _session(port) as session:
            begin = time.monotonic()

            async def ask(number: int, request: Request) -> Answer:
                await asyncio.sleep(begin + request.after_s - time.monotonic())
                sent_s = time.monotonic()
                return await _read(await _send(session, number, request), request, sent_s)

            return await asyncio.gather(*map(ask, range(len(requests)), requests))

    return asyncio.run(asyncio.wait_for(run(), timeout_s))


def wave(port: int, requests: Sequence[Request], timeout_s: float) -> list[Answer]:
    """Send all requests while the scheduler pauses, one after the other, then let it go on.

    Needs VLLM_SERVER_DEV_MODE=1 in the server. `sent_s` of each answer is the end of the pause.

    Raises:
        StreamError, TimeoutError: as `arriving`.
    """

    async def run() -> list[Answer]:
        async with _session(port) as session:
            await _post(session, "/pause?mode=keep")
            # The server answers with headers after it has taken the request.
            replies = [await _send(session, *numbered) for numbered in enumerate(requests)]
            sent_s, pairs = time.monotonic(), zip(replies, requests, strict=True)
            reading = asyncio.gather(*(_read(*pair, sent_s) for pair in pairs))
            await _post(session, "/resume")  # which may come back after the first tokens
            return await reading

    return asyncio.run(asyncio.wait_for(run(), timeout_s))


def _session(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def _post(session: aiohttp.ClientSession, path: str) -> None:
    async with session.post(path) as reply:
        reply.raise_for_status()


async def _send(
    session: aiohttp.ClientSession, number: int, request: Request
) -> aiohttp.ClientResponse:
    headers = {"X-Request-Id": f"numbered{number}"}
    reply = await session.post("/v1/completions", json=request.body, headers=headers)
    if reply.status != 200:
        raise StreamError(f"HTTP {reply.status}: {(await reply.text())[:500]}")
    return reply


async def _read(reply: aiohttp.ClientResponse, request: Request, sent_s: float) -> Answer:
    """Read to the end. Tokens that come in one event have arrived at the same time."""
    tokens: list[int] = []
    arrived_s: list[float] = []
    leaves = request.hangs_up_after
    if leaves == 0:
        reply.close()
        return Answer([], sent_s, [])
    async for line in reply.content:
        text = line.decode().removeprefix("data: ").strip()
        if not text.startswith("{"):
            continue
        event = json.loads(text)
        if "error" in event:
            raise StreamError(text[:500])
        now = time.monotonic()
        for choice in event["choices"]:
            tokens += choice["token_ids"] or []
        arrived_s += [now] * (len(tokens) - len(arrived_s))
        if leaves is not None and leaves <= len(tokens):
            reply.close()
            break
    if not tokens:
        raise StreamError("an answer ended without a token")
    return Answer(tokens, sent_s, arrived_s)
