"""All ranks of a group on ONE GPU: ours, FlashInfer's, and a device copy of the same bytes.

    rows = emulated.run(options)      # options.emulate_ranks; device "cuda" or "rehearsal"

Ours runs in two forms. Alone (Layer), a verb of all ranks is one cooperative launch
(tests/support/emulated.py): blockIdx.y is the rank, each has its share of the SMs and the launch
shape the product would choose for that share. Beside a peer (Branches), every rank launches the
product's own kernels on a branch of one graph, because that is how the peer's kernels must run; a
ratio is of this form only, and the first one stands beside it as `one_launch`.

"Remote" memory is the same GPU's. So this shows the cost of launch, routing, copy and reduction and
how near they come to the memory's speed, and nothing of NVLink: no remote latency, bandwidth or
ordering. Not run on a GPU yet.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.exchange import shapes
from moe_nvlink_plugin.exchange.launches import LayerLaunches
from moe_nvlink_plugin.exchange.sizes import layer_layout
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.plugins import find_recipe
from tests.support import emulated

from . import accounting, emulated_flashinfer, expected, rows
from .cuda_clock import Body, Clock, on_branches
from .options import OURS, OptionError, Options
from .processes import runnable
from .routers import RankTokens, tokens_of
from .rows import PHASES, Row
from .timing import PlainCopy

SHOWS = "ranks emulated on one GPU: no NVLink latency, bandwidth or ordering"
CEILING = (
    "device-to-device copy of as many bytes as the rows that all ranks put, L2 flushed, taking "
    "turns with the backends"
)
GIVEN = "nothing: routing, signals and empty slots are in the time; arguments packed before"
#: How all ranks' kernels of a verb are launched. Times of two backends are compared where this is
#: the same.
PLAIN = "one launch of all ranks"
GRAPH = f"{PLAIN}, a graph's replay"
BRANCHES = "a launch a rank and kernel, on branches of one graph"

#: Of the row of ours in one launch, what stays where ours on branches takes its place.
ONE_LAUNCH = ("launch", "given", *PHASES, "shapes", "kernels", "not_profiled")

VERBS = ("dispatch", "combine")


class Layer:
    """Ours: prepared launches of all ranks for one batch, which need this object alive.

    Attributes:
        given: what it is spared.
        branches: its bodies replay graphs already, a branch for each rank; else each of them is one
            launch.
        before: phase -> what must be done ahead of it, and is not timed.
        both: dispatch and combine, no experts.

    Args:
        backend: of the same options (make_backend), which the caller closes.
        inputs: of each rank, on the back end's device; None makes them.
        post_quant: dispatch takes rows that have been quantised before.
    """

    name, given, branches = OURS, GIVEN, False
    dispatch: Body
    combine: Body
    both: Body

    def __init__(
        self,
        options: Options,
        tokens: int,
        backend: emulated.Backend,
        *,
        inputs: Sequence[RankTokens] | None = None,
        post_quant: bool = False,
    ) -> None:
        self.options, self.tokens = options, tokens
        self.before: dict[str, Body] = {}
        self.ranks = emulated.EmulatedRanks(
            lambda rank: config_of(options, rank, tokens), backend, post_quant=post_quant
        )
        self.ranks.global_scale = expected.global_scale(options, backend.device)
        self.inputs = make_inputs(options, tokens) if inputs is None else inputs
        self._slots = [torch.empty_like(mine.topk_ids) for mine in self.inputs]
        self._outputs = [torch.empty_like(mine.hidden) for mine in self.inputs]
        # Some are made of the inputs, and live as long as the launches that read them.
        self._sources = [self._sources_of(mine) for mine in self.inputs]
        self.shapes = self._shapes(backend)
        self._prepare(backend, {"dispatch": self._dispatch(), "combine": self._combine()})

    def _prepare(self, backend: emulated.Backend, of_ranks: dict[str, list[Any]]) -> None:
        """Makes the bodies, out of each verb's arguments of all ranks."""
        dispatch, combine = (
            backend.prepare(verb, launched, self.shapes.get(verb))
            for verb, launched in of_ranks.items()
        )
        self.dispatch, self.combine = dispatch, combine

        def both() -> None:
            dispatch()
            combine()

        self.both = both

    def _shapes(self, backend: emulated.Backend) -> dict[str, shape.Shape]:
        """What the product would launch on a GPU with this rank's share of the SMs."""
        if not isinstance(backend, emulated.CudaBackend):
            return {}
        options, config = self.options, self.ranks.config
        row_bytes = {name: row.row_bytes for name, row in self.ranks.rows.items()}
        slots = config.ep_size * config.max_tokens_per_rank
        lanes_bytes = max(row_bytes.values())
        if self.ranks.quantiser:
            lanes_bytes = shapes.quantising_lanes(options.hidden_size) * shape.VECTOR_BYTES
        return {
            "dispatch": shapes.dispatch_shape(
                self.tokens,
                lanes_bytes,
                slots * row_bytes["recv_topk_ids"],
                backend.limits("dispatch", options.ep_size),
            ),
            "combine": shapes.combine_shape(
                self.tokens,
                options.hidden_size,
                config.dtype.itemsize,
                backend.limits("combine", options.ep_size),
                0 if config.combine == "bf16" else slots,
            ),
        }

    def _dispatch(self) -> list[Any]:
        launched = []
        for rank, sources in enumerate(self._sources):
            args = self.ranks.dispatch_arguments(rank)
            args.geometry.num_tokens = self.tokens
            args.send_slots = self._slots[rank].data_ptr()
            emulated.set_sources(args, sources)
            launched.append(args)
        return launched

    def _combine(self) -> list[Any]:
        launched = []
        for rank, output in enumerate(self._outputs):
            args = self.ranks.combine_arguments(rank)
            args.geometry.num_tokens = self.tokens
            args.send_slots, args.output = self._slots[rank].data_ptr(), output.data_ptr()
            if "combine" in self.shapes:
                args.hidden_splits = self.shapes["combine"].splits
            launched.append(args)
        return launched

    def _sources_of(self, mine: RankTokens) -> list[torch.Tensor | None]:
        """What dispatch reads, in the order of its payloads; None: it makes the scales itself."""
        rows, scales = mine.hidden, None
        if not self.ranks.quantiser:
            rows, scales = expected.quantised(self.options, mine.hidden)
        has_scales = "recv_scales" in self.ranks.rows
        return [mine.topk_ids, mine.topk_weights, rows, *([scales] if has_scales else [])]

    def check(self, dispatch: Body | None = None, combine: Body | None = None) -> None:
        """Bit for bit as moe_nvlink_plugin.reference; on a GPU, with nvfp4 to a code or two.

        Args:
            dispatch, combine: in the place of its own, such as their graphs' replays.

        Raises:
            WrongResult: a wrong row or a fault word, with rank and place.
        """
        for output in self._outputs:
            output.fill_(float("nan"))
        (dispatch or self.dispatch)()
        for rank in range(self.options.ep_size):
            self._run_experts(rank)
        (combine or self.combine)()
        try:
            self.ranks.check_faults()
        except AssertionError as error:
            raise expected.WrongResult(f"{self.name}, {self.tokens} tokens: {error}") from error
        near = self.ranks.memory.is_cuda and "nvfp4" in (self.options.recipe, self.options.combine)
        how = "alike" if near else "exact"
        for rank, output in enumerate(self._outputs):
            check_output(self.name, self.options, rank, self.inputs[rank], output, how)

    def _run_experts(self, rank: int) -> None:
        received = self.ranks.received(rank, (), self._slots[rank])
        hidden = expected.activations(self.options, received.hidden_states, received.scales)
        filled = received.topk_ids[:, 0] >= 0
        of_experts = (hidden, received.topk_ids, received.topk_weights)
        rows = expected.expert_rows(self.options, rank, *(part[filled] for part in of_experts))
        self._send_back(rank, filled, rows)

    def _send_back(self, rank: int, filled: torch.Tensor, rows: torch.Tensor) -> None:
        """As the experts of the layer's format of combine would: they write activations."""
        self.ranks.view(rank, "combine")[filled] = rows

    def close(self) -> None:
        """Nothing: the back end is the caller's."""


