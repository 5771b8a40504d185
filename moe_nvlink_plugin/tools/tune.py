"""moe-nvlink tune: which choices of launches are faster on this machine than today's.

ranks.py starts the ranks, or finds that a launcher has.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_nvlink_plugin import driver, env
from moe_nvlink_plugin.choices import TODAY, Choice, Choices, Value, table
from moe_nvlink_plugin.config import ACTIVATION_DTYPES, AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange import tuning
from moe_nvlink_plugin.exchange.all_to_all import MoeAllToAll
from moe_nvlink_plugin.exchange.sizes import gets_by_tma
from moe_nvlink_plugin.exchange.tuning import Layer, Machine, Tuning
from moe_nvlink_plugin.groups import Group, all_or_none, refuse_differences
from moe_nvlink_plugin.verify import search, turns
from moe_nvlink_plugin.verify.search import Found, Ratios, Step, Verdict
from moe_nvlink_plugin.verify.trial import Trials

from . import ranks

#: A process ends if it still runs so many seconds after its budget.
_BEYOND_S = 1200.0

#: Loads: tokens of a rank, with the most that the layer takes.
_TOKENS = (1, 8, 32, 128, 512, 1024, 4096)

#: Parts of the budget: until the search ends, and for the result against today's values.
_SEARCH, _CONFIRM = 0.8, 0.15

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ACTIVATION_DTYPES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asks for; equal on every rank, `output` apart.

    Attributes:
        device: "cpu" or "cuda"; "" for GPUs if torch sees any.
        ranks: to start if no launcher has; 0: one for each GPU, 2 on a CPU or one GPU.
        num_experts, top_k, hidden_size, max_tokens: of the layer; 0: as the device suggests.
        dtype: of activations, a key of DTYPES.
        recipe: what travels; "" for the unquantised recipe.
        combine: as AllToAllConfig.combine.
        budget_s: seconds that the search takes.
        timeout_s: seconds that a rank waits for another one.
        output: file to write or to add the layer to.
    """

    device: str = ""
    ranks: int = 0
    num_experts: int = 0
    top_k: int = 8
    hidden_size: int = 0
    max_tokens: int = 0
    dtype: str = "bfloat16"
    recipe: str = ""
    combine: str = "bf16"
    budget_s: float = 180.0
    timeout_s: float = 20.0
    output: Path = Path("moe-nvlink-tuning.json")


def main(options: Options) -> int:
    """Tune and print. Collective among the ranks of a launcher.

    Returns:
        0, with a gain or without; 1 if a rank failed.

    Raises:
        ConfigError: an option cannot be.
    """
    options = dataclasses.replace(options, device=ranks.device_kind(options.device))
    limit_s = options.budget_s + _BEYOND_S
    wanted = ranks.Wanted("tune", options.device, options.ranks, options.timeout_s, limit_s)
    return ranks.run(wanted, functools.partial(_tuned, options))


def space(config: AllToAllConfig, device: torch.device) -> list[Choice]:
    """Return the choices that have an effect here, with the candidates that differ. Local.

    What a variable has set is no choice, as no file would change it.
    """
    on_gpus = device.type == "cuda"
    threads_asked = env.asked_host_threads() is not None
    fixed = {
        "small_tokens": config.small_tokens is not None,
        "small_combine_tokens": config.small_tokens is not None or config.combine != "bf16",
        "host_threads": threads_asked,
        "pdl": not env.pdl(),
        "async_release": on_gpus and not driver.has_async_release(device.index or 0),
        "tma_sms": not gets_by_tma(dataclasses.replace(config, tuning=TODAY)),
    }
    most_threads = (os.cpu_count() or 1) // config.ep_size
    found = []
    for one in table():
        if fixed.get(one.name) or device.type not in one.devices:
            continue
        candidates = one.candidates
        if one.name in ("small_tokens", "small_combine_tokens"):
            # On CPU ranks today's value is 0.
            candidates = _up_to(candidates, config.max_tokens_per_rank, () if on_gpus else (0,))
        elif one.name == "host_threads":  # today's value is 1
            candidates = tuple(n for n in candidates if n is None or 1 < n <= most_threads)
        if len(candidates) > 1:
            found.append(one._replace(candidates=candidates))
    return found


