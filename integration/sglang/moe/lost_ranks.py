"""What a forward does when a rank dies, where SGLang keeps a record of the ranks that live.

SGLang has the record with ``--elastic-ep-backend``. It looks at it after each forward. If a rank is
gone there, SGLang moves that rank's experts to the others, and runs the forward again. It expects
of a dispatcher that it writes the record; ours does it here, for all layers of a model at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

from moe_nvlink_plugin.errors import ExchangeStateError, ExchangeTimeoutError, PeerError
from moe_nvlink_plugin.integration.common.pool import ExchangePool

logger = logging.getLogger(__name__)


def forward(pool: ExchangePool, run: Callable[[], Any]) -> Any:
    """Run a forward; if ranks have died in it, leave them out of the exchange. Collective.

    Where SGLang keeps a record, it waits for the forward to end: the verbs of a replayed graph
    raise nothing. The ranks that live meet without the others after four timeouts at most.

    Args:
        pool: the exchanges of the model.
        run: the forward.

    Returns:
        What `run` returns. None if ranks were left out: SGLang sees that in its record, and runs
        the forward again.

    Raises:
        ExchangeStateError: a rank that was left out is in SGLang's record again.
        ExchangeTimeoutError, PeerError: a verb failed, but no rank is gone; or the ranks that live
            do not agree who is.
        Exception: what else `run` raises.
    """
    record = ElasticEPStateManager.instance()
    if record is None:
        return run()
    _refuse_return(pool, record)
    try:
        output = run()
        for exchange in pool.exchanges[:1]:  # one is enough: they share the workspace
            exchange.synchronize()
        return output
    except (ExchangeTimeoutError, PeerError) as failure:
        gone = pool.go_on_without_late()
        if not gone:  # SGLang would not run the forward again
            raise
        record.active_ranks[list(gone)] = 0
        logger.warning(
            "moe_nvlink: rank %d goes on without rank(s) %s, which SGLang's record now says, and "
            "the forward runs again: %s",
            pool.ranks.rank,
            ", ".join(map(str, gone)),
            failure,
        )
    return None


def _refuse_return(pool: ExchangePool, record: Any) -> None:
    """Raise ExchangeStateError if SGLang has taken a rank in that the exchange has left out."""
    places, listed = pool.places(), record.active_ranks_cpu.tolist()
    back = [r for r in range(pool.ranks.size) if listed[r] and r not in places]
    if back:
        raise ExchangeStateError(
            f"{pool.ranks.wording.flag}: SGLang has taken rank(s) {', '.join(map(str, back))} in "
            "again, but the exchange goes on without them: no hook of SGLang's tells the others "
            "when a rank joins its exchange. Start all ranks again."
        )
