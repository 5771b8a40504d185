"""A plugin of vLLM that ends or stops its worker inside a draft step, when a test says so.

The test writes "<rank> <signal>" to the file that ORDER_VARIABLE names. The data-parallel rank that
reads its own number there signals itself after the draft's forward and before its rows are sent, so
that the others wait for it in the exchange of the LM head and nowhere else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ORDER_VARIABLE = "STOP_IN_HEAD"


def register() -> None:
    """Puts `sharded_argmax` behind a look at the file; before anything has imported it."""
    import moe_nvlink_plugin

    original = moe_nvlink_plugin.sharded_argmax
    order = Path(os.environ[ORDER_VARIABLE])

    def sharded_argmax(*arguments: Any, **named: Any) -> Any:
        if order.exists():
            from vllm.distributed import get_dp_group

            rank, number = order.read_text("utf-8").split()
            if int(rank) == get_dp_group().rank_in_group:
                order.unlink()
                os.kill(os.getpid(), int(number))
        return original(*arguments, **named)

    moe_nvlink_plugin.sharded_argmax = sharded_argmax
