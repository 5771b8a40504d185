"""Elastic expert parallelism (``--enable-elastic-ep``): ranks join and leave while others serve.

vLLM makes new groups beside those that serve, with a communicator and an all-to-all manager of
their own, and later swaps them. So each size has exchanges of its own on a workspace of its own:
old ranks create them in the groups to come (``scaling``) while the newcomers load the model, and
the retired groups' manager releases its workspace.

``cpu_scaling`` has what vLLM's CPU build lacks, and is not used on CUDA ranks.
"""
