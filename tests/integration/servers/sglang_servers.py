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
from tests.integration.servers.servers import EpServer, Forked, Template
from tests.support import sglang_triton

_FAST_SGLANG = str(Path(__file__).parent / "fast_sglang.py")


@functools.cache
def template() -> Template:
    """The one of this run. Which plugins a server loads is decided in its fork."""
    return _started()


@functools.cache
def template_with_triton(variables: frozenset[tuple[str, str]]) -> Template:
    """The one whose servers compute as on GPUs, in Triton's interpreter (`sglang_triton`)."""
    return _started(**dict(variables))


def _started(**variables: str) -> Template:
    program = (str(interpreter()), _FAST_SGLANG)
    return Template.started({**CPU_ENVIRONMENT, **variables}, program)


class ForkedSglang(SglangServer):
    """A server that starts without an import."""

    def _start(self, variables: Mapping[str, str], log: IO[bytes]) -> Forked:
        triton = frozenset(sglang_triton.chosen(variables).items())
        forked_from = template_with_triton(triton) if triton else template()
        return forked_from.fork(self.command[1:], variables, log)


class EpSglang(EpServer):
    """An SGLang server with our backend; what it is asked and how it is judged is as for vLLM's."""

    forked = ForkedSglang
    flags = ("--moe-a2a-backend=moe_nvlink",)
    #: Long enough for a slow machine between two MoE layers.
    timeout_s = 60
