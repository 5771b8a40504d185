"""A small shared LM head and what it must give, for the tests of lm_head.py.

The products are of small whole numbers: exact in every element type, so that a product of all rows
with the whole head and one of some rows with a part of it have the same bits in any BLAS.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import HeadConfig, HeadGroup, sharded_argmax, sharded_logits

VOCAB, HIDDEN, CAPACITY = 50, 8, 4


def config(tp_size: int = 1, tp_rank: int = 0, **values: Any) -> HeadConfig:
    usual: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "max_rows_per_rank": CAPACITY,
        "dtype": torch.float32,
        "timeout_s": 30,
    }
    return HeadConfig(tp_size=tp_size, tp_rank=tp_rank, **{**usual, **values})


class Problem(NamedTuple):
    """One call on all ranks.

    Attributes:
        rows: of each rank, `[n, hidden_size]`.
        weight: `[vocab_size or more, hidden_size]`.
        bias: `[vocab_size or more]`, or None.
        function: soft_cap and scale, where they are given.
    """

    rows: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    function: dict[str, float] = {}  # noqa: RUF012 - never written to

    def options(self) -> dict[str, Any]:
        """Of the verbs."""
        return {"bias": self.bias, **self.function}

    def to(self, device: torch.device | str) -> Problem:
        """The same tensors there; those on it already are the same objects."""
        bias = None if self.bias is None else self.bias.to(device)
        rows = [each.to(device) for each in self.rows]
        return Problem(rows, self.weight.to(device), bias, self.function)


def whole(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -2 to 2; sums of 24 products of them are below 2^7."""
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def problem(
    mine: HeadConfig, counts: list[int], seed: int = 0, *, padding: int = 0, bias: bool = False
) -> Problem:
    """Random rows and weights; `padding` rows behind the vocabulary would win by far."""
    generator = torch.Generator().manual_seed(seed)
    rows = [whole((count, mine.hidden_size), generator, mine.dtype) for count in counts]
    weight = whole((mine.vocab_size + padding, mine.hidden_size), generator, mine.dtype)
    weight[mine.vocab_size :: 2] = float("nan")
    weight[mine.vocab_size + 1 :: 2] = float("inf")
    offsets = whole((mine.vocab_size + padding,), generator, mine.dtype)
    offsets[mine.vocab_size :] = float("inf")
    return Problem(rows, weight, offsets if bias else None)


def logits_of(mine: HeadConfig, given: Problem, rank: int) -> torch.Tensor:
    """The product with the whole head, in float32 and rounded once; neither cap nor scale."""
    weight = given.weight[: mine.vocab_size].float()
    logits = given.rows[rank].float() @ weight.T
    if given.bias is not None:
        logits += given.bias[: mine.vocab_size].float()
    return logits.to(mine.dtype)


def ids_of(mine: HeadConfig, given: Problem, rank: int) -> torch.Tensor:
    """torch's argmax over the whole head."""
    values = logits_of(mine, given, rank).float()
    soft_cap = given.function.get("soft_cap")
    if soft_cap is not None:
        values = soft_cap * torch.tanh(values / soft_cap)
    return (values * given.function.get("scale", 1.0)).argmax(1)


def check_argmax(head: HeadGroup, given: Problem, **options: Any) -> None:
    """This rank's part of one call on the group's device, held to torch's argmax on the CPU."""
    rank = head.config.tp_rank
    there = given.to(head._head.workspace.device)
    ids = sharded_argmax(there.rows[rank], there.weight, group=head, **there.options() | options)
    assert ids.dtype == torch.int64
    expected = ids_of(head.config, given, rank)
    assert torch.equal(ids.cpu(), expected), f"rank {rank}: {ids.tolist()}, not {expected.tolist()}"


def check_logits(head: HeadGroup, given: Problem, **options: Any) -> None:
    """The same of all logits, bit for bit."""
    rank = head.config.tp_rank
    there = given.to(head._head.workspace.device)
    logits = sharded_logits(there.rows[rank], there.weight, group=head, **there.options() | options)
    assert logits.dtype == head.config.dtype
    expected = logits_of(head.config, given, rank)
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)
