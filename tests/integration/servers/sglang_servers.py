"""SGLang servers of the end-to-end tests: forks of a template, as `servers` has them of vLLM."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from moe_nvlink_plugin.integration.demo.sglang_server import (
    CPU_ENVIRONMENT,
    SglangServer,
    interpreter,
)
from tests.integration.servers.servers import EpServer, Forked, Requests, Template

_FAST_SGLANG = str(Path(__file__).parent / "fast_sglang.py")
#: Long enough for a slow machine between two MoE layers.
TIMEOUT_S = 60


@functools.cache
def template() -> Template:
    """The one of this run. Which plugins a server loads is decided in its fork."""
    return Template.started(CPU_ENVIRONMENT, (str(interpreter()), _FAST_SGLANG))


class ForkedSglang(SglangServer):
    """A server that starts without an import."""

    def _start(self, variables: Mapping[str, str], log: IO[bytes]) -> Forked:
        return template().fork(self.command[1:], variables, log)


class EpSglang(EpServer):
    """An SGLang server with our backend; what it is asked and how it is judged is as for vLLM's."""

    def __init__(self, requests: Requests, folder: Path, name: str, *arguments: str) -> None:
        self.requests = requests
        self.stats_folder = folder / f"stats {name}"
        self.server = ForkedSglang(
            model=requests.checkpoint,
            name=name,
            folder=folder,
            arguments=["--moe-a2a-backend=moe_nvlink", *arguments],
            environment={
                "MOE_NVLINK_STATS_DIR": str(self.stats_folder),
                "MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S),
            },
        )
