"""What ranks of the tests of vLLM's experts do, as processes, device by name.

tests/gpu/test_vllm_experts.py runs this on "cuda", a test beside test_vllm_triton_experts.py on
"cpu" with Triton's interpreter, so that it has been run before a GPU is there. vLLM is imported in
the ranks alone: that takes ten seconds, and the ranks of one group run all schemes one after
another. A scheme that fails says so and leaves the others their turn.
"""

from __future__ import annotations

import datetime
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_nvlink_plugin.groups import StoreGroup
from tests.support import emulated, vllm_files
from tests.support.vllm_sizes import CAPACITY, HIDDEN_SIZE, TOP_K

ROUNDS = 4


class Outcome(NamedTuple):
    """What became of one scheme on one rank.

    Attributes:
        errors: of each round that had tokens: the largest difference from one rank's layer, over
            the largest number of that layer.
        recipe: by which rows travelled; None: as they were.
        is_in_place: whether the experts wrote into the combine region.
        seconds: of all rounds, Triton's compilations included.
        trace: of the exception that ended it, or nothing.
    """

    errors: tuple[float, ...] = ()
    recipe: str | None = None
    is_in_place: bool = False
    seconds: float = 0.0
    trace: str = ""


def versions() -> str:
    """What a failure is to be read with."""
    import triton
    import vllm

    names = (f"Python {platform.python_version()}", f"torch {torch.__version__}")
    return ", ".join((*names, f"Triton {triton.__version__}", f"vLLM {vllm.__version__}"))


def run_schemes(
    ep_rank: int,
    ep_size: int,
    device: str,
    meeting: str,
    schemes: Sequence[str],
    replayed: Sequence[str],
) -> dict[str, Outcome]:
    """Rounds of every scheme of `schemes`, then replays of those of `replayed` ("replayed NAME").

    meeting: a file that is not there yet. torch.distributed is not initialised: after a failure the
    ranks may stand at different steps of a process group, but never of a scheme's own group.
    """
    if device != "cpu":
        torch.cuda.set_device(0)
        vllm_files.complete()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from tests.integration.vllm.moe import vllm_triton

    assert current_platform.device_type == device, f"{current_platform} for {device}"
    vllm_triton.stand_in(setattr, device)
    library: Any = dist  # torch ships no types for what is used here
    store = library.FileStore(meeting, ep_size)
    store.set_timeout(datetime.timedelta(seconds=40))
    named = [(scheme, scheme, _rounds) for scheme in schemes]
    named += [(f"replayed {scheme}", scheme, _replays) for scheme in replayed]
    outcomes = {}
    with set_current_vllm_config(VllmConfig()):
        for name, scheme, run in named:
            group = StoreGroup(store, name, ep_rank, ep_size)
            outcomes[name] = _outcome(group, scheme, device, run)
    return outcomes


def _outcome(
    group: Any, scheme: str, device: str, run: Callable[[Any, str, str, int], list[float]]
) -> Outcome:
    from tests.integration.vllm.moe.vllm_layer import way_of
    from tests.integration.vllm.moe.vllm_triton import TritonLayer, spoil_workspace

    began = time.monotonic()
    try:
        spoil_workspace(device)
        layer = TritonLayer(group, scheme, device)
        errors = run(layer, scheme, device, group.rank)
        recipe, is_in_place = way_of(layer)
        layer.close()
    except Exception:  # each scheme has a test of its own, which shows this
        trace = f"{versions()}\n{traceback.format_exc()}"
        print(f"rank {group.rank}, {scheme}: {trace}", file=sys.stderr, flush=True)
        return Outcome(seconds=time.monotonic() - began, trace=trace)
    return Outcome(tuple(errors), recipe, is_in_place, time.monotonic() - began)


def _work(number: int, rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a round of this rank: from no token to the most."""
    from tests.integration.vllm.moe.vllm_layer import work_of
    from tests.integration.vllm.moe.vllm_triton import DTYPES

    num_tokens = (number * (rank + 2) + 3 * rank) % (CAPACITY + 1)
    hidden, ids, weights = work_of(num_tokens, 100 * number + rank)
    return hidden.to(device, DTYPES[device]), ids.to(device), weights.to(device)


def error_of(scheme: str, got: torch.Tensor, work: Any) -> list[float]:
    """The largest difference over the largest number; nothing if there are no tokens."""
    from tests.integration.vllm.moe.vllm_triton import on_one_rank

    if got.shape != work[0].shape:
        return [float("inf")]
    if not len(work[0]):
        return []
    expected = on_one_rank(scheme, *work).float()
    error = (got.float() - expected).abs().nan_to_num(nan=float("inf")).max()
    # A reference that is nothing or NaN gives NaN, which is not small.
    return [float(error / expected.abs().max())]


def _rounds(layer: Any, scheme: str, device: str, rank: int) -> list[float]:
    errors = []
    for number in range(ROUNDS):
        work = _work(number, rank, device)
        errors += error_of(scheme, layer(*work), work)
        layer.poison()
    return errors


def _replays(layer: Any, scheme: str, device: str, rank: int) -> list[float]:
    """The layer's call in a CUDA graph, replayed with other tokens at the same addresses."""
    from tests.integration.vllm.moe.vllm_triton import DTYPES

    hidden = torch.zeros((CAPACITY, HIDDEN_SIZE), dtype=DTYPES[device], device=device)
    ids = torch.full((CAPACITY, TOP_K), -1, dtype=torch.int32, device=device)
    weights = torch.zeros((CAPACITY, TOP_K), device=device)
    output = torch.empty_like(hidden)

    def run() -> None:
        output.copy_(layer(hidden, ids, weights))

    run()  # Triton compiles, and a static scale is read
    layer.poison()
    replay = run if device == "cpu" else emulated.captured(run)
    errors = []
    for number in range(1, ROUNDS + 1):
        work = _work(number, rank, device)
        ids.fill_(-1)
        for buffer, given in zip((hidden, ids, weights), work, strict=True):
            buffer[: len(given)].copy_(given)
        output.fill_(float("nan"))
        replay()
        count = len(work[0])
        errors += error_of(scheme, output[:count], work)
        if count < CAPACITY:  # rows of padding have no expert, and NaN is not small either
            errors.append(float((output[count:] != 0).any()))
        layer.poison()
    return errors
