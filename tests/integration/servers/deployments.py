"""The shapes in which people start vLLM's data-parallel ranks: one command, or one a node."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from typing_extensions import Self

from moe_nvlink_plugin.integration.demo.server import ServerError, free_port
from tests.integration.servers.servers import EpServer, ForkedServer, Requests

_HERE = "127.0.0.1"


class ServeCommand(ForkedServer):
    """A server that `vllm serve` starts."""

    program = (str(Path(__file__).parent / "serve.py"), "serve")


class Node(NamedTuple):
    """One command of a deployment.

    Attributes:
        arguments: its own; the others are equal on all nodes.
        answers: whether it has an API server.
    """

    arguments: Sequence[str]
    answers: bool = True


class Shape(NamedTuple):
    """A deployment of some nodes, all on this host.

    Attributes:
        ep_size: number of ranks.
        nodes: the commands.
        by_rank: whether a client can name the rank that answers.
        on_one_node: whether the ranks need no address at which nodes meet.
    """

    ep_size: int
    nodes: Sequence[Node]
    by_rank: bool = False
    on_one_node: bool = False


def _headless(*arguments: str) -> Node:
    return Node(("--headless", *arguments), answers=False)


def _hybrid(first_rank: int) -> Node:
    return Node(
        (
            "--data-parallel-hybrid-lb",
            "--data-parallel-size-local=2",
            f"--data-parallel-start-rank={first_rank}",
        )
    )


SHAPES: Mapping[str, Shape] = {
    "internal balancer, two API servers, a headless node": Shape(
        2,
        [
            Node(("--data-parallel-size-local=1", "--api-server-count=2")),
            _headless("--data-parallel-size-local=1", "--data-parallel-start-rank=1"),
        ],
        by_rank=True,
    ),
    "two API servers": Shape(2, [Node(("--api-server-count=2",))], by_rank=True, on_one_node=True),
    "two nodes by number": Shape(
        2,
        [
            Node(("--nnodes=2", "--node-rank=0", f"--master-addr={_HERE}")),
            _headless("--nnodes=2", "--node-rank=1", f"--master-addr={_HERE}"),
        ],
        by_rank=True,
    ),
    "external balancer": Shape(2, [Node((f"--data-parallel-rank={rank}",)) for rank in range(2)]),
    "external balancer of three": Shape(
        3, [Node((f"--data-parallel-rank={rank}",)) for rank in range(3)]
    ),
    "hybrid balancer": Shape(4, [_hybrid(0), _hybrid(2)]),
}


class Deployment:
    """The running nodes of a shape; a context manager.

    Args:
        requests: what they are asked.
        folder: where logs and counters go.
        name: name of the shape.
        arguments: of every node.
        environment: of every node.
    """

    def __init__(
        self,
        requests: Requests,
        folder: Path,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.shape = SHAPES[name]
        stats = folder / f"stats {name}"
        meeting = [f"--data-parallel-size={self.shape.ep_size}"]
        if not self.shape.on_one_node:
            meeting += [f"--data-parallel-address={_HERE}"]
            meeting += [f"--data-parallel-rpc-port={free_port()}"]
        self._all: list[EpServer] = []
        for number, node in enumerate(self.shape.nodes):
            server = EpServer(
                requests,
                folder,
                f"{name} {number}",
                *(*meeting, *node.arguments, *arguments),
                environment={**(environment or {}), "MOE_NVLINK_STATS_DIR": str(stats)},
                server=ServeCommand,
            )
            server.stats_folder = stats
            self._all.append(server)
        pairs = zip(self._all, self.shape.nodes, strict=True)
        self.answering = [server for server, node in pairs if node.answers]

    def differing(self, numbers: range, concurrency: int) -> list[int]:
        """The requests whose tokens are not the one-rank server's; all nodes answer at once."""
        count = len(self.answering)

        def ask(number: int) -> list[int]:
            share = range(numbers.start + number, numbers.stop, count)
            return self.answering[number].differing(share, concurrency)

        with ThreadPoolExecutor(count) as pool:
            return sorted(functools.reduce(operator.iadd, pool.map(ask, range(count)), []))

    def __enter__(self) -> Self:
        """Waits until all nodes that answer are ready."""
        try:
            for server in self.answering:
                server.server.wait_until_ready()
        except ServerError as error:
            self.stop()
            tails = "".join(f"\n== {s.server.name}\n{s.server.log_tail()}" for s in self._all)
            raise ServerError(f"{error}\nThe nodes' last lines:{tails}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends all nodes."""
        with contextlib.ExitStack() as stack:
            for server in reversed(self._all):
                stack.callback(server.server.stop)
