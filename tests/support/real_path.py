"""What the tests of the real path do, device by name: MoeAllToAll through its own transport.

tests/gpu runs these on "cuda", tests/kernels/exchange/test_real_path.py on "cpu", so that they
themselves have been run before a GPU is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeTimeoutError, InputError, MoeNvlinkError
from moe_nvlink_plugin.testing import ThreadGroup
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.support import emulated

#: Seconds that a rank waits for the others. Its peers on one GPU are a time slice away; a test that
#: is stuck must not use up the minutes of a lent one. Of CPU ranks on a busy machine: more.
WAIT_S = {"cuda": 10.0, "cpu": 60.0}

check_output = emulated.check_output

ONE_RANK = Case(
    name="one rank",
    tokens=(0,),
    num_experts=12,
    top_k=4,
    hidden_size=72,
    capacity=16,
    dtype=torch.bfloat16,
    routing="invalid",
)


#: The same with the kernels for small batches.
SMALL = dataclasses.replace(ONE_RANK, name="one rank, small", small=True)


def of_processes(ep_size: int, *, small: bool = False) -> Case:
    """The case that so many processes on one device run."""
    return Case(
        name=f"{ep_size} processes",
        tokens=(0,) * ep_size,
        num_experts=3 * ep_size + 1,
        top_k=6,
        hidden_size=50,
        dtype=torch.bfloat16,
        routing="invalid",
        small=small,
    )


def create(case: Case, device: str, group: Any = None, **changes: Any) -> MoeAllToAll:
    """The layer of this rank; without a group the only one."""
    group = ThreadGroup.ranks(1)[0] if group is None else group
    ep_rank = group.rank if isinstance(group, ThreadGroup) else dist.get_rank(group)
    changes = {"timeout_s": WAIT_S[device]} | changes
    config = dataclasses.replace(case.config(ep_rank), **changes)
    return MoeAllToAll.create(config, group, device)


def poisoned_round(layer: MoeAllToAll, inputs: Inputs) -> Seen:
    """A round whose buffers are spoilt as soon as nobody may read them any more."""
    received = cases.dispatch(layer, inputs)
    region = layer.combine_input()
    region.view(torch.uint8).fill_(0xFF)
    region.copy_(expert_rows(layer, received))
    payloads = cases.received_payloads(received)
    counts, ids = received.recv_counts.cpu().clone(), received.topk_ids.cpu().clone()
    copies = tuple(payload.cpu().clone() for payload in payloads)
    for payload in payloads:
        payload.view(torch.uint8).fill_(0xFF)
    received.topk_ids.fill_(1)  # an expert everywhere
    combined = layer.combine(region, received.metadata)
    return Seen(counts, ids, copies, received.metadata.send_slots.cpu(), combined.cpu())


def expert_rows(layer: MoeAllToAll, received: Dispatched) -> torch.Tensor:
    """What this rank's experts make of all slots."""
    config = layer.config
    hidden = cases.activations(config, received.hidden_states, received.scales)
    ids, weights = received.topk_ids, received.topk_weights
    return cases.expert_rows(config, config.ep_rank, hidden, ids, weights)


class StaticLayer(emulated.FixedInputs):
    """A round on fixed addresses with a fixed token count, as a CUDA graph can hold it."""

    def __init__(self, layer: MoeAllToAll, device: str, *, zero_copy: bool = True) -> None:
        super().__init__(layer.config, device)
        self._layer, self._zero_copy = layer, zero_copy
        self.output = torch.empty_like(self.hidden)

    def warm_up(self) -> None:
        """torch's own kernels once, so that none is loaded during a capture; ours not."""
        config = self._layer.config
        region = self._layer.combine_input()
        quantised = cases.quantised(config, self.hidden)
        hidden = cases.activations(config, *quantised)
        rows = cases.expert_rows(config, config.ep_rank, hidden, self.ids, self.weights)
        region[: len(rows)].copy_(rows)
        region.view(torch.uint8).fill_(0xFF)

    def run(self) -> None:
        """Dispatch, experts, combine: no host value changes from run to run."""
        inputs = Inputs(self.hidden, self.ids, self.weights, ())
        received = cases.dispatch(self._layer, inputs)
        region = self._layer.combine_input()
        region.view(torch.uint8).fill_(0xFF)
        rows = expert_rows(self._layer, received)
        if self._zero_copy:
            rows = region.copy_(rows)
        received.hidden_states.view(torch.uint8).fill_(0xFF)
        received.topk_ids.fill_(1)
        self._layer.combine(rows, received.metadata, output=self.output)


