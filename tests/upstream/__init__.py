"""vLLM's own tests, run against our backend by `tests/integration/servers/test_upstream.py`.

It fetches vLLM's source distribution, runs a selection of its tests with our plugin, and compares
what becomes of them with `groups.yaml`. No file of vLLM is kept in this repository.

vLLM's tests are a package `tests` as well. Processes that run them import this package by the name
`moe_nvlink_upstream`, so that imports within it are relative.
"""
