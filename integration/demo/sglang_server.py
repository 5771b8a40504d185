"""Run an SGLang server as a child process, in the environment of `make sglang-env`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .server import Server, ServerError

#: The interpreter of another environment than `.venv-sglang` in the current folder.
PYTHON_VARIABLE = "MOE_NVLINK_SGLANG_PYTHON"
#: More ranks than any server here has. SGLang binds ranks to cores with a kernel library that is
#: not here, but wants to know one core for each rank.
MAX_RANKS = 8
CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * MAX_RANKS),
    # /health says that the server answers, and generates nothing for it.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
#: float32, because two rounded partial sums of bf16 are not one sum, and greedy tokens show it.
CPU_ARGUMENTS: Sequence[str] = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--dtype=float32",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--context-length=512",
    "--max-total-tokens=8192",
    "--max-running-requests=16",
)
#: What Python runs to start a server.
LAUNCH: Sequence[str] = ("-m", "sglang.launch_server")


def interpreter() -> Path:
    """Python of the environment that has SGLang. Raises ServerError if there is none."""
    path = Path(os.environ.get(PYTHON_VARIABLE, ".venv-sglang/bin/python")).absolute()
    if not path.exists():
        raise ServerError(
            f"no environment of SGLang: {path} does not exist. Run `make sglang-env`, or set "
            f"{PYTHON_VARIABLE} to the interpreter of an environment that has SGLang."
        )
    return path


class SglangServer(Server):
    """One SGLang server.

    model: checkpoint folder. arguments: SGLang's flags after ours. environment: variables over
    ours. with_plugins: False starts SGLang with no plugin at all, ours included.
    """

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
            variables["SGLANG_PLUGINS"] = "none"
        command = (
            *(str(interpreter()), *LAUNCH),
            *("--model-path", str(model)),
            *CPU_ARGUMENTS,
            *arguments,
        )
        super().__init__(command, name=name, folder=folder, environment=variables)

    def logprobs(self, sequence: Sequence[int], *, timeout_s: float = 120.0) -> list[float]:
        """Log-probability of every token but the first, after those before it."""
        body = _request_body(sequence, 1) | {"return_logprob": True, "logprob_start_len": 0}
        given = self._post("/generate", body, timeout_s)["meta_info"]["input_token_logprobs"]
        return [logprob for logprob, _token, _text in given[1:]]

    def _ask(
        self, prompt: Sequence[int], length: int, timeout_s: float, rank: int | None
    ) -> list[int]:
        body = _request_body(prompt, length)
        if rank is not None:
            body["routed_dp_rank"] = rank
        token_ids: list[int] = self._post("/generate", body, timeout_s)["output_ids"]
        return token_ids


def _request_body(prompt: Sequence[int], length: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}