def replayable(static: StaticLayer, device: str) -> Callable[[], None]:
    """On a GPU the round captured before it ever ran, and its replay; elsewhere the round."""
    static.warm_up()
    return static.run if device == "cpu" else emulated.captured(static.run)


# One rank.


def check_replays(
    device: str, rounds: int, case: Case = ONE_RANK, *, zero_copy: bool = True
) -> None:
    """The first call after create is captured; replays with other tokens and other counts."""
    with create(case, device) as layer:
        static = StaticLayer(layer, device, zero_copy=zero_copy)
        replay = replayable(static, device)
        for number, (inputs,) in enumerate(emulated.varying_inputs(case, rounds)):
            static.fill(inputs.to(device))
            replay()
            with emulated.naming(f"replay {number}"):
                check_output(case, inputs, 0, static.output.cpu())
        assert layer.stats().rounds == rounds


def quantised_rows(
    recipe: str, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Rows and scales that dispatch makes of activations, in the order of the tokens; the scale
    that the recipe was given.
    """
    case = dataclasses.replace(
        cases.with_formats(ONE_RANK, recipe),
        num_experts=1,
        top_k=1,
        hidden_size=hidden.shape[1],
        capacity=hidden.shape[0],
        dtype=hidden.dtype,
    )
    device = hidden.device
    ids = torch.zeros((len(hidden), 1), dtype=torch.int32, device=device)
    with create(case, device.type) as layer:
        inputs = Inputs(hidden, ids, torch.ones(ids.shape, device=device), ())
        received = cases.dispatch(layer, inputs)
        slots = received.metadata.send_slots[:, 0].long()
        scales = None if received.scales is None else received.scales[slots].clone()
        rows = received.hidden_states[slots].clone()
        layer.combine(layer.combine_input(), received.metadata)
    return rows, scales, cases.global_scale(case.config(0), device)


def quantiser_rows(device: str) -> torch.Tensor:
    """bf16 activations of many sizes, all finite: some rows are zero, some blocks tiny."""
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn((300, 1024), generator=generator)
    powers = torch.randint(-12, 6, (300, 1024 // 16), generator=generator)
    hidden *= torch.exp2(powers.float()).repeat_interleave(16, 1)
    hidden[::17] = 0.0
    hidden[5::29, 256:512] = 0.0
    hidden[7::31] *= 1e-30
    hidden[11::13, 0] = 448.0 * 4  # from the next number on mxfp8 has another exponent
    return hidden.to(device, torch.bfloat16)


def check_quantiser(device: str, recipe: str) -> None:
    """The product's dispatch against the recipe in torch on the same device."""
    hidden = quantiser_rows(device)
    rows, scales, scale = quantised_rows(recipe, hidden)
    config = cases.with_formats(ONE_RANK, recipe).config(0)
    found = cases.quantising(config)
    assert found is not None
    expected = found.quantise(hidden, scale)
    pairs = [(rows, expected.rows)]
    if scales is not None and expected.scales is not None:
        pairs.append((scales, expected.scales))
    near = device == "cuda" and recipe == "nvfp4"
    check = compare.assert_next_code if near else compare.assert_same_bits
    for actual, wanted in pairs:
        check(actual.cpu(), wanted.cpu(), recipe)


def check_sm_budget(device: str, tokens: int, max_sms: int | None) -> None:
    """Many more tokens than CTAs fit: each CTA has many, and the result is the same."""
    case = dataclasses.replace(ONE_RANK, capacity=tokens + 5, tokens=(tokens,))
    (inputs,) = cases.make_inputs(case)
    with create(case, device, max_sms=max_sms) as layer:
        for _ in range(2):
            seen = poisoned_round(layer, inputs.to(device))
            emulated.check_round(emulated.with_ctas(case, 2), [inputs], [seen])


def check_two_channels(device: str, rounds: int, case: Case = ONE_RANK) -> None:
    """Both are dispatched before either is combined; on a GPU each on a stream of its own."""
    case = dataclasses.replace(case, num_channels=2)
    cuda: Any = torch.cuda  # torch ships no types for what is used here
    on_gpu = device == "cuda"
    streams = [cuda.stream(cuda.Stream()) if on_gpu else contextlib.nullcontext() for _ in range(2)]
    with create(case, device) as layer:
        for number, of_round in enumerate(zip(*[iter(varying(case, 2 * rounds))] * 2, strict=True)):
            received: list[Any] = [None, None]
            combined: list[Any] = [None, None]
            for channel in (0, 1):
                with streams[channel]:
                    inputs = of_round[channel].to(device)
                    received[channel] = layer.dispatch(*inputs, channel=channel)
            for channel in (1, 0):
                with streams[channel]:
                    mine = received[channel]
                    rows = expert_rows(layer, mine)
                    region = layer.combine_input(channel=channel).copy_(rows)
                    combined[channel] = layer.combine(region, mine.metadata).cpu()
            for channel in (0, 1):
                expected = compare.expected_combined(case, of_round[channel], 0)
                what = f"round {number} channel {channel}"
                compare.assert_same_bits(combined[channel], expected, what)


def check_compiled(device: str, rounds: int) -> None:
    """Inductor's code of a round gives the verbs' bits; on a GPU also as a graph's replay."""
    with create(ONE_RANK, device) as layer:

        def block(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received = layer.dispatch(hidden, ids, weights)
            return layer.combine(received.hidden_states * 2.0, received.metadata)

        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True)
        fixed = StaticLayer(layer, device)
        given = (fixed.hidden, fixed.ids, fixed.weights)

        def run() -> None:
            fixed.output.copy_(compiled(*given))

        run()  # Inductor compiles, which no capture may hold
        replay = run if device == "cpu" else emulated.captured(run)
        for number, inputs in enumerate(varying(ONE_RANK, rounds)):
            fixed.fill(inputs.to(device))
            expected = block(*given)
            for found in (compiled(*given), _after(replay, fixed.output)):
                compare.assert_same_bits(found.cpu(), expected.cpu(), f"round {number}")


def _after(replay: Callable[[], None], output: torch.Tensor) -> torch.Tensor:
    output.fill_(float("nan"))
    replay()
    return output


def varying(case: Case, rounds: int) -> list[Inputs]:
    """Rank 0's inputs of so many rounds."""
    return [of_round[0] for of_round in emulated.varying_inputs(case, rounds)]


def check_bad_input(device: str, elsewhere: str) -> None:
    """Refused before anything is launched; the layer goes on."""
    (inputs,) = cases.make_inputs(ONE_RANK, (5,))
    here = inputs.to(device)
    with create(ONE_RANK, device) as layer:
        there = inputs.to(elsewhere)
        with pytest.raises(InputError, match=f"is on {elsewhere}"):
            layer.dispatch(*there)
        with pytest.raises(InputError, match=f"is on {elsewhere}"):
            layer.dispatch(here.hidden_states, here.topk_ids, there.topk_weights)
        strided = torch.empty((5, 2 * ONE_RANK.hidden_size), dtype=ONE_RANK.dtype, device=device)
        with pytest.raises(InputError, match=r"hidden_states is not contiguous \(strides"):
            layer.dispatch(strided[:, ::2], here.topk_ids, here.topk_weights)
        seen = poisoned_round(layer, here)
        compare.check_combined(ONE_RANK, [inputs], [seen])


# Ranks as processes; every function below is one rank's.


def process_replays(
    ep_rank: int, ep_size: int, device: str, rounds: int, small: bool = False
) -> list[torch.Tensor]:
    """Each rank captures when it gets there, before any verb has run; then replays."""
    case = of_processes(ep_size, small=small)
    with create(case, device, dist.group.WORLD) as layer:
        static = StaticLayer(layer, device)
        time.sleep(0.3 * ep_rank)
        replay = replayable(static, device)
        outputs = []
        for of_round in emulated.varying_inputs(case, rounds):
            static.fill(of_round[ep_rank].to(device))
            replay()
            outputs.append(static.output.cpu().clone())
        layer.synchronize()
        return outputs


def process_missing(
    ep_rank: int, ep_size: int, device: str, small: bool = False
) -> tuple[Any, ...]:
    """The last rank never dispatches."""
    case = of_processes(ep_size, small=small)
    layer = create(case, device, dist.group.WORLD, timeout_s=1.5)
    if ep_rank == ep_size - 1:
        return ()
    inputs = cases.make_inputs(case, (3,) * ep_size)[ep_rank]
    try:
        layer.dispatch(*inputs.to(device))
        layer.synchronize()
    except ExchangeTimeoutError as error:
        works = float(torch.ones(8, device=device).sum())
        return error.phase, error.ranks, works
    return ("no error",)


def process_grows(
    ep_rank: int, ep_size: int, device: str, rounds: int, small: bool = False
) -> list[Seen]:
    """Poisoned rounds, ranks out of step; a larger layer comes in the middle."""
    case = of_processes(ep_size, small=small)
    larger = dataclasses.replace(case, capacity=64, hidden_size=301)
    with create(case, device, dist.group.WORLD) as layer:
        seen = []
        for number, of_round in enumerate(emulated.varying_inputs(case, rounds)):
            if number == rounds // 2:
                config = dataclasses.replace(larger.config(ep_rank), timeout_s=WAIT_S[device])
                grown = MoeAllToAll.create(config, dist.group.WORLD, device, share_with=layer)
                mine = cases.make_inputs(larger, (64,) * ep_size)[ep_rank]
                compare.assert_same_bits(
                    poisoned_round(grown, mine.to(device)).combined,
                    compare.expected_combined(larger, mine, ep_rank),
                    "the larger layer",
                )
            if (number + ep_rank) % 16 == 0:
                time.sleep(0.002)
            seen.append(poisoned_round(layer, of_round[ep_rank].to(device)))
        grown.close()
        return seen


def check_process_rounds(seen: list[list[Seen]], device: str, rounds: int) -> None:
    """`seen[rank][round]` of process_grows."""
    case = of_processes(len(seen))
    compared = emulated.with_ctas(case, 1 if device == "cpu" else 2)
    for number, of_round in enumerate(emulated.varying_inputs(case, rounds)):
        with emulated.naming(f"round {number}"):
            emulated.check_round(compared, of_round, [of_rank[number] for of_rank in seen])


def check_process_replays(outputs: list[list[torch.Tensor]], rounds: int) -> None:
    """`outputs[rank][round]` of process_replays."""
    case = of_processes(len(outputs))
    for number, of_round in enumerate(emulated.varying_inputs(case, rounds)):
        for rank, mine in enumerate(of_round):
            with emulated.naming(f"replay {number}"):
                check_output(case, mine, rank, outputs[rank][number])


def process_refused(ep_rank: int, ep_size: int, device: str) -> str:
    """The message with which create refuses, or nothing."""
    try:
        create(of_processes(ep_size), device, dist.group.WORLD).close()
    except MoeNvlinkError as error:
        return str(error)
    return ""
