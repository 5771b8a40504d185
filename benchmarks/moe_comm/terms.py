"""Predict what one dispatch or combine over NVLink costs, term by term: an analytical model.

A verb's time is a sum of what can only come one after the other,

    launches, flags there and back, polls, a release that waits for the rows' arrival, ...

and of what overlaps: the way of the last token through its CTA (`path`: trips to peers and to local
memory that wait for each other) with all bytes on the link (`stream`):

    (path ** overlap + stream ** overlap) ** (1 / overlap)

which is the larger of the two far from the knee, and somewhat more at the knee. That term is shared
out between its parts in proportion to what each would save if it were a little smaller
(path ** overlap : stream ** overlap), so terms add up to the verb's time.

Two protocols have the same terms with other counts: the published kernels (REFERENCE) and ours
(OURS, with the grids of moe_nvlink_plugin/exchange/shapes.py). benchmarks/model.py fits the
constants. **All that comes from here is predicted; nothing here has been measured.**
Times in microseconds, bandwidths in GB/s (1e9), sizes in bytes, one rank's view.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from moe_nvlink_plugin.exchange import shapes
from moe_nvlink_plugin.launch import shape

VERBS = ("dispatch", "combine")

#: Format -> bytes an element of activations takes, bytes of scales an element.
FORMATS = {
    "bf16": (2.0, 0.0),
    "fp8": (1.0, 0.0),  # the published kernels' combine: a cast
    "fp8_block": (1.0, 4 / 128),
    "fp8_block_pow2": (1.0, 4 / 128),
    "mxfp8": (1.0, 1 / 32),
    "nvfp4": (0.5, 1 / 16),
}
#: Ids and router weights of one token, 4 bytes each for every k.
EXTRA_BYTES_PER_K = 8

#: Threads of a CTA of the published kernels, and bytes a thread moves at a time: 14336 bytes are
#: four passes.
REFERENCE_THREADS = 256
VECTOR_BYTES = shape.VECTOR_BYTES
#: Vectors a thread of ours loads before it stores them (kVectorsInFlight on the GPU).
OUR_LOADS_IN_FLIGHT = 2
#: Threads an SM holds of kernels with 64 registers a thread: what ours are bounded to, by estimate.
THREADS_PER_SM = 1024
#: One SM's stores of expert ids into empty slots, GB/s: an estimate (kernels/exchange/dispatch.cu).
MARKING_GB_S = 100.0


class Machine(NamedTuple):
    """A GPU in its NVLink domain, by its data sheet.

    Attributes:
        link_gb_s: one way; memory_gb_s: of the GPU's own memory; sms: streaming multiprocessors.
    """

    name: str
    link_gb_s: float
    sms: int
    memory_gb_s: float


GB200 = Machine("GB200", 900.0, 148, 8000.0)
H200 = Machine("H200", 450.0, 132, 4800.0)


class Constants(NamedTuple):
    """What the data sheet does not say. benchmarks/model.py fits all but the first.

    Attributes:
        launch_us: start and end of one more kernel in a stream or graph. Assumed.
        remote_us: round trip of a CTA's reads from, or acknowledged stores to, its peers.
        local_us: a load of local memory that something waits for, or an atomic.
        peer_us: one more rank in a barrier: its flag stored and polled.
        turn_us: an SM's second and every later CTA, beside the work: its own poll and acquire.
        put_share, get_share: of the link's bandwidth that stores and loads reach, 8 ranks.
        put_loss, get_loss: of that, lost with every doubling of the ranks beyond 8.
        overlap: how sharply the longer one of path and stream hides the other; 1: not at all.
    """

    launch_us: float
    remote_us: float
    local_us: float
    peer_us: float
    turn_us: float
    put_share: float
    get_share: float
    put_loss: float
    get_loss: float
    overlap: float


class Work(NamedTuple):
    """One call on every rank. Sizes in elements, tokens per rank.

    Attributes:
        recipe: what dispatch puts; combine: what combine gets: keys of FORMATS.
        router: "perfect": a token's experts lie on as many ranks as can be, the same number of rows
            for each rank; "uniform": random experts, no expert twice.
    """

    ep_size: int
    tokens: int
    recipe: str = "bf16"
    combine: str = "bf16"
    hidden_size: int = 7168
    top_k: int = 8
    num_experts: int = 256
    router: str = "perfect"

    @property
    def fan_out(self) -> float:
        """Number of ranks a token goes to, its own counted; the mean if routing is random."""
        if self.router == "perfect":
            return float(min(self.ep_size, self.top_k))
        here = self.num_experts / self.ep_size
        none = math.prod(
            (self.num_experts - here - k) / (self.num_experts - k) for k in range(self.top_k)
        )
        return self.ep_size * (1.0 - max(none, 0.0))

    @property
    def remote_share(self) -> float:
        """Share of a token's ranks that are not its own, on average."""
        return (self.ep_size - 1) / self.ep_size

    @property
    def recipe_bytes(self) -> float:
        """Bytes of a token's row as dispatch puts it, scales included."""
        return self.hidden_size * sum(FORMATS[self.recipe])

    @property
    def combine_bytes(self) -> float:
        """Bytes of a partial row as combine gets it, scales included."""
        return self.hidden_size * sum(FORMATS[self.combine])

    def logical_bytes(self, verb: str) -> float:
        """Return bytes by the published formula: own share counted, as many ranks as possible."""
        row = self.recipe_bytes if verb == "dispatch" else self.combine_bytes
        return self.tokens * min(self.ep_size, self.top_k) * row

    def wire_bytes(self, verb: str) -> float:
        """Return bytes of rows to, or from, other ranks; ids and weights not counted."""
        row = self.recipe_bytes if verb == "dispatch" else self.combine_bytes
        return self.tokens * self.fan_out * self.remote_share * row


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Counts of what a verb does one after the other.

    Attributes:
        dispatch_launches, combine_launches: kernels of one call.
        routing_reads: trips to local memory before a token's first row is loaded.
        publish_reads: the same between the last row and the flags (arrival, counters).
        releases_rows: dispatch ends with a release that waits until peers have acknowledged rows.
        one_payload_after_another: scales, ids and weights travel behind the activations, a trip
            each, and not beside them.
        combine_pass_reads: trips to local memory in each pass of combine's loop.
        our_grids: launch shapes of this project's, else one CTA of 256 threads a token.
        quantises: recipes are made in dispatch, combine formats in combine, and not before.
        pushes_sums: combine's rows come with their flags (an idea, nobody has written it).
    """

    name: str
    dispatch_launches: float
    combine_launches: float
    routing_reads: int
    publish_reads: int
    combine_pass_reads: int
    releases_rows: bool = True
    one_payload_after_another: bool = False
    our_grids: bool = False
    quantises: bool = False
    pushes_sums: bool = False


#: As published: prepare, dispatch and a kernel that marks empty slots; prepare and combine. Routing
#: loads ids, then takes slots by atomics of one thread, then shares them; combine's loop loads
#: target and slot, its peers' rows, and stores the sum.
REFERENCE = Protocol(
    "reference",
    dispatch_launches=3,
    combine_launches=2,
    routing_reads=3,
    publish_reads=1,
    combine_pass_reads=2,
    one_payload_after_another=True,
)
#: kernels/exchange/: ids, then all slots at once; arrival, then counters; addresses
#: are found while the flags are on their way.
OURS = Protocol(
    "moe_nvlink",
    dispatch_launches=1,
    combine_launches=1,
    routing_reads=2,
    publish_reads=2,
    combine_pass_reads=1,
    our_grids=True,
    quantises=True,
)


class Term(NamedTuple):
    """Microseconds of one verb, and what they go into."""

    name: str
    us: float


def terms(
    verb: str,
    work: Work,
    machine: Machine,
    protocol: Protocol,
    constants: Constants,
    *,
    has_sync: bool = True,
) -> list[Term]:
    """Return the verb's terms, none below zero; their sum is its predicted time.

    Args:
        has_sync: with flags and waits. Without: what a build for profiling would take.
    """
    parts = _dispatch if verb == "dispatch" else _combine
    before, path, stream, sync = parts(work, machine, protocol, constants)
    found = [*before, *_overlapped(path, stream, constants.overlap)]
    return [*found, *sync] if has_sync else found


def time_us(
    verb: str,
    work: Work,
    machine: Machine,
    protocol: Protocol,
    constants: Constants,
    *,
    has_sync: bool = True,
) -> float:
    """Return the predicted time of one verb."""
    found = terms(verb, work, machine, protocol, constants, has_sync=has_sync)
    return sum(term.us for term in found)


#: What comes before; the path; the stream; flags and waits.
_Parts = tuple[list[Term], list[Term], Term, list[Term]]


def _dispatch(work: Work, machine: Machine, protocol: Protocol, constants: Constants) -> _Parts:
    local_us, remote_us = constants.local_us, constants.remote_us
    before = [Term("launches", protocol.dispatch_launches * constants.launch_us)]
    passes, finishers = _dispatch_grid(work, machine, protocol)
    path = [
        Term("routing: ids, slots", protocol.routing_reads * local_us),
        Term("passes over the row, local loads", passes * local_us),
    ]
    extra = EXTRA_BYTES_PER_K * work.top_k
    rows = work.tokens * work.fan_out * (work.recipe_bytes + extra)
    stream = _stream(
        remote=rows * work.remote_share,
        near=work.tokens * work.recipe_bytes + rows,
        machine=machine,
        share=_share(constants.put_share, constants.put_loss, work.ep_size),
    )
    release = remote_us if protocol.releases_rows else 0.0
    sync = [
        Term("release: rows acknowledged", release),
        Term("arrival, counters", protocol.publish_reads * local_us),
        *_flags(work, constants),
        Term("empty slots marked", _marking_us(work, protocol, finishers)),
    ]
    return before, path, stream, sync


def _combine(work: Work, machine: Machine, protocol: Protocol, constants: Constants) -> _Parts:
    local_us, remote_us = constants.local_us, constants.remote_us
    before = [Term("launches", protocol.combine_launches * constants.launch_us)]
    passes, ctas = _combine_grid(work, machine, protocol)
    trips = 0.0 if protocol.pushes_sums else passes * remote_us
    path = [
        Term("passes over the row, remote trips", trips),
        Term("passes over the row, local", passes * protocol.combine_pass_reads * local_us),
    ]
    rows = work.tokens * work.fan_out * work.combine_bytes
    stream = _stream(
        remote=rows * work.remote_share,
        near=work.tokens * work.hidden_size * FORMATS["bf16"][0] + rows,
        machine=machine,
        share=_share(constants.get_share, constants.get_loss, work.ep_size),
    )
    # A CTA's first wait is that for the flags, which all of an SM's first CTAs spend side by side.
    turns = max(ctas / machine.sms - 1.0, 0.0)
    sync = [*_flags(work, constants), Term("acquires of later CTAs", turns * constants.turn_us)]
    if protocol.quantises and work.combine != "bf16":
        received = work.tokens * work.fan_out
        rounds = math.ceil(received / min(max(received, 1.0), _resident(machine, 256)))
        before.append(Term("rows quantised, arrival", (2 * rounds + 2) * local_us))
    return before, path, stream, sync


def _flags(work: Work, constants: Constants) -> list[Term]:
    return [
        Term("flags on their way", constants.remote_us / 2),
        Term("poll", constants.local_us),
        Term("a flag for each rank", constants.peer_us * work.ep_size),
    ]


def _overlapped(path: Sequence[Term], stream: Term, overlap: float) -> list[Term]:
    """Overlap path and stream; the terms add up to what both take together."""
    path_us = sum(term.us for term in path)
    longest = max(path_us, stream.us)
    if longest <= 0.0:
        return [*path, stream]
    # Of ratios, so that no power overflows.
    both = (path_us / longest) ** overlap + (stream.us / longest) ** overlap
    total = longest * both ** (1.0 / overlap)
    of_path = total * (path_us / longest) ** overlap / both
    shared = [Term(term.name, of_path * term.us / path_us) for term in path if path_us > 0.0]
    return [*shared, Term(stream.name, total - of_path)]


def _stream(*, remote: float, near: float, machine: Machine, share: float) -> Term:
    """Send bytes through the link or this GPU's memory, whichever takes longer."""
    link_us = remote / (machine.link_gb_s * share * 1e3)
    memory_us = near / (machine.memory_gb_s * 1e3)
    if memory_us > link_us:
        return Term("rows through local memory", memory_us)
    return Term("rows through the link", link_us)


