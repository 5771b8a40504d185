"""A plugin of vLLM that ends or stops its worker inside an exchange, when a test says so.

The test writes "<place> <rank> <signal>" to the file that ORDER_VARIABLE names. The data-parallel
rank that comes to the place and reads its own number signals itself before it sends anything, so
that the others wait for it in that exchange and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORDER_VARIABLE = "STOP_ON_ORDER"
#: The places: dispatch of a MoE layer, and the head of a draft step behind the draft's forward.
DISPATCH, HEAD = "dispatch", "head"


def register() -> None:
    """Puts both verbs behind a look at the file; before anything has imported the second."""
    import moe_nvlink_plugin

    layer = moe_nvlink_plugin.MoeAllToAll
    layer.dispatch = _obeying(DISPATCH, layer.dispatch)  # type: ignore[method-assign]
    moe_nvlink_plugin.sharded_argmax = _obeying(HEAD, moe_nvlink_plugin.sharded_argmax)


def _obeying(here: str, original: Callable[..., Any]) -> Callable[..., Any]:
    order = Path(os.environ[ORDER_VARIABLE])

    def verb(*arguments: Any, **named: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):  # none, or another rank has just taken it
            place, rank, number = order.read_text("utf-8").split()
            from vllm.distributed import get_dp_group

            if place == here and int(rank) == get_dp_group().rank_in_group:
                order.unlink()
                os.kill(os.getpid(), int(number))
        return original(*arguments, **named)

    return verb
