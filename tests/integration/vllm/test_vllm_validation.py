"""What is refused at start-up, each time naming the flag to change."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode
from vllm.config.lora import LoRAConfig

from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm import backend, compat
from moe_nvlink_plugin.integration.vllm.choices import KEY, WORDING, options_of
from moe_nvlink_plugin.integration.vllm.plugin import communicator, flag, validation
from tests.integration.vllm.vllm_config import config_with_us, other
from tests.support.refusals import refused


def drafting(method: str) -> dict[str, Any]:
    """Values of a configuration that drafts."""
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[]))
    return {"speculative_config": SimpleNamespace(method=method, draft_model_config=model)}


#: Adapters on all layers, a compiled model, one that vLLM can send to sleep, two stages of a
#: pipeline, a load balancer, and ranks that may join.
LORA = LoRAConfig()
COMPILED = {"mode": CompilationMode.VLLM_COMPILE}
SLEEPS = {"enable_sleep_mode": True, "sleep_mode_backend": "cumem"}
STAGED = {"pipeline_parallel_size": 2}
BALANCING = {
    "enable_eplb": True,
    "eplb_config": SimpleNamespace(
        num_redundant_experts=0, communicator="torch_gloo", use_async=False
    ),
}
ELASTIC = {**BALANCING, "enable_elastic_ep": True, "data_parallel_external_lb": True}


def chosen(**options: Any) -> dict[str, Any]:
    """Values of a configuration with these options of ours."""
    return {"additional_config": {backend.KEY: backend.BACKEND, KEY: options}}


@pytest.fixture(scope="module")
def good(checkpoint: Path) -> Any:
    """vLLM's configuration of two ranks."""
    return config_with_us(checkpoint, enforce_eager=True)


def _refusal(config: Any, device: str = "cpu") -> str:
    with pytest.raises(UnsupportedError, match="cannot serve") as caught:
        validation.check(config, device)
    return str(caught.value)


