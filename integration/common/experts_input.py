"""What the experts of one layer take, in terms that each adapter translates its framework into."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from .options import Wording


class ExpertsInput(abc.ABC):
    """What the experts of one layer take, and how the framework makes it."""

    @property
    @abc.abstractmethod
    def wording(self) -> Wording:
        """Words of the framework's messages."""

    @property
    @abc.abstractmethod
    def quant_dtype(self) -> Any:
        """Type of rows: a torch dtype, "mxfp8", "nvfp4" or the framework's name; None: floats."""

    @property
    @abc.abstractmethod
    def block_shape(self) -> Sequence[int] | None:
        """Rows and columns that one scale of the weights covers; None: weights have no blocks.

        A scale of the activations covers so many columns of one row.
        """

    @property
    @abc.abstractmethod
    def per_token(self) -> bool:
        """Whether each row has one dynamic scale."""

    @property
    @abc.abstractmethod
    def padded_to(self) -> int | None:
        """Number of elements to a multiple of which the framework pads rows; None or 0: none."""

    @property
    @abc.abstractmethod
    def static_scale(self) -> torch.Tensor | None:
        """Scale of the checkpoint for the framework's quantiser; None: scales are dynamic."""

    @property
    @abc.abstractmethod
    def wants_powers_of_two(self) -> bool:
        """Whether scales of FP8 blocks must be powers of two."""

    @property
    def scales_layout(self) -> str:
        """Layout in which the experts' kernel reads scales, as AllToAllConfig names it."""
        return "linear"

    @abc.abstractmethod
    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantise float rows `[n, hidden_size]` by the framework; return rows, scales. Local.

        The scales are linear, one row of scales per row.
        """

    @abc.abstractmethod
    def laid_out(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return scales `[n, ...]` of rows in the layout that the experts' kernel reads. Local."""
