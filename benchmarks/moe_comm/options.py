"""Hold the options of bench_moe_comm, and read them from its command line.

They are spelled as in TensorRT-LLM's bench_moe_comm.py, whose command lines run here as they are. A
dash and an underscore in an option's name are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, env
from moe_nvlink_plugin.config import COMBINE_FORMATS
from moe_nvlink_plugin.errors import ConfigError


class Shape(NamedTuple):
    """A layer's geometry: elements of a row, ids per token, routed experts of all ranks."""

    hidden_size: int
    top_k: int
    num_experts: int


#: From the models' published configurations (config.json of the checkpoints).
PROFILES: dict[str, Shape] = {
    "deepseek_v3": Shape(7168, 8, 256),
    "gpt_oss": Shape(2880, 4, 128),
    "qwen3": Shape(4096, 8, 128),  # 235B-A22B
    "kimi_k2": Shape(7168, 8, 384),
}
CUSTOM = "custom"

#: Every backend there is a name for, ours first: ratios are to it.
OURS = "moe_nvlink"
#: Ours as a server runs it that audits rows: in an audited round, and in one between two audits.
AUDITED, AUDIT_WORDS = f"{OURS}_audited", f"{OURS}_audit_words"
BACKENDS = (
    OURS,
    *(AUDITED, AUDIT_WORDS),
    *("gloo_gather", "all_to_all", "gloo_gather_full", "all_to_all_full"),
    *("nccl_gather", "flashinfer"),
)
#: What TensorRT-LLM calls a backend -> ours that takes its place.
ALIASES = {"nvlink_one_sided": OURS}
#: Measured if nothing is asked for. Those that a machine lacks are left out and named.
DEFAULT_BACKENDS = {
    "cpu": (OURS, "gloo_gather", "all_to_all"),
    "rehearsal": (OURS,),
    "cuda": (OURS, "nccl_gather", "all_to_all", "flashinfer"),
}
DEFAULT_BATCHES = {
    "cpu": (1, 16, 128),
    "rehearsal": (1, 8),
    "cuda": (1, 4, 16, 64, 128, 256, 512, 1024, 2048),
}

ROUTERS = ("uniform", "perfect", "spread", "local", "hotspot", "zipf")
RECIPES = (
    "bf16",
    "fp16",
    "fp32",
    "fp8_block",
    "fp8_block_pow2",
    "fp8_token",
    "fp8_tensor",
    "mxfp8",
    "nvfp4",
)
#: TensorRT-LLM's name for a model's quantisation -> what dispatch sends; None: dtype as it is.
QUANTS = {
    "NO_QUANT": None,
    "FP8": "fp8_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_token",
    "FP8_BLOCK_SCALES": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "fp8_tensor",
    "W4A8_MXFP4_FP8": "fp8_tensor",
    "W4A8_MXFP4_MXFP8": "mxfp8",
    "W4A16_MXFP4": None,
}
_UNQUANTISED = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEVICES = ("cpu", "cuda", "rehearsal")


class OptionError(ValueError):
    """An option that cannot be: its value, the limit, and what to do instead."""


