"""Our classes inside vLLM's MoE layers."""
