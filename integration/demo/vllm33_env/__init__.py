"""Lets vLLM 0.33 serve on CPU; `make vllm33-env` makes the environment."""
