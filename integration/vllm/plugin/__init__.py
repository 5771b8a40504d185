"""How vLLM finds the backend: flag, platform, validation, worker, communicator."""
