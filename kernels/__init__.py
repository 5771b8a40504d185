"""The kernel sources (.cu, .h), read as package data by moe_nvlink_plugin.jit; no Python here."""
