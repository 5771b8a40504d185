"""A package that knows only our hooks adds a recipe and a transport; a taken name is refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, plugins
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.plugins import builtin as builtin_plugins
from moe_nvlink_plugin.plugins import hookspecs
from moe_nvlink_plugin.transport.host import HostTransport
from tests.support.programs import python

CONFIG = AllToAllConfig(
    ep_size=1, ep_rank=0, num_experts=1, top_k=1, hidden_size=32, max_tokens_per_rank=1
)

#: What a stranger ships: a recipe that sends int8 with one fp32 scale per 32 and leaves quantising
#: to the caller; one that quantises, to 3-bit codes of which ten fill an int32, with an fp16 scale
#: per 20; a transport that notes what it allocates.
STRANGER = """
import torch
import pluggy
from moe_nvlink_plugin.recipes import PayloadRow, QuantisedRows
from moe_nvlink_plugin.transport.host import HostTransport

hookimpl = pluggy.HookimplMarker("moe_nvlink")


class Int8:
    name = "int8x32"
    activation_dtypes = (torch.float32,)

    def hidden_row(self, hidden_size):
        return PayloadRow(torch.int8, hidden_size)

    def scales_row(self, hidden_size):
        return PayloadRow(torch.float32, hidden_size // 32)


class Tenths:
    name = "int3x20"
    activation_dtypes = (torch.bfloat16, torch.float32)
    needs_global_scale = True
    quantiser = "None"

    def hidden_row(self, hidden_size):
        return PayloadRow(torch.int32, hidden_size // 10)

    def scales_row(self, hidden_size):
        return PayloadRow(torch.float16, hidden_size // 20)

    def quantise(self, hidden_states, global_scale=None):
        blocks = hidden_states.float().unflatten(1, (-1, 20)) * global_scale
        scales = (blocks.abs().amax(2) / 3).clamp(min=2.0**-14).half()
        codes = ((blocks / scales.float()[:, :, None]).round().clamp(-3, 3) + 3).int().flatten(1)
        shifts = 3 * torch.arange(10, dtype=torch.int32)
        rows = (codes.unflatten(1, (-1, 10)) << shifts).sum(2, dtype=torch.int32)
        return QuantisedRows(rows, scales)

    def dequantise(self, rows, scales, dtype, global_scale=None):
        shifts = 3 * torch.arange(10, dtype=torch.int32)
        codes = ((rows[:, :, None] >> shifts) & 7).flatten(1) - 3
        blocks = codes.float().unflatten(1, (-1, 20)) * scales.float()[:, :, None] / global_scale
        return blocks.flatten(1).to(dtype)


class Noting(HostTransport):
    name = "noting"
    mapped = []

    def serves(self, device):
        return device.type in ("cpu", "xla")

    def reserve(self, group, reserve_bytes, device):
        memory = super().reserve(group, reserve_bytes, device)
        inner = memory.extend

        def extend(extents):
            self.mapped.append(sum(extent.size_bytes for extent in extents))
            inner(extents)

        memory.extend = extend
        return memory


@hookimpl
def moe_nvlink_recipes():
    return [Int8(), Tenths()]


@hookimpl
def moe_nvlink_transports():
    return [Noting()]
"""

USES_IT = """
import torch
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, plugins
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
import stranger

def rank_main(group):
    config = AllToAllConfig(ep_size=2, ep_rank=group.rank, num_experts=4, top_k=2, hidden_size=64,
                            max_tokens_per_rank=8, dtype=torch.float32, timeout_s=30,
                            recipe="int8x32", transport="noting", extra_payload_bytes=(6,))
    rows = torch.arange(5 * 64).reshape(5, 64).to(torch.int8) + group.rank
    scales = torch.full((5, 2), 0.5 + group.rank)
    ids = torch.tensor([[0, 3]] * 5, dtype=torch.int32)
    extra = torch.full((5, 3), 7 + group.rank, dtype=torch.int16)
    with MoeAllToAll.create(config, group) as layer:
        got = layer.dispatch(rows, ids, torch.ones(5, 2), [extra], scales=scales)
        assert got.hidden_states.dtype is torch.int8 and got.scales.shape == (16, 2)
        for source in range(2):
            here = slice(8 * source, 8 * source + 5)
            assert torch.equal(got.hidden_states[here] - source, rows - group.rank)
            assert bool((got.scales[here] == 0.5 + source).all())
            assert bool((got.extra_payloads[0][here] == 7 + source).all())
        partial = got.hidden_states.float() * got.scales.repeat_interleave(32, dim=1)
        combined = layer.combine(partial, got.metadata)
        # Both ranks own one of the two experts: two equal partial rows each.
        assert torch.equal(combined, 2 * rows.float() * (0.5 + group.rank))
        return layer.workspace_bytes

first, second = run_ranks(2, rank_main)
assert stranger.Noting.mapped == [first, second], stranger.Noting.mapped
# Ours stay the default for the devices they serve; a stranger's serves the others.
assert plugins.find_transport(None, torch.device("cpu")).name == "host"
assert plugins.find_transport(None, torch.device("xla")).name == "noting"
print("used")
"""


#: Both ways in: activations, and rows that the caller has quantised. Of an odd hidden size, bf16,
#: with an extra payload behind the scales, two channels, and the experts' rows back in a format of
#: ours.
QUANTISES = """
import hashlib
import os
import torch
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, plugins
from moe_nvlink_plugin.errors import InputError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.testing import generators, random_inputs, run_ranks

HIDDEN, CAPACITY = 640, 7
SCALE = torch.tensor([0.5])

def refused(body, words):
    try:
        body()
    except InputError as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")

def rank_main(group):
    config = AllToAllConfig(ep_size=3, ep_rank=group.rank, num_experts=7, top_k=3,
                            hidden_size=HIDDEN, max_tokens_per_rank=CAPACITY, timeout_s=30,
                            recipe="int3x20", combine="fp8_block", extra_payload_bytes=(5,),
                            num_channels=2)
    recipe = plugins.find_recipe(config)
    hidden, ids, weights = random_inputs(config, 5 - group.rank, generators(3, 1)[group.rank])
    extra = torch.full((len(ids), 5), group.rank, dtype=torch.uint8)
    rows, scales = recipe.quantise(hidden, SCALE)
    seen = []
    with MoeAllToAll.create(config, group) as layer:
        refused(lambda: layer.dispatch(hidden, ids, weights, [extra]), "needs global_scale")
        refused(lambda: layer.dispatch(rows, ids, weights, [extra]), "needs scales")
        for channel in (0, 1):
            if channel == 0:
                got = layer.dispatch(hidden, ids, weights, [extra], global_scale=SCALE)
            else:
                got = layer.dispatch(rows, ids, weights, [extra], scales=scales, channel=1)
            assert (got.hidden_states.dtype, got.scales.dtype) == (torch.int32, torch.float16)
            filled = torch.cat([torch.arange(count) + CAPACITY * source
                                for source, count in enumerate(got.recv_counts.tolist())])
            back = recipe.dequantise(got.hidden_states, got.scales, config.dtype, SCALE)
            seen.append((group.rank, got.recv_counts.tolist(), got.hidden_states[filled].clone(),
                         got.scales[filled].clone(), got.extra_payloads[0][filled].clone()))
            combined = layer.combine(back, got.metadata)
            # Each token comes back once for each rank that it went to, as its own dequantised row.
            places = (got.metadata.send_slots >= 0).sum(1, keepdim=True)
            ours = recipe.dequantise(rows, scales, config.dtype, SCALE).float()
            off = (combined.float() - places * ours).abs().amax()
            assert off < 0.1 * ours.abs().amax(), off
    return rows, scales, seen

by_rank = run_ranks(3, rank_main)
for rows, _scales, seen in by_rank:
    for fused, given in zip(seen[0], seen[1]):
        equal = torch.equal(fused, given) if isinstance(fused, torch.Tensor) else fused == given
        assert equal, "activations and the caller's rows arrive alike"
    rank, counts, got_rows, got_scales, extras = seen[0]
    assert extras[:, 0].tolist() == [s for s, count in enumerate(counts) for _ in range(count)]
    for row, scale, origin in zip(got_rows, got_scales, extras[:, 0].tolist()):
        here = (by_rank[origin][0] == row).all(1) & (by_rank[origin][1] == scale).all(1)
        assert int(here.sum()) == 1, "a row and its scales as the recipe made them"
print(hashlib.sha256(LAYER.host_source().encode()).hexdigest())
print(os.readlink(host.load(LAYER.host_source())._library._name))
"""


def install(folder: Path, name: str, code: str) -> None:
    """As pip would leave it: a module and a dist-info with an entry point."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.ENTRY_POINT_GROUP}]\n{name} = {name}\n")


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    # The folder goes to the front of sys.path before anything of ours is imported.
    start = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    return python("-c", start + code)


def test_a_third_party_package(tmp_path: Path) -> None:
    install(tmp_path, "stranger", STRANGER)
    done = run(tmp_path, USES_IT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "used"


def test_a_third_party_quantiser(tmp_path: Path) -> None:
    """A format nobody here has thought of, and the kernels are those they were without it: the same
    text, and the same compiled library.
    """
    install(tmp_path, "stranger", STRANGER)
    text = LAYER.host_source()
    library = host.build(text)
    done = run(tmp_path, QUANTISES)
    assert done.returncode == 0, done.stderr
    digest, loaded = done.stdout.splitlines()
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert Path(loaded) == library, "it is named after all that it was compiled from"


def with_a_stranger(
    folder: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> pluggy.PluginManager:
    """A manager of a process that has this package, too."""
    install(folder, "stranger", code)
    monkeypatch.syspath_prepend(str(folder))
    try:
        return plugins.manager.__wrapped__()
    finally:
        sys.modules.pop("stranger", None)


def test_a_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clash = STRANGER.replace('"int8x32"', '"bf16"').replace('"noting"', '"host"')
    manager = with_a_stranger(tmp_path, clash, monkeypatch)
    monkeypatch.setattr(plugins.registry, "manager", lambda: manager)
    with pytest.raises(ConfigError, match="two plugins provide the recipe 'bf16'"):
        plugins.find_recipe(CONFIG)
    with pytest.raises(ConfigError, match="two plugins provide the transport 'host'"):
        plugins.find_transport(None, torch.device("cpu"))


def test_a_hook_we_do_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than never called."""
    typo = STRANGER.replace("moe_nvlink_recipes", "moe_nvlink_recipies")
    with pytest.raises(pluggy.PluginValidationError, match="moe_nvlink_recipies"):
        with_a_stranger(tmp_path, typo, monkeypatch)


def test_ours_come_through_the_same_hooks() -> None:
    assert plugins.manager().get_plugin("builtin") is builtin_plugins
    hook = plugins.manager().hook
    recipes = [recipe.name for members in hook.moe_nvlink_recipes() for recipe in members]
    assert set(recipes) >= {"bf16", "fp16", "fp32"}
    transports = [each for members in hook.moe_nvlink_transports() for each in members]
    assert any(isinstance(each, HostTransport) for each in transports)


def test_without_ours_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core knows no recipe and no transport by name."""
    empty = pluggy.PluginManager(hookspecs.PROJECT)
    empty.add_hookspecs(hookspecs)
    monkeypatch.setattr(plugins.registry, "manager", lambda: empty)
    with pytest.raises(ConfigError, match="recipe='bf16' is unknown"):
        plugins.find_recipe(CONFIG)
    with pytest.raises(ConfigError, match="transport='host' is unknown"):
        plugins.find_transport("host", torch.device("cpu"))
