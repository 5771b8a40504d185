"""pytest plugins inside vLLM's test processes: they fit its tests to our backend and to CPUs."""
