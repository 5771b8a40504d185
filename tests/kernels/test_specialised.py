"""What a GPU gets, a Config with fixed values, on the host: unrolled loops, the oracle's bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, make_inputs
from tests.support import case_list, kernel_texts
from tests.support.case_list import run_case
from tests.support.delays import replace_once

#: Ids that are no experts, tokens without an expert, a rank without tokens.
ROWS = Case(tokens=(8, 3, 0, 7), num_experts=25, top_k=6, routing="invalid", num_threads=2)

Loads = Callable[[host.HostLibrary], None]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """Makes a library the one that ranks of this process run."""
    return lambda library: monkeypatch.setattr(host, "load", lambda _text: library)


def built(text: str, *flags: str) -> host.HostLibrary:
    """With -O1: seconds less to compile, and the bits do not depend on it."""
    return host.HostLibrary(host.build(text, (*host.FLAGS, "-O1", *flags)))


def check(name: str, case: Case, **values: Any) -> None:
    case_list.check_case(dataclasses.replace(case, name=name, **values))


def streaming_text() -> str:
    """Return a text that streams every row that may be, however few there are."""
    text = kernel_texts.host_source()
    return replace_once(text, "kStreamedBytes = 1 << 20", "kStreamedBytes = 0")


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "hidden_size"),
    [
        (torch.bfloat16, 1056),  # rows of 66 registers of 32 bytes: 16 vectors, and 2 registers
        (torch.float16, 1040),
        (torch.float32, 1032),
        (torch.bfloat16, 1044),  # rows that lie on no whole registers are not streamed
    ],
)
def test_streamed_rows(
    dtype: torch.dtype, hidden_size: int, num_threads: int, loads: Loads
) -> None:
    loads(built(streaming_text()))
    finish = {"add": "in place", "scale": 0.3}
    sizes = {"dtype": dtype, "hidden_size": hidden_size, "num_threads": num_threads}
    check("streamed rows", ROWS, **sizes, **finish)


@pytest.mark.parametrize(
    ("recipe", "back", "dtype", "hidden_size"),
    [
        # With registers of 32 bytes rows of 544 bytes are streamed, with registers of 64 not.
        ("nvfp4", "nvfp4", torch.bfloat16, 1088),
        ("nvfp4", "nvfp4", torch.float32, 1152),
        ("fp8_block", "fp8_block", torch.bfloat16, 1152),
        ("fp8_token", "bf16", torch.float16, 1088),  # 8 pieces, and a tail of 64
        ("mxfp8", "fp8_block", torch.float32, 1152),
        ("fp8_tensor", "bf16", torch.bfloat16, 1120),
        (None, "fp8_tensor", torch.bfloat16, 1136),  # 8 pieces, and a tail of 112
    ],
)
def test_streamed_quantised_rows(
    recipe: str, back: str, dtype: torch.dtype, hidden_size: int, loads: Loads
) -> None:
    loads(built(streaming_text()))
    formats = {"recipe": recipe, "combine": back}
    check("streamed rows", ROWS, dtype=dtype, hidden_size=hidden_size, **formats)


#: platform.h's constants of the host, and what stands there for the GPU.
AS_ON_THE_GPU = {
    "constexpr int kVectorBytes = 128;": "constexpr int kVectorBytes = 16;",
    "constexpr bool kAlignedVectorsOnly = false;": "constexpr bool kAlignedVectorsOnly = true;",
    "constexpr int kVectorsInFlight = 1;": "constexpr int kVectorsInFlight = 2;",
    "constexpr bool kSkipAbsentRows = true;": "constexpr bool kSkipAbsentRows = false;",
}


def gpu_like_text(top_k: int, element: int, *, pdl: bool = True) -> str:
    """The specialised host text with the GPU's widths, batches and fewer finishers than CTAs."""
    text = kernel_texts.specialised_source(top_k, element, pdl=pdl, host=True)
    for host_line, gpu_line in AS_ON_THE_GPU.items():
        text = replace_once(text, host_line, gpu_line)
    return replace_once(text, "kMaxFinishers = 32", "kMaxFinishers = 2")


