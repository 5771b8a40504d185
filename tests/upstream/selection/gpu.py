"""What needs GPUs, and what was written for other all-to-alls of GPUs. On GPUs never run so far.

Groups of other areas run on GPUs, too, where their `devices` say so. Here are those that only GPUs
can run: the layer tests with vLLM's own GPU experts, captured layers, engines with CUDA graphs and
speculation. `gpus` is how many devices a group asks for; tests whose ranks can share one ask for 1.

FlashInfer's and DeepEP's tests also run on CPU processes, with experts in torch.

On a machine with N GPUs, vLLM's CUDA build and this package's extra `upstream` installed:

    python -m tests.upstream --gpu N [--group NAME ...]

Without a network there, copy the folder `moe_nvlink/upstream` of the user's cache (80 MB: vLLM's
tests, unpacked, and the models' stand-ins) from a machine where a run has filled it. Models without
a stand-in come from the user's folder of Hugging Face (HF_HOME), where they must have been put
before: tests fetch nothing.

Not selected: tests/distributed/test_eplb_spec_decode.py and test_elastic_ep.py, for we refuse
expert load balancing and elastic parallelism in engines; DeepEP's tests with rows per expert
(test_deepep_deepgemm_moe.py, test_deepep_v2_moe.py), a layout that is not ours.
"""

from __future__ import annotations

from types import MappingProxyType

from ..groups import Device, Group, Plugin

_LAYER = "tests/kernels/moe/test_moe_layer.py"
_MNNVL = "tests/distributed/test_mnnvl_alltoall.py"
_DEEPEP = "tests/kernels/moe/test_deepep_moe.py"
_WHOLE_LAYER = (
    "tests/kernels/moe/test_flashinfer_moe_ep.py::test_init_warmup_forward_is_exact_on_grid_inputs"
)
_DRAFTS = "tests/v1/e2e/spec_decode/test_mtp_parallel_load.py"
_GPU = frozenset({Device.GPU})
_OTHERS = ("shared_gpu", "gpu_layers")
#: Real models of the hub, by their names: a stand-in for a draft alone would not fit its target,
#: and the tests would fail alike with our plugin and without.
_WITHOUT_STAND_INS = MappingProxyType({"VLLM_MODEL_REDIRECT_PATH": ""})
#: For ranks that name a device each, up to so many: told of more devices than there are, for the
#: sake of those that share, they would fail instead of being skipped.
_DEVICE_EACH = 4
#: Triton and FlashInfer compile for minutes.
_SLOW_S = 1800

GROUPS: tuple[Group, ...] = (
    Group(
        name="exchanges",
        title="FlashInfer's exchanges of rows, two-sided and one-sided",
        arguments=(
            f"{_MNNVL}::test_two_sided_dispatch_combine",
            f"{_MNNVL}::test_one_sided_dispatch_combine",
            f"{_MNNVL}::test_one_sided_combine_low_precision",
        ),
        adapters=_OTHERS,
        gpus=2,
    ),
    Group(
        name="deepep",
        title="DeepEP's prepare/finalize before experts in torch",
        # On CPUs vLLM has no quantiser of FP8 weights: bfloat16 alone, "dtype0". Its second
        # quantisation parameter changes nothing then.
        arguments=(f"{_DEEPEP}::test_deep_ep_moe", "-k", "dtype0 and False"),
        devices=frozenset({Device.CPU}),
        adapters=_OTHERS,
    ),
    Group(
        name="gpu-deepep",
        title="DeepEP's prepare/finalize before Triton's experts, FP8 dispatch and weights too",
        arguments=(_DEEPEP,),
        devices=_GPU,
        adapters=_OTHERS,
        test_timeout_s=_SLOW_S,
    ),
    Group(
        name="gpu-layer",
        title="A MoE layer, DP x TP x EP, with vLLM's GPU experts",
        arguments=(f"{_LAYER}::test_moe_layer",),
        devices=_GPU,
        adapters=("shared_gpu", "moe_layer"),
        environment=MappingProxyType({"VLLM_LOGGING_LEVEL": "ERROR"}),
        test_timeout_s=_SLOW_S,
    ),
    Group(
        name="gpu-layer-graph",
        title="A captured MoE layer, replayed with other routing",
        arguments=(f"{_LAYER}::test_moe_layer_mori_graph",),
        devices=_GPU,
        adapters=_OTHERS,
        test_timeout_s=_SLOW_S,
    ),
    Group(
        name="whole-layer",
        title="FlashInfer's expert-parallel layer, bit for bit, with small experts",
        arguments=(_WHOLE_LAYER, "-k", "2-cutedsl-dsv4-flash"),
        devices=frozenset({Device.CPU}),
        adapters=_OTHERS,
    ),
    Group(
        name="gpu-whole-layer",
        title="FlashInfer's expert-parallel layer, bit for bit, at the sizes of large models",
        arguments=(_WHOLE_LAYER, "-k", "cutedsl"),
        devices=_GPU,
        adapters=_OTHERS,
        test_timeout_s=_SLOW_S,
        gpus=_DEVICE_EACH,
    ),
    Group(
        name="gpu-moved-experts",
        title="Layers whose experts are moved between ranks",
        arguments=(
            "tests/distributed/test_eplb_fused_moe_layer.py",
            "tests/distributed/test_eplb_fused_moe_layer_dep_nvfp4.py",
        ),
        devices=_GPU,
        adapters=_OTHERS,
        test_timeout_s=_SLOW_S,
        gpus=_DEVICE_EACH,
    ),
    Group(
        name="gpu-graphs",
        title="CUDA graphs of engines on one GPU",
        arguments=(
            "tests/v1/cudagraph",
            "tests/compile/fullgraph/test_full_cudagraph.py",
            "tests/compile/fullgraph/test_simple.py",
            "tests/compile/fullgraph/test_multiple_graphs.py",
        ),
        plugin=Plugin.COMPARED,
        devices=_GPU,
        environment=_WITHOUT_STAND_INS,
        test_timeout_s=_SLOW_S,
    ),
    Group(
        name="gpu-speculation",
        title="Speculative decoding of engines on one GPU",
        arguments=(
            "tests/v1/e2e/spec_decode/draft_model",
            "tests/v1/e2e/spec_decode/eagle/test_eagle_correctness.py",
            "tests/v1/e2e/spec_decode/ngram_suffix",
        ),
        plugin=Plugin.COMPARED,
        devices=_GPU,
        environment=_WITHOUT_STAND_INS,
        test_timeout_s=_SLOW_S,
    ),
    Group(
        name="drafts",
        title="Two engines that draft tokens with a layer of their own (MTP)",
        arguments=(f"{_DRAFTS}::test_deepseek_mtp_load_dp", "-k", "dp2"),
        adapters=("forked", "redirects", "engines", "drafts"),
        gpus=2,
    ),
    Group(
        name="gpu-layer-one-rank",
        title="A MoE layer on one GPU, not ours",
        arguments=(_LAYER, "-k", "no_parallel"),
        plugin=Plugin.COMPARED,
        devices=_GPU,
        test_timeout_s=_SLOW_S,
    ),
)
