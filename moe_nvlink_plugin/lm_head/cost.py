"""Rule that estimates when it pays to split the LM head's product of a draft step over ranks.

The rule gives the time of a step with `rows` rows per rank, a head of `V` rows of `H` elements, and
groups of `g` ranks:

    one rank alone   product(V*H*element / read, 2*rows*V*H / flops)
    a group          product(S*H*element / read, 2*g*rows*S*H / flops) + exchange
                     + rows*(g-1)*(H*element + 8) / link

A GPU reads while it multiplies: its product takes the longer of both times. A CPU core takes their
sum. `S` is a rank's share of the vocabulary, about V/g. In a group, each rank reads 1/g of the head
and multiplies as much as alone. So splitting saves the time of reading the rest, and costs two
exchanges: a rank sends its rows to g-1 peers, and each peer returns a pair of value and id per row.
The rule leaves out the logits, because their number is equal in both cases. If a GPU multiplies for
as long as it reads the whole head, splitting saves nothing. The gain falls as rows grow;
`crossover_rows` returns where it ends.

All rates are estimates: figures of data sheets times shares that we assume to be reachable, and an
exchange that no GPU has measured. A log line of them says "expected". Every function is local and
plain arithmetic, and allocates no device memory. Call it outside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.config import check_int
from moe_nvlink_plugin.errors import ConfigError, UnsupportedError

from .config import MAX_VOCAB_SIZE, SHARD_MULTIPLE

#: Bytes that a rank returns for another rank's row: 32 bits of value, 32 bits of the token's id.
PAIR_BYTES = 8
#: Limit of every size in this module.
_MOST = MAX_VOCAB_SIZE


class HeadShape(NamedTuple):
    """LM head `[vocab_size, hidden_size]`; an element of the head or of a row has element_bytes."""

    vocab_size: int
    hidden_size: int
    element_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of the whole head."""
        return self.vocab_size * self.hidden_size * self.element_bytes


class Rates(NamedTuple):
    """Rates that a rank reaches.

    Attributes:
        read_bytes_per_s: bytes per second that it reads from its memory.
        flops_per_s: multiplications and additions per second.
        link_bytes_per_s: bytes per second to its peers, one way.
        exchange_s: seconds of both exchanges without rows.
        overlaps: whether it reads weights while it multiplies others.
    """

    read_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    exchange_s: float
    overlaps: bool = True


class DataSheet(NamedTuple):
    """Figures of a GPU: memory in TB/s; dense bf16 and fp32 TFLOPS; NVLink in GB/s, one way."""

    memory_tb_s: float
    bf16_tflops: float
    fp32_tflops: float
    link_gb_s: float


#: Words of a device's name -> figures. The first entry whose words are all in the name counts. bf16
#: is half of the figure with sparsity; link is half of the figure for both directions.
#: Sources: NVIDIA's data sheets of H100 (SXM, NVL; PCIe of 2022), H200 (SXM, NVL), GH200 (its
#: faster memory) and Blackwell (GB200 NVL72, HGX B200), as other pages quote them; the sheets
#: themselves were not available. H20, B300 and GB300: third-party tables only.
DATA_SHEETS: dict[tuple[str, ...], DataSheet] = {
    ("H100", "PCIe"): DataSheet(2.0, 756, 51, 300),
    ("H100", "NVL"): DataSheet(3.9, 835, 60, 300),
    ("H100",): DataSheet(3.35, 989, 67, 450),
    ("H200", "NVL"): DataSheet(4.8, 835, 60, 450),
    ("H200",): DataSheet(4.8, 989, 67, 450),
    ("H20",): DataSheet(4.0, 148, 44, 450),
    ("GH200",): DataSheet(4.9, 990, 67, 450),
    ("B200",): DataSheet(7.7, 2250, 75, 900),
    ("GB200",): DataSheet(8.0, 2500, 80, 900),
    ("B300",): DataSheet(7.7, 2250, 75, 900),
    ("GB300",): DataSheet(8.0, 2500, 80, 900),
}

#: Shares of a data sheet's figures that we assume to be reachable. Not measured.
READ_SHARE, FLOPS_SHARE, LINK_SHARE = 0.85, 0.7, 0.75

#: Two exchanges on a GPU, seconds. NOT MEASURED: each a launch, stores to the peers, a signal and
#: the wait for the slowest. Between two figures that users report of one 8-byte all-reduce in a
#: node: 2.3 to 3 us of NCCL's symmetric kernels (NVIDIA/nccl issue 1940), 6 to 17 us of PyTorch's
#: one-shot all-reduce (pytorch/pytorch issue 131739).
GPU_EXCHANGE_S = 2 * 10e-6

