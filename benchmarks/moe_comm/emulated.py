"""Measure all ranks of a group on ONE GPU: ours, FlashInfer's, and a device copy of the same bytes.

    rows = emulated.run(options)      # options.emulate_ranks; device "cuda" or "rehearsal"

Ours runs in two forms. Alone (Layer), a verb of all ranks is one cooperative launch
(tests/support/emulated.py): blockIdx.y is the rank, and each rank has its share of the SMs and the
launch shape that the product would choose for that share. Beside a peer (Branches), every rank
launches the product's own kernels on a branch of one graph, because the peer's kernels must run so.
Ratios are of this form. The first form then has rows of its own, named ONE_LAUNCH, without a ratio.

"Remote" memory is the same GPU's. So this shows what launch, routing, copy and reduction cost, and
how near they come to the memory's speed. It shows nothing of NVLink: no remote latency, bandwidth
or ordering.

Small batches go through their kernels up to the product's limit for GPUs, or up to
MOE_NVLINK_SMALL_TOKENS; with 0 all batches go through the others. Fields "is_small" (dispatch) and
"combine_is_small" of a row say which were launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.columns import print_headings
from moe_nvlink_plugin import AllToAllConfig, driver
from moe_nvlink_plugin.exchange import shapes
from moe_nvlink_plugin.exchange.launches import LayerLaunches
from moe_nvlink_plugin.exchange.small_batches import (
    small_combine_sizes,
    small_dispatch_sizes,
    with_small_tokens,
)
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.verify import cases
from tests.support import emulated
from tests.support.ranks import run_threads

from . import accounting, emulated_flashinfer, expected, rows
from .cuda_clock import Body, Clock, on_branches
from .options import OURS, OptionError, Options
from .processes import runnable
from .routers import RankTokens, tokens_of
from .rows import PHASES, Row
from .timing import CEILING as COPY
from .timing import PlainCopy, bodies_of

SHOWS = "ranks emulated on one GPU: no NVLink latency, bandwidth or ordering"
CEILING = (
    "device-to-device copy of as many bytes as the rows that all ranks put, L2 flushed, taking "
    "turns with the backends"
)
GIVEN = "nothing: routing, signals and empty slots are in the time; arguments packed before"
#: How all ranks' kernels of a verb are launched. Times of two backends are compared only if they
#: are launched in the same way.
PLAIN = "one launch of all ranks"
GRAPH = f"{PLAIN}, a graph's replay"
BRANCHES = "a launch a rank and kernel, on branches of one graph"

#: Backend of the rows of ours in one launch, if ours on branches is measured too.
ONE_LAUNCH = f"{OURS}_one_launch"

VERBS = PHASES[:2]


class Layer:
    """Ours: prepared launches of all ranks for one batch, which need this object alive.

    Attributes:
        given: what it is spared.
        branches: whether its bodies replay graphs already, a branch for each rank; else each body
            is one launch.
        before: phase -> what must be done ahead of it, and is not timed.

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
        self.inputs = make_inputs(options, tokens) if inputs is None else inputs
        self._slots = [torch.empty_like(mine.topk_ids) for mine in self.inputs]
        self._outputs = [torch.empty_like(mine.hidden) for mine in self.inputs]
        # Some are made of the inputs, and live as long as the launches that read them.
        self._sources = [self.ranks.sources(cases.Inputs(*mine, ())) for mine in self.inputs]
        self.shapes = self._shapes(backend)
        ranks = range(options.ep_size)
        self._prepare(
            backend,
            [self._dispatch_arguments(rank) for rank in ranks],
            [self._combine_arguments(rank) for rank in ranks],
        )
        self._has_dispatched = False
        # A dispatch refuses to follow one that has not been combined.
        self.before = {"dispatch": self.combine, "both": self.combine}

    def _prepare(
        self, backend: emulated.Backend, dispatches: list[Any], combines: list[Any]
    ) -> None:
        """Make the bodies out of each verb's arguments of all ranks."""
        verbs = {verb: self.ranks.verb(verb) for verb in VERBS}
        self.dispatch = backend.prepare(verbs["dispatch"], dispatches, self.shapes.get("dispatch"))
        self.combine = backend.prepare(verbs["combine"], combines, self.shapes.get("combine"))
        self.both = bodies_of(self)[2]

    def _shapes(self, backend: emulated.Backend) -> dict[str, shape.Shape]:
        """Choose what the product would launch on a GPU with this rank's share of the SMs."""
        if not isinstance(backend, emulated.CudaBackend):
            return {}
        kernels = {verb: self.ranks.verb(verb) for verb in VERBS}
        return {
            verb: self._shape(kernel, backend.limits(kernel, self.options.ep_size))
            for verb, kernel in kernels.items()
        }

    def _shape(self, kernel: str, limits: shape.Limits) -> shape.Shape:
        config, quantiser = self.ranks.config, self.ranks.quantiser
        row_bytes = {name: row.row_bytes for name, row in self.ranks.rows.items()}
        if kernel == "small_dispatch":
            of_dispatch = small_dispatch_sizes(config, row_bytes, quantiser)
            return shapes.small_shape(self.tokens, of_dispatch, limits)
        if kernel == "small_combine":
            of_combine = small_combine_sizes(config, config.dtype.itemsize)
            return shapes.small_shape(self.tokens, of_combine, limits)
        slots = config.ep_size * config.max_tokens_per_rank
        if kernel == "dispatch":
            lanes_bytes = max(row_bytes.values())
            if quantiser:
                lanes_bytes = shapes.quantising_lanes(config.hidden_size) * shape.VECTOR_BYTES
            marked = slots * row_bytes["recv_topk_ids"]
            return shapes.dispatch_shape(self.tokens, lanes_bytes, marked, limits)
        quantised = 0 if config.combine == "bf16" else slots
        element_bytes = config.dtype.itemsize
        return shapes.combine_shape(
            self.tokens, config.hidden_size, element_bytes, limits, quantised
        )

    def _dispatch_arguments(self, rank: int) -> Any:
        args = self.ranks.dispatch_arguments(rank)
        args.geometry.num_tokens = self.tokens
        args.send_slots = self._slots[rank].data_ptr()
        if "dispatch" in self.shapes:
            args.senders = self.shapes["dispatch"].splits
        emulated.set_sources(args, self._sources[rank])
        return args

    def _combine_arguments(self, rank: int) -> Any:
        args = self.ranks.combine_arguments(rank)
        args.geometry.num_tokens = self.tokens
        args.send_slots = self._slots[rank].data_ptr()
        args.output = self._outputs[rank].data_ptr()
        if "combine" in self.shapes:
            # Each kernel reads the one that it knows.
            args.hidden_splits = args.senders = self.shapes["combine"].splits
        return args

    def check(self, dispatch: Body | None = None, combine: Body | None = None) -> None:
        """Hold the results to moe_nvlink_plugin.reference, bit for bit; nvfp4 on a GPU to a code.

        Args:
            dispatch, combine: in the place of its own, such as their graphs' replays.

        Raises:
            WrongResult: a wrong row or a fault word, with rank and place.
        """
        if self._has_dispatched:
            self.before.get("dispatch", lambda: None)()
        self._has_dispatched = True
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
        expected.check_outputs(self, self._outputs, "alike" if near else "exact")

    def _run_experts(self, rank: int) -> None:
        received = self.ranks.received(rank, (), self._slots[rank])
        hidden = cases.activations(self.ranks.config, received.hidden_states, received.scales)
        filled = received.topk_ids[:, 0] >= 0
        of_experts = (hidden, received.topk_ids, received.topk_weights)
        made = expected.expert_rows(self.options, rank, *(part[filled] for part in of_experts))
        self._send_back(rank, filled, made)

    def _send_back(self, rank: int, filled: torch.Tensor, rows: torch.Tensor) -> None:
        """Write activations, as the experts do in every format of combine."""
        self.ranks.view(rank, "combine")[filled] = rows

    def close(self) -> None:
        """Do nothing: the caller closes the back end."""


