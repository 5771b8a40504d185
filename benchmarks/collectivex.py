"""Our exchange as a backend of CollectiveX, the neutral benchmark of expert-parallel transports.

    torchrun --nproc-per-node 8 benchmarks/collectivex.py --checkout InferenceX/... OPTIONS

CollectiveX (SemiAnalysisAI/InferenceX, experimental/CollectiveX) brings the routing, the oracle,
the clock and the result file; an adapter is a subclass of its EPBackend. Its own bench/run_ep.py
knows a fixed list of backends, so this file is the entry point in its place, and then hands over to
its ep_harness.run_sweep. A checkout whose interface is not the RECORDED one is refused.

Not run: CollectiveX measures on GPUs with CUDA events. What has run is the adapter's side of the
interface, on CPU ranks, in tests/unit/test_bench_collectivex.py.
"""

from __future__ import annotations

import abc
import argparse
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll, QuantisingRecipe
from moe_nvlink_plugin.config import local_expert_range

#: Its dispatch precisions, and what travels for each; combine is always bf16.
RECIPES = {"bf16": "bf16", "fp8": "fp8_block"}
FP8_BLOCK = 128


class Interface(NamedTuple):
    """What was read of EPBackend. abstract and provided: parameters by method, self left out."""

    commit: str
    abstract: dict[str, tuple[str, ...]]
    provided: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]


#: bench/ep_backend.py and what bench/ep_harness.py, ep_oracle.py and ep_results.py ask of it, as
#: they were at this commit of SemiAnalysisAI/InferenceX.
RECORDED = Interface(
    commit="850d65ea228550dff0cde2736e868d7cf63bdfb7",
    abstract={
        "create_buffer": ("spec",),
        "dispatch": ("problem",),
        "stage": ("problem", "handle"),
        "combine": ("problem", "handle"),
        "recv_tokens": ("handle",),
        "inspect_dispatch": ("problem", "handle"),
        "combine_transformed": ("problem", "handle", "transformed"),
    },
    provided={
        "__init__": ("args", "rank", "world_size", "local_rank", "device"),
        "semantic_payload": ("x",),
        "_topk_idx_dtype": (),
        "finalize": ("rc",),
    },
    attributes=(
        *("name", "maturity", "SUPPORTED_MODES", "SUPPORTED_PRECISIONS", "stage_device_work"),
        *("requires_fresh_pair", "receive_layout", "combine_weight_semantics", "dispatch_dtype"),
        *("dispatch_value_bytes", "dispatch_scale_bytes_per_copy"),
    ),
)


class InterfaceError(Exception):
    """A checkout's EPBackend is not the one this adapter was written against."""


class Handle:
    """One dispatch: what arrived, and the rows that combine is to take."""

    def __init__(self, received: Dispatched) -> None:
        self.received = received
        self.combine_input: torch.Tensor | None = None