class Branches(Layer):
    """Ours as each rank would launch it on a GPU of its own with a rank's share of the SMs.

    The product's kernels by the product's launcher, so shapes are the product's. All ranks' CTAs
    fit on the GPU together, because no rank fills more than its share. For the same reason there is
    no PDL: a combine that came early would take the place of a peer's dispatch, and wait for it.
    """

    branches = True
    given = f"{GIVEN}; {BRANCHES}, whose fork and join are in its time"

    def _shapes(self, backend: emulated.Backend) -> dict[str, shape.Shape]:
        return {}  # the product's launcher chooses them

    def _prepare(self, backend: emulated.Backend, of_ranks: dict[str, list[Any]]) -> None:
        if not isinstance(backend, emulated.CudaBackend):
            super()._prepare(backend, of_ranks)  # a thread for each rank
            return
        executor = CudaExecutor(backend.device)
        executor.pdl = False
        ranks = len(self.inputs)
        share = max(executor.device_facts.num_sms // ranks, 1)
        config = dataclasses.replace(self.ranks.config, max_sms=share)
        row_bytes = {name: row.row_bytes for name, row in self.ranks.rows.items()}
        launchers = [
            LayerLaunches(executor, config, row_bytes, self.ranks.quantiser) for _ in range(ranks)
        ]

        def dispatch(rank: int) -> None:
            launchers[rank].dispatch(of_ranks["dispatch"][rank])

        def combine(rank: int) -> None:
            launchers[rank].combine(of_ranks["combine"][rank])

        together = functools.partial(_together, backend.device, ranks)
        self.dispatch, self.combine = together(dispatch), together(combine)
        self.both = together(dispatch, combine)


def _together(device: torch.device, ranks: int, *verbs: Callable[[int], None]) -> Body:
    """The verbs of all ranks at once; on the stand-in's CPU, which has no streams, in threads."""
    if device.type == "cuda":
        return on_branches(device, ranks, *verbs)

    def in_order(rank: int) -> None:
        for verb in verbs:
            verb(rank)

    def body() -> None:
        with concurrent.futures.ThreadPoolExecutor(ranks) as threads:
            list(threads.map(in_order, range(ranks)))

    return body


def config_of(options: Options, rank: int, tokens: int) -> AllToAllConfig:
    """One rank's, for a GPU whose minutes are lent: a wait that hangs ends soon."""
    patience_s = 10.0 if options.device == "cuda" else options.timeout_s
    return dataclasses.replace(options.config(rank, tokens), timeout_s=patience_s)


def device_of(options: Options) -> str:
    """Where tensors are: of a rehearsal, on the CPU."""
    return "cuda" if options.device == "cuda" else "cpu"


def make_inputs(options: Options, tokens: int) -> list[RankTokens]:
    """Of each rank, on the device."""
    device = device_of(options)
    return [tokens_of(options, tokens, rank).to(device) for rank in range(options.ep_size)]


def check_output(
    backend: str, options: Options, rank: int, mine: RankTokens, combined: torch.Tensor, how: str
) -> None:
    """One rank's combined rows against the check's experts; `how`: as expected.check_combined's.

    Raises:
        WrongResult: naming backend, batch, rank and place.
    """
    context = expected.Context(options, rank, mine, None, mine.hidden.device)
    complaints = expected.Complaints(backend, context)
    expected.check_combined(complaints, context, combined, how)
    complaints.raise_any()


def make_backend(
    options: Options, *, post_quant: bool = False, alone: bool = False
) -> emulated.Backend:
    """For a Layer of the same options; `alone`: with its quantiser as a verb of its own."""
    if options.device != "cuda":
        return emulated.CpuBackend(options.ep_size, ctas=1)
    return emulated.CudaBackend(
        options.ep_size,
        1,
        config_of(options, 0, 1),
        pdl=options.pdl,
        post_quant=post_quant,
        alone=alone,
        as_product=True,
    )


def stand_in_backend(options: Options) -> emulated.Backend:
    """What a GPU would be given, on the driver of tests/support/fake_cuda: for the tests."""
    config = config_of(options, 0, 1)
    return emulated.CudaBackend(
        options.ep_size, 1, config, pdl=options.pdl, device="cpu", as_product=True
    )


def run(
    options: Options,
    *,
    explicit: bool = False,
    not_measured: list[str] | None = None,
    failed: list[str] | None = None,
    show: Callable[[list[Row]], None] | None = None,
    backend: emulated.Backend | None = None,
) -> list[Row]:
    """Rows of every batch, ratios included. A peer that fails is left out, and ours goes on.

    Args:
        explicit: a backend that cannot run with these options is an error rather than left out.
        not_measured: takes what was left out, and why.
        failed: takes those of them that were to be measured: a peer that is asked for and does not
            run here, or whatever failed later.
        show: is given the rows of each batch when they are there.
        backend: of the tests; else what the options ask for.

    Raises:
        WrongResult: of ours, before or after it was timed.
        OptionError: an explicit backend cannot run, or none can.
    """
    left_out = [] if not_measured is None else not_measured
    broken = [] if failed is None else failed
    names = runnable(options, explicit=explicit, left_out=left_out, why_not=unavailable)
    wanted = _wanted(options, names, broken if explicit else left_out)
    clock = Clock(device_of(options), options.iters, options.warmup)
    found: list[Row] = []
    with contextlib.ExitStack() as stack:
        if backend is None:
            backend = stack.enter_context(contextlib.closing(make_backend(options)))
        for tokens in options.batches:
            reason = too_large(options, tokens)
            if reason is not None:
                left_out.append(reason)
                continue
            made = measure(options, tokens, clock, backend, wanted, broken)
            _give_back(options)
            found += made
            left_out += [text for text in broken if text not in left_out]
            if show is not None:
                show(made)
    return found


#: What is measured -> what makes it: of options, tokens, ours' back end, inputs.
_MAKE: dict[str, Callable[..., Any]] = {
    "ours": lambda options, tokens, backend, inputs: Layer(options, tokens, backend, inputs=inputs),
    "ours on branches": lambda options, tokens, backend, inputs: Branches(
        options, tokens, backend, inputs=inputs
    ),
    "flashinfer": lambda options, tokens, _backend, inputs: emulated_flashinfer.make_layer(
        options, tokens, inputs
    ),
}


def _wanted(options: Options, names: Sequence[str], left_out: list[str]) -> list[str]:
    """What is measured, ours first; ours on branches too where a peer is there to compare with.

    Raises:
        OptionError: nothing is left.
    """
    wanted = ["ours"] if OURS in names else []
    if "flashinfer" in names:
        reason = emulated_flashinfer.probe(options)
        if reason is not None:
            left_out.append(f"flashinfer: {reason}")
        else:
            wanted += [*(["ours on branches"] if wanted else []), "flashinfer"]
    if not wanted:
        raise OptionError(f"no backend can run here: {'; '.join(left_out)}")
    return wanted


def _give_back(options: Options) -> None:
    """Memory of a batch that is over, so that the next one is held against all there is."""
    if options.device == "cuda":
        gc.collect()  # graphs and launches refer to each other
        torch.cuda.empty_cache()


def unavailable(name: str, options: Options) -> str | None:
    """Why a backend cannot run on emulated ranks here; None: it can."""
    if name == OURS:
        return None
    if name == "flashinfer":
        return emulated_flashinfer.unavailable(options)
    return (
        "needs a process for every rank, which emulated ranks have not; leave out --emulate_ranks"
    )


def too_large(options: Options, tokens: int) -> str | None:
    """Why a batch does not fit into the GPU's memory; None: it does."""
    if options.device != "cuda":
        return None
    needed, (free, _total) = bytes_needed(options, tokens), torch.cuda.mem_get_info()
    if needed <= free:
        return None
    return (
        f"{tokens} tokens on {options.ep_size} emulated ranks need {needed / 2**30:.1f} GiB, and "
        f"{free / 2**30:.1f} GiB of the GPU are free; take fewer of either"
    )


def bytes_needed(options: Options, tokens: int) -> int:
    """Of all that one batch allocates: workspaces, inputs, outputs, the copy's two buffers."""
    config = config_of(options, 0, tokens)
    (regions,) = emulated._packed_regions(layer_layout(config, find_recipe(config)))
    workspace = max(region.offset + region.size_bytes for region in regions.values())
    rows_bytes = 3 * tokens * options.hidden_size * config.dtype.itemsize
    sides = 1 + 2 * ("flashinfer" in options.backends)  # then ours on branches, too
    put = accounting.traffic(options, tokens)
    copied = sum(put.put_bytes("both", rank) for rank in range(options.ep_size))
    return options.ep_size * sides * (workspace + rows_bytes) + 2 * copied


def measure(
    options: Options,
    tokens: int,
    clock: Clock,
    backend: emulated.Backend,
    wanted: list[str] | None = None,
    broken: list[str] | None = None,
) -> list[Row]:
    """The rows of one batch, ours first; all sides and the copy take turns.

    Args:
        wanted: the sides; without it, ours in one launch. The first one must not fail; another one
            that does is taken out of the list.
        broken: takes why.
    """
    wanted, broken = ["ours"] if wanted is None else wanted, [] if broken is None else broken
    inputs, traffic = make_inputs(options, tokens), accounting.traffic(options, tokens)
    made: list[Row] = []
    with contextlib.ExitStack() as stack:
        sides: dict[str, Any] = {
            "copy": PlainCopy(traffic, range(options.ep_size), device_of(options))
        }
        bodies = {("copy", phase): getattr(sides["copy"], phase) for phase in PHASES}
        before: dict[tuple[str, str], Body] = {}
        for name in list(wanted):
            with _spared(name, wanted, broken, tokens):
                mine = _MAKE[name](options, tokens, backend, inputs)
                stack.enter_context(contextlib.closing(mine))
                mine.check()
                replayed = options.cuda_graph and not mine.branches
                for phase in PHASES:
                    body = getattr(mine, phase)
                    bodies[name, phase] = clock.replay(body) if replayed else body
                before |= {(name, phase): body for phase, body in mine.before.items()}
                sides[name] = mine
        taken = clock.flushed(bodies, before)
        samples = {
            name: {phase: torch.tensor(taken[name, phase]).double()[:, None] for phase in PHASES}
            for name in sides
        }
        ceilings = samples.pop("copy")
        for name in samples:
            with _spared(name, wanted, broken, tokens):
                mine, verbs = sides[name], {verb: bodies[name, verb] for verb in VERBS}
                extra = _told(options, mine, clock, verbs)
                mine.check()  # still right after all those rounds
                if extra["launch"] == GRAPH:
                    mine.check(**verbs)  # and what was timed is the same
                backend_of = (options, mine.name, tokens)
                made.append(rows.make_row(*backend_of, samples[name], traffic, ceilings, extra))
    return _one_of_ours(made)


def _told(options: Options, mine: Any, clock: Clock, verbs: dict[str, Body]) -> Row:
    """Fields of a side's row beside its times."""
    launch = BRANCHES if mine.branches else GRAPH if options.cuda_graph else PLAIN
    extra: Row = {"given": mine.given, "launch": launch, "shows": SHOWS}
    if options.kernel_breakdown:
        try:
            of = {verb: clock.kernels(body, mine.before.get(verb)) for verb, body in verbs.items()}
            extra["kernels"] = {verb: kernels for verb, kernels in of.items() if kernels}
        except (RuntimeError, ValueError) as error:  # the figures without it are worth the row
            extra["not_profiled"] = str(error)
    if launched := getattr(mine, "shapes", {}):
        extra["shapes"] = {verb: chosen._asdict() for verb, chosen in launched.items()}
    return extra


@contextlib.contextmanager
def _spared(name: str, wanted: list[str], broken: list[str], tokens: int) -> Iterator[None]:
    """Whatever fails inside ends the run for the first that is wanted, and takes others out."""
    try:
        yield
    except Exception as error:  # a driver's, a library's, a wrong result
        if name == wanted[0]:
            raise
        wanted.remove(name)
        broken.append(f"{name}, from {tokens} tokens on: {type(error).__name__}: {error}")


def _one_of_ours(made: list[Row]) -> list[Row]:
    """Ours in both forms as one row: on branches, as peers, with the other one as `one_launch`."""
    if len(made) > 1 and made[1]["backend"] == OURS:
        alone, beside = made[:2]
        beside["one_launch"] = {name: alone[name] for name in ONE_LAUNCH if name in alone}
        made = [beside, *made[2:]]
    rows.add_ratios(made)
    return made
