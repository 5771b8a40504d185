"""moe-nvlink: the commands of a shell."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path

from moe_nvlink_plugin import frameworks
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.version import own_version

from . import dump_source, precompile, terminal
from .shipped import FAMILIES

_VERIFY = """
Runs every kernel of this package on this machine's ranks and holds every received bit and every sum
to the reference; then times dispatch and combine beside what torch.distributed offers. Without a
launcher it starts the ranks itself; or, over several nodes:

  torchrun --nproc-per-node 8 -m moe_nvlink_plugin verify

The last line is the verdict. The exit code is 0 if every round was right, else 1."""

_TUNE = """
Measures what launches may choose (moe_nvlink_plugin/choices.py) for one layer on this machine: a
candidate wins if it is clearly faster, and only if its results have the same bits. If anything
gains, writes a file for servers and programs that start with MOE_NVLINK_TUNING=FILE. The file names
the machine and the layer, and is refused elsewhere. Name your layer as it will run, --max-tokens
included; a second layer is added to the file. torchrun may start it:

  torchrun --nproc-per-node 8 -m moe_nvlink_plugin tune --recipe fp8_block --output tuned.json"""

_PRECOMPILE = """
Compiles the GPU kernels into a cache directory, for images that have neither a compiler nor a
network. If there is a host compiler, it also compiles the kernels for CPU ranks.

  moe-nvlink precompile --arch sm_90a --geometry deepseek-v3 --cache-dir DIR

Processes find the kernels with MOE_NVLINK_CACHE_DIR=DIR. DIR may belong to root, and processes need
only read it. Neither group nor others may be able to write to it."""

_DUMP_SOURCE = """
Prints the text of one kernel as the GPU compiler reads it, in one piece: the values of the build
stand in it, and what only the host compiles is left out. Comments and lines are those of kernels/.

  moe-nvlink dump-source --arch sm_90a small_dispatch top_k=8 dtype=bf16"""

_DOCTOR = """
Looks at this machine. The last two lines say whether GPU ranks and CPU ranks will work, and if
not, what to do. Under torchrun (RANK, WORLD_SIZE and MASTER_ADDR are set) every rank looks at its
own GPU, and rank 0 prints what all ranks found:

  torchrun --nproc-per-node 8 -m moe_nvlink_plugin doctor

The exit code is 0 if GPU ranks or CPU ranks will work, and 1 if neither will or a rank is missing.
The command compiles kernels that the cache lacks into the cache."""

_TOP = """
Shows which ranks the others wait for, from the metrics of one or several{of} servers, and again
every few seconds until Ctrl-C. Name every server of the model: with external load balancing each
server knows its own ranks only.

  moe-nvlink top http://host-a:8000 http://host-b:8000"""

_WATCH = """
Looks at the servers of a model's ranks, and has the ranks go on after a fault. Each rank has its
own{of} server, started with fault tolerance{how}.
Name all of them in rank order:

  moe-nvlink watch --act http://host-a:8000 http://host-b:8000 http://host-c:8000

A rank is dead if its port has refused connections for --patience, or if, beside an unhealthy rank,
its server has said for as long that its engine is dead. A server that merely gives no answer is not
dead: the command says so and waits. Then it posts `retry` to all ranks that live and names the dead
ones, so that the others go on without them. If none is dead, all of them try again. Before the
first retry, ranks that still look healthy have five times --patience to notice the fault.

Without --act the command posts and runs nothing: it says what it would do.

A rank that was started again cannot enter the running group yet. --restart is for ranks whose
command starts the whole group again.

The exit code is 0 after Ctrl-C, 1 if an argument is wrong, 3 if rank 0 died (no rank can go on
without it), and 4 if --attempts retries healed nothing."""


