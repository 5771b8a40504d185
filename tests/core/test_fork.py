"""A process that a rank forks: the parent's exchange is none of its business."""

from __future__ import annotations

import pytest

from tests.support.programs import python

# The child ends as programs do, with finalizers and exit handlers, and not by os._exit().
_SCRIPT = """
import os, sys
import torch
from moe_nvlink_plugin import AllToAllConfig, HeadConfig, HeadGroup, MoeAllToAll, sharded_argmax
from moe_nvlink_plugin.errors import ExchangeStateError
from moe_nvlink_plugin.testing import ThreadGroup

threads = int(sys.argv[1])
(group,) = ThreadGroup.ranks(1)
sizes = dict(ep_size=1, ep_rank=0, num_experts=4, top_k=2, hidden_size=64, max_tokens_per_rank=8)
layer = MoeAllToAll.create(AllToAllConfig(**sizes, num_threads=threads, num_channels=2), group)
sizes = dict(tp_size=1, tp_rank=0, vocab_size=8, hidden_size=8, max_rows_per_rank=2)
head = HeadGroup.create(HeadConfig(**sizes, dtype=torch.float32), group)
x, weights = torch.ones(4, 64).bfloat16(), torch.ones(4, 2)
ids = torch.zeros(4, 2, dtype=torch.int32)

def refused(call):
    try:
        call()
    except ExchangeStateError as error:
        return f"is a fork of process {os.getppid()}" in str(error)
    return False

received = layer.dispatch(x, ids, weights)
rows = layer.combine_input()
rows.copy_(received.hidden_states)
other = layer.dispatch_async(x, ids, weights, channel=1)
child = os.fork()
if child == 0:
    def speak(*_arguments):
        raise AssertionError("the child speaks to the parent's ranks")
    heard, ThreadGroup.all_gather_object = ThreadGroup.all_gather_object, speak
    rows.fill_(7.0)
    received.hidden_states.fill_(7.0)
    calls = [
        lambda: layer.combine(rows, received.metadata),
        lambda: layer.dispatch(x, ids, weights),
        lambda: other.wait(),
        lambda: layer.mask(),
        lambda: layer.stats(),
        lambda: layer.waits(),
        lambda: layer.release(),
        lambda: layer.renew(group, [0]),
        lambda: head.release(),
        lambda: head.renew(group),
        lambda: MoeAllToAll.create(layer.config, group, share_with=layer),
        lambda: sharded_argmax(torch.ones(1, 8), torch.ones(8, 8), group=head),
    ]
    answers = [refused(call) for call in calls]
    layer.close()
    head.close()
    # A new one of its own.
    ThreadGroup.all_gather_object = heard
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(layer.config, group) as own:
        again = own.dispatch(x, ids, weights)
        answers.append(torch.equal(own.combine(again.hidden_states, again.metadata), x))
    print("child", answers, flush=True)
    sys.exit(0 if all(answers) else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
layer.combine(layer.combine_input(channel=1), other.wait().metadata)
same = torch.equal(layer.combine(rows, received.metadata), x)
tokens = sharded_argmax(torch.ones(1, 8), torch.eye(8)[:8], group=head).tolist()
print("parent", status, same, tokens)
sys.exit(0 if (status, same, tokens) == (0, True, [0]) else 4)
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fork_leaves_the_exchange_to_its_parent(threads: int) -> None:
    done = python("-c", _SCRIPT, str(threads))
    assert done.returncode == 0, done.stdout + done.stderr
