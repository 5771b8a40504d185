"""Decode throughput of real vLLM servers: ours against gloo collectives behind the same seams."""
