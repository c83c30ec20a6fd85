"""What the other ranks see when one dies, stops, stays away or leaves. Real processes, a group of
their own for each test."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar.comm.messages.comm import Comm
from tests.support.cases import module
from tests.support.faults import LIMIT, SILENCE, TIMEOUT, answers, connect, free_port, launch
from tests.support.recurrent_calls import gated_delta

pytestmark = pytest.mark.alone


class Fault(NamedTuple):
    """What `rank` (of the world) does at `step` of `doing`."""

    rank: int
    doing: str
    step: int
    act: str


class End(NamedTuple):
    error: str
    seconds: float  # from the fault, or from when this rank came to its call


def act(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "stay away":
        time.sleep(2 * TIMEOUT)
    else:
        raise ValueError(kind)


def attend(rank, ranks, address, pipe, strategy, fault, members):
    """Forward and backward of one call on the group `members`, which meets `fault`."""
    torch.set_num_threads(1)
    connect(rank, ranks, address, timeout=LIMIT)
    group = dist.new_group(members, timedelta(seconds=TIMEOUT))
    if rank not in members:
        time.sleep(LIMIT)  # until the test ends: others may still be connecting to this rank
        return
    attn = gated_delta(group) if strategy == "recurrent" else module(strategy, group)
    layout, exchange = seqpar.Layout.zigzag([0, 64 * len(members)], len(members)), Comm.exchange

    def faulty(comm, sends, recvs, *, label, step=0):
        if (rank, label.partition(",")[0], step) == fault[:3]:
            act(fault.act)
        return exchange(comm, sends, recvs, label=label, step=step)

    Comm.exchange = faulty
    dist.barrier(group)  # until all have made their modules: the host of the store may be the fault
    q, k, v = (torch.randn(64, 4, 8, requires_grad=True) for _ in range(3))
    start, error = time.monotonic(), ""
    try:
        attn(q, k, v, layout, causal=False).sum().backward()
    except seqpar.PeerError as raised:
        error = str(raised)
    pipe.send(End(error, time.monotonic() - start))
    time.sleep(
        rank * SILENCE / 3
    )  # ranks go one after the other: those that went first get no blame


def ends(address, strategy, fault, in_time, members=(0, 1, 2, 3)):
    """How the call ended on each rank of `members` but the faulty one."""
    started = launch(attend, max(members) + 1, address, strategy, fault, list(members))
    ended = answers(*started, [rank for rank in members if rank != fault.rank])
    assert all(in_time(end.seconds) for end in ended.values()), ended
    return ended


def before_the_timeout(seconds):
    return seconds < TIMEOUT


def at_the_timeout(seconds):
    return TIMEOUT / 2 < seconds < 1.5 * TIMEOUT


KILLED_OR_STOPPED = [
    ("ring", Fault(2, "ring forward", 2, "kill")),
    ("ring", Fault(0, "ring backward", 1, "kill")),
    ("all_gather", Fault(0, "all_gather forward", 1, "kill")),
    ("ulysses", Fault(1, "ulysses forward", 0, "kill")),
    ("token_ring", Fault(2, "token_ring backward", 2, "kill")),
    ("mesh", Fault(3, "mesh backward", 2, "kill")),
    ("usp", Fault(3, "usp forward", 0, "kill")),
    ("disaggregated", Fault(2, "disaggregated backward", 0, "kill")),
    ("recurrent", Fault(2, "recurrent backward", 0, "kill")),
    ("ring", Fault(1, "ring forward", 1, "stop")),
]
EXHAUSTIVE = [pytest.param(*row, marks=pytest.mark.exhaustive) for row in KILLED_OR_STOPPED[1:]]


@pytest.mark.parametrize(("strategy", "fault"), [KILLED_OR_STOPPED[0], *EXHAUSTIVE])
def test_every_survivor_names_the_dead_rank(tmp_path, strategy, fault):
    survivors = ends(f"{tmp_path}/store", strategy, fault, before_the_timeout)
    where = f"{fault.doing}(, heads|, ring)?"
    for rank, end in survivors.items():
        assert end.error.startswith(f"rank {fault.rank} died or was stopped: "), (rank, survivors)
        assert re.search(
            rf"rank {rank} was in call 1, step \d of {where} and waited for .*rank \d", end.error
        ), end


@pytest.mark.exhaustive
def test_subgroup_errors_name_ranks_of_the_world(tmp_path):
    fault = Fault(2, "ring forward", 1, "kill")
    survivors = ends(f"{tmp_path}/store", "ring", fault, before_the_timeout, members=(1, 2, 3))
    for end in survivors.values():
        assert end.error.startswith("rank 1 (global rank 2) died or was stopped: "), survivors


def test_a_dead_host_of_the_store_is_named():
    fault = Fault(0, "ring backward", 2, "kill")
    survivors = ends(free_port(), "ring", fault, before_the_timeout)
    for rank, end in survivors.items():
        assert end.error.startswith(
            "the store does not answer: global rank 0, which keeps it, died"
        ), survivors
        assert re.search(rf"rank {rank} was in call 1, step \d of ring backward", end.error), end


@pytest.mark.exhaustive
def test_a_stopped_store_host_is_named_after_timeout():
    survivors = ends(free_port(), "ring", Fault(0, "ring forward", 1, "stop"), at_the_timeout)
    for end in survivors.values():
        assert end.error.startswith(
            "the store does not answer: global rank 0, which keeps it, died, left or was"
        ), survivors


@pytest.mark.exhaustive
def test_an_absent_live_rank_is_named_after_timeout():
    survivors = ends(free_port(), "ring", Fault(2, "ring forward", 1, "stay away"), at_the_timeout)
    for end in survivors.values():
        assert end.error.startswith("rank 2 is alive but did not send"), survivors


def test_a_rank_that_fails_alone_is_named_gone(tmp_path):
    fault = Fault(2, "ring forward", 2, "raise")
    for end in ends(f"{tmp_path}/store", "ring", fault, before_the_timeout).values():
        assert end.error.startswith("rank 2 left the group"), end


def come_and_go(rank, ranks, address, pipe, groups):
    """Nothing dies: groups one after the other, and then one which a rank leaves while the others
    still work."""
    for cycle in range(groups):
        connect(rank, ranks, f"{address}{cycle}")
        assert all(
            x.item() == 1 for x in Comm.of(dist.group.WORLD).all_gather(torch.ones(1), label="test")
        )
        dist.destroy_process_group()
        assert threading.active_count() == 1
    connect(rank, ranks, address)
    comm = Comm.of(dist.group.WORLD)
    comm.all_gather(torch.ones(1), label="test")
    if rank == 1:
        time.sleep(1.5 * SILENCE)
        comm.exchange([(2, torch.ones(1))], [], label="test").wait()
    elif rank == 2:
        comm.exchange([], [(1, torch.ones(1))], label="test").wait()
    pipe.send("done")


@pytest.mark.parametrize("groups", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_ranks_come_and_go_in_order(tmp_path, groups):
    processes, pipes = launch(come_and_go, 3, str(tmp_path / "store"), groups)
    for process, pipe in zip(processes, pipes, strict=True):
        assert pipe.poll(LIMIT)
        assert pipe.recv() == "done"
        process.join(LIMIT)
        assert process.exitcode == 0
