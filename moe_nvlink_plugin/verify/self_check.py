"""A few rounds against the reference, before a server loads weights."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import Any

import torch

from moe_nvlink_plugin.choices import TODAY, Choices
from moe_nvlink_plugin.config import SELF_CHECKS, AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError, SelfCheckError
from moe_nvlink_plugin.exchange import tuning
from moe_nvlink_plugin.groups import all_or_none, as_group, refuse_differences
from moe_nvlink_plugin.plugins import find_recipe

from .cases import RECIPES, with_formats
from .checks import Check, Rounds
from .plan import Geometry, has_async_release, plan

#: Most tokens of a rank: in a quick check, and in a full one.
_QUICK_TOKENS, _FULL_TOKENS = 16, 64
#: Choices with builds of the kernels of their own that hold for any number of tokens.
_OF_KERNELS = ("pdl", "tma_sms", "async_release")

logger = logging.getLogger(__name__)


def self_check(
    config: AllToAllConfig,
    group: Any,
    device: torch.device | str = "cpu",
    *,
    level: str = "quick",
) -> None:
    """Run rounds of a layer's geometry and hold every bit to the reference. Collective.

    It is not capturable, and leaves nothing behind: its exchanges have their own memory, for at
    most 64 tokens of a rank, and give it back. It takes far less than 2 s on CPU ranks, and on GPUs
    as long as the kernels compile that the layer needs too.

    Args:
        config: of the layer: ranks, experts, top_k, hidden_size, dtype, and the formats that
            travel. Equal on every rank, apart from what may differ by rank.
        group: as `MoeAllToAll.create` takes it.
        device: where the tensors live.
        level: "quick": rounds of the kernels that the layer launches, with its formats. "full":
            all checks of `moe-nvlink verify`. "off": none.

    Raises:
        SelfCheckError: on every rank: a rank failed, or found other bits than the reference.
        ConfigError: `level` is none of these; or the file of `tuning` is torn, or belongs to
            another machine or layer.
        DisagreementError: on every rank: levels or formats differ.
        PeerError: a rank did not come.
    """
    start, here = time.monotonic(), torch.device(device)
    ranks = as_group(group, config.first_timeout_s or _timeout_s(config))
    # Ranks with different checks would wait for one another, "off" on one of them included.
    names = ("recipe", "combine", "small_tokens")
    given = {"level": level} | {name: str(getattr(config, name)) for name in names}
    given["tuning"] = "given" if config.tuning else "none"
    given["a GPU with st.async.release"] = str(has_async_release(here))
    refuse_differences(ranks.all_gather_object(given))
    if level not in SELF_CHECKS:
        raise ConfigError(f"level={level!r} is not one of {', '.join(SELF_CHECKS)}")
    if level == "off":
        return
    if config.tuning:
        config = all_or_none(ranks, "reading choices", functools.partial(_resolved, config, here))
    # May differ by rank, but the checks may not.
    config = dataclasses.replace(config, leave_sms=any(ranks.all_gather_object(config.leave_sms)))
    checks = _checks(config, here, is_full=level == "full")
    for check in checks:
        # A framework that loads a model has set another default device, or another default type,
        # on which no check depends.
        with torch.device("cpu"):
            wrong = check.run(ranks, here)
        told = [f"rank {rank}: {error}" for rank, error in enumerate(wrong) if error]
        if told:
            raise SelfCheckError(f"the self-check ({check.name}) failed: {'; '.join(told)}")
    logger.info(
        "Self-check of rank %d: %d rounds as the reference has them, in %.1f s with what compiled",
        ranks.rank,
        sum(check.rounds for check in checks),
        time.monotonic() - start,
    )


def _checks(config: AllToAllConfig, device: torch.device, *, is_full: bool) -> list[Check]:
    """Return the checks of a layer's geometry. Local; equal on every rank."""
    most = _FULL_TOKENS if is_full else _QUICK_TOKENS
    geometry = Geometry(
        # Places without a rank are absent from the checks.
        ep_size=config.ep_size if config.places is None else len(config.places),
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        max_tokens=min(most, config.max_tokens_per_rank),
        dtype=config.dtype,
        timeout_s=_timeout_s(config),
        choices=_of_file(config.choices),
    )
    if is_full:
        return plan(geometry, device, quick=False)
    return _quick(geometry, config, device)


def _resolved(config: AllToAllConfig, device: torch.device) -> AllToAllConfig:
    """Return the configuration with the choices of its file."""
    return tuning.resolved(config, find_recipe(config).name, device)


def _of_file(choices: Choices) -> Choices:
    """Return what holds for a layer of another size: the choices of other kernels."""
    return dataclasses.replace(TODAY, **{name: getattr(choices, name) for name in _OF_KERNELS})


def _timeout_s(config: AllToAllConfig) -> float:
    """Return how long a rank waits for another one in a round, in seconds."""
    assert config.timeout_s is not None  # AllToAllConfig has filled it in
    return config.timeout_s


def _quick(geometry: Geometry, config: AllToAllConfig, device: torch.device) -> list[Check]:
    """Return rounds of the kernels that the layer launches, with its formats."""
    checks: list[Check] = []
    combine = config.combine or "bf16"
    formats: list[tuple[str | None, str]] = [(None, combine)]
    if config.recipe in RECIPES:
        formats.append((config.recipe, combine))
    # Unless they or a file are told, GPUs use the kernels for small batches, and CPU ranks do not.
    asked = config.small_tokens
    uses_small = device.type == "cuda" if asked is None else asked > 0
    uses_small = uses_small or (asked is None and bool(config.tuning))
    for recipe, back in formats:
        for small_tokens in (0, geometry.max_tokens) if uses_small else (0,):
            kind = "small batches" if small_tokens else "large batches"
            case = with_formats(geometry.case(kind, geometry.max_tokens, device), recipe, back)
            case = dataclasses.replace(
                case,
                unit_data_bytes=config.unit_data_bytes,
                max_sms=config.max_sms,
                leave_sms=config.leave_sms,
            )
            rounds = Rounds(name=case.name, case=case, rounds=3, small_tokens=small_tokens)
            if case.hidden_size != geometry.hidden_size:
                continue
            checks.append(rounds)
            if config.leave_sms and not small_tokens:
                name = f"{case.name}, beside the caller"
                checks.append(dataclasses.replace(rounds, name=name, beside=True))
    return checks