@pytest.mark.parametrize("cta_threads", [1, 4])
@pytest.mark.parametrize(
    ("top_k", "element", "dtype", "hidden_size"),
    [
        (3, "kElementFp32", torch.float32, 41),  # rows of 164 bytes: words of 4
        (8, "kElementBf16", torch.bfloat16, 1048),  # 131 vectors of 16 bytes
    ],
)
def test_constants_of_the_gpu(
    top_k: int,
    element: str,
    dtype: torch.dtype,
    hidden_size: int,
    cta_threads: int,
    loads: Loads,
) -> None:
    """The branches that the host's own constants leave out, with one and with many threads."""
    flag = f"-DMOE_NVLINK_CTA_THREADS={cta_threads}"
    loads(built(gpu_like_text(top_k, constants()[element]), flag))
    finish = {"add": "in place" if cta_threads > 1 else "unaligned", "scale": -0.7}
    sizes = {"top_k": top_k, "hidden_size": hidden_size, "dtype": dtype}
    check(element, ROWS, tokens=(8, 4), num_threads=3, **sizes, **finish)


#: Lanes as on the GPU: 16 elements each, and those of a block exchange its largest magnitude, here
#: by way of memory. A warp of the host is half of a CTA's threads; 8 of them have a block of 128.
#: What is loaded or stored across its boundary, which is an error on the GPU, goes wrong here too.
LANES_OF_THE_GPU = {
    "constexpr int kLaneElements = 128;": "constexpr int kLaneElements = 16;",
    "  const int num_threads_;": " public:\n  unsigned board[8];\n  const int num_threads_;",
    "      std::memcpy(&vector, source, Bytes);\n": """
      std::memset(&vector, 0x5a, Bytes);
      if (reinterpret_cast<uint64_t>(source) % Bytes == 0) std::memcpy(&vector, source, Bytes);
""",
    "      std::memcpy(target, &vector, Bytes);\n": """
      if (reinterpret_cast<uint64_t>(target) % Bytes == 0) std::memcpy(target, &vector, Bytes);
""",
    "int kExchangeThreads = 1;": "int kExchangeThreads = kWarpThreads;",
    "    static_assert(Lanes == 1);\n    return value;\n": """
    const int lane = thread % kWarpThreads;
    warp_barrier->board[lane] = value;
    sync_warp();
    for (int i = lane - lane % Lanes; i < lane - lane % Lanes + Lanes; ++i) {
      value = warp_barrier->board[i] > value ? warp_barrier->board[i] : value;
    }
    sync_warp();
    return value;
""",
    "    return sum;\n": """
    const int lane = thread % kWarpThreads;
    warp_barrier->board[lane] = sum;
    sync_warp();
    sum = 0;
    for (int i = 0; i < Lanes; ++i) sum += warp_barrier->board[i];
    sync_warp();
    return sum;
""",
}
LANE_THREADS = 16


def library_with_lanes(text: str) -> host.HostLibrary:
    """Of a host text, which then quantises as a GPU does."""
    for host_text, gpu_text in (AS_ON_THE_GPU | LANES_OF_THE_GPU).items():
        text = replace_once(text, host_text, gpu_text)
    return built(text, f"-DMOE_NVLINK_CTA_THREADS={LANE_THREADS}")


@pytest.fixture
def lanes(loads: Loads) -> None:
    """Ranks of this process quantise as a GPU does."""
    loads(library_with_lanes(kernel_texts.host_source()))


def quantised_case(recipe: str, hidden_size: int) -> Case:
    """More pieces than threads where the size is over 256; a warp that is partly behind the end."""
    return Case(
        name=f"{recipe}, lanes of 16, {hidden_size}",
        tokens=(4, 3),
        num_experts=6,
        top_k=3,
        hidden_size=hidden_size,
        dtype=torch.bfloat16,
        recipe=recipe,
        routing="invalid",
    )


@pytest.mark.parametrize(
    ("recipe", "hidden_size"),
    [
        ("fp8_block", 384),
        ("fp8_token", 400),
        ("fp8_token", 43),  # rows that begin anywhere: elementwise
        ("fp8_tensor", 72),  # loads are wide, stores are not
        ("mxfp8", 352),
        ("nvfp4", 304),
    ],
)
@pytest.mark.usefixtures("lanes")
def test_lanes_of_the_gpu(recipe: str, hidden_size: int) -> None:
    case_list.check_case(quantised_case(recipe, hidden_size))


