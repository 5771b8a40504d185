"""What SGLang's resolution makes of our name, and what it refuses, each time naming the flag."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.sglang import backend
from moe_nvlink_plugin.integration.sglang.plugin import validation
from tests.sglang import arguments

Resolve = Callable[..., Any]


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import resolved_view

    return resolved_view(server_args)


def _budget(server_args: Any) -> Any:
    from moe_nvlink_plugin.integration.sglang import budget

    return budget.of(server_args)


def test_expert_parallelism_spans_the_tensor_parallel_ranks(resolved: Resolve) -> None:
    server_args = resolved()
    view = _view(server_args)
    assert (view.moe_a2a_backend, view.ep_size, view.tp_size) == ("customized", 2, 2)
    assert view.disable_shared_experts_fusion is True
    assert server_args.moe_a2a_backend == backend.BACKEND, "the raw arguments stay the user's"
    assert view.cuda_graph_config.prefill.backend == "disabled"
    assert view.speculative_moe_a2a_backend is None, "a draft inherits the target's"


def test_the_drafts_flag_becomes_the_carrier_too(resolved: Resolve) -> None:
    view = _view(resolved(speculative_moe_a2a_backend="moe_nvlink"))
    assert view.speculative_moe_a2a_backend == "customized"


def test_attention_may_be_data_parallel(resolved: Resolve) -> None:
    view = _view(resolved(attn_dp_size=2))
    assert (view.attn_dp_size, view.ep_size) == (2, 2)


def test_without_our_name_nothing_is_declared(resolved: Resolve) -> None:
    view = _view(resolved(moe_a2a_backend="none"))
    assert (view.moe_a2a_backend, view.ep_size) == ("none", 1)
    assert view.disable_shared_experts_fusion is False


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        # Two ranks of one attention group share a chunk, or a step of all requests.
        ({"chunked_prefill_size": 64, "max_running_requests": 8}, 32),
        ({"chunked_prefill_size": 63, "max_running_requests": 8}, 32),
        ({"chunked_prefill_size": 64, "max_running_requests": 512}, 256),
        # SGLang itself sets no more requests than this.
        ({"chunked_prefill_size": 64}, 2048),
        # Each data-parallel rank has its own chunk and its own requests.
        ({"chunked_prefill_size": 64, "max_running_requests": 8, "attn_dp_size": 2}, 32),
        ({"chunked_prefill_size": 64, "max_running_requests": 512, "attn_dp_size": 2}, 256),
    ],
)
def test_the_budget_of_a_round(resolved: Resolve, values: dict[str, Any], tokens: int) -> None:
    assert _budget(resolved(**values)).tokens_per_rank == tokens


def test_the_budget_counts_drafts_and_graphs(resolved: Resolve) -> None:
    budget = _budget(resolved(chunked_prefill_size=64, max_running_requests=8))
    assert budget._replace(tokens_per_request=9).tokens_per_rank == 36
    assert budget._replace(captured=100).tokens_per_rank == 50
    assert budget._replace(captured=100, prefill=0, ranks=1).tokens_per_rank == 100
    # 100 requests on 8 ranks are padded to 104.
    padded = budget._replace(prefill=0, requests=100, tokens_per_request=4, ranks=8)
    assert padded.tokens_per_rank == 52


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"enable_two_batch_overlap": True}, ["two-batch overlap", "--enable-two-batch-overlap"]),
        (
            {"enable_single_batch_overlap": True},
            ["single-batch overlap", "--enable-single-batch-overlap"],
        ),
        ({"enable_waterfill": True}, ["waterfill", "--enable-waterfill"]),
        ({"enforce_shared_experts_fusion": True}, ["--enforce-shared-experts-fusion"]),
        ({"moe_runner_backend": "cutlass"}, ["--moe-runner-backend cutlass", "triton"]),
        (
            {"speculative_moe_runner_backend": "marlin"},
            ["--speculative-moe-runner-backend marlin"],
        ),
        ({"tp_size": 1}, ["--tp-size is 1", "Use 2 or more"]),
        ({"tp_size": 4, "ep_size": 2}, ["--ep-size is 2, --tp-size 4", "remove --ep-size"]),
        ({"nnodes": 2, "tp_size": 4}, ["--nnodes is 2", "set it to 1"]),
        ({"pp_size": 2}, ["--pp-size is 2", "set it to 1"]),
        ({"attn_cp_size": 2, "tp_size": 4}, ["--attn-cp-size is 2", "set it to 1"]),
        ({"dcp_size": 2}, ["--dcp-size is 2", "set it to 1"]),
        (
            {"moe_dp_size": 2, "attn_cp_size": 2, "tp_size": 4},
            ["--moe-dp-size is 2", "set it to 1"],
        ),
        ({"dwdp_size": 2}, ["--dwdp-size is 2", "set it to 1"]),
        ({"disable_attn_tp_gather": True}, ["--disable-attn-tp-gather", "Remove it"]),
        ({"enable_pdmux": True}, ["remove --enable-pdmux"]),
        ({"enable_lora": True}, ["LoRA", "remove --enable-lora"]),
        (
            {"elastic_ep_backend": "mooncake"},
            ["mooncake on cpu", "Remove --elastic-ep-backend", "Add the second flag"],
        ),
        (
            {"elastic_ep_backend": "nixl", "ep_join_mode": "recover"},
            ["--elastic-ep-backend nixl", "Remove --elastic-ep-join-mode", "start all ranks again"],
        ),
        ({"enable_return_routed_experts": True}, ["--enable-return-routed-experts", "Remove it"]),
        ({"kt_weight_path": "/x"}, ["remove --kt-weight-path"]),
        (
            {"moe_a2a_backend": "none", "speculative_moe_a2a_backend": "moe_nvlink"},
            ["--speculative-moe-a2a-backend moe_nvlink without --moe-a2a-backend moe_nvlink"],
        ),
        ({"tp_size": 16}, ["8 experts on 16 ranks (--tp-size)"]),
        ({"chunked_prefill_size": -1}, ["--chunked-prefill-size is -1", "Set it to 8192"]),
    ],
)
def test_what_is_refused(resolved: Resolve, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolved(**values)
    message = str(caught.value)
    assert message.startswith("--moe-a2a-backend moe_nvlink cannot serve this configuration")
    for word in words:
        assert word in message


def test_everything_refused_is_listed_at_once(resolved: Resolve) -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolved(enable_two_batch_overlap=True, enable_waterfill=True)
    assert str(caught.value).count("\n  - ") == 2


def test_models_that_would_sum_twice_are_refused(resolved: Resolve, tmp_path: Path) -> None:
    model = arguments.write_model(
        tmp_path, architectures=["OlmoeForCausalLM"], model_type="olmoe", clip_qkv=None
    )
    with pytest.raises(UnsupportedError, match="architecture OlmoeForCausalLM"):
        resolved(model_path=str(model))


@pytest.mark.parametrize("architecture", validation.ARCHITECTURES)
def test_every_model_on_the_list_is_one_of_sglangs(architecture: str) -> None:
    """Read off SGLang's models, which need a GPU to be imported."""
    import sglang.srt

    models = Path(next(iter(sglang.srt.__path__))) / "models"
    defined = [p for p in models.glob("*.py") if f"class {architecture}(" in p.read_text("utf-8")]
    assert len(defined) == 1


