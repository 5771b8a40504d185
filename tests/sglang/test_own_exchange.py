"""What ranks decide before SGLang makes its groups, and what its layers are built with then."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from moe_nvlink_plugin.errors import SelfCheckError, UnsupportedError
from moe_nvlink_plugin.integration.common import start as decisions

Resolve = Callable[..., Any]
RANK = 1


class World:
    """SGLang's group of all ranks, as rank 1 of 2 sees it; the other rank does as this one."""

    world_size, rank_in_group = 2, RANK

    def __init__(self) -> None:
        self.cpu_group = SimpleNamespace(
            rank=RANK, size=2, all_gather_object=lambda mine: [mine] * 2
        )


@pytest.fixture
def groups_are_made(
    resolved: Resolve, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Publishes arguments with some options of ours, and comes to where SGLang makes its groups."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state

    from moe_nvlink_plugin.integration.sglang.plugin import start

    def run(options: dict[str, Any], *, wrong: str = "", apart: str = "", **values: Any) -> Any:
        def self_check(config: Any, *_: Any, level: str) -> None:
            run.checked.append((config, level))  # type: ignore[attr-defined]
            if wrong:
                raise SelfCheckError(wrong)

        monkeypatch.setattr(decisions, "self_check", self_check)
        monkeypatch.setattr(decisions, "why_apart", lambda ranks, device: apart)
        monkeypatch.setattr(start, "get_world_group", World)
        given = {"json_model_override_args": json.dumps({"moe_nvlink": options}), **values}
        server_args = resolved(**given)
        ranks = runtime_context.SpawnRanks(world_rank=RANK, dp_rank=None, gpu_id=None)
        runtime_context.publish(server_args, role="scheduler", ranks=ranks)
        hooked = parallel_state.initialize_model_parallel
        # SGLang's own part comes after our hook, and wants torch's groups first.
        with pytest.raises(AssertionError):
            hooked()
        return runtime_context

    run.checked = []  # type: ignore[attr-defined]
    yield run
    runtime_context.reset_context()


def place(context: Any) -> tuple[Any, ...]:
    parallel = context.get_parallel()
    return (
        context.get_exec().moe.moe_a2a_backend,
        (parallel.ep_size, parallel.moe_ep_size, parallel.moe_ep_rank),
        (parallel.moe_tp_size, parallel.moe_tp_rank),
    )


OURS = ("customized", (2, 2, RANK), (1, 0))
SGLANGS = ("none", (1, 1, 0), (2, RANK))


def test_right_ranks_stay_with_ours(groups_are_made: Any) -> None:
    context = groups_are_made({"fallback": "none", "self_check": "full", "combine": "nvfp4"})
    assert place(context) == OURS
    ((config, level),) = groups_are_made.checked
    assert level == "full"
    assert (config.ep_size, config.ep_rank, config.combine) == (2, RANK, "nvfp4")
    assert (config.num_experts, config.top_k, config.hidden_size) == (8, 2, 64)


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ({"wrong": "1 row instead of 2"}, "1 row instead of 2"),
        ({"apart": "two hosts"}, "no transport connects the ranks: two hosts"),
    ],
    ids=["wrong", "apart"],
)
def test_ranks_fall_back_to_what_the_user_would_have_without_us(
    problem: dict[str, str], told: str, groups_are_made: Any
) -> None:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, initialize_moe_config

    context = groups_are_made({"fallback": "none"}, **problem)
    assert place(context) == SGLANGS
    initialize_moe_config()
    assert get_moe_a2a_backend().is_none()
    assert not get_moe_a2a_backend().is_flashinfer(), "layers add up their own outputs"
    with pytest.raises(UnsupportedError) as caught:
        groups_are_made({}, **problem)
    assert str(caught.value).startswith(f"--moe-a2a-backend moe_nvlink: {told}. Drop the flag, or")
    assert """-args '{"moe_nvlink": {"fallback": "none"}}' on all ranks.""" in str(caught.value)


def test_flags_that_were_made_before_are_made_again(
    groups_are_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's benchmark makes them before its groups."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, initialize_moe_config

    publish = runtime_context.publish

    def publish_and_make(*given: Any, **named: Any) -> None:
        publish(*given, **named)
        initialize_moe_config()
        assert get_moe_a2a_backend().is_customized()

    monkeypatch.setattr(runtime_context, "publish", publish_and_make)
    groups_are_made({"fallback": "none"}, wrong="a planted fault")
    assert get_moe_a2a_backend().is_none()


def test_a_draft_falls_back_too(groups_are_made: Any) -> None:
    context = groups_are_made(
        {"fallback": "none"}, wrong="a planted fault", speculative_moe_a2a_backend="moe_nvlink"
    )
    assert context.get_spec().speculative_moe_a2a_backend == "none"


def test_whole_experts_stay_whole(groups_are_made: Any) -> None:
    """As a user with GPUs gets them who has set --ep-size."""
    from moe_nvlink_plugin.integration.sglang import own_exchange

    context = groups_are_made({}, ep_size=2)
    own_exchange.put_in_place(context.get_server_args())
    assert place(context) == ("none", (2, 2, RANK), (1, 0))


def test_without_our_name_nobody_decides(groups_are_made: Any) -> None:
    context = groups_are_made({}, moe_a2a_backend="none", wrong="nobody looks")
    assert place(context) == SGLANGS
    assert groups_are_made.checked == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ep_size": 2}, ["--ep-size 2 on CPU ranks", "Remove --ep-size"]),
        ({"ep_size": 2, "moe_runner_backend": "triton_kernel"}, ["triton_kernel with --ep-size"]),
        ({"enable_eplb": True}, ["balanced or redundant", "Remove fallback, or --enable-eplb"]),
        ({"ep_num_redundant_experts": 2}, ["balanced or redundant"]),
        ({"init_expert_location": "/x.json"}, ["balanced or redundant"]),
        (
            {"speculative_moe_a2a_backend": "flashinfer"},
            ["--speculative-moe-a2a-backend flashinfer", "Remove one of the two"],
        ),
    ],
)
def test_what_is_refused_with_a_fallback(
    resolved: Resolve, values: dict[str, Any], words: list[str]
) -> None:
    options = json.dumps({"moe_nvlink": {"fallback": "none"}})
    with pytest.raises(UnsupportedError) as caught:
        resolved(json_model_override_args=options, **values)
    for word in words:
        assert word in str(caught.value)


def test_another_fallback_is_refused(resolved: Resolve) -> None:
    options = json.dumps({"moe_nvlink": {"fallback": "deepep"}})
    with pytest.raises(UnsupportedError, match="fallback='deepep' is not none"):
        resolved(json_model_override_args=options)