class Branches(Layer):
    """Ours as each rank would launch it on a GPU of its own with a rank's share of the SMs.

    The product's launcher launches the product's kernels, so shapes are the product's. No rank
    fills more than its share, so all ranks' CTAs fit on the GPU together. For the same reason there
    is no PDL: a combine that came early would take the place of a peer's dispatch, and wait for it.
    """

    branches = True
    given = f"{GIVEN}; {BRANCHES}, whose fork and join are in its time"

    def _shapes(self, backend: emulated.Backend) -> dict[str, shape.Shape]:
        return {}  # the product's launcher chooses them

    def _prepare(
        self, backend: emulated.Backend, dispatches: list[Any], combines: list[Any]
    ) -> None:
        if not isinstance(backend, emulated.CudaBackend):
            super()._prepare(backend, dispatches, combines)  # a thread for each rank
            return
        executor = CudaExecutor(backend.device)
        executor.pdl = False
        ranks = len(self.inputs)
        share = max(executor.device_facts.num_sms // ranks, 1)
        # With this limit, but by the kernels of a GPU of its own.
        choices = self.ranks.config.choices.but("tma_sms", 0)
        config = dataclasses.replace(self.ranks.config, max_sms=share, tuning=choices)
        row_bytes = {name: row.row_bytes for name, row in self.ranks.rows.items()}
        launchers = [
            LayerLaunches(executor, config, row_bytes, self.ranks.quantiser) for _ in range(ranks)
        ]

        def dispatch(rank: int) -> None:
            launchers[rank].dispatch(dispatches[rank])

        def combine(rank: int) -> None:
            launchers[rank].combine(combines[rank])

        together = functools.partial(_together, backend.device, ranks)
        self.dispatch, self.combine = together(dispatch), together(combine)
        self.both = together(dispatch, combine)


def _together(device: torch.device, ranks: int, *verbs: Callable[[int], None]) -> Body:
    """Run the verbs of all ranks at once: on the stand-in's CPU, without streams, in threads."""
    if device.type == "cuda":
        return on_branches(device, ranks, *verbs)

    def in_order(rank: int) -> None:
        for verb in verbs:
            verb(rank)

    def body() -> None:
        run_threads(ranks, in_order)

    return body


def config_of(options: Options, rank: int, tokens: int) -> AllToAllConfig:
    """Configure one rank, whose small batches go through their kernels as in the product on a GPU.

    On a GPU, whose minutes are lent, a wait that hangs ends soon.
    """
    patience_s = 10.0 if options.device == "cuda" else options.timeout_s
    config = dataclasses.replace(options.config(rank, tokens), timeout_s=patience_s)
    return with_small_tokens(config, find_recipe(config), sms_of_a_rank(options))


def sms_of_a_rank(options: Options) -> int:
    """Return a rank's share of the GPU's SMs; a rehearsal has one GPU of an H200's for each."""
    return driver.device(0).num_sms // options.ep_size if options.device == "cuda" else 132


def device_of(options: Options) -> str:
    """Say where tensors are: those of a rehearsal on the CPU."""
    return "cuda" if options.device == "cuda" else "cpu"


def make_inputs(options: Options, tokens: int) -> list[RankTokens]:
    """Make the tokens of each rank, on the device."""
    device = device_of(options)
    return [tokens_of(options, tokens, rank).to(device) for rank in range(options.ep_size)]


def make_backend(
    options: Options, *, post_quant: bool = False, alone: bool = False
) -> emulated.Backend:
    """Make the back end of a Layer; `alone`: with its quantiser as a verb of its own."""
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


def run(
    options: Options,
    *,
    explicit: bool = False,
    not_measured: list[str] | None = None,
    failed: list[str] | None = None,
    show: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Return rows of every batch, ratios included. If a peer fails, ours goes on alone.

    Args:
        explicit: a backend that cannot run with these options is an error rather than left out.
        not_measured: takes what was left out, and why.
        failed: takes what of it was to be measured: a peer that is asked for and does not run
            here, or whatever failed later.
        show: is called with the rows of each batch as soon as they are there.

    Raises:
        WrongResult: of ours, before or after it was timed.
        OptionError: an explicit backend cannot run, or none can.
    """
    not_measured = [] if not_measured is None else not_measured
    failed = [] if failed is None else failed
    lists: Any = {"explicit": explicit, "not_measured": not_measured}
    names = runnable(options, **lists, why_not=unavailable)
    wanted = _wanted(options, names, failed if explicit else not_measured)
    clock = Clock(device_of(options), options.iters, options.warmup)
    found: list[Row] = []
    print_headings(rows.COLUMNS)
    with contextlib.closing(make_backend(options)) as backend:
        for tokens in options.batches:
            _give_back(options)
            try:
                made = measure(options, tokens, clock, backend, wanted)
            except torch.cuda.OutOfMemoryError as error:
                what = f"{tokens} tokens on {options.ep_size} emulated ranks"
                not_measured.append(f"{what}: {error}; take fewer of either")
                continue
            except Exception as error:  # a driver's, a library's, a wrong result
                if ONE_LAUNCH not in wanted:
                    raise
                failed.append(f"peers, from {tokens} tokens on: {type(error).__name__}: {error}")
                wanted, made = [OURS], []
            if not made:
                _give_back(options)
                made = measure(options, tokens, clock, backend, wanted)
            found += made
            not_measured += [text for text in failed if text not in not_measured]
            rows.show(made)
            if show is not None:
                show(made)
    return found


def _wanted(options: Options, names: Sequence[str], lost: list[str]) -> list[str]:
    """Return the backends to measure, ours first; in both forms if a peer is there to compare with.

    Raises:
        OptionError: nothing is left.
    """
    wanted = [name for name in names if name == OURS]
    if "flashinfer" in names:
        reason = emulated_flashinfer.probe(options)
        if reason is None:
            return [*([ONE_LAUNCH, OURS] if wanted else []), "flashinfer"]
        lost.append(f"flashinfer: {reason}")
    if not wanted:
        raise OptionError(f"no backend can run here: {'; '.join(lost)}")
    return wanted


def _make(
    name: str,
    wanted: Sequence[str],
    backend: emulated.Backend,
    inputs: list[RankTokens],
    options: Options,
) -> Any:
    """Make all ranks of a backend. Ours is launched as its peers are; if it has none, at once."""
    tokens = len(inputs[0].hidden)
    if name == "flashinfer":
        return emulated_flashinfer.make_layer(options, tokens, inputs)
    kind = Branches if name == OURS and ONE_LAUNCH in wanted else Layer
    return kind(options, tokens, backend, inputs=inputs)


def _give_back(options: Options) -> None:
    """Free the memory of a batch that is over, so that the next one finds all there is."""
    if options.device == "cuda":
        gc.collect()  # graphs and launches refer to each other
        torch.cuda.empty_cache()


def unavailable(name: str, options: Options) -> str | None:
    """Say why a backend cannot run on emulated ranks here; None: it can."""
    if name == OURS:
        return None
    if name == "flashinfer":
        return emulated_flashinfer.unavailable(options)
    return (
        "needs a process for every rank, which emulated ranks have not; leave out --emulate_ranks"
    )


def measure(
    options: Options,
    tokens: int,
    clock: Clock,
    backend: emulated.Backend,
    wanted: Sequence[str] = (OURS,),
) -> list[Row]:
    """Return the rows of one batch. All wanted backends and the copy take turns.

    Raises:
        Exception: whatever fails of a backend, or WrongResult; there are no rows of the batch.
    """
    inputs, traffic = make_inputs(options, tokens), accounting.traffic(options, tokens)
    copy = PlainCopy(traffic, range(options.ep_size), device_of(options))
    bodies = {(COPY, phase): body for phase, body in zip(PHASES, bodies_of(copy), strict=True)}
    before: dict[tuple[str, str], Body] = {}
    made: list[Row] = []
    with contextlib.ExitStack() as stack:
        sides = {name: _make(name, wanted, backend, inputs, options) for name in wanted}
        for name, side in sides.items():
            stack.enter_context(contextlib.closing(side))
            side.check()
            replayed = options.cuda_graph and not side.branches
            for phase in PHASES:
                body = getattr(side, phase)
                bodies[name, phase] = clock.replay(body) if replayed else body
            before |= {(name, phase): body for phase, body in side.before.items()}
        taken = clock.flushed(bodies, before)
        times = {key: torch.tensor(of, dtype=torch.float64)[:, None] for key, of in taken.items()}
        ceilings = {phase: times[COPY, phase] for phase in PHASES}
        for name, side in sides.items():
            verbs = {verb: bodies[name, verb] for verb in VERBS}
            extra = _told(options, side, clock, verbs)
            side.check()  # still right after all those rounds
            if extra["launch"] == GRAPH:
                side.check(**verbs)  # and what was timed is the same
            mine = {phase: times[name, phase] for phase in PHASES}
            made.append(rows.make_row(options, name, tokens, mine, traffic, ceilings, extra))
    rows.add_ratios(made)
    return made


def _told(options: Options, mine: Any, clock: Clock, verbs: dict[str, Body]) -> Row:
    """Return the fields of a side's row beside its times."""
    launch = BRANCHES if mine.branches else GRAPH if options.cuda_graph else PLAIN
    extra: Row = {"given": mine.given, "launch": launch, "shows": SHOWS}
    if isinstance(mine, Layer):
        extra["is_small"] = cases.is_small(mine.ranks.config)
        extra["combine_is_small"] = cases.is_small(mine.ranks.config, "combine")
    if options.kernel_breakdown:
        try:
            of = {verb: clock.kernels(body, mine.before.get(verb)) for verb, body in verbs.items()}
            extra["kernels"] = {verb: kernels for verb, kernels in of.items() if kernels}
        except (RuntimeError, ValueError) as error:  # the figures without it are worth the row
            extra["not_profiled"] = str(error)
    if launched := getattr(mine, "shapes", {}):
        extra["shapes"] = {verb: chosen._asdict() for verb, chosen in launched.items()}
    return extra
