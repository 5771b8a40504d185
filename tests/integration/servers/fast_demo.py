"""The demo with servers that are forks of templates, where how they start is not the point.

    python -m tests.integration.servers.fast_demo FORKED SOCKET SOCKET SESSIONS <demo's arguments>

FORKED: "all" servers, or the "one-rank" server alone, while vLLM starts ours in its own way.
SOCKET: the numbers of both templates' sockets, inherited. SESSIONS: the file to which each forked
server's session is appended; such a server is a child of its template, not of this process.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO
from unittest import mock

from moe_nvlink_plugin.integration.demo import demo
from moe_nvlink_plugin.integration.demo.server import ServerProcess, VllmServer
from tests.integration.servers import servers
from tests.integration.servers.servers import ForkedServer, Template, Templates


def main(which: str, with_ours: str, without: str, sessions: str, *arguments: str) -> int:
    class NotedServer(ForkedServer):
        def _start(self, variables: Mapping[str, str], log: IO[bytes]) -> ServerProcess:
            if which not in ("all", self.name):
                return VllmServer._start(self, variables, log)
            forked = super()._start(variables, log)
            with Path(sessions).open("a") as file:
                file.write(f"{forked.pid}\n")
            return forked

    given = Templates(*(Template(socket.socket(fileno=int(one))) for one in (with_ours, without)))
    noted = demo.FRAMEWORKS["vllm"]._replace(server=NotedServer)
    with (
        mock.patch.object(servers, "templates", return_value=given),
        mock.patch.dict(demo.FRAMEWORKS, vllm=noted),
    ):
        return demo.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
