"""AllToAllConfig: geometry and options of one MoE layer's exchange, validated once."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import env
from .choices import TODAY, Choices
from .errors import ConfigError

#: Limits. tests/core/jit/test_header.py compares the kernels' own constants with these.
MAX_RANKS = 128
MAX_TOP_K = 32
MAX_CALLER_PAYLOADS = 8
MAX_CHANNELS = 64
#: Words of counts that a rank sends with each dispatch. At 128 ranks their staging takes 43 MiB.
MAX_EXPERT_COUNTS = 2**16

#: The most that small_tokens may be.
MAX_SMALL_TOKENS = env.MAX_SMALL_TOKENS
#: Bytes of memory that the staging of small batches may take on a rank, for each channel.
MAX_STAGING_BYTES = 128 * 2**20

#: Formats in which partial rows travel back. "bf16" means unquantised rows of config.dtype.
COMBINE_FORMATS = ("bf16", "fp8_block", "nvfp4", "fp8_tensor")

#: The least scale of combine's format fp8_tensor, and the reciprocal of the largest.
LEAST_COMBINE_SCALE = 2.0**-100

#: What received rows have in the place of their tokens' expert ids; or an integer, the id of absent
#: experts.
RECEIVED_IDS = ("global", "elsewhere", "local")

#: How the scales of received rows may lie -> bytes that a scale then has; None: any number.
SCALES_LAYOUTS = {"linear": None, "interleaved": 1, "column_major": 4}

#: How thorough self_check is.
SELF_CHECKS = ("quick", "full", "off")

#: Activation types that combine can reduce and write.
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Fields of every configuration that take their value from the environment if they are None.
#: fill_timeouts handles first_timeout_s.
HOST_DEFAULTS: dict[str, Callable[[], object]] = {
    "timeout_s": env.timeout_s,
    "num_threads": env.host_threads,
    "max_sms": env.max_sms,
}


def check_kind(config: object, kind: type[Any]) -> None:
    """Check that a configuration is one of its kind. Local.

    Raises:
        ConfigError: it is another object.
    """
    if isinstance(config, kind):
        return
    name = kind.__name__
    values = "**config" if isinstance(config, dict) else "..."
    raise ConfigError(
        f"config={reprlib.repr(config)} is a {type(config).__name__}, not of class {name}; pass "
        f"{name}({values})"
    )


def fill_defaults(config: object, **defaults: Callable[[], object]) -> None:
    """Replace None by the field's default in each named field of a frozen configuration. Local."""
    for name, default in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, default())


def fill_timeouts(config: Any) -> None:
    """Set first_timeout_s if the caller gave no timeout. Local; call it before fill_defaults.

    If the caller gives timeout_s alone, that limit applies to every wait. first_timeout_s then
    stays None: if the caller later replaces timeout_s, the new limit applies to every wait too.
    """
    if config.first_timeout_s is None and config.timeout_s is None:
        object.__setattr__(config, "first_timeout_s", env.first_timeout_s())


