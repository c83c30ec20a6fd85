"""What ranks answer a sweep: contenders on four real ones, against fp64."""

import json

import pytest
import torch

from seqpar import Layout, make_attention
from seqpar.bench import sweep
from seqpar.bench.workers import rank as module
from seqpar.bench.workers.rank import Rank, answer_to
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import Workload
from seqpar.comm.messages.comm import Comm
from seqpar.strategies.registry import SOFTMAX

WORKLOAD = Workload(4, 96, 4, 4, 8, "causal", "fp32", "forward+backward")
BY_HAND = "all-to-all-by-hand"


def answers(group):
    """What this rank answers, by request and contender."""
    torch.manual_seed(0)
    measuring, module.EXPOSURE_ROUNDS = Rank(Comm.of(group), torch.device("cpu")), 1
    asked = [("check", name) for name in (ONE, *SOFTMAX, BY_HAND)]
    asked += [("costs", "ring"), ("costs", BY_HAND), ("time", "ring"), ("time", ONE)]
    found = {}
    for what, name in asked:
        request = {"do": what, "workload": WORKLOAD.as_dict(), "contender": name}
        found[what, name] = json.loads(json.dumps(answer_to(measuring, request)))
    layout = Layout.zigzag(96, 4)
    traffic = make_attention("ring", group).traffic(
        *torch.zeros(3, layout.tokens_on(group.rank()), 4, 8), layout, causal=True
    )
    return found, sum(row.bytes for row in traffic)


@pytest.mark.exhaustive
def test_what_ranks_answer(pool):
    found, sent = zip(*pool(4, answers), strict=True)
    for what, name in found[0]:
        values = [answer[what, name].get("value") for answer in found]
        assert None not in values, (what, name, found[0][what, name])
        if what == "check":
            checked, reason = sweep.judge(WORKLOAD, values, None if name == ONE else {})
            assert reason is None and checked["relative"] < 1e-6, name
    ring, by_hand = ([x["costs", name]["value"] for x in found] for name in ("ring", BY_HAND))
    assert tuple(cost["bytes"] for cost in ring) == sent and min(sent) > 0
    assert len({cost["exposure"]["total"] for cost in ring}) == 1
    assert ring[0]["exposure"]["samples"][0][0] > 0
    assert {cost["bytes"] for cost in by_hand} == {cost["exposure"] for cost in by_hand} == {None}
    assert all(x["time", "ring"]["value"] > 0 for x in found)