@dataclasses.dataclass(frozen=True)
class Options:
    """One run. Lengths in elements, batches in tokens per rank.

    Attributes:
        backends: names of BACKENDS, in the order of the table.
        profile: name of PROFILES whose shape this is, or "custom".
        recipe, combine: as AllToAllConfig's.
        dtype: of activations, as torch names it ("bfloat16").
        router: of ROUTERS; see routers.py.
        device: "cpu", "cuda", or "rehearsal": the code for a GPU on CPU threads, for the tests.
        emulate_ranks: all ep_size ranks on one GPU.
        pdl: programmatic dependent launch of ours.
        ordered_slots: as AllToAllConfig's, of ours.
        threads: compute threads of a CPU rank, of our backend and of torch.
        bind: each CPU rank that this program starts keeps to as many cores as it has threads.
        max_tokens: capacity of our backend's buffers; 0: the batch.
        payload_in_workspace: the experts write their rows where our combine reads them; otherwise
            combine copies them there first.

    Raises:
        OptionError: naming the value, its limit and what to do.
    """

    backends: tuple[str, ...] = DEFAULT_BACKENDS["cpu"]
    profile: str = "deepseek_v3"
    hidden_size: int = 7168
    top_k: int = 8
    num_experts: int = 256
    recipe: str = "bf16"
    combine: str = "bf16"
    dtype: str = "bfloat16"
    ep_size: int = 4
    batches: tuple[int, ...] = DEFAULT_BATCHES["cpu"]
    iters: int = 50
    warmup: int = 5
    router: str = "uniform"
    device: str = "cpu"
    emulate_ranks: bool = False
    pdl: bool = False
    ordered_slots: bool = False
    cuda_graph: bool = False
    kernel_breakdown: bool = False
    iter_stats: bool = False
    threads: int = 1
    seed: int = 1
    max_tokens: int = 0
    bind: bool = False
    payload_in_workspace: bool = True

    def __post_init__(self) -> None:
        for mistake in itertools.chain(_too_small(self), _contradictions(self)):
            raise OptionError(mistake)
        try:
            MoeAllToAll.check(self.config(0, max(self.batches)))
        except ConfigError as error:
            raise OptionError(str(error)) from error

    def config(self, rank: int, tokens: int) -> AllToAllConfig:
        """Return the configuration of one rank of our backend for batches of `tokens`."""
        return AllToAllConfig(
            ep_size=self.ep_size,
            ep_rank=rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens_per_rank=self.max_tokens or tokens,
            dtype=self.torch_dtype,
            recipe=self.recipe,
            combine=self.combine,
            num_threads=self.threads,
            timeout_s=self.timeout_s,
            ordered_slots=self.ordered_slots,
            ranks_may_leave=False,  # as for vLLM and SGLang; peers have no masks
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of activations."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def timeout_s(self) -> float:
        """Seconds a rank waits for the others: more where many of them may share few cores."""
        return 120.0 + 5.0 * self.ep_size


def _too_small(of: Options) -> Iterator[str]:
    least = {"iters": 2, "warmup": 0, "max_tokens": 0, "seed": 0}  # quartiles need two
    values = [(name, getattr(of, name), limit) for name, limit in least.items()]
    for name, value, limit in (*values, *(("batches", batch, 1) for batch in of.batches or (0,))):
        if value < limit:
            yield f"{name}={value} must be at least {limit}; raise it"


def _contradictions(of: Options) -> Iterator[str]:
    """Name values that do not go together; MoeAllToAll.check knows what our backend refuses."""
    for name, values in (("batches", of.batches), ("backends", of.backends)):
        if not values or len(set(values)) != len(values):
            yield f"{name}={values} must name at least one, and each once; leave one out"
    if of.top_k > of.num_experts:
        yield (
            f"top_k={of.top_k} experts a token, none twice, need as many experts, and "
            f"num_experts={of.num_experts}; lower top_k"
        )
    if of.max_tokens and of.max_tokens < max(of.batches):
        yield (
            f"max_tokens={of.max_tokens} is below the largest batch, {max(of.batches)}; "
            "raise --max_num_tokens_per_rank or leave it out"
        )
    if of.router == "perfect" and of.num_experts % of.ep_size:
        yield (
            f"the perfect router needs num_experts={of.num_experts} to be a multiple of "
            f"ep_size={of.ep_size}; use --router spread"
        )
    for name in ("cuda_graph", "pdl", "emulate_ranks") if of.device == "cpu" else ():
        if getattr(of, name):
            yield f"{name} is a GPU's, and device is 'cpu'; add --device cuda or leave it out"
    if not of.payload_in_workspace and (of.emulate_ranks or of.device == "rehearsal"):
        yield (
            "emulated ranks launch the kernels alone, without the copy of rows that lie elsewhere; "
            "leave --no_payload_in_workspace out"
        )
    if of.bind and of.device != "cpu":
        yield f"bind is for CPU ranks, and device is {of.device!r}; leave --bind out"


class Request(NamedTuple):
    """A command line.

    Attributes:
        explicit: the backends were asked for by name, so that one that cannot run is an error.
        output_file: of the JSON result, or None.
        plot: folder of the PNGs, or None.
    """

    options: Options
    explicit: bool
    output_file: Path | None
    plot: Path | None
    list_only: bool


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Method, units and what is not measured: benchmarks/README.md.",
    )
    made.add_argument("--list", action="store_true", help="what could run here, and why not; end")
    what_is = made.add_argument_group("what is measured")
    add = what_is.add_argument
    what = (
        f"of {', '.join(BACKENDS)}; or all. *_full: packing, unpacking and reducing are timed. "
        f"NVLINK_ONE_SIDED is {OURS}"
    )
    names: Any = {"type": _backend, "choices": [*BACKENDS, "all"], "metavar": "NAME"}
    add("--backend", nargs="+", help=what, **names)
    add("--profile", default="deepseek_v3", choices=[*PROFILES, CUSTOM])
    add("--hidden_size", type=int, help="these three: instead of the profile's")
    add("--top_k", type=int)
    add("--num_experts", type=int, help="of all ranks")
    _add_formats(what_is)
    add("--dtype", default="bfloat16", choices=list(_UNQUANTISED))
    add("--ep_size", type=int, help="ranks; default 4 on CPUs, all GPUs, or 8")
    routers = what_is.add_mutually_exclusive_group()
    routers.add_argument("--router", choices=ROUTERS, default="uniform")
    perfect: Any = {"action": "store_const", "const": "perfect", "dest": "router"}
    routers.add_argument("--perfect_router", help="--router perfect", **perfect)
    add("-b", "--minbatch", type=int, help="first batch, in tokens per rank")
    add("-e", "--maxbatch", type=int, help="last batch")
    growth = what_is.add_mutually_exclusive_group()
    growth.add_argument("-i", "--stepbatch", type=int, help="growing by so many; default 128")
    growth.add_argument("-f", "--stepfactor", type=float, help="or by this factor")
    add("--batches", type=int, nargs="+", help="instead: these batches")
    capacity: Any = {"dest": "max_tokens", "help": "our capacity; default: the batch"}
    add("--max_num_tokens_per_rank", type=int, default=0, **capacity)
    add("--random_seed", type=int, default=1, dest="seed")
    add = made.add_argument_group("how").add_argument
    add("--device", default="cpu", choices=DEVICES, metavar="cpu|cuda")
    add("--emulate_ranks", type=int, metavar="N", help="N ranks on one GPU; sets --ep_size")
    add("--iters", type=int, help="timed; default 50 on CPUs, 200 on GPUs")
    add("--warmup", type=int, help="before those; default 5 on CPUs, 20 on GPUs")
    add("--threads", type=int, default=1, help="of a CPU rank: ours and torch's")
    bound = "CPU: rank r keeps to core r, with more ranks than cores in turn; its threads too"
    add("--bind", action="store_true", help=bound)
    graphs = "replay graphs (default on GPUs)"
    add("--cuda_graph", action="store_true", default=None, help=graphs)
    add("--no_cuda_graph", action="store_false", dest="cuda_graph")
    pdl = "programmatic dependent launch; with a GPU for each rank: as MOE_NVLINK_PDL says"
    add("--pdl", action="store_true", help=pdl)
    add("--ordered_slots", action="store_true", help="ours: rows in the order of their tokens")
    add = made.add_argument_group("what comes out").add_argument
    kernels = (
        "GPU: time of each kernel, by the profiler. CPU, ours: time in the kernel's call, of "
        "that before the last rank had begun, and the Python around it; in iterations of its own"
    )
    add("--kernel_breakdown", action="store_true", help=kernels)
    stats = "mean, median, stdev, min, max of every rank; all samples"
    add("--iter_stats", action="store_true", help=stats)
    add("--output_file", type=Path, help="JSON, with machine, commit and command")
    folder: Any = {"nargs": "?", "const": Path(), "metavar": "FOLDER"}
    add("--plot", type=Path, help="PNGs; default here", **folder)
    return made


