"""What a user can choose beside the backend: the fields of `Options`, and some variables.

The variables ``MOE_NVLINK_DISPATCH``, ``MOE_NVLINK_COMBINE`` and ``MOE_NVLINK_MTP_LM_HEAD_TP`` are
the defaults of three fields. Where a user writes the fields depends on the framework: `Wording`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_nvlink_plugin import env
from moe_nvlink_plugin.config import COMBINE_FORMATS, SELF_CHECKS
from moe_nvlink_plugin.errors import ConfigError

AUTO = "auto"
UNQUANTISED = "bf16"
FUSED, FRAMEWORK = "fused", "framework"


class Wording(NamedTuple):
    """How users of a framework write what our messages tell them to write.

    Attributes:
        framework: name of the framework.
        flag: what chooses our backend.
        options: where our options stand.
        unquantised: what sets `Options.dispatch` to `UNQUANTISED`.
        own_backend: the framework's own exchange, which Options.fallback may name; "" if none.
    """

    framework: str
    flag: str
    options: str
    unquantised: str
    own_backend: str = ""

    @property
    def quantise_on_arrival(self) -> str:
        """What a user can do if a format cannot travel."""
        return (
            f"To serve it all the same, let rows travel unquantised and {self.framework} quantise "
            f"those that arrived: {self.unquantised}, or MOE_NVLINK_DISPATCH={UNQUANTISED}."
        )


class Options(NamedTuple):
    """One worker's choices; equal on all ranks.

    Attributes:
        dispatch: format that travels.
            "auto": the format that the model's experts take.
            "bf16": activations as they are, in the model's own type. If experts take quantised
            rows, the framework quantises the rows on arrival.
            Any other: name of a recipe. If experts take floats, this rank dequantises the rows on
            arrival.
        combine: as AllToAllConfig.combine.
        quantise: who quantises before an "auto" dispatch. "fused": our kernel, if its bits equal
            those of the framework's quantiser. "framework": the framework's quantiser.
        dispatch_global_scale: scale of a recipe named in `dispatch` that needs one; without it,
            nvfp4 has 1.0.
        mtp_lm_head_tp_size: number of consecutive data-parallel ranks that share the LM head of an
            MTP draft; 1: none share. "auto": decided step by step by the rule of lm_head/cost.py.
        overlap_shared_experts: whether combine runs beside the shared experts, and not after them.
        fallback: name of the framework's own exchange, with which the ranks go on if no transport
            connects them, or if the self-check fails; None: they stop.
        self_check: rounds that the ranks hold to the reference when the server starts: "quick",
            "full" or "off".
        tuning: as AllToAllConfig.tuning; None takes MOE_NVLINK_TUNING.
        audit_every: N: in every N-th dispatch one row of each rank is compared with what its
            sender sent (``audit``); 0: none is.
        ordered_slots: as AllToAllConfig.ordered_slots.
    """

    dispatch: str = AUTO
    combine: str = UNQUANTISED
    quantise: str = FUSED
    dispatch_global_scale: float | None = None
    mtp_lm_head_tp_size: int | str = 1
    overlap_shared_experts: bool = False
    fallback: str | None = None
    self_check: str = SELF_CHECKS[0]
    tuning: str | None = None
    audit_every: int = 0
    ordered_slots: bool = False

    @property
    def shares_lm_head(self) -> bool:
        """Whether the user wants ranks to share the draft's LM head."""
        return self.mtp_lm_head_tp_size != 1


#: Name of the option. If only its variable is set and there is no draft, that is no error.
MTP_LM_HEAD = "mtp_lm_head_tp_size"
#: Largest `audit_every`: some days of a fast server.
MOST_ROUNDS = 10**9

_ALLOWED = {
    "combine": COMBINE_FORMATS,
    "quantise": (FUSED, FRAMEWORK),
    "self_check": SELF_CHECKS,
}


