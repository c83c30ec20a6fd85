"""The host's time is measured beside a floor that does what a call does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import overhead
from benchmarks.ranks.overhead_rank import Floor, Recorder
from tests.support.fakes import fake_group

ROOT = Path(overhead.__file__).parents[2]


def work(group):
    """Post two messages in an exchange, move rows three times, post two more exchanges, and make
    and merge zeros."""
    x = torch.ones(4, 2)
    operations = [
        dist.P2POp(operation, x, group=group, group_peer=peer)
        for operation, peer in ((dist.irecv, 0), (dist.isend, 2))
    ]
    dist.batch_isend_irecv(operations)
    x[1:].copy_(x.t().contiguous().t()[1:])
    x.addcmul_(x, x)
    dist.isend(x, group=group, group_dst=3)
    dist.irecv(x, group=group, group_src=0)  # receives come first in an exchange
    x.new_zeros(4, 2).lerp_(x, torch.zeros_like(x).zero_())
    x.new_zeros(0)  # nothing


def test_the_floor_does_what_was_recorded():
    with fake_group(1, 4) as group:
        with Recorder() as recorder:
            work(group)
        floor = Floor(recorder.events)
        done = {"exchanges": 3, "messages": 4, "copies": 3, "fills": 2, "merges": 1}
        assert floor.counts() == done
        with Recorder() as again:
            floor()
    assert Floor(again.events).counts() == floor.counts()
    messages = [[x for x in found.events if x.kind == "messages"] for found in (recorder, again)]
    assert len(messages[0]) == 4
    for found, expected in zip(*messages, strict=True):
        assert (found.function, found.named) == (expected.function, expected.named)
        assert found.positional[0].shape == expected.positional[0].shape


def test_a_row_has_the_ratios_of_medians():
    samples = {
        "forward floor": [1.0, 2.0, 9.0],
        "forward strategy": [3.0, 3.0, 3.0],
        "forward strategy before": [12.0, 6.0, 18.0],
        "backward floor": [5.0, 5.0, 5.0],
    }
    row = overhead.row("ring", "zigzag", "forward", {"forward": {"messages": 28}}, samples)
    assert (row["of_floor"], row["less_than_before"]) == (1.5, 4.0)
    assert row["work"] == {"messages": 28} and "floor" in row["samples"]


def test_a_commit_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"--before: .*no-such-commit"):
        overhead.sources_at("no-such-commit", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["triton", "FlashAttention-4"])
def test_a_rank_times_calls_of_a_tree(kernel):
    file, asked = ROOT / "benchmarks/ranks/overhead_rank.py", json.dumps(["ring", "zigzag", 1])
    command = [sys.executable, "-P", str(file), str(ROOT), kernel]
    found = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    answer = json.loads(found.stdout)
    assert answer["counts"]["forward"]["launches"] >= 1
    assert answer["counts"]["backward"]["messages"] > answer["counts"]["forward"]["messages"] > 0
    kinds = {"call", "strategy", "floor"}
    assert set(answer["times"]) == {f"{x} {kind}" for x in overhead.PASSES for kind in kinds}
    assert all(microseconds > 0 for values in answer["times"].values() for microseconds in values)
