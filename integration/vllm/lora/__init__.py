"""Adapters (LoRA) of vLLM (``--enable-lora``)."""