def read(given: Any, wording: Wording) -> Options:
    """Return the choices of a user. Local.

    Args:
        given: what the user wrote where the framework has our options; None or {}: nothing.
        wording: words of the framework's messages.

    Raises:
        ConfigError: it is no mapping, or has an unknown key or a value that is not allowed; the
            message lists what is allowed. The adapter checks names of recipes with the model.
    """
    given, where = given or {}, wording.options
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is a {type(given).__name__}, it must be a dict of {_keys()}")
    unknown = sorted(set(given) - set(Options._fields), key=str)
    if unknown:
        raise ConfigError(f"{where} has no {', '.join(map(repr, unknown))}; its keys are {_keys()}")
    defaults: dict[str, Any] = {"dispatch": env.dispatch() or AUTO, "combine": env.combine()}
    if MTP_LM_HEAD not in given:
        defaults[MTP_LM_HEAD] = env.mtp_lm_head_tp()
    chosen = Options(**{**defaults, **given})
    for field, allowed in _ALLOWED.items():
        value = getattr(chosen, field)
        if value not in allowed:
            source = _source(field, given, where)
            raise ConfigError(f"{source}={value!r} is not one of {', '.join(allowed)}")
    if not isinstance(chosen.dispatch, str):
        raise ConfigError(
            f"{where}: dispatch={chosen.dispatch!r} is not {AUTO}, {UNQUANTISED} or a recipe's name"
        )
    for field in ("overlap_shared_experts", "ordered_slots"):
        if not isinstance(value := getattr(chosen, field), bool):
            raise ConfigError(f"{where}: {field}={value!r} is not true or false")
    tuning: object = chosen.tuning
    if not isinstance(tuning, str | None):
        raise ConfigError(f"{where}: tuning={tuning!r} is no path of a file of moe-nvlink tune")
    _check_global_scale(chosen, where)
    _check_mtp_lm_head(chosen, where)
    _check_fallback(chosen, wording)
    _check_audit(chosen, where)
    return chosen


def _keys() -> str:
    return ", ".join(Options._fields)


def _source(field: str, given: Mapping[str, Any], where: str) -> str:
    """Return where the user wrote a value, in the user's words."""
    return f"{where}: {field}" if field in given else f"MOE_NVLINK_{field.upper()}"


def _check_global_scale(chosen: Options, where: str) -> None:
    scale = chosen.dispatch_global_scale
    if scale is None:
        return
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not number or not 2.0**-126 <= scale <= 2.0**126:
        raise ConfigError(
            f"{where}: dispatch_global_scale={scale!r} must be a number from 2^-126 to 2^126"
        )
    if chosen.dispatch in (AUTO, UNQUANTISED):
        raise ConfigError(
            f"{where}: dispatch_global_scale is for a recipe named in dispatch, which is "
            f"{chosen.dispatch!r}; remove it (the model brings its own scales)"
        )


def _check_mtp_lm_head(chosen: Options, where: str) -> None:
    size = chosen.mtp_lm_head_tp_size
    number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    if not number and size != AUTO:
        raise ConfigError(
            f"{where}: {MTP_LM_HEAD}={size!r} is no number of ranks from 1 up, nor {AUTO!r}"
        )


def _check_fallback(chosen: Options, wording: Wording) -> None:
    name, where = chosen.fallback, wording.options
    if name is None:
        return
    if not wording.own_backend:
        raise ConfigError(
            f"{where}: fallback={name!r} is not available with {wording.framework}; remove it"
        )
    if name != wording.own_backend:
        raise ConfigError(f"{where}: fallback={name!r} is not {wording.own_backend}")


def _check_audit(chosen: Options, where: str) -> None:
    every: object = chosen.audit_every  # of any type: a user wrote it
    number = isinstance(every, int) and not isinstance(every, bool)
    if not number or not 0 <= chosen.audit_every <= MOST_ROUNDS:
        raise ConfigError(
            f"{where}: audit_every={every!r} is no number of rounds from 1 to {MOST_ROUNDS}, nor "
            "0, which compares no row"
        )