#: CPU ranks, by element size. Medians of three runs of
#:     python benchmarks/bench_lm_head.py --rates --groups 2 --seconds 2
#: on an AMD EPYC with AVX-512 and its bf16 instructions, 2 cores, nothing else running, 2026-11-24.
#: `rank_rates` there says what each rate is. 2 bytes is bf16. Without these instructions a CPU
#: multiplies it more slowly (1.1e10 on a busy one): there the rule expects too much of splitting
#: with bf16. With 4 bytes it expects too much for 1 row
#: (benchmarks/results/2026-11-24-cpu-lm-head.json).
CPU_RATES = {
    2: Rates(1.6e10, 4.6e11, 4.1e9, 7.8e-5, overlaps=False),
    4: Rates(1.1e10, 9.1e10, 3.1e9, 1.0e-4, overlaps=False),
}


def rates_of(device: torch.device, element_bytes: int = 2) -> Rates:
    """Return the rates of a device for elements of 2 (bf16, fp16) or 4 bytes (fp32, without TF32).

    If the GPU is not in DATA_SHEETS, is a MIG slice, or its driver does not answer, each rate is
    the figure of the table that makes splitting slowest, and the exchange takes twice as long.

    Raises:
        ConfigError: element_bytes is neither 2 nor 4.
    """
    if element_bytes not in (2, 4):
        raise ConfigError(f"element_bytes={element_bytes!r}: there are rates for 2 and 4 bytes")
    if device.type == "cpu":
        return CPU_RATES[element_bytes]
    return rates_of_gpu(_name_of(device), element_bytes)


def _name_of(device: torch.device) -> str:
    try:
        return driver.device(device.index or 0).name
    except UnsupportedError:
        return "unknown"


def rates_of_gpu(name: str, element_bytes: int = 2) -> Rates:
    """Return the rates of the GPU with this name, as the driver gives it ("NVIDIA H100 NVL")."""
    words = set(name.split())
    found = next((sheet for key, sheet in DATA_SHEETS.items() if words >= {*key}), None)
    if found is None or "MIG" in words:
        return _reached(_worst_for_splitting(), element_bytes, 2 * GPU_EXCHANGE_S)
    return _reached(found, element_bytes, GPU_EXCHANGE_S)


def _worst_for_splitting() -> DataSheet:
    memory, bf16, fp32, link = zip(*DATA_SHEETS.values(), strict=True)
    return DataSheet(max(memory), min(bf16), min(fp32), min(link))


def _reached(sheet: DataSheet, element_bytes: int, exchange_s: float) -> Rates:
    tflops = sheet.bf16_tflops if element_bytes == 2 else sheet.fp32_tflops
    return Rates(
        sheet.memory_tb_s * 1e12 * READ_SHARE,
        tflops * 1e12 * FLOPS_SHARE,
        sheet.link_gb_s * 1e9 * LINK_SHARE,
        exchange_s,
    )


def step_seconds(shape: HeadShape, rows: int, tp_size: int, rates: Rates) -> float:
    """Return the expected seconds of the head in one draft step with `rows` rows per rank.

    Args:
        shape: the head.
        rows: rows of each rank.
        tp_size: ranks of a group; 1 means that the product is not split.
        rates: those of the device.

    Raises:
        ConfigError: a size or a rate is out of range.
    """
    _check(shape, rates, rows=rows, tp_size=tp_size)
    share = _widest_share(shape, tp_size)
    read_s = share * shape.hidden_size * shape.element_bytes / rates.read_bytes_per_s
    multiply_s = 2 * tp_size * rows * share * shape.hidden_size / rates.flops_per_s
    product_s = max(read_s, multiply_s) if rates.overlaps else read_s + multiply_s
    if tp_size == 1:
        return product_s
    link_s = exchanged_bytes(shape, rows, tp_size) / rates.link_bytes_per_s
    return product_s + rates.exchange_s + link_s


def exchanged_bytes(shape: HeadShape, rows: int, tp_size: int) -> int:
    """Return the bytes that a rank sends in one step: its rows to each peer, pairs for theirs."""
    return rows * (tp_size - 1) * (shape.hidden_size * shape.element_bytes + PAIR_BYTES)


