"""What load balancing and LoRA add to our layers: `moe` knows neither of them.

Each of these rooms has a subclass of `Feature`, which a worker adds before it creates layers. This
module imports nothing of vLLM.
"""

from __future__ import annotations

import contextlib
from typing import Any

#: The number that tokens without an adapter (LoRA) have; also the slot of no adapter, as in vLLM.
BASE = -1
#: Bytes of the number of an adapter, which travels with each token.
NUMBER_BYTES = 4


class Feature:
    """What one feature of vLLM adds to the layers that it is on for; by default nothing.

    Attributes:
        payload_bytes: bytes of each extra payload that travels with a token.
    """

    payload_bytes: tuple[int, ...] = ()

    def is_on(self, vllm_config: Any, moe_config: Any) -> bool:
        """Return whether a layer has the feature. Local.

        Args:
            vllm_config: vLLM's VllmConfig, or None.
            moe_config: vLLM's FusedMoEConfig of the layer.
        """
        raise NotImplementedError

    def choose_experts(self, quant_method: Any) -> None:
        """Change the experts that vLLM has chosen for a layer. Local; raises UnsupportedError."""

    def check(self, experts: Any, layer: Any) -> None:
        """Raise UnsupportedError for experts that cannot be served with the feature. Local."""

    def in_use(self, experts: Any) -> contextlib.AbstractContextManager[None]:
        """Surround a look at experts, which then say what they take with the feature. Local."""
        return contextlib.nullcontext()


_features: dict[type, Feature] = {}


def add(feature: Feature) -> None:
    """Let the layers that are created from now on have a feature. Local; idempotent."""
    _features[type(feature)] = feature


def features_of(vllm_config: Any, moe_config: Any) -> tuple[Feature, ...]:
    """Return the features of a layer; arguments as `Feature.is_on`. Local."""
    return tuple(one for one in _features.values() if one.is_on(vllm_config, moe_config))
