"""What a launch may choose freely: one table of choices, with today's values and candidates.

No choice changes a result, but for the bits of a NaN; each changes how long a verb takes.
`moe-nvlink tune` measures the candidates on a machine, and a file of what it found replaces today's
values (exchange/tuning.py). The module imports no torch, because every compiling process of
`moe-nvlink precompile` would pay for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeAlias

from moe_nvlink_plugin.errors import ConfigError

#: Value of a choice; None: the rule that the choice's text names decides.
Value: TypeAlias = int | float | bool | None

CPU, GPU = ("cpu",), ("cuda",)


class Choice(NamedTuple):
    """One choice.

    Attributes:
        name: field of Choices.
        today: value without a file.
        candidates: all values that it may have, today's among them.
        devices: types of the devices on which it has an effect.
        text: what it chooses, and how today's value is known.
    """

    name: str
    today: Value
    candidates: tuple[Value, ...]
    devices: tuple[str, ...]
    text: str

    @property
    def is_tuned(self) -> bool:
        """Whether there is anything to choose from."""
        return len(self.candidates) > 1


def _choice(
    today: Value, candidates: tuple[Value, ...], devices: tuple[str, ...], text: str
) -> Any:
    metadata = {"candidates": candidates or (today,), "devices": devices, "text": text}
    return dataclasses.field(default=today, metadata=metadata)


_LIMITS = (None, 0, 1, 2, 4, 8, 16, 24, 32, 48, 64)
_WEIGHTS = (0.5, 0.7, 1.0, 1.4, 2.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A value for each choice; equal on all ranks of an exchange. `table` has their meanings.

    Raises:
        ConfigError: a value is none of the choice's candidates; names it and them.
    """

    small_tokens: int | None = _choice(
        None,
        _LIMITS,
        CPU + GPU,
        "most tokens of a rank that dispatch sends by the kernel for small batches, if "
        "AllToAllConfig.small_tokens and its variable do not say. None: on GPUs the estimate of "
        "exchange/small_batches.py (measured on an H200 with near memory), on CPU ranks 0",
    )
    small_combine_tokens: int | None = _choice(
        None,
        _LIMITS,
        CPU + GPU,
        "the same for combine: up to so many tokens the experts' ranks push the rows, above it the "
        "tokens' ranks pull them. None: as above",
    )
    host_threads: int | None = _choice(
        None,
        (None, 1, 2, 4, 8),
        CPU,
        "threads of a CPU rank, if AllToAllConfig.num_threads and its variable do not say. None: 1",
    )
    pdl: bool = _choice(
        True,
        (True, False),
        GPU,
        "whether a kernel may start while the one before it in its stream ends; MOE_NVLINK_PDL=0 "
        "and several channels forbid it (an estimate). Each value has its builds of the kernels",
    )
    async_release: bool = _choice(
        False,
        (False, True),
        GPU,
        "whether ranks signal each other by st.async.release, which does not hold its thread until "
        "all before it has arrived (modelled). Only sm_100 and sm_103 have such a store; elsewhere "
        "it changes nothing. Each value has its builds of the kernels",
    )
    dispatch_threads: int = _choice(
        256,
        (128, 256, 512),
        GPU,
        "threads of a CTA of dispatch if several share an SM: while one waits at a barrier, "
        "another copies (an estimate)",
    )
    wide_ctas_per_sm: int = _choice(
        1,
        (0, 1, 2),
        GPU,
        "tokens for each SM up to which a CTA of dispatch has a thread for each vector of its row, "
        "so that the whole row is in flight at once (an estimate)",
    )
    marked_bytes_per_cta: int = _choice(
        64 * 1024,
        (16 * 1024, 64 * 1024, 256 * 1024),
        GPU,
        "bytes of empty slots for which one more CTA of dispatch is worth launching (an estimate)",
    )
    marking_ctas: int = _choice(
        32,
        (8, 16, 32),
        GPU,
        "most CTAs that are launched to mark empty slots; kMaxFinishers of config.h bounds it "
        "(an estimate)",
    )
    laid_out_weight: int = _choice(
        4,
        (),
        GPU,
        "what a byte of a scale in another layout costs beside a byte of an empty slot: it is "
        "loaded and stored in words of 4 bytes (an estimate)",
    )
    combine_threads: int = _choice(
        256,
        (128, 256, 512),
        GPU,
        "most threads of a CTA of combine; a row has as many parts as it has vectors for so many "
        "threads (an estimate)",
    )
    most_splits: int | None = _choice(
        None,
        (None, 1, 2, 4),
        GPU,
        "most CTAs that share a row of combine. None: as many as the row has parts, while all fit "
        "(an estimate)",
    )
    full_link_sms: int = _choice(
        96,
        (32, 48, 64, 96, 128, 256),
        GPU,
        "SMs whose CTAs fill the links in a combine of many tokens. More CTAs would only take "
        "registers while they wait for peers, and kernels of other streams (shared experts) would "
        "find fewer. Modelled, 8 ranks, 2048 tokens: on GB200 288.4 us with all SMs, 289.7 with "
        "96, 296.0 with 64; on H200 561.5 with all, 560.0 with 48. Dispatch has no such limit: its "
        "CTAs end when they have put their rows, and at most marking_ctas of them wait",
    )
    tma_sms: int = _choice(
        32,
        (0, 32),
        GPU,
        "max_sms up to which combine gets rows without a format by TMA, and SMs that verbs beside "
        "their caller fill with leave_sms: what an SM has in flight is then bound by its shared "
        "memory (modelled). Each way has its builds of the kernels",
    )
    many_tokens_per_cta: int = _choice(
        4,
        (2, 4, 8),
        GPU,
        "tokens for each CTA of combine from which on full_link_sms holds: a token more or less "
        "for some of the CTAs then costs little (an estimate)",
    )
    small_threads: int = _choice(
        256,
        (128, 256),
        GPU,
        "threads of a CTA of the kernels for small batches (tried on an H200)",
    )
    sent_weight: float = _choice(
        1.0,
        _WEIGHTS,
        GPU,
        "factor on what a part costs a CTA that sends it in a small dispatch: more gives senders "
        "more of the CTAs, and receivers fewer (tried on an H200)",
    )
    summed_weight: float = _choice(
        1.0,
        _WEIGHTS,
        GPU,
        "factor on what the sum of a part costs a CTA in a small combine: more gives receivers "
        "more of the CTAs, and senders fewer (tried on an H200)",
    )
    most_small_tokens: int = _choice(
        32, (), GPU, "the most that small_tokens is by the estimate (tried on an H200)"
    )
    small_dispatch_parts: float = _choice(
        7.0,
        (),
        GPU,
        "received parts for each CTA with which dispatch for any size is as fast as that for small "
        "batches; the estimate of small_tokens follows from it (measured on an H200)",
    )
    small_combine_parts: float = _choice(
        2.5, (), GPU, "the same of combine, in sent parts (measured on an H200)"
    )
    small_ctas_per_sm: int = _choice(
        2, (), GPU, "CTAs of the kernels for small batches on an SM, as the estimate counts them"
    )
    head_threads: int = _choice(
        256, (), GPU, "most threads of a CTA of a shared LM head's argmax (an estimate)"
    )
    logits_bytes_per_cta: int = _choice(
        16 * 1024,
        (),
        GPU,
        "bytes of a row's logits for which one more CTA is worth launching: a few vectors for each "
        "thread (an estimate)",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), field.metadata["candidates"]
            if not any(value == one and type(value) is type(one) for one in allowed):
                raise ConfigError(
                    f"{field.name}={value!r} is none of {', '.join(map(str, allowed))}"
                )

    def but(self, name: str, value: Value) -> Choices:
        """Return these choices with another value for one of them."""
        other: dict[str, Any] = {name: value}
        return dataclasses.replace(self, **other)

    def changed(self) -> dict[str, Value]:
        """Return name -> value of each choice that differs from today's."""
        return {one.name: getattr(self, one.name) for one in table() if self._differs(one)}

    def _differs(self, one: Choice) -> bool:
        value: Value = getattr(self, one.name)
        return value != one.today

    def __str__(self) -> str:
        """Return what differs from today's values."""
        return ", ".join(f"{name}={value}" for name, value in self.changed().items()) or "today's"


#: What holds without a file.
TODAY = Choices()


def table() -> tuple[Choice, ...]:
    """Return every choice, in the order in which they are tuned."""
    return tuple(
        Choice(field.name, getattr(TODAY, field.name), **field.metadata)
        for field in dataclasses.fields(Choices)
    )