class Transport:
    """The methods of an EPBackend through MoeAllToAll; `backend_class` joins the two.

    problem: their namespace of one batch, of which we read dispatch_x `[T, hidden]` bf16, topk_idx
    int32 and topk_weights fp32 `[T, top_k]`.
    """

    name = "moe-nvlink"
    maturity = "candidate"  # vLLM serves with it, by a plugin; no engine ships it
    kernel_generation = "moe-nvlink-put-get"
    SUPPORTED_MODES = ("normal",)  # one family of kernels, for decode and prefill
    SUPPORTED_PRECISIONS = tuple(RECIPES)
    # Experts write into the region that combine reads; staging stands in for them.
    stage_device_work = True
    requires_fresh_pair = True
    receive_layout = "token-rank"
    combine_weight_semantics = "unweighted-rank-sum"
    combine_reduction = "domain-fp32"
    # Of their base class, for the type checker.
    args: Any
    rank: int
    world_size: int
    device: torch.device
    precision: str

    def __init__(
        self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device
    ) -> None:
        super().__init__(args, rank, world_size, local_rank, device)  # type: ignore[call-arg]
        self.library_version = importlib.metadata.version("moe-nvlink-plugin")
        self._exchange: MoeAllToAll | None = None
        self._first, self._end = local_expert_range(args.experts, world_size, rank)
        if self.precision == "fp8":
            self.dispatch_dtype = "fp8-e4m3fn"
            self.dispatch_value_bytes = 1
            self.dispatch_scale_bytes_per_copy = args.hidden // FP8_BLOCK * 4

    def create_buffer(self, spec: Any) -> None:
        """The exchange, for their largest batch. Collective; raises as MoeAllToAll.create."""
        self._exchange = MoeAllToAll.create(
            self._config(spec.max_tokens_per_rank), World(), self.device
        )

    def dispatch(self, problem: Any) -> Handle:
        """Collective; in fp8 our kernel quantises on the way."""
        return Handle(
            self._made().dispatch(problem.dispatch_x, problem.topk_idx, problem.topk_weights)
        )

    def stage(self, problem: Any, handle: Handle) -> None:
        """The rows that arrived, as bf16, go where experts would have written theirs."""
        self._put(problem, handle, self._payload(problem, handle))

    def combine(self, _problem: Any, handle: Handle) -> torch.Tensor:
        """Collective. `[T, hidden]` bf16: the sum over ranks of what was staged there."""
        assert handle.combine_input is not None
        return self._made().combine(handle.combine_input, handle.received.metadata)

    def combine_transformed(
        self, problem: Any, handle: Handle, transformed: torch.Tensor
    ) -> torch.Tensor:
        """As combine, of rows in the order of inspect_dispatch. Collective."""
        self._put(problem, handle, transformed)
        return self.combine(problem, handle)

    def recv_tokens(self, handle: Handle) -> int:
        """Rows that arrived. Waits for the device."""
        return int(handle.received.recv_counts.sum())

    def inspect_dispatch(self, problem: Any, handle: Handle) -> SimpleNamespace:
        """payload `[rows, hidden]` bf16; expert_ids int64, global, -1 for other ranks' experts, and
        weights fp32, 0 there, `[rows, top_k]`; local_expert_counts `[experts of this rank]`.
        """
        rows = self._filled(problem, handle)
        ids = handle.received.topk_ids[rows].to(torch.int64)
        weights = handle.received.topk_weights[rows]
        local = (ids >= self._first) & (ids < self._end)
        counts = torch.bincount(ids[local] - self._first, minlength=self._end - self._first)
        return SimpleNamespace(
            payload=self._payload(problem, handle),
            expert_ids=ids.masked_fill(~local, -1),
            weights=weights.masked_fill(~local, 0.0),
            local_expert_counts=counts,
        )

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """What arrives for `x` `[T, hidden]`: in fp8, quantised and back."""
        recipe = MoeAllToAll.check(self._config(1))
        if not isinstance(recipe, QuantisingRecipe):
            return x
        rows = recipe.quantise(x)
        return recipe.dequantise(rows.rows, rows.scales, x.dtype)

    def _topk_idx_dtype(self) -> torch.dtype:
        """What travels, so that nothing is cast inside their clock."""
        return torch.int32

    def finalize(self, rc: int) -> int:
        """Closes the exchange, then theirs."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        done: int = super().finalize(rc)  # type: ignore[misc]
        return done

    def _config(self, max_tokens_per_rank: int) -> AllToAllConfig:
        return AllToAllConfig(
            ep_size=self.world_size,
            ep_rank=self.rank,
            max_tokens_per_rank=max_tokens_per_rank,
            hidden_size=self.args.hidden,
            num_experts=self.args.experts,
            top_k=self.args.topk,
            dtype=torch.bfloat16,
            recipe=RECIPES[self.precision],
        )

    def _made(self) -> MoeAllToAll:
        if self._exchange is None:
            raise RuntimeError("create_buffer comes before dispatch and combine")
        return self._exchange

    def _filled(self, problem: Any, handle: Handle) -> torch.Tensor:
        """Which of the received rows are filled; looked at once, as a batch's routing is fixed."""
        found: torch.Tensor | None = getattr(problem, "moe_nvlink_filled", None)
        if found is None:
            counts = handle.received.recv_counts
            capacity = len(handle.received.topk_ids) // self.world_size
            slots = torch.arange(capacity, device=counts.device)
            found = (slots[None, :] < counts[:, None]).flatten().nonzero().flatten()
            problem.moe_nvlink_filled = found
        return found

    def _payload(self, problem: Any, handle: Handle) -> torch.Tensor:
        rows, received = self._filled(problem, handle), handle.received
        recipe = self._made().recipe
        if not isinstance(recipe, QuantisingRecipe):
            return received.hidden_states[rows]
        assert received.scales is not None
        return recipe.dequantise(
            received.hidden_states[rows], received.scales[rows], torch.bfloat16
        )

    def _put(self, problem: Any, handle: Handle, rows: torch.Tensor) -> None:
        region = self._made().combine_input()
        region.index_copy_(0, self._filled(problem, handle), rows)
        handle.combine_input = region


