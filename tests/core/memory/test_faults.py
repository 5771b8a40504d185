"""What the host makes of a fault word, whoever wrote it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    MoeNvlinkError,
    PeerError,
)
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.memory.faults import Faults
from moe_nvlink_plugin.memory.startup import Startup, Timeouts


def error_of(
    word: int, *, ask_device: bool = True, left_out: tuple[int, ...] = ()
) -> MoeNvlinkError | None:
    """What rank 0 of 4 reports, as a layer reads its workspace's word."""
    workspace: Any = SimpleNamespace(
        fault=lambda channel: word, startup=Startup(lambda: False), left_out=left_out
    )
    faults = Faults(workspace, 0, 0, 4, Timeouts(60.0, 5.0), LAYER.phases)
    return faults.error(
        lambda peer, phase, epoch: f"rank {peer}, {phase}, epoch {epoch}", ask_device=ask_device
    )


def word_of(fault: str, phase: int, peer: int = 2, epoch: int = 7) -> int:
    """As pack_fault of epoch_flags.h."""
    return constants()[fault] << 56 | phase << 48 | peer << 32 | epoch


FOREIGN = [*(phase.code for phase in HEAD.phases), 0, 200]


def test_no_fault_is_no_error() -> None:
    assert error_of(0) is None


@pytest.mark.parametrize("fault", ["kFaultTimeout", "kFaultAhead", "kFaultBadCount"])
def test_a_rank_that_mask_has_left_out(fault: str) -> None:
    """However a launch without the mask has found out: a rank that lives after all may go on."""
    word = word_of(fault, constants()["kPhaseDispatch"])
    error = error_of(word, left_out=(2,))
    assert isinstance(error, PeerError)
    assert "dispatch of epoch 7 took rank 2 for a rank that takes part, but mask()" in str(error)
    assert "left it out" not in str(error_of(word, left_out=(1,), ask_device=False))


@pytest.mark.parametrize("phase", FOREIGN)
def test_a_timeout_in_a_kernel_of_another_family(phase: int) -> None:
    error = error_of(word_of("kFaultTimeout", phase))
    assert isinstance(error, ExchangeTimeoutError)
    assert (error.ranks, error.epoch) == ((2,), 7)
    assert f"phase {phase} (of another kernel) of epoch 7 for rank(s) 2" in str(error)


@pytest.mark.parametrize("phase", FOREIGN)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("kFaultGeometry", DisagreementError),
        ("kFaultAhead", PeerError),
        ("kFaultBadCount", PeerError),
    ],
)
def test_other_faults_of_another_family(fault: str, kind: type, phase: int) -> None:
    error = error_of(word_of(fault, phase))
    assert isinstance(error, kind)
    assert f"phase {phase}" in str(error)
    assert "rank 2" in str(error)


def test_a_dispatch_that_was_replayed_without_its_combine() -> None:
    error = error_of(word_of("kFaultRepeated", constants()["kPhaseDispatch"], peer=0))
    assert isinstance(error, ExchangeStateError)
    assert "rank 0 ran dispatch of epoch 7 again without its combine" in str(error)
    assert "capture both in one graph" in str(error)


def test_phases_of_the_reader_have_their_names() -> None:
    for phase in LAYER.phases:
        error = error_of(word_of("kFaultTimeout", phase.code), ask_device=False)
        assert isinstance(error, ExchangeTimeoutError)
        assert error.phase == phase.name


def test_a_code_that_no_kernel_writes() -> None:
    """Whatever overwrote the word, reading it raises nothing of its own."""
    error = error_of(0xEE << 56 | LAYER.phases[0].code << 48 | 1 << 32 | 3)
    assert isinstance(error, PeerError)
    assert "fault word 0xee01000100000003" in str(error)
