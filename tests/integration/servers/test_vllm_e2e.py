"""Real vLLM servers, expert parallel through our exchange, against the one-rank server.

Greedy tokens in float32 must be equal sequence by sequence, and the workers' counters must show
that the MoE layers' rows went through the exchange: a backend that is silently not used fails here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.integration.demo import processes
from moe_nvlink_plugin.integration.demo.server import (
    CPU_ENVIRONMENT,
    ServerError,
    VllmServer,
    free_port,
)
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import (
    DEEPSEEK_V3,
    MODELS,
    TinyModel,
    write_checkpoint,
)
from tests.integration.servers import lost_rows, ray_on_cpus, stop_on_order
from tests.integration.servers.deployments import SHAPES, Deployment
from tests.integration.servers.servers import (
    NO_WEIGHTS,
    EpServer,
    Forked,
    ForkedServer,
    Requests,
    Stops,
    check_stopped_rank_is_named,
    our_files,
    templates,
    without_weights,
    write_plugin,
)

# A server of four workers on two cores needs its time to start.
pytestmark = pytest.mark.e2e

#: Two layers tell whether a layer reads another's rows, and start sooner than three.
QWEN3 = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
#: A dense layer and one with experts.
SHORT_GLM4 = dataclasses.replace(MODELS["glm4_moe"], num_layers=2)
#: A dense layer and two with experts: the compiled graph has our op twice. Its heads have a size
#: for which vLLM has attention on CPU.
SHORT_DEEPSEEK = dataclasses.replace(DEEPSEEK_V3, num_layers=3, head_dim=48, rope_head_dim=16)
#: A layer with a window and one without; the model brings its own experts class.
SHORT_GPT_OSS = dataclasses.replace(MODELS["gpt_oss"], num_layers=2)
#: The only sizes for which vLLM has latent attention on CPU.
LATENT_DEEPSEEK = dataclasses.replace(
    DEEPSEEK_V3, num_layers=2, latent_size=512, head_dim=64, rope_head_dim=64
)
#: vLLM's attention by heads also for models with latent attention, see DEEPSEEK_V3.
BY_HEADS = {"VLLM_MLA_DISABLE": "1"}
NUM_SEQUENCES = 40
#: Of the server whose rank is stopped, for the test waits as long.
SHORT_TIMEOUT_S = 8
NAME = "qwen3 dp2"


@pytest.fixture(scope="module")
def requests_of(folder: Path) -> Callable[[TinyModel], Requests]:
    """Requests and expected tokens by model; one server each, without any plugin."""
    made: dict[TinyModel, Requests] = {}

    def get(model: TinyModel) -> Requests:
        if model not in made:
            made[model] = ask_one_rank(model, folder / f"model{len(made)}")
        return made[model]

    return get


def ask_one_rank(model: TinyModel, folder: Path) -> Requests:
    checkpoint = write_checkpoint(folder / model.architecture, model)
    requests = Requests.drawn(checkpoint, model.vocab_size, NUM_SEQUENCES)
    server = ForkedServer(
        model=checkpoint,
        name=f"one rank {model.architecture}",
        folder=folder,
        arguments=["--enforce-eager"],
        with_plugins=False,
        environment=BY_HEADS,
    )
    with server:
        server.wait_until_ready()
        return requests._replace(expected=requests.ask(server))


def _num_moe_layers(model: TinyModel) -> int:
    return model.num_layers - model.num_dense_layers


def _our_mappings(pids: list[int]) -> list[str]:
    """The lines of our shared memory in the processes' maps."""
    lines = []
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text("utf-8")
        except OSError:
            continue
        lines += [
            line for line in maps.splitlines() if "moe_nvlink" in line and "/dev/shm/" in line
        ]
    return lines


@pytest.fixture(scope="class")
def server(requests_of: Callable[[TinyModel], Requests], folder: Path) -> Iterator[EpServer]:
    with EpServer(
        requests_of(QWEN3),
        folder,
        NAME,
        *("--data-parallel-size=2", "--enforce-eager"),
        environment={
            **Stops(folder, NAME).install(),
            "MOE_NVLINK_TIMEOUT_S": str(SHORT_TIMEOUT_S),
            "VLLM_SERVER_DEV_MODE": "1",  # for the calls that pause and reload
        },
    ) as server:
        yield server


