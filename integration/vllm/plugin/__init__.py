"""The parts by which vLLM finds the backend: flag, platform, validation, worker, communicator."""