def _add_formats(group: Any) -> None:
    """Add the options for what travels and what comes back."""
    sent = group.add_mutually_exclusive_group().add_argument
    sent("--recipe", choices=RECIPES, help="what travels; default: dtype as it is")
    quant = f"or by TensorRT-LLM's name: {', '.join(QUANTS)}"
    sent("--quant", type=str.upper, choices=QUANTS, metavar="ALGO", help=quant)
    back = group.add_mutually_exclusive_group().add_argument
    back("--combine", choices=COMBINE_FORMATS, help="what comes back; default bf16")
    cast: Any = {"action": "store_const", "const": "fp8_tensor", "dest": "combine"}
    back("--use_low_precision_combine", help="--combine fp8_tensor", **cast)
    copied = "the experts' rows lie elsewhere, so that our combine copies them first"
    elsewhere: Any = {"action": "store_false", "dest": "payload_in_workspace", "help": copied}
    group.add_argument("--no_payload_in_workspace", **elsewhere)


def parse(description: str, arguments: Sequence[str] | None = None) -> Request:
    """Return the command line as a Request; end the process with a message if it cannot be."""
    made = parser(description)
    arguments = sys.argv[1:] if arguments is None else arguments
    given = made.parse_args([_with_underscores(argument) for argument in arguments])
    try:
        options = options_of(given)
    except (OptionError, ConfigError) as error:
        made.error(str(error))
    explicit = given.backend is not None and "all" not in given.backend
    return Request(options, explicit, given.output_file, given.plot, given.list)


