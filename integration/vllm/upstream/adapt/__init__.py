"""pytest plugins that run inside vLLM's test processes and fit its tests to our backend and to CPUs."""