@pytest.mark.parametrize(
    ("changes", "travels"),
    [
        ({}, True),
        ({"quantization": None}, False),
        ({"quantization": None, "meta": {"group_size": 16}}, True),
        ({"runner": "triton"}, False),
        ({"dispatch": "nvfp4"}, True),
        ({"dispatch": "bf16"}, False),
        ({"variable": "0"}, False),
        ({"variable": "1"}, False),  # SGLang's layers ask it themselves
    ],
)
def test_rows_of_nvfp4_models(
    changes: dict[str, Any], travels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule alone: SGLang resolves no such model without a GPU."""
    from moe_nvlink_plugin.integration.sglang.plugin import resolution

    monkeypatch.delenv("SGLANG_MOE_NVFP4_DISPATCH", raising=False)
    if "variable" in changes:
        monkeypatch.setenv("SGLANG_MOE_NVFP4_DISPATCH", changes["variable"])
    view = SimpleNamespace(
        quantization=changes.get("quantization", "modelopt_fp4"),
        moe_runner_backend=changes.get("runner", "flashinfer_cutlass"),
    )
    model = SimpleNamespace(nvfp4_moe_meta=changes.get("meta"))
    options = Options(dispatch=changes.get("dispatch", "auto"))
    assert resolution.travels_as_nvfp4(view, model, options) == travels


def _with_options(options: Any) -> dict[str, Any]:
    return {"json_model_override_args": json.dumps({"moe_nvlink": options})}


def test_options_come_in_the_models_overrides(resolved: Resolve) -> None:
    from moe_nvlink_plugin.integration.sglang.choices import options_of

    server_args = resolved(**_with_options({"combine": "nvfp4"}))
    assert options_of(server_args).combine == "nvfp4"
    assert options_of(resolved()).combine == "bf16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"combin": "nvfp4"}, "\"moe_nvlink\" in --json-model-override-args has no 'combin'"),
        ({"combine": "fp3"}, "'fp3' is not one of"),
        ({"dispatch": "nvfp5"}, "nvfp5"),
        (["combine"], "is a list, it must be a dict"),
        ({"mtp_lm_head_tp_size": 2}, "mtp_lm_head_tp_size=2 is not served under SGLang"),
        ({"overlap_shared_experts": True}, "overlap_shared_experts is not served under SGLang"),
    ],
)
def test_options_that_are_refused(resolved: Resolve, options: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        resolved(**_with_options(options))
