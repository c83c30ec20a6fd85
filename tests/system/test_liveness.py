"""What is no fault is not taken for one: a rank whose interpreter is locked, or which stands still
for a while, and an exit. Nor does a store whose host died or stands still hold up the others."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar.comm import waiting
from seqpar.comm.faults import heartbeat
from seqpar.comm.messages.comm import Comm
from tests.support.faults import LIMIT, SILENCE, TIMEOUT, answers, connect, free_port, launch

pytestmark = pytest.mark.alone
RANKS = range(3)


def agree(comm, value):
    """The least value of all ranks."""
    return min(map(float, comm.all_gather(torch.tensor(float(value)), label="test")))


def hold_the_lock(rank, ranks, address, pipe, tries):
    """Each time another rank keeps all other threads of its process from running.

    There are more rounds than usual, so that it need not do so for long, and the group's timeout is
    far off.
    """
    heartbeat.MIN_ROUNDS_PER_TIMEOUT, timeout = 800, 30
    silence = timeout / heartbeat.MIN_ROUNDS_PER_TIMEOUT * heartbeat.MAX_SILENT_READS
    connect(rank, ranks, address, timeout)
    comm = Comm.of(dist.group.WORLD)
    for turn in range(tries):
        agree(comm, 0)
        if turn % ranks == rank:
            count = comm._heartbeat._count
            ctypes.PyDLL(None).usleep(int(3e6 * silence))
            assert comm._heartbeat._count <= count + 1
    agree(comm, 0)
    pipe.send("done")


@pytest.mark.parametrize("tries", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_holding_the_interpreter_lock_is_not_dying(tries):
    said = answers(*launch(hold_the_lock, len(RANKS), free_port(), tries), RANKS)
    assert said == dict.fromkeys(RANKS, "done")


def stand_still(rank, ranks, address, pipe, timeout, seconds):
    """Exchange for some seconds, and end as a program does that meets an error."""
    connect(rank, ranks, address, timeout)
    comm = Comm.of(dist.group.WORLD)
    agree(comm, 0)
    pipe.send("begun")
    end, calls = time.monotonic() + seconds, 0
    try:
        while agree(comm, time.monotonic() < end):
            time.sleep(0.01)
            calls += 1
    except seqpar.PeerError as error:
        pipe.send(str(error))
    else:
        pipe.send("done")


def said_after_standing_still(who, timeout, seconds):
    """What the ranks say when one is stopped for so many seconds."""
    processes, pipes = launch(stand_still, len(RANKS), free_port(), timeout, seconds + 2)
    for pipe in pipes:
        assert pipe.poll(LIMIT)
        pipe.recv()
    time.sleep(0.5)
    os.kill(processes[who].pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(processes[who].pid, signal.SIGCONT)
    return answers(processes, pipes, RANKS)


@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_short_pause_of_a_rank_is_survived(who):
    """Rank 0 keeps the store."""
    assert said_after_standing_still(who, timeout=20, seconds=1.5) == dict.fromkeys(RANKS, "done")


@pytest.mark.exhaustive
def test_a_long_pause_is_named_by_its_rank():
    """The others are gone by then, and the store with them."""
    said = said_after_standing_still(1, TIMEOUT, 2 * SILENCE)
    assert said[0].startswith("rank 1 died or was stopped: "), said
    assert said[2].startswith("rank 1 died or was stopped: "), said
    assert said[1].startswith(("rank 1 died or was stopped: ", "rank 1 was stopped, or ")), said


def come_late(rank, ranks, address, pipe, how):
    """The store's host dies before the others make their first module."""
    connect(rank, ranks, address, TIMEOUT)
    if rank == 0:
        time.sleep(0.5)  # gloo connects first
        os.kill(os.getpid(), how)
    time.sleep(1)
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(seqpar.PeerError) as caught:
            seqpar.RingAttention(dist.group.WORLD)
        pipe.send((str(caught.value), time.monotonic() - start))


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)]
)
def test_a_store_host_dead_before_start_is_named(how):
    said = answers(*launch(come_late, len(RANKS), free_port(), how), RANKS[1:])
    for rank, (error, seconds) in said.items():
        assert error.startswith(
            "the store does not answer: global rank 0, which keeps it, died, left or was stopped. "
            f"rank {rank} was making a module for this group. "
        )
        assert seconds < TIMEOUT


def wait_for_rank_0(rank, ranks, address, pipe):
    """Rank 0, the store's host, is stopped while the others wait for its work."""
    waiting.ANSWER_SECONDS = 3.0
    connect(rank, ranks, address)
    comm = Comm.of(dist.group.WORLD)
    agree(comm, 0)
    work = lambda: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
    with pytest.raises(seqpar.PeerError) as caught:
        waiting.while_others_wait(comm, work, "some work", LIMIT)
    pipe.send(str(caught.value))


@pytest.mark.exhaustive
def test_a_wait_at_a_stopped_store_ends():
    said = answers(*launch(wait_for_rank_0, len(RANKS), free_port()), RANKS[1:])
    for rank, error in said.items():
        assert error.startswith("the store does not answer: global rank 0, which keeps it, ")
        assert f"rank {rank} was in a wait: some work and waited for rank 0" in error


EXIT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist, seqpar
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, ranks = dist.get_rank(), dist.get_world_size()
attn = seqpar.RingAttention(dist.group.WORLD)
layout = seqpar.Layout.zigzag(64, ranks)
q = torch.randn(layout.tokens_on(rank), 4, 8)
attn(q, q, q, layout, causal=True)
time.sleep(2 * rank)  # which is several beats
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""


def started(command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes):
    """Their exit codes, and what they printed."""
    return [(process.communicate(timeout=LIMIT)[0], process.returncode) for process in processes]


@pytest.mark.parametrize("how", ["", pytest.param("destroy", marks=pytest.mark.exhaustive)])
def test_exit_is_silent_though_the_store_ends_first(how):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [started(["-c", EXIT, how], RANK=str(rank), **place) for rank in range(2)]
    assert ended(processes) == [("", 0)] * 2


FAIL = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist, seqpar
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
rank, ranks = dist.get_rank(), dist.get_world_size()
attn = seqpar.RingAttention(dist.group.WORLD)
layout = seqpar.Layout.zigzag(64, ranks)
q = torch.randn(layout.tokens_on(rank), 4, 8)
attn(q, q, q, layout, causal=True)
if rank == int(sys.argv[2]):
    if sys.argv[1] == "raise":
        raise SystemExit(3)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
attn(q, q, q, layout, causal=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("how", ["raise", "SIGKILL", "SIGSTOP"])
def test_a_peer_error_exits_like_any_error(how, faulty):
    """It does not abort, though its threads and connections are in use when it ends."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    processes = [started(["-c", FAIL, how, str(faulty)], RANK=str(rank), **place) for rank in RANKS]
    survivors = ended([process for rank, process in enumerate(processes) if rank != faulty])
    processes[faulty].kill()
    processes[faulty].communicate()
    for printed, code in survivors:
        assert code == 1 and "seqpar.comm.faults.heartbeat.PeerError: " in printed, printed


@pytest.mark.exhaustive
def test_an_exit_under_torchrun_prints_nothing(tmp_path):
    script = tmp_path / "exit.py"
    script.write_text(EXIT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert ended([started([*launcher, str(script)])]) == [("", 0)]