def _up_to(candidates: tuple[Value, ...], most: int, without: tuple[int, ...]) -> tuple[Value, ...]:
    """Return the limits that differ if no call has more than so many tokens."""
    limits = [limit for limit in candidates if limit is not None and limit not in without]
    kept = [limit for limit in limits if limit < most]
    return (None, *kept, *limits[len(kept) : len(kept) + 1])


def _tuned(options: Options, group: Group, device: torch.device) -> int:
    """Search, print, and write the file on rank 0. Collective."""
    here = Machine.here(device, group.size)
    own = dataclasses.replace(options, output=Path())
    told = {name: str(value) for name, value in dataclasses.asdict(own).items()}
    facts = {name: str(value) for name, value in here._asdict().items() if name != "nvlink"}
    refuse_differences(group.all_gather_object(told | facts))
    config = _config(options, group, device)
    layer = Layer.of(config, MoeAllToAll.check(config).name)
    all_or_none(group, "reading --output", lambda: _check_output(options, here, group.rank))
    say = ranks.voice(group.rank)
    found = _search(config, device, options.budget_s, say)
    if not found.gains:
        say(_no_gain(found, options))
        return 0
    content = Tuning(here, {layer: found.choices})
    write = functools.partial(_write, options.output, content, group.rank)
    all_or_none(group, "writing --output", write)
    assert found.total is not None
    say(
        f"tune: {_part(found.total, _loads(config))}; {options.output} says so for this layer. "
        f"Start every rank with MOE_NVLINK_TUNING={options.output}"
    )
    return 0


def _config(options: Options, group: Group, device: torch.device) -> AllToAllConfig:
    """Return the user's layer; what is missing is DeepSeek-V3's on GPUs, a smaller on CPUs."""
    on_gpus = device.type == "cuda"
    layer = Layer(
        num_experts=options.num_experts or (256 if on_gpus else 64),
        top_k=options.top_k,
        hidden_size=options.hidden_size or (7168 if on_gpus else 1024),
        max_tokens_per_rank=options.max_tokens or (1024 if on_gpus else 64),
        dtype=options.dtype,
        recipe=options.recipe,
        combine=options.combine,
    )
    return _config_of(layer, group, options.timeout_s)


def _config_of(layer: Layer, group: Group, timeout_s: float) -> AllToAllConfig:
    """Return a layer's configuration with today's choices.

    Raises:
        ConfigError: there is no such layer.
    """
    if layer.dtype not in DTYPES:
        raise ConfigError(f"dtype {layer.dtype!r} is none of {', '.join(DTYPES)}")
    given: dict[str, Any] = layer._asdict()
    given |= {"dtype": DTYPES[layer.dtype], "recipe": layer.recipe or None, "tuning": ""}
    return AllToAllConfig(ep_size=group.size, ep_rank=group.rank, timeout_s=timeout_s, **given)


def _check_output(options: Options, here: Machine, rank: int) -> None:
    """Check on rank 0 that a layer can be added to --output, before the search takes minutes.

    Raises:
        ConfigError: it is another machine's, or no such file, or cannot be written.
    """
    if rank:
        return
    path = str(options.output)
    if not options.output.exists():
        folder = options.output.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            reason = "cannot be written to" if folder.is_dir() else "is no directory"
            raise ConfigError(f"--output {path}: {folder} {reason}; name a file elsewhere")
        return
    if options.output.is_dir():  # as "" is, of a shell's unset variable
        raise ConfigError(f"--output {path} is a directory; name a file")
    try:
        found = tuning.load(path)
        tuning.check_machine(path, found.machine, here)
    except ConfigError as error:
        raise ConfigError(
            f"--output {path} is there and cannot be added to; remove it, or name another file: "
            f"{error}"
        ) from error


def _write(path: Path, content: Tuning, rank: int) -> None:
    if rank:
        return
    try:
        tuning.add(str(path), content)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error