class World:
    """The default process group, as far as creating an exchange needs one: also with NCCL alone."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def check_interface(base: type) -> None:
    """Raises InterfaceError where an EPBackend is not as RECORDED, naming each difference."""
    found = {
        name: tuple(inspect.signature(getattr(base, name)).parameters)[1:]
        for name in (*RECORDED.abstract, *RECORDED.provided)
        if hasattr(base, name)
    }
    expected = {**RECORDED.abstract, **RECORDED.provided}
    wrong = [
        f"{name}{found.get(name, ' is missing')} instead of {parameters}"
        for name, parameters in expected.items()
        if found.get(name) != parameters
    ]
    abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    wrong += [f"{name} is abstract" for name in sorted(abstract - RECORDED.abstract.keys())]
    wrong += [f"no attribute {name}" for name in RECORDED.attributes if not hasattr(base, name)]
    if wrong:
        raise InterfaceError(
            f"this checkout's EPBackend differs from that of commit {RECORDED.commit}: "
            + "; ".join(wrong)
            + ". Check out that commit, or adapt benchmarks/collectivex.py"
        )


def backend_class(base: type) -> type:
    """Their EPBackend with our transport. Raises InterfaceError."""
    check_interface(base)
    return abc.ABCMeta("MoeNvlinkBackend", (Transport, base), {"name": Transport.name})


def main(arguments: Sequence[str] | None = None) -> int:
    """One case on this rank; the exit code is theirs."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--checkout", type=Path, required=True)
    known, rest = own.parse_known_args(arguments)
    harness, base = _import(known.checkout)
    args = _case(harness, rest)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.case_id = harness.case_id(
        args.runner, {**_factors(args), "backend": Transport.name, "ep": world_size}
    )
    args.runtime_device_product = torch.cuda.get_device_name(device)
    args.runtime = {
        "accelerator_runtime": torch.version.cuda,
        "framework": torch.__version__,
        "vendor": "nvidia",
    }
    backend = backend_class(base)(args, rank, world_size, local_rank, device)
    code = harness.run_sweep(args, backend, torch, dist, device, rank, world_size)
    done: int = backend.finalize(code)
    return done


def _import(checkout: Path) -> tuple[Any, type]:
    """Their harness and their EPBackend. Raises InterfaceError for a folder without them."""
    bench = checkout / "bench"
    if not (bench / "ep_backend.py").is_file():
        raise InterfaceError(f"{checkout} has no bench/ep_backend.py; give the CollectiveX folder")
    sys.path[:0] = [str(bench), str(checkout)]
    base: type = importlib.import_module("ep_backend").EPBackend
    return importlib.import_module("ep_harness"), base


def _case(harness: Any, rest: Sequence[str]) -> argparse.Namespace:
    """Their options. The case's name follows from them and need not be given."""
    parser = argparse.ArgumentParser(prog="collectivex.py")
    harness.add_common_args(parser)
    return parser.parse_args([*rest, "--case-id", "follows"])


def _factors(args: argparse.Namespace) -> dict[str, Any]:
    names = ("mode", "phase", "routing", "precision")
    return {"workload": args.workload_name, **{name: getattr(args, name) for name in names}}


if __name__ == "__main__":
    raise SystemExit(main())
