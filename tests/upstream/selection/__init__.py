"""The selected tests, by area."""

from __future__ import annotations

from ..groups import Group


def all_groups() -> tuple[Group, ...]:
    """Every group, in the order they run and are reported in."""
    from . import cpu_experts, engines, gpu, harmless, modular_kernels, moe_layer, plugins

    areas = (plugins, moe_layer, modular_kernels, cpu_experts, engines, harmless, gpu)
    return tuple(group for area in areas for group in area.GROUPS)