def _search(
    config: AllToAllConfig, device: torch.device, budget_s: float, say: Callable[[str], None]
) -> Found:
    """Search within the budget. Collective."""
    group = dist.group.WORLD
    assert group is not None
    choices, loads = space(config, device), _loads(config)
    told = ", ".join(map(str, loads))
    say(f"tune: {len(choices)} choices at {told} tokens a rank, about {budget_s:g} s")
    trials = Trials(group, device, config, loads)
    # Each winner is measured twice. What the first layer compiles does not count.
    planned = sum(len(one.candidates) - 1 for one in choices) + len(choices) // 2
    clock = _Clock(group, trials, _SEARCH * budget_s, planned)

    def confirm(first: Choices, second: Choices) -> Ratios | None:
        trials.seconds = _CONFIRM * budget_s
        return trials(first, second)

    say(f"  {'choice':24}{'today':>10}{'tuned':>10}   time")
    try:
        return search.search(
            choices,
            clock.compare,
            goes_on=lambda: clock.left() > 0,
            confirm=confirm,
            report=lambda step: say(_as_text(step)),
        )
    finally:
        trials.close()


class _Clock:
    """Divides the time of a search among its comparisons. Collective."""

    def __init__(
        self, group: dist.ProcessGroup, trials: Trials, budget_s: float, planned: int
    ) -> None:
        self._group, self._trials, self._planned = group, trials, planned
        self._end = time.monotonic() + budget_s
        self._beside = 0.0  # of the last comparison: what it took beside the time that it was given

    def left(self) -> float:
        """Return the seconds that are left, equal on all ranks."""
        left = self._end - time.monotonic()
        return turns.agreed(self._group, dist.ReduceOp.MIN, left)[0]

    def compare(self, first: Choices, second: Choices) -> Ratios | None:
        """Compare as Trials does, in this comparison's share of the time."""
        given = max(self.left() / max(self._planned, 4) - self._beside, 0.0)
        self._trials.seconds = given
        start, self._planned = time.monotonic(), self._planned - 1
        ratios = self._trials(first, second)
        beside = max(time.monotonic() - start - given, 0.0)
        self._beside = turns.agreed(self._group, dist.ReduceOp.MAX, beside)[0]
        return ratios


def _loads(config: AllToAllConfig) -> list[int]:
    most = config.max_tokens_per_rank
    return [*(count for count in _TOKENS if count < most), most]


def _as_text(step: Step) -> str:
    today = getattr(TODAY, step.name)
    gain = f"{step.score:.2f} of before" if step.value != step.before else "-"
    unfit = f", cannot run here: {', '.join(map(str, step.unfit))}" if step.unfit else ""
    return f"  {step.name:24}{today!s:>10}{step.value!s:>10}   {gain}{unfit}"


def _part(total: Verdict, loads: Sequence[int]) -> str:
    """Return the time with tuned values as a part of today's, all loads together and each."""
    each = ", ".join(
        f"{median:.2f} at {count}" for count, median in zip(loads, total.medians, strict=True)
    )
    return f"tuned values take {total.score:.2f} of today's time ({each} tokens a rank)"


def _no_gain(found: Found, options: Options) -> str:
    more = (
        ""
        if found.is_complete
        else f"; {options.budget_s:g} s did not suffice for all candidates: a larger --budget does"
    )
    return f"tune: no gain: nothing is clearly faster here than today's values{more}; wrote no file"


def compared(
    path: str, group: Group, device: torch.device, *, seconds: float, timeout_s: float
) -> list[str]:
    """Return for each layer of a file how long its values take beside today's. Collective."""
    found = all_or_none(group, "reading the tuning file", lambda: _checked(path, group, device))
    everyones = group.all_gather_object({"the file's layers": str(list(found.layers.items()))})
    refuse_differences(everyones)
    lines, world = [], dist.group.WORLD
    assert world is not None
    for layer, choices in found.layers.items():
        config = _config_of(layer, group, timeout_s)
        loads = _loads(config)
        trials = Trials(world, device, config, loads)
        trials.seconds = seconds / len(found.layers)
        try:
            ratios = trials(TODAY, choices)
        finally:
            trials.close()
        told = "cannot run here" if ratios is None else _part(search.judge(ratios), loads)
        lines.append(f"{path}, {tuning.arguments(layer)}: {told}")
    return lines


def _checked(path: str, group: Group, device: torch.device) -> Tuning:
    found = tuning.load(path)
    tuning.check_machine(path, found.machine, Machine.here(device, group.size))
    return found