def _share(at_8_ranks: float, loss: float, ep_size: int) -> float:
    """Return the share of the link: less with every doubling of the ranks, more below 8."""
    return min(max(at_8_ranks * (1.0 - loss * math.log2(ep_size / 8)), 0.01), 1.0)


def _dispatch_grid(work: Work, machine: Machine, protocol: Protocol) -> tuple[int, int]:
    """Return passes over a token's rows, and CTAs that mark empty slots."""
    element, scale = FORMATS[work.recipe]
    if not protocol.our_grids:
        passes = _ceil_div(work.hidden_size * element, REFERENCE_THREADS * VECTOR_BYTES)
        others = 2 + (scale > 0)  # ids, weights, scales
        return passes + (others if protocol.one_payload_after_another else 0), 0
    # What is loaded is a row of bf16 where dispatch quantises it.
    loaded = work.hidden_size * FORMATS["bf16" if protocol.quantises else work.recipe][0]
    launch = shapes.dispatch_shape(work.tokens, int(loaded), _empty_bytes(work), _limits(machine))
    vectors = _ceil_div(loaded, VECTOR_BYTES)
    in_flight = OUR_LOADS_IN_FLIGHT if vectors > launch.threads else 1
    return _ceil_div(vectors, launch.threads * in_flight), min(
        launch.blocks, shapes.MOST_MARKING_CTAS
    )


