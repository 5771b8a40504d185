"""Masks of the ranks that take part in a round, as the kernels read them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moe_nvlink_plugin.errors import InputError

_WORD_BITS = 64


def num_words(ep_size: int) -> int:
    """Return how many words a mask of `ep_size` ranks has."""
    return -(-ep_size // _WORD_BITS)


def rank_mask(
    ranks: Iterable[int], ep_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Make the argument active_ranks of MoeAllToAll.dispatch. Local.

    Args:
        ranks: the ranks that take part.
        ep_size: ranks of the exchange.
        device: where the exchange's tensors live.

    Returns:
        `[ceil(ep_size / 64)]` int64. Bit r % 64 of word r // 64 is set if rank r takes part.

    Raises:
        InputError: a rank is not one of the exchange, or no integer: bools would pass for ranks 0
            and 1.
    """
    if not isinstance(ranks, Iterable):
        raise InputError(f"ranks={ranks!r} is no sequence of ranks; for one rank pass [{ranks!r}]")
    words = [0] * num_words(ep_size)
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise InputError(
                f"rank {rank!r} is a {type(rank).__name__}, it must be an integer; of a tensor or "
                "an array pass .tolist(), and of bools the places of True"
            )
        if not 0 <= rank < ep_size:
            raise InputError(
                f"rank {rank!r} is not in 0..{ep_size - 1}; name ranks of the exchange's group"
            )
        words[rank // _WORD_BITS] |= 1 << rank % _WORD_BITS
    signed = [word - (word >> 63 << 64) for word in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def ranks_in(mask: torch.Tensor, ep_size: int) -> list[int]:
    """Return the ranks that a mask names. Local; on a GPU it waits for the device."""
    words = mask.tolist()
    return [rank for rank in range(ep_size) if words[rank // _WORD_BITS] >> rank % _WORD_BITS & 1]
