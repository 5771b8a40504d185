"""benchmarks/moe_comm: what is asked for, whose tokens go where, and how many bytes that is."""

from __future__ import annotations

import statistics

import pytest
import torch

from benchmarks import common
from benchmarks.moe_comm import accounting, options, routers, rows
from benchmarks.moe_comm.options import Options
from moe_nvlink_plugin import reference


def parsed(*arguments: str) -> Options:
    return options.parse("", arguments).options


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        options.parse("", arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


# The command line.


def test_command_lines_of_tensorrt_llm() -> None:
    """As its post has it, and with the options for what travels."""
    found = parsed(
        *("--backend", "NVLINK_ONE_SIDED", "--profile", "deepseek_v3", "--perfect_router"),
        *("--kernel_breakdown", "--iter_stats", "--ep_size", "8", "-b", "1", "-e", "2048"),
        *("-f", "2", "--output_file", "nvlink_one_sided.json"),
    )
    assert (found.backends, found.recipe, found.combine) == (("moe_nvlink",), "bf16", "bf16")
    assert (found.ep_size, found.batches) == (8, tuple(2**power for power in range(12)))
    assert found.payload_in_workspace
    assert parsed("--quant", "fp8_block_scales").recipe == "fp8_block"
    assert parsed("--quant", "NO_QUANT", "--dtype", "float16").recipe == "fp16"
    assert parsed("--use_low_precision_combine").combine == "fp8_tensor"
    assert not parsed("--no-payload-in-workspace").payload_in_workspace


def test_sweeps() -> None:
    assert parsed("-b", "64").batches == (64,)
    assert parsed("-b", "1", "-e", "300").batches == (1, 129, 257)
    assert parsed("-b", "1", "-e", "5", "-i", "2").batches == (1, 3, 5)
    assert parsed("-b", "1", "-e", "5", "-f", "1.5").batches == (1, 2, 3, 5)
    assert parsed("--batches", "3", "9").batches == (3, 9)


def test_pdl_of_ranks_with_a_gpu_each_is_the_products(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    each, emulated = ("--device", "cuda", "--ep_size", "2"), ("--device", "cuda", "--emulate_ranks")
    monkeypatch.delenv("MOE_NVLINK_PDL", raising=False)
    assert parsed(*each).pdl
    assert not parsed(*emulated, "2").pdl
    assert parsed(*emulated, "2", "--pdl").pdl
    monkeypatch.setenv("MOE_NVLINK_PDL", "0")
    assert not parsed(*each).pdl
    assert "unset the variable" in refused(capsys, *each, "--pdl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile custom --top_k 2", "lacks --hidden_size, --num_experts"),
        ("--ep_size 129", "ep_size=129 must be an integer from 1 to 128"),
        ("--top_k 9 --num_experts 8", "top_k=9"),
        ("-b 8 -e 4", "batches from 8 to 4"),
        ("-b 1 -e 4 -i 2 -f 2", "not allowed with argument -i"),
        ("-b 1 -e 4 -f 1", "must be above 1"),
        ("--batches 4 -b 1", "contradict each other"),
        ("--batches 0", "batches=0 must be at least 1"),
        ("-f 2", "add -b"),
        ("--iters 1", "iters=1 must be at least 2"),
        ("--router perfect --ep_size 3", "use --router spread"),
        ("--router zipf --perfect_router", "not allowed with argument --router"),
        ("--max_num_tokens_per_rank 64", "below the largest batch, 128"),
        ("--recipe nvfp4 --hidden_size 100", "hidden_size=100"),
        ("--recipe bf16 --dtype float16", "takes activations of"),
        ("--cuda_graph", "cuda_graph is a GPU's"),
        ("--emulate_ranks 8", "emulate_ranks is a GPU's"),
        ("--device cuda --emulate_ranks 8 --ep_size 4", "contradict each other"),
        ("--backend moe_nvlink moe_nvlink", "each once"),
        ("--batches 4 1 4", "each once"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert message in refused(capsys, *arguments.split())


# Routers.

SMALL = {"hidden_size": 8, "top_k": 4, "num_experts": 32, "ep_size": 4, "profile": "custom"}


def small(router: str, **changes: object) -> Options:
    return Options(**{**SMALL, "router": router, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("router", options.ROUTERS)
@pytest.mark.parametrize("changes", [{}, {"num_experts": 10, "ep_size": 5}, {"ep_size": 16}])
def test_every_router(router: str, changes: dict[str, object]) -> None:
    """Ids that are experts, none twice in a token; the same for a seed; not the same for a rank."""
    chosen = small(router, **changes)
    found = [routers.tokens_of(chosen, 33, rank) for rank in range(2)]
    for tokens in found:
        ids = tokens.topk_ids
        assert ids.shape == (33, 4)
        assert ids.dtype == torch.int32
        assert bool(((ids >= 0) & (ids < chosen.num_experts)).all())
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert tokens.hidden.dtype == torch.bfloat16
    assert not torch.equal(found[0].topk_ids, found[1].topk_ids)
    assert not torch.equal(found[0].hidden, found[1].hidden)
    again = routers.tokens_of(chosen, 33, 1)
    assert all(torch.equal(one, other) for one, other in zip(found[1], again, strict=True))


def rows_to(chosen: Options, tokens: int, source: int) -> list[int]:
    """Rows that a source sends to every rank."""
    ids = routers.ids_of(chosen, tokens, source)
    return routers.target_table(ids, chosen.num_experts, chosen.ep_size).sum(0).tolist()


@pytest.mark.parametrize(("ep_size", "top_k"), [(4, 4), (4, 8), (8, 3), (8, 32)])
def test_perfect_is_balanced(ep_size: int, top_k: int) -> None:
    chosen = small("perfect", ep_size=ep_size, top_k=top_k)
    sent = torch.tensor([rows_to(chosen, 16, source) for source in range(ep_size)])
    assert len(set(sent.sum(0).tolist())) == 1, "received"
    assert sent.sum(1).tolist() == [16 * min(ep_size, top_k)] * ep_size, "as many ranks as can be"


def test_spread_goes_to_as_many_ranks_as_can_be() -> None:
    for ep_size, num_experts in ((8, 32), (3, 32), (16, 10)):
        chosen = small("spread", ep_size=ep_size, num_experts=num_experts)
        assert sum(rows_to(chosen, 64, 1)) == 64 * min(ep_size, num_experts, 4)
        assert len(set(map(tuple, routers.ids_of(chosen, 64, 1).tolist()))) >= 10, "random"


def test_local_leaves_the_rank_only_when_it_must() -> None:
    assert rows_to(small("local"), 50, 2) == [0, 0, 50, 0]  # 8 experts of its own for 4 ids
    # 2 of its own, then the next rank's: both; rank 15's next is rank 0.
    last = rows_to(small("local", ep_size=16), 50, 15)
    assert (last[15], last[0], sum(last)) == (50, 50, 100)


def test_hotspot_and_zipf_are_uneven_and_uniform_is_not() -> None:
    def shares(router: str) -> list[float]:
        chosen = small(router, top_k=1)
        ids = torch.cat([routers.ids_of(chosen, 2000, rank) for rank in range(4)]).flatten()
        counts = torch.bincount(ids.long(), minlength=32).sort(descending=True).values
        return (counts / counts.sum()).tolist()

    harmonic = sum(1 / n for n in range(1, 33))
    assert shares("zipf")[0] == pytest.approx(1 / harmonic, rel=0.1)
    assert shares("zipf")[9] == pytest.approx(0.1 / harmonic, rel=0.3)
    assert shares("uniform")[0] < 1.5 / 32
    hot = small("hotspot", top_k=1)
    sent = rows_to(hot, 2000, 3)
    assert sent[0] / statistics.mean(sent[1:]) == pytest.approx(4.0, rel=0.15)


# Bytes.


def test_traffic_counts_what_the_reference_sends() -> None:
    chosen = small("uniform", recipe="fp8_token", combine="bf16", ep_size=3)
    found = accounting.traffic(chosen, 20)
    for rank in range(3):
        table = reference.target_ranks(routers.ids_of(chosen, 20, rank), 32, 3)
        targets = [target for row in table for target in row if target is not None]
        assert found.put_rows[rank] == len(targets)
        assert found.wire_rows[rank] == sum(target != rank for target in targets)
    assert found.logical_rows == 20 * 3
    assert found.dispatch_row_bytes == 8 + 4
    assert found.dispatch_extra_bytes == 4 * (4 + 4)
    assert found.combine_row_bytes == 8 * 2
    assert found.logical_bytes("dispatch") == 60 * 12
    assert found.logical_bytes("both") == 60 * (12 + 16)
    assert found.put_bytes("dispatch", 1) == found.put_rows[1] * (12 + 32)
    assert found.mean_wire_bytes("both") == sum(found.wire_rows) / 3 * (12 + 32 + 16)
    assert found.mean_put_bytes("combine") == sum(found.put_rows) / 3 * 16


# Rows.


def make(backend: str, factor: float, **changes: object) -> dict[str, object]:
    chosen = small("uniform", iters=4, **changes)
    base = torch.tensor([[10.0, 20.0], [30.0, 20.0], [20.0, 40.0], [50.0, 10.0]]).double()
    samples = dict.fromkeys(rows.PHASES, base * factor)
    ceilings = dict.fromkeys(rows.PHASES, torch.full((4, 2), 5.0).double())
    traffic = accounting.Traffic(100, (80, 60), (50, 40), 1000, 24, 500)
    return rows.make_row(chosen, backend, 16, samples, traffic, ceilings, {"given": "nothing"})


def test_a_row_is_of_the_slowest_rank() -> None:
    phase = make("moe_nvlink", 1.0)["dispatch"]
    assert isinstance(phase, dict)
    assert phase["median_us"] == 35.0  # of 20, 30, 40, 50
    assert phase["p95_us"] == 40.0
    assert phase["min_rank_us"] == 20.0  # of 20, 20, 40, 10
    assert phase["max_rank_us"] == 25.0  # of 10, 30, 20, 50
    assert phase["logical_gb_s"] == pytest.approx(100 * 1000 / 35.0 / 1e3)
    assert phase["wire_gb_s"] == pytest.approx(45 * 1024 / 35.0 / 1e3)
    assert phase["copied_gb_s"] == pytest.approx(70 * 1024 / 35.0 / 1e3)
    assert phase["ceiling_gb_s"] == pytest.approx(70 * 1024 / 5.0 / 1e3)
    assert phase["of_ceiling"] == pytest.approx(5 / 35)


def test_ratios_and_what_is_written() -> None:
    ours, theirs = make("moe_nvlink", 1.0, iter_stats=True), make("gloo_gather", 3.0)
    rows.add_ratios([ours, theirs])
    head = rows.head(small("uniform"), ceiling="a copy")
    written = rows.Growing(common.Record(None, head), []).finish([ours, theirs])
    ratio = written["rows"][1]["ratio_to_ours"]["both"]
    assert ratio == {"median": 3.0, "q25": 3.0, "q75": 3.0}
    assert "ratio_to_ours" not in written["rows"][0]
    assert written["rows"][0]["samples"]["combine"][1] == [30.0, 20.0]
    assert written["rows"][0]["dispatch"]["per_rank"]["rank0"]["max"] == 50.0
    assert not [name for row in written["rows"] for name in row if name.startswith("_")]
    assert {"commit", "command", "cpu", "date"} <= set(written["machine"])
    assert written["options"]["router"] == "uniform"
