"""Numbers that stand in the kernels' headers and in Python are the same numbers."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin import AllToAllConfig, env
from moe_nvlink_plugin.config import (
    COMBINE_FORMATS,
    MAX_CALLER_PAYLOADS,
    MAX_RANKS,
    MAX_SMALL_TOKENS,
    MAX_TOP_K,
    RECEIVED_IDS,
    SCALES_LAYOUTS,
)
from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.exchange import rank_masks, sizes
from moe_nvlink_plugin.exchange.arguments import formats_code, number_code, written_code
from moe_nvlink_plugin.exchange.kernels import COMBINE, LAYER, UNITS
from moe_nvlink_plugin.exchange.shapes import MOST_STAGES
from moe_nvlink_plugin.exchange.small_batches import MAX_STAGED_BYTES, PART_UNITS
from moe_nvlink_plugin.jit import header, host, nvrtc, source
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.lm_head.kernels import GATHER, HEAD, MOST_HEAD_SPLITS
from moe_nvlink_plugin.memory import layout
from moe_nvlink_plugin.memory.workspace import COUNTERS
from moe_nvlink_plugin.recipes import BUILT_IN
from tests.support import kernel_texts


def test_limits() -> None:
    numbers = constants()
    assert numbers["kMaxRanks"] == MAX_RANKS
    assert numbers["kRankMaskWords"] == rank_masks.num_words(MAX_RANKS)
    assert numbers["kMeetingWords"] == layout._MEETING_WORDS == numbers["kRankMaskWords"] + 1
    assert numbers["kMaxTopK"] == MAX_TOP_K
    # Beside the caller's: expert ids and router weights.
    assert numbers["kMaxPayloads"] == MAX_CALLER_PAYLOADS + numbers["kFirstCallerPayload"]
    assert numbers["kRegionAlignment"] == layout.REGION_ALIGNMENT
    assert numbers["kMaxHeadSplits"] == MOST_HEAD_SPLITS
    assert numbers["kMaxSmallTokens"] == MAX_SMALL_TOKENS == env.MAX_SMALL_TOKENS
    assert numbers["kPartUnits"] == PART_UNITS
    assert numbers["kMaxStagedBytes"] == MAX_STAGED_BYTES
    stages = constants("exchange/combine_shared.h")["kMostStages"]
    assert stages == MOST_STAGES
    units = constants("include/moe_nvlink/units.h")
    assert units["kUnitBytes"] == sizes.UNIT_BYTES
    assert units["kUnitWords"] * 4 == sizes.UNIT_DATA_BYTES == min(UNITS.choices().values())


def test_no_constant_is_overlooked() -> None:
    """However the formatter breaks its line."""
    text = source.read_kernel_file("include/moe_nvlink/config.h")
    enums = re.findall(r"^enum \w+ : int \{(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    enumerators = [name for body in enums for name in re.findall(r"\bk\w+", body)]
    assert len(enums) == 5
    written = re.findall(r"^constexpr int k", text, re.MULTILINE)
    assert len(constants()) == len(written) + len(enumerators) > 10


@pytest.mark.parametrize(
    ("prefix", "count"),
    [
        ("kElement", "kNumElements"),
        ("kQuantiser", "kNumQuantisers"),
        ("kCombine", "kNumCombineFormats"),
        ("kReceivedIds", "kNumReceivedIds"),
        ("kScalesLayout", "kNumScalesLayouts"),
    ],
)
def test_each_enum_has_its_number(prefix: str, count: str) -> None:
    codes = [value for name, value in constants().items() if name.startswith(prefix)]
    assert sorted(codes) == list(range(constants()[count]))


@pytest.mark.parametrize("name", ["LocalControl", "ExchangeCounters"])
def test_reserved_bytes_hold_the_struct(name: str) -> None:
    assert ctypes.sizeof(structs()[name]) <= layout.STRUCT_BYTES


def test_counters_are_the_stats_in_this_order() -> None:
    names = [field[0] for field in structs()["ExchangeCounters"]._fields_]
    assert tuple(names) == COUNTERS


def test_arguments_fit_a_kernel_launch() -> None:
    for name in ("DispatchArgs", "CombineArgs", "HeadArgs"):
        assert ctypes.sizeof(structs()[name]) <= 4096
    payloads = dict(field[:2] for field in structs()["DispatchArgs"]._fields_)["payloads"]
    assert ctypes.sizeof(payloads) == 16 * constants()["kMaxPayloads"]


#: NVRTC of CUDA 13.2 has no offsetof: a struct of which only the field's bytes are 1, and the other
#: way about.
_LIES_AT = """
template <class T> struct Bytes { unsigned char at[sizeof(T)]; };
template <class T, class F> HD constexpr bool lies_at(F T::* field, int offset) {
  for (int inside = 0; inside < 2; ++inside) {
    Bytes<T> bytes{};
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
      const bool is_in = i >= offset && i < offset + static_cast<int>(sizeof(F));
      bytes.at[i] = is_in == (inside == 1);
    }
    const T whole = __builtin_bit_cast(T, bytes);
    const Bytes<F> part = __builtin_bit_cast(Bytes<F>, whole.*field);
    for (unsigned char byte : part.at) {
      if (byte != inside) return false;
    }
  }
  return true;
}
"""


def layout_assertions(mirrors: Mapping[str, type[ctypes.Structure]]) -> str:
    """args.h, and that every field of every struct in it lies where the mirror says."""
    lines = [source.amalgamate(("include/moe_nvlink/args.h",)), "using namespace moe_nvlink;"]
    lines.append(_LIES_AT)
    for struct, mirror in mirrors.items():
        lines.append(f'static_assert(sizeof({struct}) == {ctypes.sizeof(mirror)}, "{struct}");')
        for name, *_type in mirror._fields_:
            field = getattr(mirror, name)
            lines += [
                f"static_assert(lies_at(&{struct}::{name}, {field.offset}), "
                f'"offset of {struct}::{name}");',
                f"static_assert(sizeof({struct}::{name}) == {field.size}, "
                f'"size of {struct}::{name}");',
            ]
    return "\n".join(lines)


def compile_for_the_host(text: str, folder: Path) -> None:
    host.compile_text(text, folder / "layout.o", ("-std=c++20", "-c"))


def compile_for_a_gpu(text: str, _folder: Path) -> None:
    nvrtc.compile_cubin(text + '\nextern "C" __global__ void kernel() {}\n', "sm_90a")


@pytest.fixture(params=[compile_for_the_host, compile_for_a_gpu])
def compiler(request: pytest.FixtureRequest) -> Any:
    if request.param is compile_for_a_gpu:
        request.getfixturevalue("gpu_compiler")
    return request.param


def test_every_field_lies_where_the_compilers_put_it(
    compiler: Callable[[str, Path], None], tmp_path: Path
) -> None:
    text = layout_assertions(structs())
    assert text.count("static_assert") > 2 * 50
    assert 'offset of LocalControl::fault"' in text
    compiler(text, tmp_path)


def test_two_fields_in_the_other_order_are_found(
    compiler: Callable[[str, Path], None], tmp_path: Path
) -> None:
    fields = list(structs()["CombineArgs"]._fields_)
    fields[0], fields[1] = fields[1], fields[0]
    swapped: Any = type("CombineArgs", (ctypes.Structure,), {"_fields_": fields})
    assert ctypes.sizeof(swapped) == ctypes.sizeof(structs()["CombineArgs"])
    with pytest.raises(CompileError, match=f"offset of CombineArgs::{fields[0][0]}"):
        compiler(layout_assertions({**structs(), "CombineArgs": swapped}), tmp_path)


def test_the_library_agrees_about_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that has come apart from the header is refused when the library is loaded."""
    library = host.load(kernel_texts.host_source())
    for kernel in (*LAYER.kernels, *HEAD.kernels):
        library.kernel(kernel.name, kernel.args_type())
    for kernel in (COMBINE, GATHER):
        with pytest.raises(CompileError, match="DispatchArgs has"):
            library.kernel(kernel.name, structs()["DispatchArgs"])
    wrong = {**structs(), "LocalControl": structs()["DispatchArgs"]}
    monkeypatch.setattr(host, "structs", lambda: wrong)
    with pytest.raises(CompileError, match="DispatchArgs has"):
        host.HostLibrary(host.build(kernel_texts.host_source()))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Gives a file below kernels/ another text; what was read meanwhile is forgotten afterwards."""
    really = source.read_kernel_file

    def give(path: str, text: str) -> None:
        header.constants.cache_clear()
        header.struct.cache_clear()
        monkeypatch.setattr(
            source, "read_kernel_file", lambda name: text if name == path else really(name)
        )

    yield give
    header.constants.cache_clear()
    header.struct.cache_clear()


@pytest.mark.parametrize("path", ["include/moe_nvlink/args.h", "odd/odd.cu"])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("int32_t a, b;", "'int32_t a, b;' is not one field"),
        ("double seconds;", "field seconds has type double; use one of int32_t, "),
        ("uint32_t words[kNowhere];", "field words has length kNowhere; use a constant"),
        ("uint32_t words[4];", "field words has length 4; use a constant"),
    ],
)
def test_a_field_that_is_not_understood_is_refused(
    field: str, message: str, path: str, pretend: Callable[[str, str], None]
) -> None:
    """The error names file and struct: a new kernel's struct may stand in the kernel's own file."""
    pretend(path, f"struct Odd {{\n  int32_t first;\n  {field}\n}};\n")
    of_args: Callable[[], Any] = header.structs.__wrapped__  # leaves what others have read
    read = of_args if path == source.ARGS_HEADER else lambda: header.struct("Odd", path)
    with pytest.raises(ValueError, match=re.escape(f"{path}, struct Odd: {message}")):
        read()


def test_a_struct_beside_args_h(pretend: Callable[[str, str], None]) -> None:
    """Its fields are scalars, structs of args.h, and structs and lengths of its own file."""
    text = (
        "constexpr int kWords = 3;\n"
        "struct Inner {\n  uint64_t cell;\n};\n"
        "struct Outer {\n  Inner inner;\n  ControlRegions control;\n  int32_t words[kWords];\n};\n"
    )
    path = "words/words.cu"
    pretend(path, text)
    control = ctypes.sizeof(structs()["ControlRegions"])
    assert header.struct("Outer", path)._fields_[2][0] == "words"
    assert ctypes.sizeof(header.struct("Outer", path)) >= 8 + control + 12
    with pytest.raises(ValueError, match=r"words/words.cu: no struct Missing"):
        header.struct("Missing", path)


def layer_of(**values: Any) -> AllToAllConfig:
    values |= {"num_experts": 8, "top_k": 2, "hidden_size": 128, "max_tokens_per_rank": 4}
    return AllToAllConfig(ep_size=2, ep_rank=0, **values)


def layers_of_every_format() -> list[AllToAllConfig]:
    formats = itertools.product(BUILT_IN, COMBINE_FORMATS)
    return [layer_of(recipe=recipe.name, combine=combine) for recipe, combine in formats]


def layers_that_write_differently() -> list[AllToAllConfig]:
    ways = itertools.product((*RECEIVED_IDS, -1, 8), SCALES_LAYOUTS)
    return [layer_of(received_ids=ids, scales_layout=layout) for ids, layout in ways]


def test_masks_that_differ_in_one_rank_or_two_have_tags_of_their_own() -> None:
    """As long as there are fewer ranks than tags."""
    library = ctypes.CDLL(str(host.build(kernel_texts.host_source())))
    library.moe_nvlink_mask_tag.restype = ctypes.c_uint32
    ranks = range(127)

    def tag(left_out: Collection[int]) -> int:
        mask = rank_masks.rank_mask(set(ranks) - set(left_out), len(ranks))
        args: Any = structs()["DispatchArgs"]()
        args.active_ranks, args.geometry.ep_size = mask.data_ptr(), len(ranks)
        return int(library.moe_nvlink_mask_tag(ctypes.byref(args)))

    assert tag(()) == 0
    alone = [tag((rank,)) for rank in ranks]
    assert len({0, *alone}) == 2**7 == max(alone) + 1
    others = [tag((5, 77, rank)) for rank in ranks if rank not in (5, 77)]
    assert len({tag((5, 77)), *others}) == len(others) + 1
    assert tag(()) == int(library.moe_nvlink_mask_tag(ctypes.byref(structs()["DispatchArgs"]())))


def test_geometries_that_ranks_may_mix_up_have_tags_of_their_own() -> None:
    """Capacities that are powers of two always; of others, about one pair in 128 shares a tag."""
    library = ctypes.CDLL(str(host.build(kernel_texts.host_source())))
    library.moe_nvlink_geometry_tag.restype = ctypes.c_uint32

    def tag(
        capacity: int,
        top_k: int = 8,
        hidden_size: int = 7168,
        num_experts: int = 256,
        formats: int = 0,
    ) -> int:
        geometry: Any = structs()["Geometry"]()
        geometry.max_tokens_per_rank, geometry.top_k = capacity, top_k
        geometry.hidden_size, geometry.num_experts = hidden_size, num_experts
        geometry.formats = formats
        return int(library.moe_nvlink_geometry_tag(ctypes.byref(geometry)))

    for layer in ((8, 7168, 256), (4, 2880, 128), (1, 8, 4), (22, 5120, 384)):
        tags = [tag(2**power, *layer) for power in range(25)]
        assert len(set(tags)) == len(tags)
        assert max(tags) < 2**7
    codes = {formats_code(layer) for layer in layers_of_every_format()}
    assert len(codes) == len({tag(128, formats=code) for code in codes}) == 36
    assert max(codes) < 64, "then codes of two layers in a row differ (number_code)"
    numbers = [number_code(number) for number in range(3, 3 + 128)]
    assert len({tag(128, formats=code) for code in numbers}) == 128
    near = {code ^ number for code in codes for number in numbers[:2]}
    assert len({tag(128, formats=code) for code in near}) == 2 * 36
    written = [written_code(layer) << 7 for layer in layers_that_write_differently()]
    assert written[0] == 0
    assert len({tag(128, formats=code) for code in written}) == len(set(written)) == len(written)
    assert max(written) < 2**32
    drawn = [
        tag(capacity, 8, hidden) for capacity in range(1, 100) for hidden in range(64, 6464, 64)
    ]
    most = max(drawn.count(value) for value in set(drawn))
    assert len(set(drawn)) == 128
    assert most < 3 * len(drawn) / 128


def test_rows_that_ranks_may_mix_up_have_tags_of_their_own() -> None:
    """Types and formats of one width always; of two widths, about one pair in 128 shares a tag."""
    library = ctypes.CDLL(str(host.build(kernel_texts.host_source())))
    library.moe_nvlink_combine_tag.restype = ctypes.c_uint32

    def tag(width: int, element: int = 0, combine: int = 0) -> int:
        args: Any = structs()["CombineArgs"]()
        args.geometry.hidden_size, args.geometry.element, args.format = width, element, combine
        return int(library.moe_nvlink_combine_tag(ctypes.byref(args)))

    for width in (1, 34, 2880, 7168):
        tags = {tag(width, element, combine) for element in range(3) for combine in range(3)}
        assert len(tags) == 9
        assert max(tags) < 2**7
    drawn = [tag(width) for width in range(64, 16385, 64)]
    assert len(set(drawn)) == 128
    assert max(drawn.count(value) for value in drawn) < 3 * len(drawn) / 128
