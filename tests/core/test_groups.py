"""What an exchange keeps of the group that it was created on."""

from __future__ import annotations

from tests.support.programs import python

#: Prints the names of the process's threads when its process group is destroyed, and when the
#: exchange is closed.
CLOSED = """
import os, torch, torch.distributed as dist
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll

def show():
    tasks = "/proc/self/task"
    print(*(open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = AllToAllConfig(
    ep_size=1, ep_rank=0, num_experts=4, top_k=2, hidden_size=64, max_tokens_per_rank=4
)
exchange = MoeAllToAll.create(config, dist.group.WORLD)
dist.destroy_process_group()
show()
exchange.close()
show()
"""


def test_a_closed_exchange_lets_go_of_its_process_group() -> None:
    """Or gloo's threads are still there while Python ends, which sometimes ends it by SIGABRT."""
    done = python("-c", CLOSED)
    assert done.returncode == 0, done.stderr
    held, closed = done.stdout.splitlines()
    assert "pt_gloo_runloop" in held.split()
    assert "pt_gloo_runloop" not in closed.split()
