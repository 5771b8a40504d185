"""The backend inside vLLM's MoE layers."""
