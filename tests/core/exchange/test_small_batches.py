"""Up to how many tokens a layer takes the kernels for small batches."""

from __future__ import annotations

import pytest

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.errors import DriverError, PeerError
from moe_nvlink_plugin.exchange import small_batches
from moe_nvlink_plugin.exchange.small_batches import with_small_tokens
from moe_nvlink_plugin.launch.cpu import HostExecutor
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks

H200_SMS = 132


def small_config(group: ThreadGroup, **values: object) -> AllToAllConfig:
    usual = {"num_experts": 8, "top_k": 2, "hidden_size": 7168, "max_tokens_per_rank": 64}
    ranks = {"ep_size": group.size, "ep_rank": group.rank}
    return AllToAllConfig(**{**ranks, **usual, **values})  # type: ignore[arg-type]


def limits(num_sms: int, **values: object) -> tuple[int | None, int | None]:
    """Of dispatch and of combine, at DeepSeek-V3's sizes."""
    usual = {"ep_size": 8, "ep_rank": 0, "num_experts": 256, "top_k": 8, "hidden_size": 7168}
    config = AllToAllConfig(**{**usual, "max_tokens_per_rank": 256, **values})  # type: ignore[arg-type]
    found = with_small_tokens(config, find_recipe(config), num_sms)
    return found.small_tokens, found.small_combine_tokens


@pytest.fixture(autouse=True)
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_NVLINK_SMALL_TOKENS", raising=False)


def test_as_many_as_they_gain_for() -> None:
    assert limits(H200_SMS) == (32, 13)
    assert limits(H200_SMS, unit_data_bytes=12) == (32, 10)
    assert limits(16) == (4, 1)
    # Two ranks send a quarter of the rows; measured as 40 and 12 with units of 12 bytes.
    assert limits(66, ep_size=2) == (32, 17)
    assert limits(0) == (0, 0)


def test_what_is_asked_for() -> None:
    assert limits(H200_SMS, small_tokens=64) == (64, 64)
    assert limits(0, small_tokens=16) == (16, 16)
    assert limits(16, small_tokens=16, small_combine_tokens=3) == (16, 3)
    assert limits(H200_SMS, small_combine_tokens=40) == (32, 32)
    assert limits(H200_SMS, small_tokens=16, max_tokens_per_rank=7) == (7, 7)
    assert limits(H200_SMS, combine="fp8_block")[0] == 32


def test_units_carry_whole_words() -> None:
    """A verb's own rows decide: of activations, scales and extra payloads; of the experts."""
    assert limits(H200_SMS, hidden_size=7169) == (0, 0)
    assert limits(H200_SMS, small_tokens=16, hidden_size=7170) == (16, 16)
    assert limits(H200_SMS, small_tokens=16, recipe="fp8_tensor", hidden_size=7170) == (0, 16)
    assert limits(H200_SMS, small_tokens=16, recipe="mxfp8", hidden_size=2880) == (0, 16)
    assert limits(H200_SMS, small_tokens=16, recipe="nvfp4", hidden_size=2880)[0] == 16
    assert limits(H200_SMS, extra_payload_bytes=(4, 5)) == (0, 13)
    assert limits(H200_SMS, extra_payload_bytes=(4, 8)) == (32, 13)
    assert limits(0, extra_payload_bytes=(5,)) == (0, 0)
    assert limits(0, small_tokens=0, small_combine_tokens=4, extra_payload_bytes=(5,)) == (0, 0)
    assert limits(0, small_tokens=9, recipe="bytes_14335", combine="bf16") == (0, 9)


def test_a_packed_row_that_is_too_long_to_quantise() -> None:
    assert limits(0, small_tokens=4, recipe="fp8_token", hidden_size=16384) == (0, 4)
    assert limits(0, small_tokens=4, hidden_size=16384) == (4, 4)


def test_what_is_asked_for_and_does_not_hold_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_batches._say_once.cache_clear()
    assert limits(H200_SMS, extra_payload_bytes=(4, 5)) == (0, 13)  # nobody asked
    limits(0, small_tokens=16, extra_payload_bytes=(4, 4))
    assert not caplog.messages
    for _ in range(2):
        limits(0, small_tokens=16, extra_payload_bytes=(4, 5))
    (said,) = caplog.messages
    assert "small_tokens=16 does not hold for dispatch: the bytes of a row must be a" in said
    assert "a multiple of 4 (5 of extra_1); pad it" in said
    caplog.clear()
    limits(0, small_tokens=16, recipe="fp8_token", hidden_size=16384)
    assert "with recipe fp8_token the payloads of a token may take 16384 bytes, and" in caplog.text
    caplog.clear()
    limits(0, small_tokens=16, small_combine_tokens=8, combine="fp8_block")
    assert "small_combine_tokens=8 does not hold: combine='fp8_block' with rows" in caplog.text
    monkeypatch.setenv("MOE_NVLINK_SMALL_TOKENS", "24")
    limits(0, extra_payload_bytes=(6,))
    assert "small_tokens=24 does not hold for dispatch: " in caplog.text


def test_the_variable_is_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_SMALL_TOKENS", "24")
    assert limits(H200_SMS) == (24, 24)


def test_ranks_take_the_limit_of_the_one_with_the_fewest_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """max_sms may differ by rank, but all ranks of a round launch the same kernels."""
    monkeypatch.setattr(HostExecutor, "num_sms", lambda self: H200_SMS)

    def rank_main(group: ThreadGroup) -> tuple[int | None, int | None]:
        config = small_config(group, max_sms=None if group.rank else 3)
        with MoeAllToAll.create(config, group) as layer:
            return layer.config.small_tokens, layer.config.small_combine_tokens

    first, second = run_ranks(2, rank_main)
    assert first == second == (2, 0)


def test_nobody_waits_for_a_rank_that_cannot_count_its_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = iter([True])

    def num_sms(self: HostExecutor) -> int:
        if next(first, False):
            raise DriverError("cuCtxGetDevice: CUDA_ERROR_INVALID_CONTEXT", call="", status="")
        return H200_SMS

    monkeypatch.setattr(HostExecutor, "num_sms", num_sms)
    outcomes = try_ranks(2, lambda group: MoeAllToAll.create(small_config(group), group).close())
    assert {type(outcome) for outcome in outcomes} == {DriverError, PeerError}