def _widest_share(shape: HeadShape, tp_size: int) -> int:
    """Return the vocabulary rows of rank 0, which has as many as any other (HeadConfig.shard)."""
    even = -(-shape.vocab_size // tp_size)
    return min(shape.vocab_size, -(-even // SHARD_MULTIPLE) * SHARD_MULTIPLE)


def crossover_rows(shape: HeadShape, tp_size: int, rates: Rates, most_rows: int) -> int:
    """Return up to how many rows per rank splitting is expected to be faster; 0 means never.

    The result is at most `most_rows`. Splitting is expected to be faster with every smaller number
    of rows too; the module's text says why.

    Raises:
        ConfigError: as step_seconds.
    """
    _check(shape, rates, tp_size=tp_size, most_rows=most_rows)
    faster, slower = 0, most_rows + 1
    while slower - faster > 1:
        rows = (faster + slower) // 2
        if step_seconds(shape, rows, tp_size, rates) < step_seconds(shape, rows, 1, rates):
            faster = rows
        else:
            slower = rows
    return faster


def choose_size(shape: HeadShape, candidates: Iterable[int], most_rows: int, rates: Rates) -> int:
    """Return the group size with the least expected time; 1 if no candidate pays.

    The time of a size is a mean over steps of 1, 2, 4 .. most_rows rows per rank. Each step counts
    with the faster of splitting and not splitting, because a step above the crossover is not split.
    Of equal times the smaller size wins.

    Raises:
        ConfigError: as step_seconds.
    """
    sampled = _sampled_rows(most_rows)

    def mean_s(tp_size: int) -> float:
        sizes = (1, tp_size)
        best = [min(step_seconds(shape, rows, size, rates) for size in sizes) for rows in sampled]
        return sum(best) / len(best)

    return min(sorted({1, *candidates}), key=mean_s)


def _sampled_rows(most_rows: int) -> list[int]:
    """Return 1, 2, 4 .. and most_rows itself."""
    check_int("most_rows", most_rows, 1, _MOST)
    return [*_powers_below(most_rows), most_rows]


def _powers_below(bound: int) -> Iterator[int]:
    rows = 1
    while rows < bound:
        yield rows
        rows *= 2


def report(shape: HeadShape, tp_size: int, most_rows: int, rates: Rates) -> str:
    """Describe what splitting is expected to do, in a few lines for a log.

    Raises:
        ConfigError: as step_seconds.
    """
    _check(shape, rates, tp_size=tp_size, most_rows=most_rows)
    whole = shape.head_bytes
    head = (
        f"LM head {shape.vocab_size} x {shape.hidden_size}, {shape.element_bytes} bytes an element"
    )
    if tp_size == 1:
        return f"{head}: not split, every rank reads {_size(whole)} in each draft step"
    part = _widest_share(shape, tp_size) * shape.hidden_size * shape.element_bytes
    crossover = crossover_rows(shape, tp_size, rates, most_rows)
    rows = [n for n in _sampled_rows(most_rows) if n in (1, 8, 32, 128, most_rows)]
    bytes_out = ", ".join(f"{n}: {_size(exchanged_bytes(shape, n, tp_size))}" for n in rows)
    gains = ", ".join(f"{n}: {_gain(shape, n, tp_size, rates)}" for n in rows)
    return "\n".join(
        (
            f"{head}: {_size(whole)} read per rank and draft step, "
            f"{_size(part)} in groups of {tp_size}",
            f"exchanged per rank and draft step, by rows a rank: {bytes_out}",
            f"expected time of a draft step's head, by rows a rank: {gains}",
            _crossover_line(crossover, most_rows),
        )
    )


def _crossover_line(crossover: int, most_rows: int) -> str:
    if crossover == most_rows:
        return f"splitting is expected to pay with every number of rows up to {most_rows}"
    if crossover == 0:
        return "splitting is not expected to pay with any number of rows"
    return f"splitting is expected to pay up to {crossover} rows a rank"


def _gain(shape: HeadShape, rows: int, tp_size: int, rates: Rates) -> str:
    alone_s, split_s = (step_seconds(shape, rows, size, rates) for size in (1, tp_size))
    return f"{alone_s * 1e6:.4g} -> {split_s * 1e6:.4g} us ({alone_s / split_s:.2f}x)"


def _size(count: int) -> str:
    return f"{count / 1e6:.4g} MB" if count >= 1e6 else f"{count / 1e3:.4g} kB"


def _check(shape: HeadShape, rates: Rates, **sizes: int) -> None:
    for name, value in {**shape._asdict(), **sizes}.items():
        check_int(name, value, 1, _MOST)
    for name in ("read_bytes_per_s", "flops_per_s", "link_bytes_per_s", "exchange_s"):
        rate = getattr(rates, name)
        if not 0 <= rate < float("inf") or (rate == 0 and name != "exchange_s"):
            raise ConfigError(f"{name}={rate!r} is no rate; take those of rates_of(device)")
