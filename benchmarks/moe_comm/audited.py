"""Our rounds with the audits of rows that a server may ask for (`audit_every`)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.integration.common.audit import AUDIT_BYTES, Audit
from moe_nvlink_plugin.integration.common.formats import Sent

from .expected import Complaints, Context
from .options import AUDIT_WORDS, AUDITED, Options
from .ours import Ours


class Audited(Ours):
    """MoeAllToAll of one rank that compares a row of every rank in each round."""

    name = AUDITED
    given = "nothing; rows are compared in every round, a server does so in every N-th"
    every: ClassVar[int] = 1

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return (
            "it calls the product, and emulated ranks launch kernels"
            if (options.emulate_ranks or options.device == "rehearsal")
            else None
        )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._audit = Audit(self._exchange, self.every, context.device)

    def _config(self, context: Context) -> AllToAllConfig:
        return dataclasses.replace(context.config, extra_payload_bytes=(AUDIT_BYTES,))

    def dispatch(self) -> None:
        hidden, ids, weights = self.context.tokens
        words = self._audit.words(Sent(hidden, None, self._scale), ids, weights)
        received = self._exchange.dispatch(hidden, ids, weights, (words,), global_scale=self._scale)
        self.received = self._audit.compared(received)

    def check_result(self, complaints: Complaints) -> None:
        """Demand also that no audit has found anything, and that each has compared something."""
        super().check_result(complaints)
        found = self._audit.found()
        faults = torch.tensor([found.wrong, found.stale])
        complaints.same(faults, torch.zeros_like(faults), "faults that audits have found")
        is_compared = torch.tensor(any(found.rows))
        complaints.same(is_compared, torch.tensor(self.every == 1), "whether rows were compared")


class AuditWords(Audited):
    """What the rounds between two audits cost: their words travel, and nothing is compared."""

    name = AUDIT_WORDS
    given = "nothing; the words of an audit travel, and no row is compared"
    every = 10**9
