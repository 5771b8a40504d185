"""Whether a transport connects some ranks: asked before anything is set up, answered alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import check_connected
from moe_nvlink_plugin.errors import MoeNvlinkError, PeerError, TransportError, UnsupportedError
from moe_nvlink_plugin.integration.common import start
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import Wording, read
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.transport import hosts
from moe_nvlink_plugin.transport.host import HostMemory
from moe_nvlink_plugin.transport.hosts import Host
from tests.core.transport.test_host_transport import window_mappings

CPU = torch.device("cpu")
WORDING = Wording("Toy", "--toy-backend moe_nvlink", "toy.yaml", "", own_backend="its_own")


def test_connected_ranks_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    peers: list[str] = []
    inner = HostMemory._map_all

    def looking(memory: HostMemory, *arguments: Any) -> None:
        inner(memory, *arguments)
        peers.extend(window_mappings())

    monkeypatch.setattr(HostMemory, "_map_all", looking)
    before = window_mappings()
    run_ranks(3, check_connected)
    assert set(peers) - set(before), "the ranks mapped no memory, so nothing was tried"
    assert set(window_mappings()) <= set(before)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """What ranks say of their hosts, in the order in which they ask."""
    said: list[Host] = []
    number = itertools.count()
    monkeypatch.setattr(hosts, "here", lambda: said[next(number)])
    yield said
    assert next(number) == len(said)


def test_ranks_of_two_hosts_are_told_apart_by_boot_id(places: list[Host]) -> None:
    """Also if the hosts have one name, as containers may, and their /dev/shm one number."""
    places += [Host("boot 1", "27:1", "node"), Host("boot 2", "27:1", "node")]
    (told,) = {str(outcome) for outcome in try_ranks(2, check_connected)}
    for words in ("on several hosts", "on node (boot id boot 1)", "on node (boot id boot 2)"):
        assert words in told


def test_containers_of_one_host_are_told_about_their_shared_memory(places: list[Host]) -> None:
    places += [Host("boot 1", "27:1", "a"), Host("boot 1", "31:1", "b")]
    for outcome in try_ranks(2, check_connected):
        assert isinstance(outcome, UnsupportedError)
        assert "see different /dev/shm" in str(outcome)
        assert "--ipc=host" in str(outcome)


def test_this_process_shares_memory_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.check_shared({0: hosts.here(), 1: hosts.here()})
    assert hosts.boot_id() in hosts.here()
    monkeypatch.setattr(hosts, "_BOOT_ID", Path("/no/such/file"))
    assert hosts.boot_id() == hosts.here().name
    monkeypatch.setattr(hosts, "SHARED_MEMORY", Path("/no/such/folder"))
    assert hosts.here().shared_memory == ""


# What adapters ask.


def _why(group: ThreadGroup) -> str:
    return start.why_apart(Ranks(group, group.rank, group.size, WORDING), CPU)


def test_ranks_that_decide_by_the_reason_decide_alike(places: list[Host]) -> None:
    places += [Host("1", "a", "alpha"), Host("2", "a", "beta"), Host("1", "a", "alpha")]
    (why,) = set(run_ranks(3, _why))
    assert "on several hosts" in why


def test_the_rank_whose_own_step_failed_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have a PeerError, which only repeats it."""
    inner = HostMemory._map_all
    calls = itertools.count()

    def failing(memory: HostMemory, *arguments: Any) -> None:
        if next(calls) == 0:
            raise TransportError("made to fail")
        inner(memory, *arguments)

    monkeypatch.setattr(HostMemory, "_map_all", failing)
    assert run_ranks(3, _why) == ["made to fail"] * 3


def test_nothing_is_said_of_connected_ranks() -> None:
    assert run_ranks(2, _why) == ["", ""]


def test_errors_that_are_no_answer_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: Any, device: Any) -> None:
        raise RuntimeError("gloo is gone")

    monkeypatch.setattr(start, "check_connected", broken)
    (outcome,) = try_ranks(1, _why)
    assert isinstance(outcome, RuntimeError)


def test_a_device_without_transport_is_refused_on_every_rank() -> None:
    for outcome in try_ranks(2, lambda group: check_connected(group, "meta")):
        assert isinstance(outcome, UnsupportedError)
        assert not isinstance(outcome, PeerError)
        assert "no installed transport serves meta ranks" in str(outcome)


# The option.


def test_a_fallback_is_the_frameworks_own_exchange() -> None:
    assert read({}, WORDING).fallback is None
    assert read({"fallback": "its_own"}, WORDING).fallback == "its_own"
    with pytest.raises(MoeNvlinkError, match=r"toy\.yaml: fallback='deepep' is not its_own"):
        read({"fallback": "deepep"}, WORDING)
    for value in ("its_own", ""):
        with pytest.raises(MoeNvlinkError, match="is not available with Toy; remove it"):
            read({"fallback": value}, WORDING._replace(own_backend=""))