def local_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Return the range `[first, end)` of experts that `ep_rank` owns. Local.

    Ranks own contiguous ranges. If ep_size does not divide num_experts, each of the first
    `num_experts % ep_size` ranks owns one expert more than each of the others.

    Raises:
        ConfigError: the group of ep_size ranks has no rank ep_rank.
    """
    if not 0 <= ep_rank < ep_size:
        raise ConfigError(
            f"ep_rank={ep_rank} is not from 0 to {ep_size - 1} (ep_size={ep_size}); the arguments "
            "are num_experts, ep_size, ep_rank"
        )
    # Not divmod: torch.compile cannot trace it, and experts call this function in their layer.
    fewest, num_larger = num_experts // ep_size, num_experts % ep_size
    first = ep_rank * fewest + min(ep_rank, num_larger)
    return first, first + fewest + (1 if ep_rank < num_larger else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllToAllConfig:
    """Geometry and options of one layer's dispatch and combine.

    All ranks must have equal values, except `ep_rank`, `num_threads`, `max_sms` and `leave_sms`.
    `MoeAllToAll.create` checks this.

    Attributes:
        ep_size: number of ranks in the expert-parallel group, 1..128.
        ep_rank: number of this rank, 0..ep_size-1.
        num_experts: number of routed experts of the layer, over all ranks.
        top_k: number of expert ids per token, 1..32.
        hidden_size: number of elements in an activation row.
        max_tokens_per_rank: capacity: the most tokens that one rank dispatches in one call.
        dtype: activation type; combine reduces in fp32 and writes this type, or that of the
            rows (combine_dtypes).
        recipe: name of the format that dispatch sends; None: the unquantised recipe of `dtype`.
            "bytes_N": rows of N bytes that the caller has made, 1 to 2^24.
        combine: format in which the experts' rows travel back. "bf16": unquantised, in `dtype`
            whichever type it is. "fp8_block", "nvfp4": the rank that computed the rows quantises
            them in blocks, and the rank that receives them adds them in fp32; combine_formats.py
            bounds the error. "fp8_tensor": the same with combine_scale for all elements; magnitudes
            above 448 * combine_scale saturate. None takes MOE_NVLINK_COMBINE.
        combine_scale: what a code of 1 stands for with combine="fp8_tensor", 2^-100 to 2^100; a
            model's calibration knows it, as amax / 448. With 1 the rows are cast.
        timeout_s: seconds to wait for the other ranks. None takes MOE_NVLINK_TIMEOUT_S.
        first_timeout_s: seconds to wait for the other ranks until the second complete round,
            because a rank may still compile, load or tune its experts. None takes timeout_s if the
            caller gives it, else MOE_NVLINK_FIRST_TIMEOUT_S.
        num_channels: number of independent sets of control and buffers, one per micro-batch in
            flight. On a GPU, if it is above 1, each channel's kernels take a share of the SMs, one
            CTA per SM, and run without programmatic dependent launch, so that kernels of
            several streams can wait side by side. Layers that share a workspace and run side by
            side need the same number. Start the ranks with CUDA_MODULE_LOADING=EAGER: by default
            the driver loads each kernel, third-party kernels too, at its first launch, and may
            first wait until the GPU is idle. If a kernel of one channel waits there for a rank
            whose host waits likewise in another channel, neither continues.
        num_threads: host threads per rank. None takes MOE_NVLINK_HOST_THREADS. May differ by rank.
        max_sms: number of SMs. A launch has at most as many CTAs as this number of SMs holds; the
            GPU may place them on any SMs. None takes MOE_NVLINK_MAX_SMS; if that is unset, all SMs.
            Up to 32 (Choices.tma_sms), combine gets rows without a format by TMA, with the bits of
            any other combine; its kernels have `tma=yes` for `moe-nvlink precompile`. So verbs that
            run beside the experts leave them the other SMs. May differ by rank. Several channels,
            or several ranks on one GPU, lower the limit to their share.
        leave_sms: whether verbs that run beside their caller leave SMs to it. On a GPU
            dispatch_async and combine_async then fill at most 32 (Choices.tma_sms; 0: as many as
            other verbs), and combine_async gets rows by TMA, as with such a max_sms. Small batches,
            a combine with a format, and rows that are no whole vectors of 16 bytes launch as other
            verbs do. By the table in benchmarks/README.md ("Fewer SMs", modelled) 32 SMs fill the
            links. The layer's kernels have `tma=yes` for `moe-nvlink precompile`. May differ by
            rank.
        small_tokens: most tokens of a rank for which dispatch uses the kernel for small batches,
            0..64; 0: none. It counts against the bound of a call, so all ranks of a round use the
            same kernels. Their rows carry their own flags and take staging memory. `create` lowers
            the number to max_tokens_per_rank, and until the staging takes at most 128 MiB; with a
            quantising recipe it is 0 if the payloads of a token take more than 16 KiB, and with any
            recipe if the bytes of a payload's row are no multiple of 4; if a number was asked for,
            one log line says so. None takes MOE_NVLINK_SMALL_TOKENS; if that is unset, as many
            tokens as these kernels gain for, but at most 32, on GPUs (32 at 8 ranks with all SMs of
            an H200, hidden_size 7168, top_k 8), and 0 on CPU ranks, where a fence costs nothing.
        small_combine_tokens: the same for combine, whose rows are the experts': `create` lowers it
            to what small_tokens is before the payloads are looked at. None: as small_tokens, if
            that or its variable is set; else as many as it gains for on GPUs (13 there), and 0 on
            CPU ranks. It is 0 with a format of combine, which has no such kernel, and if the bytes
            of the experts' widest rows are no multiple of 4.
        unit_data_bytes: bytes of data in each 16 bytes in which rows of small batches travel
            between GPUs, 14 or 12. 14 rests on words of 16 bytes that arrive as a whole, 12 on
            words of 8 (kernels/PROTOCOL.md, P10). Each has its builds of the kernels. Rows of
            fp32 in combine have 12 with either. None takes MOE_NVLINK_UNIT_DATA_BYTES; if that is
            unset, 14.
        combine_dtypes: types beside `dtype` in which combine takes and returns rows, call by call.
            `create` loads their kernels, because the first call may be captured, and makes room
            for rows of hidden_size elements of the widest type.
        extra_payload_bytes: capacities of the extra payloads: the most bytes per token of each, in
            the order dispatch gets them.
        received_ids: what received rows and empty slots have as `topk_ids`. An absent id is an id
            whose expert is on another rank than the receiving one, or an id that is no expert; an
            empty slot has absent ids only. Unless "global", dispatch writes weight 0 beside every
            absent id, so experts can read both tensors as they are.
            "global": all ids of the token; -1 for an id that is no expert, and in empty slots.
            "elsewhere": global ids; an absent id becomes the id of the expert after the receiving
            rank's last, or 0 if there is none after it. That expert is on another rank, unless one
            rank has all experts.
            "local": ids from 0 up to the number of the rank's experts; an absent id becomes -1.
            An integer from -1 to 2^31 - 1: global ids; an absent id becomes this integer.
        scales_layout: how the scales of received rows lie. Scales travel row by row; at the end of
            dispatch the receiving rank copies them into another layout. Over all slots:
            "linear": `[slots, scales per row]`.
            "interleaved": the tiles of 128 rows x 4 scales that CUTLASS reads, for recipes with
            scales of one byte (mxfp8, nvfp4): flat uint8, rows padded to a multiple of 128 and
            scales per row to one of 4. Padding scales of filled rows are 0.
            "column_major": `[slots, scales per row]` with strides `(1, slots)`, for recipes with
            float32 scales.
        num_expert_counts: int32 words of counts per expert that each rank sends to every rank with
            each dispatch (Dispatched.expert_counts), 0..65536; 0: none. If it is num_experts,
            dispatch can count by itself. It costs no launch, and no row waits for counts. With 0
            the kernels are builds that know nothing of counts.
        ordered_slots: whether the rows from a rank lie in the order of its tokens, so that received
            rows lie alike in every run. False: dispatch of large batches gives a row the turn in
            which its CTA came; combine's results are the same bits either way, but experts whose
            bits depend on where a row lies give the same bits again only with True. Small batches
            have that order anyway. What it adds to the time of a dispatch (modelled, H200, bf16):
            at most 2% from 512 tokens on; with 64 tokens 4% at 8 ranks and 10% at 64.
        ranks_may_leave: whether a dispatch may leave out ranks that live (its argument
            active_ranks). False: only ranks that `MoeAllToAll.mask` has left out; a combine of
            large batches then does not say at its end that it has read its rows, which on GPUs
            takes 1.4 to 4.4 us (modelled). Equal for all layers that share a workspace.
        places: if ranks are to come and go: the places that have a rank, in the order of the group
            that `create` gets, which has as many ranks. ep_size is then the number of places,
            ep_rank this rank's, and experts belong to places. Rows for an empty place go nowhere,
            as for a rank that `MoeAllToAll.mask` has left out. None: every place has a rank, and
            the group's rank r is in place r.
        transport: name of the transport. None chooses by device: "host" for cpu, "nvlink" for cuda.
        tuning: path of a file that `moe-nvlink tune` wrote on such a machine for such a layer;
            `create` reads it, and then this is what the file says. Paths may differ by rank, and
            what the files say may not. It holds for what no other field or variable says
            (small_tokens, num_threads). None takes MOE_NVLINK_TUNING; if that is unset, or "",
            there is no file. Or the choices.Choices themselves.

    Raises:
        ConfigError: a field is out of range; names the field, its value and the limit.
    """

    ep_size: int
    ep_rank: int
    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: torch.dtype = torch.bfloat16
    recipe: str | None = None
    combine: str | None = None
    combine_scale: float = 1.0
    timeout_s: float | None = None
    first_timeout_s: float | None = None
    num_channels: int = 1
    num_threads: int | None = None
    max_sms: int | None = None
    leave_sms: bool = False
    small_tokens: int | None = None
    small_combine_tokens: int | None = None
    unit_data_bytes: int | None = None
    combine_dtypes: tuple[torch.dtype, ...] = ()
    extra_payload_bytes: tuple[int, ...] = ()
    received_ids: str | int = "global"
    scales_layout: str = "linear"
    num_expert_counts: int = 0
    ordered_slots: bool = False
    ranks_may_leave: bool = True
    places: tuple[int, ...] | None = None
    transport: str | None = None
    tuning: str | Choices | None = None

    def __post_init__(self) -> None:
        fill_timeouts(self)
        fill_defaults(self, combine=env.combine, small_tokens=env.small_tokens, tuning=env.tuning)
        fill_defaults(self, unit_data_bytes=env.unit_data_bytes)
        fill_defaults(self, **HOST_DEFAULTS | {"num_threads": self._threads})
        for name in ("combine_dtypes", "extra_payload_bytes"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        self._check_ints()
        self._check_rest()
        if self.places is not None:
            places = check_places("places", self.places, self.ep_size, self.ep_rank)
            object.__setattr__(self, "places", places)

    @property
    def choices(self) -> Choices:
        """What launches choose: today's values until `create` has read a file."""
        return self.tuning if isinstance(self.tuning, Choices) else TODAY

    def _threads(self) -> int | None:
        """Return the default of num_threads; None: a file that is not read yet may say."""
        asked = env.asked_host_threads()
        if asked is None and isinstance(self.tuning, str) and self.tuning:
            return None
        return asked or self.choices.host_threads or env.host_threads()

    def _check_ints(self) -> None:
        check_int("ep_size", self.ep_size, 1, MAX_RANKS)
        check_int("ep_rank", self.ep_rank, 0, self.ep_size - 1)
        check_int("num_experts", self.num_experts, 1, 2**24)
        check_int("top_k", self.top_k, 1, MAX_TOP_K)
        check_int("hidden_size", self.hidden_size, 1, 2**20)
        # The kernels number slots in int32 over all source ranks. 2^24 tokens with rows of 1 byte
        # take 16 MiB; no batch is larger.
        most_tokens = min(2**24, (2**31 - 1) // self.ep_size)
        check_int("max_tokens_per_rank", self.max_tokens_per_rank, 1, most_tokens)
        check_int("num_channels", self.num_channels, 1, MAX_CHANNELS)
        if self.num_threads is not None:
            check_int("num_threads", self.num_threads, 1, env.MAX_HOST_THREADS)
        if self.max_sms is not None:
            check_int("max_sms", self.max_sms, 1, env.MAX_SMS)
        for name in ("small_tokens", "small_combine_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_SMALL_TOKENS)
        check_int("num_expert_counts", self.num_expert_counts, 0, MAX_EXPERT_COUNTS)
        for row_bytes in self.extra_payload_bytes:
            check_int("extra_payload_bytes", row_bytes, 1, 2**24)
        data_bytes = self.unit_data_bytes
        if type(data_bytes) is not int or data_bytes not in env.UNIT_DATA_BYTES:
            raise ConfigError(f"unit_data_bytes={data_bytes!r} is neither 14 nor 12")

    def _check_rest(self) -> None:
        if not isinstance(self.tuning, str | Choices):
            raise ConfigError(
                f"tuning={self.tuning!r} is a {type(self.tuning).__name__}; pass the path of a "
                'file of moe-nvlink tune as a str, or "" for none'
            )
        for name in ("recipe", "transport"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; pass its name")
        for name, dtype in (
            ("dtype", self.dtype),
            *(("combine_dtypes", dtype) for dtype in self.combine_dtypes),
        ):
            if dtype not in ACTIVATION_DTYPES:
                raise ConfigError(
                    f"{name}={dtype} cannot be combined; use one of "
                    + ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
                )
        if self.combine not in COMBINE_FORMATS:
            raise ConfigError(
                f"combine={self.combine!r} (MOE_NVLINK_COMBINE) is no format of combine; use one "
                f"of {', '.join(COMBINE_FORMATS)}"
            )
        self._check_combine_scale()
        self._check_received_ids()
        for name in ("ranks_may_leave", "ordered_slots", "leave_sms"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}={value!r} must be True or False")
        if self.scales_layout not in tuple(SCALES_LAYOUTS):
            raise ConfigError(
                f"scales_layout={self.scales_layout!r} is none of {', '.join(SCALES_LAYOUTS)}"
            )
        check_timeouts(self.timeout_s, self.first_timeout_s)

    def _check_combine_scale(self) -> None:
        scale = self.combine_scale
        # bool is an int. The limits keep the reciprocal, and 448 times the scale, normal in fp32.
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not LEAST_COMBINE_SCALE <= scale <= 1 / LEAST_COMBINE_SCALE:
            raise ConfigError(f"combine_scale={scale!r} must be a number from 2^-100 to 2^100")
        if scale != 1 and self.combine != "fp8_tensor":
            raise ConfigError(
                f"combine_scale={scale} with combine={self.combine!r}, which makes its own scales "
                "or none; use combine='fp8_tensor', or leave combine_scale at 1"
            )

    def _check_received_ids(self) -> None:
        ids = self.received_ids
        if isinstance(ids, int) and not isinstance(ids, bool) and -1 <= ids < 2**31:
            return
        if ids not in RECEIVED_IDS:
            raise ConfigError(
                f"received_ids={ids!r} is none of {', '.join(RECEIVED_IDS)} and no integer from -1 "
                "to 2147483647"
            )


def check_places(name: str, places: Any, ep_size: int, ep_rank: int) -> tuple[int, ...]:
    """Return places of an exchange as a tuple, if each is one and this rank's is among them. Local.

    Raises:
        ConfigError: they are not; names the field, its value and the limit.
    """
    listed = _as_tuple(name, places)
    for place in listed:
        check_int(name, place, 0, ep_size - 1)
    if len(set(listed)) != len(listed) or ep_rank not in listed:
        raise ConfigError(
            f"{name}={listed} must have each place once, and ep_rank={ep_rank} among them"
        )
    return listed


def check_timeouts(timeout_s: object, first_timeout_s: object) -> None:
    """Check that both limits are seconds between 0 and 1e6. Local.

    Raises:
        ConfigError: a limit is out of range; names the field, its value and the limit.
    """
    given = {"timeout_s": timeout_s, "first_timeout_s": first_timeout_s}
    if first_timeout_s is None:  # timeout_s applies to every wait
        del given["first_timeout_s"]
    for name, seconds in given.items():
        is_bool = isinstance(seconds, bool)
        if is_bool or not isinstance(seconds, int | float) or not 0 < seconds < env.MAX_SECONDS:
            raise ConfigError(f"{name}={seconds!r} must be between 0 and 1e6 seconds")


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, Iterable) and not isinstance(values, str):
        return tuple(values)
    raise ConfigError(f"{name}={values!r} must be a tuple; for one entry write ({values!r},)")


def check_int(name: str, value: object, lowest: int, highest: int) -> None:
    """Check that `value` is an integer from `lowest` to `highest`. Local.

    Raises:
        ConfigError: it is not; names the field, its value and the limits.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ConfigError(f"{name}={value!r} must be an integer from {lowest} to {highest}")