class TestTwoDataParallelRanks:
    """One eager DP2 server for several questions; the last one breaks it."""

    def test_one_request_at_a_time_leaves_a_rank_idle(self, server: EpServer) -> None:
        assert server.differing(range(8), concurrency=1) == []
        log = server.server.log_path.read_text("utf-8", errors="replace")
        layers = _num_moe_layers(QWEN3)
        assert f"without requests, this rank runs its {layers} MoE layers alone" in log

    @pytest.mark.parametrize("concurrency", range(2, 9))
    def test_concurrent_requests(self, server: EpServer, concurrency: int) -> None:
        first = 4 * concurrency
        assert server.differing(range(first, first + 8), concurrency=concurrency) == []

    def test_the_rows_went_through_our_exchange(self, server: EpServer) -> None:
        server.check_traffic(2, NUM_SEQUENCES, _num_moe_layers(QWEN3))

    def test_the_servers_metrics_have_the_workers_counters(self, server: EpServer) -> None:
        server.check_metrics(2)

    def test_shared_memory_has_no_name_any_more(self, server: EpServer) -> None:
        stats = server.stats(2)
        mapped = _our_mappings([counters["pid"] for counters in stats])
        assert len(mapped) >= 2 * 2  # each worker has its own workspace and its peer's
        assert all(line.endswith("(deleted)") for line in mapped)
        # The name is what the next tests look for, so it must be the one that was mapped.
        assert all(any(f"-{c['pid']}-" in line for line in mapped) for c in stats)
        assert our_files(stats) == []

    @pytest.mark.long
    def test_requests_go_on_after_a_pause(self, server: EpServer) -> None:
        """Longer than a rank waits for another: no rank may stand in the middle of a round."""
        rounds = server.stats(2)[0]["rounds"]
        prompts, expected = server.requests.prompts[:4], server.requests.expected[:4]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(server.server.complete, prompts, max_tokens=400)
            server.wait_for_rounds(0, rounds + 20)
            assert _post(server, "/pause?mode=keep") == {"status": "paused"}
            assert server.server.get("/is_paused") == {"is_paused": True}
            paused = server.stats(2)[0]["rounds"]
            time.sleep(SHORT_TIMEOUT_S + 1)
            assert server.stats(2)[0]["rounds"] == paused
            assert not asking.done(), "there was nothing to pause"
            assert _post(server, "/resume") == {"status": "resumed"}
            answers = [answer.token_ids for answer in asking.result()]
        firsts = [tokens[: len(right)] for tokens, right in zip(answers, expected, strict=True)]
        assert firsts == expected

    def test_requests_go_on_after_a_sleep(self, server: EpServer) -> None:
        """vLLM's CPU workers keep their memory, so here a sleep is a pause."""
        assert _post(server, "/sleep?level=1")["status"] == "sleeping"
        assert server.server.get("/is_sleeping") == {"is_sleeping": True}
        assert _post(server, "/wake_up")["status"] == "awake"
        assert server.differing(range(4), concurrency=4) == []

    def test_reloaded_weights_are_computed_with(self, server: EpServer, folder: Path) -> None:
        """Other weights give other tokens, and the first ones the tokens from before."""
        other = write_checkpoint(folder / "other weights", QWEN3, seed=1)
        for checkpoint in (other, server.requests.checkpoint):
            _post(server, "/pause?mode=wait")
            kwargs = {"weights_path": str(checkpoint)}
            _post(server, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
            _post(server, "/resume")
            numbers = range(8)
            differing = server.differing(numbers, concurrency=4)
            assert differing == (list(numbers) if checkpoint == other else [])

    def test_tokens_stay_after_a_checkpoint(self, server: EpServer) -> None:
        """In between no rank has memory of its own or of another one mapped."""
        pids = [counters["pid"] for counters in server.stats(2)]
        mapped = len(_our_mappings(pids))
        for repeated in (1, 2):
            _post(server, "/pause?mode=wait")
            for _ in range(repeated):
                _post(server, "/collective_rpc", {"method": "checkpoint_prepare"})
            assert _our_mappings(pids) == []
            _post(server, "/collective_rpc", {"method": "checkpoint_restore"})
            assert len(_our_mappings(pids)) == mapped
            _post(server, "/resume")
            assert server.differing(range(8), concurrency=4) == []

    def test_a_rank_that_hangs_is_named_and_nothing_waits_for_ever(
        self, server: EpServer, folder: Path
    ) -> None:
        told = f"rank 0 waited {SHORT_TIMEOUT_S} s in dispatch of epoch"
        check_stopped_rank_is_named(server, Stops(folder, NAME), stop_on_order.DISPATCH, told)


def _post(server: EpServer, path: str, body: Mapping[str, Any] | None = None) -> Any:
    return server.server._post(path, body or {}, 60.0)


EAGER = "--enforce-eager"
DP2, DP4, DP2_TP2 = (
    ["--data-parallel-size=2"],
    ["--data-parallel-size=4", EAGER],
    ["--data-parallel-size=2", "--tensor-parallel-size=2", EAGER],
)


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


# GLM-4 MoE with two and with four data-parallel ranks, eager: test_mtp_e2e.py too. If the model is
# compiled, a layer of Qwen3 is an op of vLLM's, and a layer of the other models is an op of ours.
# With tensor parallelism the experts of Qwen3 get slices of the batch, and those of GLM-4 get
# all of it; there vLLM adds the shared experts' output, and in all other servers combine does.
@pytest.mark.parametrize(
    ("name", "model", "ep_size", "arguments"),
    [
        _long("deepseek dp2 compiled", SHORT_DEEPSEEK, 2, DP2),
        ("qwen3 dp2 compiled", QWEN3, 2, DP2),
        ("qwen3 dp2 tp2", QWEN3, 4, DP2_TP2),
        ("gpt-oss dp2", SHORT_GPT_OSS, 2, [*DP2, EAGER]),
        _long("gpt-oss dp2 tp2", SHORT_GPT_OSS, 4, DP2_TP2),
        _long("gpt-oss dp2 compiled", SHORT_GPT_OSS, 2, DP2),
        _long("glm4 dp2 tp2", SHORT_GLM4, 4, DP2_TP2),
        _long("glm4 dp2", SHORT_GLM4, 2, [*DP2, EAGER]),
        _long("glm4 dp2 compiled", SHORT_GLM4, 2, DP2),
        _long("glm4 dp4", SHORT_GLM4, 4, DP4),
        _long("deepseek dp2", SHORT_DEEPSEEK, 2, [*DP2, EAGER]),
        _long("deepseek dp4", SHORT_DEEPSEEK, 4, DP4),
        # Eager: test_deepseek_with_tensor_parallelism.
        _long("deepseek dp2 tp2 compiled", SHORT_DEEPSEEK, 4, DP2_TP2[:2]),
    ],
)
def test_tokens_equal_those_of_one_rank(
    name: str,
    model: TinyModel,
    ep_size: int,
    arguments: list[str],
    requests_of: Callable[[TinyModel], Requests],
    folder: Path,
) -> None:
    # Four ranks of which two always wait for the other two's cores are slow.
    alone, count = (4, 24) if ep_size == 2 else (2, 12)
    requests = requests_of(model)
    with EpServer(requests, folder, name, *arguments, environment=BY_HEADS) as server:
        assert server.differing(range(alone), concurrency=1) == []
        assert server.differing(range(alone, count), concurrency=5) == []
        server.check_traffic(ep_size, count, _num_moe_layers(model))
        # If vLLM adds it where combine should, the tokens are the same.
        assert _combine_adds(server) == (model.num_shared_experts > 0 and arguments is not DP2_TP2)


def _combine_adds(server: EpServer) -> bool:
    """Whether a worker has said that combine adds the shared experts' output."""
    log = server.server.log_path.read_text("utf-8")
    return "combine ends layers" in log and "and adds the shared experts' output" in log


@pytest.mark.long
def test_each_stage_of_a_pipeline_has_its_exchange(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """Two stages with a MoE layer each. The first one's files have the names of other servers'."""
    arguments = (*DP2, "--pipeline-parallel-size=2")
    with EpServer(requests_of(QWEN3), folder, "pipeline", *arguments) as server:
        assert server.differing(range(4), concurrency=1) == []
        assert server.differing(range(4, 24), concurrency=5) == []
        server.check_traffic(2, 24, 1)
        least = server.requests.num_tokens(24)
        later = [server.stats_folder / f"stage1-rank{rank}.json" for rank in (0, 1)]
        assert sum(json.loads(path.read_text("utf-8"))["tokens"] for path in later) >= least


@pytest.mark.long
def test_the_transformers_backend(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """Its model is that of transformers, with an experts class of vLLM's backend in its layers."""
    arguments = (*DP2, EAGER, "--model-impl=transformers")
    with EpServer(requests_of(QWEN3), folder, "transformers", *arguments) as server:
        assert server.differing(range(24), concurrency=5) == []
        server.check_traffic(2, 24, _num_moe_layers(QWEN3))


@pytest.mark.long
def test_processes_started_in_vllms_own_way(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """Engines and workers are spawned: each imports vLLM anew, which loads our plugin there.

    With this variable, which vLLM sets for several API servers, they count in its directory.
    """
    name, counts = "spawned", folder / "prometheus"
    counts.mkdir()
    with EpServer(
        requests_of(QWEN3),
        folder,
        name,
        *DP2,
        EAGER,
        '--additional-config={"moe_nvlink": {"audit_every": 3}}',
        environment={"PROMETHEUS_MULTIPROC_DIR": str(counts)},
        server=VllmServer,
    ) as server:
        assert server.differing(range(8), concurrency=8) == []
        server.check_traffic(2, 8, _num_moe_layers(QWEN3))
        server.check_metrics(2)
        for counted in server.stats(2):  # rows were compared, and none was wrong
            assert min(counted["audited"]) > 3
            assert counted["audit_faults"] == [0, 0]


@pytest.mark.long
def test_shared_experts_beside_combine(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """Their output is added after combine, in float32 with the same tokens."""
    option = '{"moe_nvlink": {"overlap_shared_experts": true}}'
    arguments = (*DP2, EAGER, "--additional-config", option)
    requests = requests_of(SHORT_DEEPSEEK)
    with EpServer(requests, folder, "beside", *arguments, environment=BY_HEADS) as server:
        assert server.differing(range(4), concurrency=1) == []
        assert server.differing(range(4, 24), concurrency=5) == []
        server.check_traffic(2, 24, _num_moe_layers(SHORT_DEEPSEEK))
        log = server.server.log_path.read_text("utf-8")
        assert "adds nothing, because the shared experts run beside it" in log


@pytest.mark.long
def test_latent_attention(requests_of: Callable[[TinyModel], Requests], folder: Path) -> None:
    """With vLLM's latent attention (MLA) two ranks give the tokens that one gives by heads."""
    requests = requests_of(LATENT_DEEPSEEK)
    arguments = (*DP2, EAGER, "--attention-backend=CPU_MLA")
    with EpServer(requests, folder, "deepseek latent dp2", *arguments) as server:
        assert server.differing(range(4), concurrency=1) == []
        assert server.differing(range(4, 24), concurrency=5) == []
        server.check_traffic(2, 24, _num_moe_layers(LATENT_DEEPSEEK))
        assert "Using CPU_MLA backend" in server.server.log_path.read_text("utf-8")


@pytest.mark.long
def test_deepseek_with_tensor_parallelism(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """Each step has two tokens or more: for a step of one, vLLM's eager model has wrong logits.

    The model tells a tensor-parallel rank's slice of a batch from the whole batch by the number of
    rows, and both have one row if the batch has one. So every token is asked for as the first one
    after a longer prompt. The compiled model gathers slices always.
    """
    given = requests_of(SHORT_DEEPSEEK)
    answered = zip(given.prompts[:4], given.expected[:4], strict=True)
    steps = [
        ([*prompt, *answer[:n]], [token])
        for prompt, answer in answered
        for n, token in enumerate(answer)
        if len(prompt) + n > 1
    ]
    prompts, expected = (list(column) for column in zip(*steps, strict=True))
    requests = Requests(given.checkpoint, prompts, [1] * len(steps), expected)
    name, alone = "deepseek dp2 tp2", len(steps) // 2
    with EpServer(requests, folder, name, *DP2_TP2, environment=BY_HEADS) as server:
        assert server.differing(range(alone), concurrency=1) == []
        assert server.differing(range(alone, len(steps)), concurrency=5) == []
        server.check_traffic(4, len(steps), _num_moe_layers(SHORT_DEEPSEEK))
        assert _combine_adds(server)


# Of the shapes, the first has most: two API servers, a coordinator, an engine of each of two nodes.
@pytest.mark.parametrize("name", [next(iter(SHAPES)), *map(_long, list(SHAPES)[1:])])
def test_every_shape_of_a_deployment(
    name: str, requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """One node's requests leave the other ranks idle; then all nodes answer at once."""
    requests, ep_size = requests_of(QWEN3), SHAPES[name].ep_size
    with Deployment(requests, folder, name, EAGER) as deployment:
        for server in deployment.answering:
            assert server.differing(range(3), concurrency=1) == []
        if SHAPES[name].by_rank:
            for rank in range(ep_size):
                assert deployment.answering[0].differing(range(3, 6), 3, rank=rank) == []
        assert deployment.differing(range(6, 18), concurrency=4) == []
        deployment.answering[0].check_traffic(ep_size, 18, _num_moe_layers(QWEN3))


def test_ranks_whose_rows_get_lost_do_not_serve(folder: Path) -> None:
    """The self-check finds it before weights are looked for, and every rank stops."""
    checkpoint = without_weights(write_checkpoint(folder / "lost, no weights", QWEN3))
    plugin = write_plugin(folder / "plugin lost", "lost_rows", lost_rows)
    server = EpServer(
        Requests(checkpoint, [], [], []),
        folder,
        "lost",
        *DP2,
        EAGER,
        environment={"PYTHONPATH": str(plugin)},
    )
    with pytest.raises(ServerError), server:
        pass
    told = server.server.log_path.read_text("utf-8")
    assert "--all2all-backend moe_nvlink: the self-check (large batches) failed: rank 0: " in told
    assert "0 rows instead of" in told
    assert "`moe-nvlink verify` shows more" in told
    assert NO_WEIGHTS not in told


@pytest.mark.long
def test_an_audited_server_whose_rows_are_overwritten(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """Nothing else tells of it: the server goes on, and its answers are wrong."""
    name = "overwritten"
    plugin = write_plugin(folder / f"plugin {name}", "lost_rows", lost_rows)
    options = {"self_check": "off", "audit_every": 1}
    server = EpServer(
        requests_of(QWEN3),
        folder,
        name,
        *DP2,
        EAGER,
        f"--additional-config={json.dumps({'moe_nvlink': options})}",
        environment={
            "PYTHONPATH": str(plugin),
            "MOE_NVLINK_SMALL_TOKENS": "0",
            lost_rows.FAULT_VARIABLE: lost_rows.OVERWRITTEN,
        },
    )
    with server:
        assert server.differing(range(8), concurrency=4) != []
        for counted in server.stats(2):
            assert min(counted["audit_faults"]) > 0
        told = server.server.log_path.read_text("utf-8")
        assert "found wrong rows; answers since then may be wrong" in told


@pytest.mark.long
def test_ray(requests_of: Callable[[TinyModel], Requests], folder: Path) -> None:
    """Engines are Ray's actors, and so are their workers: vLLM then takes its executor for Ray.

    vLLM's CPU platform leaves Ray out; a plugin of this test lifts that.
    """
    pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    name = "ray"
    # Ray's workers ask for the resource after they have chosen a platform, and before plugins.
    groups = ("vllm.platform_plugins", "vllm.general_plugins")
    plugin = write_plugin(folder / f"plugin {name}", "ray_on_cpus", ray_on_cpus, groups)
    arguments = (*DP2, EAGER, "--data-parallel-backend=ray")
    environment = {"PYTHONPATH": str(plugin)}
    # Each process of Ray imports vLLM anew.
    with EpServer(
        requests_of(QWEN3), folder, name, *arguments, environment=environment, ready_s=780
    ) as server:
        assert server.differing(range(3), concurrency=1) == []
        assert server.differing(range(3, 12), concurrency=4) == []
        server.check_traffic(2, 12, _num_moe_layers(QWEN3))


def test_a_refusal_ends_the_server_with_its_reason(folder: Path) -> None:
    """It comes before weights are looked for: there are none."""
    checkpoint = without_weights(write_checkpoint(folder / "refused", "qwen3_moe"))
    lora = ["--enable-lora", "--fully-sharded-loras"]
    ours = ["--data-parallel-size=2", "--all2all-backend=moe_nvlink"]
    told = {}
    for name, arguments in (
        ("refused", [*ours, *lora]),
        ("loaded", [*ours, "--enable-expert-parallel", EAGER]),
    ):
        server = ForkedServer(model=checkpoint, name=name, folder=folder, arguments=arguments)
        with server, pytest.raises(ServerError, match="exit code 1"):
            server.wait_until_ready()
        told[name] = server.log_path.read_text("utf-8")
    last = "\n".join(told["refused"].splitlines()[-5:])
    assert "--all2all-backend moe_nvlink cannot serve this configuration" in last
    assert "add --enable-expert-parallel" in last
    assert "LoRA on experts with --fully-sharded-loras: remove the flag" in last
    assert NO_WEIGHTS not in told["refused"]
    assert NO_WEIGHTS in told["loaded"], "nobody would have noticed that weights were loaded"


_PYTHON = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    checkpoint, requests, answers = sys.argv[1:]
    llm = LLM(
        model=checkpoint,
        all2all_backend="moe_nvlink",
        enable_expert_parallel=True,
        enforce_eager=True,
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
    )
    prompts, lengths = json.load(open(requests))
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    json.dump([list(o.outputs[0].token_ids) for o in outputs], open(answers, "w"))
"""


def test_python_llm_on_two_ranks(
    requests_of: Callable[[TinyModel], Requests], folder: Path
) -> None:
    """`LLM(all2all_backend="moe_nvlink")`, the way vLLM runs data parallel without a server."""
    requests, work = requests_of(QWEN3), folder / "python"
    work.mkdir()
    script = work / "generate.py"
    script.write_text(_PYTHON, "utf-8")
    port = free_port()
    shares = [range(6), range(7, 8)]  # one rank is done long before the other
    last = [max(requests.lengths[number] for number in share) for share in shares]
    assert last[0] >= 2 * last[1], last
    running = [
        _start_python(script, rank, port, requests, share, work)
        for rank, share in enumerate(shares)
    ]
    try:
        for process in running:
            assert process.wait(timeout=240) == 0, (work / "log").read_text("utf-8")[-3000:]
    finally:
        for process in running:
            processes.end_session(process.pid)
    for rank, share in enumerate(shares):
        answers = json.loads((work / f"answers{rank}.json").read_text("utf-8"))
        assert answers == [requests.expected[number] for number in share]
        stats = json.loads((work / "stats" / f"rank{rank}.json").read_text("utf-8"))
        assert stats["rounds"] > 0
        assert stats["bytes_combined_remote"] > 0


def _start_python(
    script: Path, rank: int, port: int, requests: Requests, share: range, work: Path
) -> Forked:
    asked = work / f"requests{rank}.json"
    asked.write_text(
        json.dumps([[requests.prompts[n] for n in share], [requests.lengths[n] for n in share]])
    )
    answers = work / f"answers{rank}.json"
    environment = {
        **os.environ,
        **CPU_ENVIRONMENT,
        "MOE_NVLINK_STATS_DIR": str(work / "stats"),
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
    with (work / "log").open("ab") as log:
        command = [str(script), str(requests.checkpoint), str(asked), str(answers)]
        return templates().with_ours.fork(command, environment, log)