def _combine_grid(work: Work, machine: Machine, protocol: Protocol) -> tuple[int, float]:
    """Return passes of a CTA over its part of a row, and CTAs that wait and acquire."""
    if not protocol.our_grids:
        row = work.hidden_size * FORMATS[work.combine][0]
        return _ceil_div(row, REFERENCE_THREADS * VECTOR_BYTES), work.tokens
    slots = 0 if work.combine == "bf16" else work.ep_size * work.tokens
    launch = shapes.combine_shape(work.tokens, work.hidden_size, 2, _limits(machine), slots)
    vectors = _ceil_div(work.hidden_size * 2, VECTOR_BYTES)
    return _ceil_div(vectors, launch.threads * launch.splits), launch.blocks


def _limits(machine: Machine) -> shape.Limits:
    return shape.Limits(machine.sms, shape.MOST_THREADS, _blocks_per_sm)


def _blocks_per_sm(threads: int) -> int:
    return THREADS_PER_SM // threads


def _resident(machine: Machine, threads: int) -> int:
    return machine.sms * _blocks_per_sm(threads)


def _empty_bytes(work: Work) -> int:
    """Bytes of expert ids in slots that nobody fills, in buffers as large as the batch."""
    empty = work.ep_size * work.tokens - work.tokens * work.fan_out
    return int(empty * work.top_k * 4)


def _marking_us(work: Work, protocol: Protocol, finishers: int) -> float:
    """Time to mark empty slots; the published kernels' launch for it is counted there."""
    if not protocol.our_grids:
        return 0.0
    return _empty_bytes(work) / (finishers * MARKING_GB_S * 1e3)


def _ceil_div(count: float, size: float) -> int:
    return math.ceil(count / size)


def largest_first(found: Sequence[Term]) -> list[Term]:
    """Sort the terms that take time."""
    return sorted((term for term in found if term.us > 0.0), key=lambda term: -term.us)
