"""Our prepare/finalize by vLLM's registry of factories (pull request 50556), where there is one.

No release has the registry yet; this was tested against a stand-in.

Our layers do not come by it. ``parallel_config`` keeps its carrier (``backend``), because the rest
of vLLM knows the carrier and not us: its communicators raise for other names, and LoRA layers
assert it. And vLLM asks a factory before it makes the experts, and tells it no layer. Our method
needs both, for static scales before weights are processed, adapters, the load balancer, reloaded
weights, and combine that ends the layer. So our name becomes the carrier wherever a user or a layer
brings it (``plugin.flag``, ``layers``), and our method alone serves our layers. vLLM asks our
factory for kernels beside them: those that a program makes with our name in their
FusedMoEParallelConfig.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.agreement import Proposal
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm import compat
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, OurManager

from .cpu_prepare_finalize import CpuPrepareAndFinalize
from .method import check_summed_once, prepare_finalize_for

#: The layer in messages; vLLM does not tell its name.
_LAYER = f'a kernel with all2all_backend "{BACKEND}"'

logger = logging.getLogger(__name__)


def put_in_place() -> None:
    """Register our factory if this vLLM has the registry. Local; idempotent.

    Without it this does nothing. If the registry is another than we know, or already has our name,
    this logs one warning. Our layers are served in any case.
    """
    try:
        differs = compat.registry_differs()
        if differs == "":
            differs = _register()
    except Exception as error:  # our layers need nothing that this vLLM may have there
        differs = f"{type(error).__name__}: {error}"
    if differs:
        _warn(differs)


def _register() -> str:
    """Return why our factory cannot be registered; "" if it is. Local."""
    register, known, base = (names.find(one) for one in compat.REGISTRY[:3])
    present = known.get(BACKEND)
    if present is None:
        members = {
            "__module__": __name__,
            "backend_name": BACKEND,
            "supports_sequence_parallel": True,  # as under the carrier
            "create": classmethod(create),
        }
        register(type("MoeNvlinkFactory", (base,), members))
        present = known.get(BACKEND)
    if getattr(present, "__module__", None) != __name__:
        return f"it has {present} for {BACKEND}"
    return ""


@functools.cache
def _warn(differs: str) -> None:
    """Log once per process why vLLM cannot make our prepare/finalize. Local."""
    logger.warning(
        "vLLM %s has a registry of prepare/finalize factories that moe_nvlink does not know: %s. "
        "--all2all-backend %s serves without it; only kernels that a program makes by that name "
        "are not served.",
        *(compat.vllm_version(), differs, BACKEND),
    )


def create(
    _cls: Any,
    *,
    moe: Any,
    quant_config: Any,
    routing_tables: Any,
    all2all_manager: Any,
    allow_new_interface: bool,
    use_monolithic: bool,
    eep_stage: bool,
) -> mk.FusedMoEPrepareAndFinalize:
    """Return our prepare/finalize, which completes itself when vLLM makes the kernel. Local.

    Args:
        moe: vLLM's FusedMoEConfig.
        quant_config: unused; the experts have it too.
        routing_tables: placement of experts other than in contiguous ranges, or None.
        all2all_manager: manager of the expert-parallel group.
        allow_new_interface: unused; there is no older one of ours.
        use_monolithic: whether the experts route inside their kernel.
        eep_stage: whether the kernel is for a group that is to come.

    Raises:
        UnsupportedError: our exchange cannot serve the kernel.
    """
    for is_so, problem in (
        (
            use_monolithic,
            "its experts route inside their kernel. Choose others with --moe-backend (triton is "
            "one).",
        ),
        (
            routing_tables is not None,
            "its experts are not placed in contiguous ranges. Remove --expert-placement-strategy.",
        ),
        (
            eep_stage,
            "it is for ranks that are to come (--enable-elastic-ep), where we serve our own layers "
            "only. Make it by another backend.",
        ),
        (
            not isinstance(all2all_manager, OurManager),
            f"the expert-parallel group has {type(all2all_manager).__name__} instead of our "
            f"manager. Start vLLM with --all2all-backend {BACKEND}.",
        ),
    ):
        if is_so:
            raise UnsupportedError(f"{_LAYER}: {problem}")
    check_summed_once(_LAYER, moe)
    return ByName(all2all_manager.pool, moe)


class ByName(CpuPrepareAndFinalize):
    """Becomes our prepare/finalize for the rank's device when the experts are known.

    Before that vLLM asks only for what all of ours answer alike, such as the activation format.

    Args:
        pool: this worker's pool.
        moe: vLLM's FusedMoEConfig.
    """

    def __init__(self, pool: ExchangePool, moe: Any) -> None:
        self._pool, self._moe = pool, moe

    @overrides
    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Agree on an exchange for the experts. Collective; raises as `method.install_for`."""
        ranks = self._pool.ranks
        made = prepare_finalize_for(self._pool, _LAYER, self._moe, fused_experts)
        with ranks.telling_all(_LAYER):
            made.post_init_setup(fused_experts)
        ranks.agree(Proposal(_LAYER))
        # From now on the object is what our method puts into layers.
        self.__dict__, self.__class__ = vars(made), type(made)  # type: ignore[assignment]
