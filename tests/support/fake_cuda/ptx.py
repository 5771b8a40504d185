"""The PTX behind cubins: for a driver that runs PTX where it would call the host build.

    folder = ptx.prepare(tmp_path / "ptx", ptx.of(LAYER.variant(top_k=4, dtype="bf16")))
    env = fake_cuda.environment(fake_cuda.build(tmp_path), ptx=folder)

A cubin does not say which PTX it was assembled from. `prepare` therefore compiles each text twice,
with the same options: to the cubin that the product loads from its cache, and to PTX. It leaves the
driver (ptx.h) both, the PTX as a library, before there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.exchange import launches
from moe_nvlink_plugin.exchange.kernels import QUANTISER
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.launch.kernel import Variant
from tests.support.ptx import build

#: A parameter of tests that run on PTX by `-m long` only: they compile for a minute or more.
LONG = pytest.param("ptx", marks=pytest.mark.long)


class Unit(NamedTuple):
    """A translation unit and the architecture that it is compiled for."""

    text: str
    architecture: str = "sm_90a"


def of(*variants: Variant, pdl: Iterable[bool] = (True,)) -> list[Unit]:
    """What callers with these variants load, with or without programmatic dependent launch."""
    builds = {build: None for one in variants for each in pdl for build in one.builds(pdl=each)}
    return [Unit(build.text()) for build in builds]


def of_configs(*configs: AllToAllConfig) -> list[Unit]:
    """What layers of these configurations load; with several channels, launches may not overlap."""
    units = {
        unit: None
        for config in configs
        for unit in of(
            launches.variant(config, QUANTISER.code(config.recipe or "none")),
            pdl=(config.num_channels == 1,),
        )
    }
    return list(units)


def prepare(folder: Path, units: Iterable[Unit]) -> Path:
    """Compile what is not in the cache yet; fill `folder` for the driver. Seconds for each unit.

    Raises:
        UnsupportedError, CompileError: as nvrtc.load_or_compile and build.library_path.
        UnknownPtxError: the software GPU does not know an instruction.
    """
    folder.mkdir(exist_ok=True)
    for number, unit in enumerate(units):
        cubin = folder / f"{number}.cubin"
        cubin.write_bytes(nvrtc.load_or_compile(*unit))
        cubin.with_suffix(".so").symlink_to(build.library_path(build.ptx_of(*unit)))
    return folder
