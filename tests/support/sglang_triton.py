"""Triton for SGLang's environment, which has none: that of the environment of vLLM 0.33.

Triton has 700 MB; `make test` makes both environments, and one copy does for both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.demo.server import ServerError, Vllm33Server

_NAMES = ("TRITON_INTERPRET", "PYTHONPATH")


def variables(folder: Path) -> dict[str, str]:
    """Variables of processes of SGLang's environment in which Triton interprets its kernels.

    Skips the test if there is no Triton.

    folder: where a link to Triton goes, and nothing else.
    """
    try:
        python = Path(Vllm33Server.interpreter())
    except ServerError as error:
        pytest.skip(f"Triton comes from another environment: {error}")
    packages = next(python.parents[1].glob("lib/python3*/site-packages"))
    for found in packages.glob("triton*"):
        (folder / found.name).symlink_to(found)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}


def chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of `variables` that a process gets; none if it has no Triton."""
    if "TRITON_INTERPRET" not in environment:
        return {}
    return {name: environment[name] for name in _NAMES}