def _geometry(text: str) -> Variant:
    try:
        return precompile.parse_geometry(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {error}") from error
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names no command; leave the option out")
    return words


def _folder(text: str) -> Path:
    if not text.strip():  # of a shell's unset variable; as a Path it is the current directory
        raise argparse.ArgumentTypeError(f"{text!r} names no directory; leave the option out")
    return Path(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def _presets() -> str:
    return "\n".join(f"  {name:12} {value}" for name, value in precompile.PRESETS.items())


def _choices() -> str:
    """Return what may stand for each placeholder of a geometry that stands for a name."""
    axes = dict.fromkeys(axis for family in FAMILIES for axis in family.axes)
    named = [axis for axis in axes if axis.default is not None and axis.placeholder != "yes"]
    return ", ".join(f"{axis.placeholder} is one of {', '.join(axis.choices())}" for axis in named)


def _parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser. Only two commands' texts ask plugins, which may import torch."""
    parser = argparse.ArgumentParser(prog="moe-nvlink", description=__doc__)
    parser.add_argument("--version", action="version", version=f"moe-nvlink {own_version()}")
    serving = frameworks.named(frameworks.METRICS) if command == "top" else ""
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say whether this machine will work, and if not, what to do",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = doctor.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print JSON instead of text")
    what.add_argument(
        "--memory",
        metavar="NAME=N,...",
        help="only say what the workspace of such a layer takes on each rank, as in "
        "ep_size=64,max_tokens_per_rank=8192,hidden_size=7168,top_k=8,recipe=fp8_block",
    )
    doctor.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="of --memory (default: cuda)"
    )
    _add_verify(commands)
    _add_tune(commands)
    compiling = commands.add_parser(
        "precompile",
        help="compile kernels ahead of time",
        description=_PRECOMPILE,
        epilog="geometries by model:\n" + _presets(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compiling.add_argument(
        "--arch",
        nargs="+",
        action="extend",
        choices=nvrtc.ARCHITECTURES,
        metavar="ARCH",
        help=f"architectures to compile for, among {', '.join(nvrtc.ARCHITECTURES)} "
        "(default: this machine's GPUs; all of these if it has none)",
    )
    compiling.add_argument(
        "--geometry",
        nargs="+",
        action="extend",
        type=_geometry,
        metavar="|".join(["MODEL", *(family.usage for family in FAMILIES)]),
        help="layers to compile for; lm_head is the LM head that draft ranks share (default: all "
        f"models below, and lm_head); {_choices()}; recipe= and combine= may follow a model's "
        "name, as in qwen3,recipe=mxfp8",
    )
    compiling.add_argument(
        "--no-pdl", action="store_true", help="for processes that run with MOE_NVLINK_PDL=0"
    )
    compiling.add_argument(
        "--cache-dir",
        type=_folder,
        metavar="DIR",
        help="directory to fill (default: MOE_NVLINK_CACHE_DIR, or the user's cache directory)",
    )
    compiling.add_argument(
        "--jobs", type=_count, metavar="N", help="compiling processes (default: one per CPU)"
    )
    dumping = commands.add_parser(
        "dump-source",
        help="print a kernel's text as the GPU compiler reads it",
        description=_DUMP_SOURCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dumping.add_argument(
        "--arch",
        required=True,
        choices=nvrtc.ARCHITECTURES,
        metavar="ARCH",
        help=f"architecture, one of {', '.join(nvrtc.ARCHITECTURES)}",
    )
    names = [kernel.name for family in FAMILIES for kernel in family.kernels]
    dumping.add_argument("kernel", metavar="KERNEL", help=f"one of {', '.join(names)}")
    dumping.add_argument(
        "values",
        nargs="*",
        metavar="NAME=VALUE",
        help="values that the kernel is compiled for; a refusal lists those that it takes",
    )
    dumping.add_argument("--ptx", action="store_true", help="print the PTX that NVRTC makes of it")
    watching = commands.add_parser(
        "top",
        help="show which ranks of a running model the others wait for",
        description=_TOP.format(of=f" {serving}" if serving else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watching.add_argument("urls", nargs="+", metavar="URL", help="a server, or its /metrics")
    watching.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds (default: 2)"
    )
    watching.add_argument("--once", action="store_true", help="print one table and end")
    _add_watch(commands, is_asked=command == "watch")
    return parser


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="run every kernel against the reference, and time it",
        description=_VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("--quick", action="store_true", help="the shortest checks, and no table")
    _add_layer(verify, "most tokens of a rank in a check (default: 128 on GPUs, 64 on CPU ranks)")
    verify.add_argument("--output", type=Path, metavar="FILE", help="report as JSON")


def _add_layer(command: argparse.ArgumentParser, max_tokens: str) -> None:
    """Add the options of ranks and of a layer's sizes."""
    command.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda if torch sees a GPU, else cpu"
    )
    command.add_argument(
        "--ranks", type=_count, default=0, metavar="N", help="to start (default: the GPUs, or 2)"
    )
    for name, what in (
        ("num-experts", "experts of the layer (default: 256 on GPUs, 64 on CPU ranks)"),
        ("hidden-size", "elements of a row (default: 7168 on GPUs, 1024 on CPU ranks)"),
        ("max-tokens", max_tokens),
    ):
        command.add_argument(f"--{name}", type=_count, default=0, metavar="N", help=what)
    command.add_argument(
        "--top-k", type=_count, default=8, metavar="N", help="experts of a token (default: 8)"
    )
    command.add_argument(
        "--timeout",
        type=_seconds,
        default=20.0,
        metavar="S",
        help="seconds that a rank waits for another one (default: 20)",
    )


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure what launches may choose, and write what is faster here",
        description=_TUNE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_layer(tune, "most tokens of a rank in a call (default: 1024 on GPUs, 64 on CPU ranks)")
    tune.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of activations (default: bfloat16)",
    )
    tune.add_argument(
        "--recipe", default="", metavar="RECIPE", help="what travels (default: unquantised)"
    )
    tune.add_argument(
        "--combine", default="bf16", metavar="FORMAT", help="what travels back (default: bf16)"
    )
    tune.add_argument(
        "--budget",
        type=_seconds,
        default=180.0,
        metavar="S",
        help="seconds for the search, beside what compiles (default: 180)",
    )
    tune.add_argument(
        "--output",
        type=Path,
        default=Path("moe-nvlink-tuning.json"),
        metavar="FILE",
        help="file to write, or to add the layer to (default: moe-nvlink-tuning.json)",
    )


def _run_tune(options: argparse.Namespace) -> int:
    from . import tune

    return tune.main(
        tune.Options(
            device=options.device or "",
            ranks=options.ranks,
            num_experts=options.num_experts,
            top_k=options.top_k,
            hidden_size=options.hidden_size,
            max_tokens=options.max_tokens,
            dtype=options.dtype,
            recipe=options.recipe,
            combine=options.combine,
            budget_s=options.budget,
            timeout_s=options.timeout,
            output=options.output,
        )
    )


def _add_watch(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], *, is_asked: bool
) -> None:
    names = frameworks.named(frameworks.FAULT_TOLERANCE) if is_asked else ""
    how = frameworks.advice(frameworks.FAULT_TOLERANCE) if is_asked else ""
    watch = commands.add_parser(
        "watch",
        help="after a fault or a death, have the ranks of a running model go on",
        description=_WATCH.format(of=f" {names}" if names else "", how=how),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.add_argument("urls", nargs="+", metavar="URL", help="the server of each rank, from 0 on")
    watch.add_argument("--act", action="store_true", help="post and run (default: only say it)")
    for name, default, what in (
        ("patience", 3.0, "for how long a server must be gone until its rank counts as dead"),
        ("timeout", 60.0, "for how long a retry may take until the next one"),
        ("interval", 1.0, "from one look to the next"),
    ):
        watch.add_argument(
            f"--{name}",
            type=_seconds,
            default=default,
            metavar="S",
            help=f"seconds: {what} (default: {default:.0f})",
        )
    watch.add_argument(
        "--attempts", type=_count, default=3, metavar="N", help="retries of a fault (default: 3)"
    )
    watch.add_argument(
        "--restart",
        type=_words,
        default=(),
        metavar="COMMAND",
        help="run this once for each rank that dies, not through a shell; {rank} and {url} in it "
        "stand for that rank's",
    )


def _run_watch(options: argparse.Namespace) -> int:
    from . import watch

    return watch.Watch(
        options.urls,
        watch.Options(
            act=options.act,
            patience_s=options.patience,
            timeout_s=options.timeout,
            attempts=options.attempts,
            interval_s=options.interval,
            restart=options.restart,
        ),
    ).run()


def _run_verify(options: argparse.Namespace) -> int:
    from . import verify

    return verify.main(
        verify.Options(
            device=options.device or "",
            ranks=options.ranks,
            num_experts=options.num_experts,
            top_k=options.top_k,
            hidden_size=options.hidden_size,
            max_tokens=options.max_tokens,
            timeout_s=options.timeout,
            quick=options.quick,
            output=options.output,
        )
    )


def _require_torch(command: str) -> None:
    """Raise UnsupportedError if torch cannot be imported, for whatever reason of its own."""
    try:
        importlib.import_module("torch.version")  # a folder that is left has none
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(
            f"moe-nvlink {command}: torch cannot be imported ({reason}); moe-nvlink doctor says "
            "more"
        ) from error


def _run(options: argparse.Namespace) -> int:
    memory = getattr(options, "memory", None)
    if options.command in ("verify", "tune") or memory is not None:
        _require_torch(options.command if memory is None else "doctor --memory")
    if options.command == "verify":
        return _run_verify(options)
    if options.command == "tune":
        return _run_tune(options)
    if options.command == "doctor":
        from . import doctor

        if memory is not None:
            from .doctor.memory import main as tell_memory

            return tell_memory(memory, options.device)
        return doctor.main(as_json=options.json)
    if options.command == "top":
        from . import top

        return top.main(options.urls, options.interval, once=options.once)
    if options.command == "watch":
        return _run_watch(options)
    if options.command == "dump-source":
        build = dump_source.parse_build(options.kernel, options.values)
        return dump_source.main(build, options.arch, as_ptx=options.ptx)
    return precompile.precompile(
        options.arch or precompile.default_architectures(),
        options.geometry or precompile.default_geometries(),
        pdl=not options.no_pdl,
        folder=options.cache_dir,
        jobs=options.jobs,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the console script; return its exit code."""
    terminal.take_any_text()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _code(given)
        finally:  # after --help too; at Python's exit nobody catches what a flush raises
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError:
        if not terminal.has_lost_output():
            raise
        return 1


def _code(given: list[str]) -> int:
    try:
        return _run(_parser(given[0] if given else "").parse_args(given))
    except MoeNvlinkError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
