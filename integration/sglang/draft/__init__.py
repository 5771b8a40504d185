"""Draft models (MTP, EAGLE) under SGLang: what they share with us, and what they do not.

Their MoE layers exchange through `moe`, in a namespace and a workspace of their own.

The LM head that ranks share (`sharded_argmax`) has no place there, as SGLang 0.5.23 stands. The
method of its LogitsProcessor that looks like the place, ``_tp_lm_head_all_to_all``, has another
contract:

| | ``_tp_lm_head_all_to_all`` | `sharded_argmax` |
|---|---|---|
| the head's weights | a rank holds a part of the vocabulary | a rank holds all, reads a part |
| rows it is given | all ranks', gathered and multiplied by that part | this rank's alone |
| what a rank gets | the logits of its own rows, which the sampler reads | their token ids |
| steps it serves | equally many rows on each rank, at least one | any, a rank without rows too |

The first line decides: SGLang's head is split already, so that each rank reads 1 / tp_size of the
weights without us, which is all that sharing saves. With ``--enable-dp-lm-head`` each data-parallel
rank does hold the whole head, and no call of that method follows. There `sharded_logits` would fit
in the place of the processor's ``_compute_lm_head``; a draft takes the best tokens with their
probabilities, so that ids alone are not enough. Nobody has built that; `refusal` says so.
"""

from __future__ import annotations

from moe_nvlink_plugin.integration.common.options import MTP_LM_HEAD, Options


def refusal(options: Options) -> str | None:
    """Return why these options cannot be served; None if they can. Local."""
    if not options.shares_lm_head:
        return None
    return (
        f"{MTP_LM_HEAD}={options.mtp_lm_head_tp_size!r} is not served under SGLang, which splits "
        f'the LM head by tensor parallelism itself: remove "{MTP_LM_HEAD}" and '
        "MOE_NVLINK_MTP_LM_HEAD_TP."
    )