@pytest.mark.parametrize(
    ("combine", "hidden_size"),
    [("fp8_block", 128), ("fp8_block", 384), ("nvfp4", 304), ("fp8_tensor", 304)],
)
@pytest.mark.usefixtures("lanes")
def test_lanes_of_the_gpu_in_combine(combine: str, hidden_size: int) -> None:
    case = quantised_case("bf16", hidden_size)
    case_list.check_case(dataclasses.replace(case, combine=combine, top_k=4))


@pytest.mark.parametrize(("recipe", "hidden_size"), [(None, 42), ("fp8_token", 44), ("mxfp8", 384)])
@pytest.mark.parametrize("top_k", [3, 4])
@pytest.mark.usefixtures("lanes")
def test_lanes_of_the_gpu_in_small_batches(
    recipe: str | None, hidden_size: int, top_k: int
) -> None:
    """Slots that lanes count together, ids by vectors where they may, accesses to rows of words."""
    case = quantised_case(recipe or "bf16", hidden_size)
    words: tuple[cases.Extra, ...] = (
        (torch.uint8, (3004,)),
        (torch.int16, (6,)),
        (torch.float32, (7,)),
    )
    case = dataclasses.replace(case, recipe=recipe, tokens=(17, 9), capacity=17, top_k=top_k)
    case_list.check_case(dataclasses.replace(case, small=True, extras=words))


@pytest.mark.parametrize("hidden_size", [42, 1600])
@pytest.mark.usefixtures("lanes")
def test_small_batches_from_within_words(hidden_size: int) -> None:
    """The rows of a view may begin at any byte; a vector's load would begin before them."""

    def rank_main(group: ThreadGroup) -> None:
        config = AllToAllConfig(
            ep_size=2,
            ep_rank=group.rank,
            num_experts=4,
            top_k=4,
            hidden_size=hidden_size,
            max_tokens_per_rank=5,
            small_tokens=5,
            extra_payload_bytes=(8,),
        )
        hidden, ids, weights = random_inputs(config, 5, torch.Generator().manual_seed(group.rank))
        extra = torch.arange(40, dtype=torch.uint8).view(5, 8)
        with MoeAllToAll.create(config, group) as layer:
            assert layer.config.small_tokens == 5
            for skew in range(4):
                received = layer.dispatch(
                    skewed(hidden, skew % 2), ids, weights, [skewed(extra, skew)]
                )
                mine = slice(5 * group.rank, 5 * group.rank + 5)
                assert torch.equal(received.hidden_states[mine], hidden)
                assert torch.equal(received.extra_payloads[0][mine], extra)
                layer.combine(received.hidden_states, received.metadata)

    run_ranks(2, rank_main)


def skewed(rows: torch.Tensor, skew: int) -> torch.Tensor:
    """The same rows, so many elements behind a vector's boundary."""
    memory = torch.empty(rows.numel() + skew, dtype=rows.dtype)
    view = memory[skew:].view(rows.shape)
    assert memory.data_ptr() % 16 == 0
    return view.copy_(rows)


#: Quantiser, recipe, hidden size, and what stands in the place of what.
MISTAKES = {
    "lanes that do not exchange": (
        *("Mxfp8", "mxfp8", 352),
        *(
            "cta.max_of_lanes<kLanes>(amax_of<Element, Count>(words))",
            "amax_of<Element, Count>(words)",
        ),
    ),
    "vectors across their boundary": (  # rows of 72 bytes stored in pieces of 16
        *("Fp8Tensor", "fp8_tensor", 72),
        *("if (kAlignedVectorsOnly && whole != hidden_size) whole = 0;", ""),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, loads: Loads) -> None:
    """In a round of activations through a build that has no other quantiser."""
    quantiser, recipe, hidden_size, old, new = MISTAKES[mistake]
    codes, case = constants(), quantised_case(recipe, hidden_size)
    text = kernel_texts.specialised_source(
        3, codes["kElementBf16"], host=True, quantiser=codes[f"kQuantiser{quantiser}"]
    )
    loads(library_with_lanes(replace_once(text, old, new)))
    with pytest.raises(AssertionError, match="first difference"):
        compare.check_received(case, make_inputs(case), run_case(case, rounds=1)[0])
