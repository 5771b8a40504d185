"""Adapters for programs that call FlashInfer themselves, without a serving framework."""