def _with_underscores(argument: str) -> str:
    """Take --hidden-size for --hidden_size."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def options_of(given: argparse.Namespace) -> Options:
    """Make Options of parsed arguments. What is not given depends on the device and the profile.

    Raises:
        OptionError: they contradict each other, or a value is out of its limits.
    """
    on_cpu, base = given.device == "cpu", PROFILES.get(given.profile)
    shape = {name: getattr(given, name) for name in Shape._fields}
    if base is not None:
        shape = {name: _or(value, getattr(base, name)) for name, value in shape.items()}
    if missing := [f"--{name}" for name, value in shape.items() if value is None]:
        raise OptionError(f"--profile custom lacks {', '.join(missing)}; give them")
    everything = given.backend is not None and "all" in given.backend
    values = vars(given) | {
        **shape,
        "backends": BACKENDS if everything else given.backend or DEFAULT_BACKENDS[given.device],
        "profile": given.profile if base is not None and Shape(**shape) == base else CUSTOM,
        "recipe": given.recipe or QUANTS.get(given.quant) or _UNQUANTISED[given.dtype],
        "combine": given.combine or "bf16",
        "ep_size": _ep_size(given),
        "batches": _batches(given),
        "iters": _or(given.iters, 50 if on_cpu else 200),
        "warmup": _or(given.warmup, 5 if on_cpu else 20),
        "emulate_ranks": given.emulate_ranks is not None,
        "pdl": _pdl(given),
        "cuda_graph": _or(given.cuda_graph, given.device == "cuda"),
    }
    return common.options_from(Options, argparse.Namespace(**values))


def _backend(name: str) -> str:
    """Return our name of a backend, in small letters."""
    return ALIASES.get(name.lower(), name.lower())


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _ep_size(given: argparse.Namespace) -> int:
    if given.emulate_ranks is not None and given.ep_size not in (None, given.emulate_ranks):
        raise OptionError(
            f"--emulate_ranks {given.emulate_ranks} and --ep_size {given.ep_size} contradict each "
            "other; give one of them"
        )
    on_gpus = max(torch.cuda.device_count(), 1)
    default = {"cpu": 4, "cuda": on_gpus, "rehearsal": 8}[given.device]
    return int(_or(_or(given.emulate_ranks, given.ep_size), default))


def _pdl(given: argparse.Namespace) -> bool:
    """Emulated ranks do what is asked for; ranks with a GPU each are launched by the product."""
    if given.device != "cuda" or given.emulate_ranks is not None:
        return bool(given.pdl)
    if given.pdl and not env.pdl():
        raise OptionError("--pdl and MOE_NVLINK_PDL=0 contradict each other; unset the variable")
    return env.pdl()


def _batches(given: argparse.Namespace) -> tuple[int, ...]:
    swept = [given.minbatch, given.maxbatch, given.stepbatch, given.stepfactor]
    if given.batches is not None:
        if any(value is not None for value in swept):
            raise OptionError("--batches and -b/-e/-i/-f contradict each other; give one of them")
        return tuple(given.batches)
    if given.minbatch is None and given.maxbatch is None:
        if any(value is not None for value in swept):
            raise OptionError("-i and -f grow batches, and there is no first one; add -b")
        return DEFAULT_BATCHES[given.device]
    first = _or(given.minbatch, given.maxbatch)
    return sweep(first, _or(given.maxbatch, first), given.stepbatch, given.stepfactor)


def sweep(first: int, last: int, step: int | None, factor: float | None) -> tuple[int, ...]:
    """Return batches from `first` to at most `last`, by a step (default 128) or a factor.

    Raises:
        OptionError: there is no such sweep.
    """
    if not 1 <= first <= last:
        raise OptionError(f"batches from {first} to {last}: needs 1 <= first <= last; mend -b, -e")
    if factor is None:
        by = _or(step, 128)
        if by < 1:
            raise OptionError(f"-i {by} must be at least 1; raise it")
        return tuple(range(first, last + 1, by))
    if factor <= 1.0:
        raise OptionError(f"-f {factor} must be above 1; raise it")
    growing = itertools.accumulate(itertools.repeat(factor), operator.mul, initial=float(first))
    exact = itertools.takewhile(lambda batch: int(batch) <= last, growing)
    return tuple(dict.fromkeys(map(int, exact)))
