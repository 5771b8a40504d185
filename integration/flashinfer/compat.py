"""Names of FlashInfer that no reader finds in these modules, and the releases that were read.

`own_source` reads the others: what we import, call by its name, or mark with `overrides`. A test
compares all of them with FlashInfer's source.
``python -m moe_nvlink_plugin.integration.flashinfer.compat`` prints all.
"""

from __future__ import annotations

from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.names import Touched, fields, patch, use
from moe_nvlink_plugin.integration.common.own_source import Base, Reader, Rules

#: Releases whose source a test reads for every name below, and with which tests ran CPU ranks.
READ = ("0.7.2.post1",)
#: The oldest release that pyproject allows, because SGLang 0.5.23 pins it. No test fetches it: its
#: source was held against these names once, by hand.
OLDEST = "0.7.2"

_A2A = "flashinfer.comm.trtllm_moe_alltoall"
_ENUMS = "flashinfer.tllm_enums"

#: Our module -> names of FlashInfer that it finds by text, and what it patches.
BY_HAND: dict[str, tuple[Touched, ...]] = {
    "experts": (
        *use(
            "flashinfer.fused_moe",
            "cutlass_fused_moe",
            "trtllm_fp4_block_scale_routed_moe",
            "trtllm_fp8_block_scale_routed_moe",
        ),
        *use(
            _ENUMS,
            "ActivationType",
            "RoutingMethodType.Renormalize",
            "Fp8QuantizationType.DeepSeekFp8",
            "Fp8QuantizationType.MxFp8",
        ),
    ),
    "replacement": (
        *patch(
            _A2A,
            "moe_a2a_get_workspace_size_per_rank(ep_size, max_num_tokens,"
            "total_dispatch_payload_size_per_token, combine_payload_size_per_token,"
            "eplb_stats_num_experts, backend)",
            "the bytes of payloads and of the experts' output",
        ),
        *(
            one
            for name in ("MoeAlltoAll", "moe_a2a_get_workspace_size_per_rank")
            for one in patch("flashinfer.comm", name, "install() puts ours there")
        ),
        *(
            one
            for name in (
                *("initialize", "dispatch", "combine", "sanitize_expert_ids"),
                "wrap_payload_tensor_in_workspace",
            )
            for one in patch("flashinfer.comm", f"moe_a2a_{name}", "raises after install()")
        ),
    ),
}
RULES = Rules(
    package=__package__ or "",
    framework="flashinfer",
    by_hand=BY_HAND,
    bases={"MoeAlltoAll": [Base(_A2A, "MoeAlltoAll")]},
)

#: Attributes of objects that we read.
FIELDS = (
    *fields(
        {
            "flashinfer.comm.mapping:Mapping": "moe_ep_group moe_ep_rank moe_ep_size",
            "flashinfer.comm.mnnvl:MnnvlConfig": "comm_backend",
            "flashinfer.moe_ep.config:BootstrapConfig": "device process_group rank world_size",
            "flashinfer.moe_ep.core.comm.communication:MoEEpCommParams": (
                "dispatch_bytes_per_token dispatch_format dtype hidden_size invalid_expert_id "
                "max_tokens_per_rank num_experts token_dtype top_k"
            ),
            "flashinfer.moe_ep.core.comm.communication:MoEEpDispatchResult": (
                "eplb_gathered_stats hidden_states hidden_states_scale tokens_per_rank topk_ids "
                "topk_weights"
            ),
        }
    ),
)


def touched() -> list[Touched]:
    """Return every name of FlashInfer that we touch. Local."""
    return Reader(RULES).touched()


def supported_versions() -> str:
    """The cells of FlashInfer's row in the README's table of versions: supported, and how tried."""
    read = " and ".join(READ)
    return (
        f"{read}, and {OLDEST}, which SGLang 0.5.23 pins; on GPUs: two ranks on one | CPU "
        f"ranks ran `flashinfer.moe_ep` of {read} and the drop-in for `MoeAlltoAll`; in its source "
        f"every name we touch was found. {OLDEST} did not run: its source was read once, by "
        "hand, with the same result"
    )


if __name__ == "__main__":
    print(names.table(touched(), FIELDS))