def test_the_good_configuration_passes(good: Any, checkpoint: Path) -> None:
    assert validation.check(good, "cpu") == Options()
    assert backend.is_selected(good)
    assert backend.is_selected(config_with_us(checkpoint, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("architecture", "tensor_parallel_size", "mode", "warns"),
    [
        ("DeepseekV3ForCausalLM", 2, CompilationMode.NONE, True),
        ("MistralLarge3ForCausalLM", 4, CompilationMode.NONE, True),
        ("DeepseekV3ForCausalLM", 1, CompilationMode.NONE, False),
        ("DeepseekV3ForCausalLM", 2, CompilationMode.VLLM_COMPILE, False),
        ("Qwen3MoeForCausalLM", 2, CompilationMode.NONE, False),
    ],
)
def test_models_that_vllm_serves_with_wrong_tokens_are_warned_about(
    architecture: str,
    tensor_parallel_size: int,
    mode: CompilationMode,
    warns: bool,
    good: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"tensor_parallel_size": tensor_parallel_size}
    validation.check(other(good, architecture=architecture, mode=mode, **sizes), "cpu")
    assert ("If a step has one token" in caplog.text) == warns


def test_those_models_are_vllms() -> None:
    """Each is, or extends, the module whose model compares numbers of rows."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in validation.SLICES_BY_ROWS:
        cls = ModelRegistry.models[architecture].load_model_cls()
        assert issubclass(cls, DeepseekV2ForCausalLM)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"enable_expert_parallel": False}, ["--enable-expert-parallel", "off"]),
        ({"data_parallel_size": 1}, ["--data-parallel-size is 1"]),
        (
            {"enable_lora": True, "tensor_parallel_size": 2},
            ["LoRA on experts with --tensor-parallel-size 2", "--lora-target-modules"],
        ),
        ({"enable_dbo": True}, ["--enable-dbo", "Microbatching currently only supports"]),
        (
            {"enable_fault_tolerance": True, "enable_lora": True, "data_parallel_rank": 0},
            ["fault tolerance", "with --enable-lora"],
        ),
        ({"ubatch_size": 3}, ["--ubatch-size 3"]),
        ({"prefill_context_parallel_size": 2}, ["--prefill-context-parallel-size 2", "V2 model"]),
        ({"hf_overrides": {"hidden_size": 100}}, ["hidden_size 100", "multiple of 32"]),
        ({"data_parallel_size": 32}, ["16 experts on 32 ranks"]),
        ({"additional_config": {KEY: {"dispatch": "fp7"}}}, ["'fp7' is unknown"]),
        (
            {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 1}},
            ["num_redundant_experts=2"],
        ),
        (
            {
                "enable_eplb": True,
                "eplb_config": {"communicator": "torch_nccl", "use_async": False},
            },
            ["torch_nccl"],
        ),
        ({"enable_eplb": True, "worker_cls": "a.Worker"}, ["--worker-cls a.Worker"]),
    ],
)
def test_vllm_itself_is_refused(checkpoint: Path, values: dict[str, Any], words: list[str]) -> None:
    with refused(UnsupportedError, "--all2all-backend moe_nvlink", *words):
        config_with_us(checkpoint, **values)


@pytest.mark.parametrize("moe_backend", ["flashinfer_moe_ep_cutedsl", "deep_gemm_mega_moe"])
def test_experts_that_exchange_rows_are_left_to_vllm(
    moe_backend: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration that vLLM hands to its workers does not ask for us; the log says why."""
    told: list[str] = []
    monkeypatch.setattr(flag.logger, "warning", lambda text, *more: told.append(text % more))
    config = config_with_us(checkpoint, moe_backend=moe_backend)
    assert not backend.is_selected(config)
    assert "MoeNvlink" not in str(config.parallel_config.worker_cls)
    (line,) = told
    assert f"--moe-backend {moe_backend} dispatches and combines inside its kernels" in line
    additional = {KEY: {"dispach": "bf16"}}
    with pytest.raises(ValueError, match="dispach"):
        config_with_us(checkpoint, moe_backend=moe_backend, additional_config=additional)


def test_two_backends_at_once_are_refused(checkpoint: Path) -> None:
    both = {"additional_config": {backend.KEY: backend.BACKEND}, "all2all_backend": "deepep_v2"}
    with pytest.raises(UnsupportedError, match="name one backend, deepep_v2 or moe_nvlink"):
        config_with_us(checkpoint, **both)


@pytest.mark.parametrize(
    ("values", "device", "words"),
    [
        ({"data_parallel_backend": "ray"}, "cpu", "--data-parallel-backend ray: "),
        ({"use_ray": True}, "cpu", "--distributed-executor-backend ray: vLLM's"),
        (chosen(fallback=backend.CARRIER), "cpu", "CpuCommunicator has no all_gatherv"),
        (chosen(fallback="deepep"), "cuda", "fallback='deepep' is not allgather_reducescatter"),
        (
            {"lora_config": LORA, **chosen(fallback=backend.CARRIER)},
            "cuda",
            "fallback and LoRA on",
        ),
        (
            {**drafting("mtp"), **chosen(fallback=backend.CARRIER, mtp_lm_head_tp_size=2)},
            "cuda",
            "fallback and mtp_lm_head_tp_size",
        ),
        ({"get_num_experts": lambda: 0}, "cpu", "no MoE layers"),
        ({"get_num_experts_per_tok": lambda: 40}, "cpu", "top_k=40"),
        ({"worker_cls": "a.Worker", "lora_config": LORA}, "cpu", "--worker-cls a.Worker"),
        ({"get_num_experts": lambda: 15, "lora_config": LORA}, "cuda", "15 experts on 2"),
        ({"enable_eplb": True, "lora_config": LORA}, "cuda", "experts move"),
        ({}, "xpu", "transports for cpu and cuda ranks"),
        ({"enable_dbo": True}, "cuda", "--enable-dbo"),
        (STAGED, "cpu", "--pipeline-parallel-size 2 with --enforce-eager"),
        (
            STAGED | drafting("ngram"),
            "cuda",
            "--pipeline-parallel-size 2 with --speculative-config",
        ),
        ({**STAGED, "lora_config": LORA}, "cuda", "-parallel-size 2 with --enable-lora"),
        ({**STAGED, "enable_eplb": True}, "cuda", "-parallel-size 2 with --enable-eplb"),
        ({"lora_config": LoRAConfig(fully_sharded_loras=True)}, "cuda", "--fully-sharded-loras"),
        ({**SLEEPS, "lora_config": LORA}, "cuda", "LoRA on experts with --enable-sleep"),
        ({"lora_config": LORA, **drafting("ngram")}, "cuda", "LoRA with drafts"),
        (SLEEPS | {"sleep_mode_backend": "criu"}, "cuda", "--sleep-mode-backend criu"),
        (BALANCING | drafting("ngram"), "cpu", "draft model"),
        (BALANCING | {"use_v2_model_runner": True}, "cpu", "VLLM_USE_V2_MODEL_RUNNER=0"),
        # Where ranks may join.
        (ELASTIC | {"data_parallel_external_lb": False}, "cuda", "--data-parallel-rank"),
        (ELASTIC | {"worker_cls": "a.Worker"}, "cuda", "with --worker-cls a.Worker"),
        (ELASTIC | {"tensor_parallel_size": 2}, "cuda", "with --tensor-parallel-size above 1"),
        (ELASTIC | drafting("ngram"), "cuda", "with --speculative-config"),
        (
            {**ELASTIC, "lora_config": LoRAConfig(target_modules=["o"])},
            "cuda",
            "with --enable-lora",
        ),
        (ELASTIC | {"enable_fault_tolerance": True}, "cpu", "with --enable-fault-tolerance"),
        (ELASTIC | chosen(fallback=backend.CARRIER), "cuda", "with the option `fallback`"),
        (ELASTIC | COMPILED, "cpu", "with a compiled model on CPU ranks"),
    ],
)
def test_rules_that_vllm_or_this_machine_would_hide(
    values: dict[str, Any],
    device: str,
    words: str,
    good: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validation, "EXTERNAL_SCALING", "json")  # that a vLLM has
    assert words in _refusal(other(good, **values), device)


def test_ranks_may_join_where_vllm_scales_without_ray(
    good: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "EXTERNAL_SCALING", "no_such_module")
    assert "before 0.33 vLLM scales by Ray only" in _refusal(other(good, **ELASTIC))
    monkeypatch.setattr(validation, "EXTERNAL_SCALING", "json")
    validation.check(other(good, **ELASTIC), "cpu")
    # Rank 0 tells a rank that joins how many experts are redundant; its own command line says how
    # many there were at the start.
    joins = other(good, **ELASTIC, data_parallel_size=3)
    assert "num_redundant_experts=2" in _refusal(joins)
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    validation.check(joins, "cpu")


#: On other layers than experts, also with what experts' adapters do not go with.
ON_OTHERS = LoRAConfig(target_modules=["q_proj"], fully_sharded_loras=True)


@pytest.mark.parametrize(
    ("values", "device"),
    [
        # Two of vLLM's nodes may be one host, and two hosts one NVLink domain: the transport looks.
        ({"nnodes": 2}, "cpu"),
        # Columns of 32 are a CPU kernel's.
        ({"nnodes": 2, "get_hidden_size": lambda: 100, "dtype": torch.bfloat16}, "cuda"),
        (chosen(fallback=backend.CARRIER), "cuda"),
        (SLEEPS, "cuda"),
        ({"sleep_mode_backend": "criu"}, "cuda"),
        (BALANCING, "cpu"),
        ({**BALANCING, **drafting("ngram"), "use_v2_model_runner": True}, "cuda"),
        ({"lora_config": LORA}, "cpu"),
        ({"lora_config": LORA}, "cuda"),
        ({"lora_config": ON_OTHERS, "tensor_parallel_size": 2, "worker_cls": "a.Worker"}, "cpu"),
        # Which formats a quantised model's experts take is known when they are chosen.
        ({"quantization": "fp8", **chosen(dispatch="bf16")}, "cpu"),
        ({"quantization": "fp8", **chosen(dispatch="nvfp4", combine="fp8_block")}, "cuda"),
    ],
)
def test_what_is_left_to_those_who_know(values: dict[str, Any], device: str, good: Any) -> None:
    validation.check(other(good, **values), device)


def test_the_fallback_is_among_the_options(good: Any) -> None:
    config = other(good, **chosen(fallback=backend.CARRIER))
    assert validation.check(config, "cuda").fallback == backend.CARRIER


def test_ray_is_left_to_platforms_that_name_a_resource(
    good: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's CUDA platform does."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU", raising=False)
    validation.check(other(good, data_parallel_backend="ray", use_ray=True), "cuda")


def test_engines_in_ray_actors_get_our_variables(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies variables by prefix to them, and ours is none of its prefixes."""
    from vllm.platforms import current_platform
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "SOME_")
    monkeypatch.setenv("MOE_NVLINK_COMBINE", "fp8_block")
    assert "MOE_NVLINK_COMBINE" not in get_env_vars_to_copy()
    config = config_with_us(checkpoint)
    assert "MOE_NVLINK_COMBINE" not in get_env_vars_to_copy(), "there is no Ray"
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU", raising=False)
    config.parallel_config.data_parallel_backend = "ray"
    for _ in range(2):
        current_platform.check_and_update_config(config)
        assert os.environ["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == "SOME_,MOE_NVLINK_"
    assert "MOE_NVLINK_COMBINE" in get_env_vars_to_copy()


def test_all_problems_are_told_at_once(good: Any) -> None:
    lora = LoRAConfig(fully_sharded_loras=True)
    config = other(good, enable_expert_parallel=False, enable_dbo=True, lora_config=lora)
    assert _refusal(config).count("\n  - ") == 3


def test_without_the_flag_nothing_is_checked(checkpoint: Path) -> None:
    config = config_with_us(
        checkpoint,
        all2all_backend=backend.CARRIER,
        enable_expert_parallel=False,
        data_parallel_size=1,
        hf_overrides={"hidden_size": 100},
    )
    assert not backend.is_selected(config)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_self_check_has_the_kernels_of_the_layers(overlaps: bool, checkpoint: Path) -> None:
    ranks = Ranks(None, 0, 2, WORDING)
    options = Options(overlap_shared_experts=overlaps)
    checked = communicator._checked(ranks, options, config_with_us(checkpoint))
    assert checked is not None
    assert checked.leave_sms == overlaps


# What can be chosen.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispach": "mxfp8"}, ["no 'dispach'", "dispatch, combine, quantise"]),
        ({"dispatch": "fp7"}, ["'fp7' is unknown", "fp8_block", "nvfp4", "auto or bf16"]),
        ({"dispatch": 8}, ["dispatch=8"]),
        ({"combine": "mxfp8"}, ["combine='mxfp8'", "bf16, fp8_block, nvfp4, fp8_tensor"]),
        ({"quantise": "torch"}, ["quantise='torch'", "fused, framework"]),
        ({"overlap_shared_experts": 1}, ["overlap_shared_experts=1 is not true or false"]),
        ({"dispatch": "fp8_block"}, ["hidden_size=100", "multiple of 128", "recipe fp8_block"]),
        ({"dispatch": "mxfp8"}, ["hidden_size=100", "multiple of 32"]),
        ({"combine": "nvfp4"}, ["combine='nvfp4'", "multiple of 16", "got 100"]),
        ({"dispatch": "nvfp4", "dispatch_global_scale": 0}, ["dispatch_global_scale=0"]),
        ({"dispatch": "nvfp4", "dispatch_global_scale": True}, ["dispatch_global_scale=True"]),
        ({"dispatch": "nvfp4", "dispatch_global_scale": float("nan")}, ["=nan", "2^126"]),
        # What YAML makes of 5e-1, as README says.
        ({"dispatch": "nvfp4", "dispatch_global_scale": "5e-1"}, ["='5e-1' must be a number"]),
        ({"dispatch_global_scale": 2.0}, ["which is 'auto'"]),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: list[str], good: Any) -> None:
    told = _refusal(other(good, get_hidden_size=lambda: 100, **chosen(**options)), "cuda")
    assert [word for word in words if word not in told] == [], told


def test_options_must_be_a_dict() -> None:
    config = SimpleNamespace(additional_config={KEY: "mxfp8"})
    with pytest.raises(ConfigError, match="is a str, it must be a dict of dispatch, combine"):
        options_of(config)


def test_the_configuration_goes_before_the_environment(
    good: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_of(None) == Options()
    monkeypatch.setenv("MOE_NVLINK_DISPATCH", "mxfp8")
    monkeypatch.setenv("MOE_NVLINK_COMBINE", "nvfp4")
    assert options_of(good) == Options(dispatch="mxfp8", combine="nvfp4")
    assert options_of(other(good, **chosen(combine="bf16"))) == Options(
        dispatch="mxfp8", combine="bf16"
    )
    assert options_of(other(good, **chosen(dispatch="auto"))).dispatch == "auto"
    monkeypatch.setenv("MOE_NVLINK_COMBINE", "fp4")
    with pytest.raises(ConfigError, match="MOE_NVLINK_COMBINE='fp4'"):
        options_of(good)


# The names we touch.


def test_every_name_we_touch_exists_here() -> None:
    # The CPU build's modules for CUDA do not import, nor do drafts that see images.
    touched = compat.touched()
    left_out = [t for t in touched if t.device == "cuda" or t.needed_for == "one draft"]
    here = [t for t in touched if t not in left_out and not t.since]
    assert [touched for touched in here if not names.exists(touched)] == []
    for shared in (False, True):
        compat.check_names("cpu", drafts=shared, balances=True, adapts=True)


def test_a_missing_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (
        names.Touched("vllm.no_such_module", "Name", "use"),
        names.Touched("vllm.platforms.interface", "Platform.no_such_hook", "hook"),
        names.Touched("vllm.platforms.interface", "Platform.no_such_patch", "patch"),
        names.Touched("vllm.platforms.interface", "Platform.of_tomorrow", "use", since="9.0"),
        names.Touched("vllm.platforms.interface", "Platform.of_gpus", "use", device="cuda"),
        names.Touched("vllm", "of_drafts", "use", needed_for="drafts"),
        names.Touched("vllm", "of_one", "use", needed_for="one draft"),
    )
    by_hand = {**compat.BY_HAND, "plugin.graphs": gone}
    monkeypatch.setattr(compat, "RULES", compat.RULES._replace(by_hand=by_hand))
    hook = "vllm.platforms.interface.Platform.no_such_hook"
    with pytest.raises(UnsupportedError, match=f"(?s)vllm.no_such_module.Name.*{hook}") as caught:
        compat.check_names("cpu")
    assert "RoutedExperts" not in str(caught.value)
    for not_needed in ("no_such_patch", "of_tomorrow", "of_gpus", "of_drafts", "of_one"):
        assert not_needed not in str(caught.value)
    with pytest.raises(UnsupportedError, match="of_drafts") as caught:
        compat.check_names("cpu", drafts=True)
    assert "of_one" not in str(caught.value)
    with pytest.raises(UnsupportedError, match="of_gpus"):
        compat.check_names("cuda")


def test_names_are_looked_for_only_where_they_are_needed() -> None:
    """A CPU build lacks modules for CUDA, and a feature that is off needs nothing."""
    cpu = compat.touched("cpu", {""})
    assert {one.device for one in cpu} == {"", "cpu"}
    assert {one.needed_for for one in cpu} == {""}
    assert not [one for one in cpu if "cuda" in one.why.partition(":")[0]]
    everywhere = compat.touched()
    assert {"", "cpu", "cuda"} == {one.device for one in everywhere}
    features = {"", "adapters", "balancing", "drafts", "elastic", "faults"}
    features |= {"one draft", "scheduling"}
    assert {one.needed_for for one in everywhere} == features


@pytest.mark.parametrize(
    ("version", "device", "warns"),
    [("0.32.1", "cpu", False), ("0.34.0", "cpu", True), ("0.32.1+cu130", "cuda", True)],
)
def test_an_untried_vllm_is_warned_about(
    version: str,
    device: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    compat.warn_if_untried(device)
    assert (version in caplog.text) == warns
