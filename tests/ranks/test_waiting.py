"""Rank 0 measures its machine longer than the group's timeout: the others wait, and see it."""

import logging
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

import seqpar
from seqpar.balance import Cluster
from seqpar.comm import waiting
from seqpar.costs.profile import machine
from tests.support.ranks import Pool

TIMEOUT = 2.0  # seconds, of the group
NODES = replace(Cluster.preset("1x2-h100"), name="measured slowly")


@pytest.fixture(scope="module")
def impatient():
    """Ranks whose groups have a short timeout."""
    with Pool(2, TIMEOUT) as pool:
        yield pool


def made(group, folder, sleep, options=None):
    """The module's cluster, the log's lines and the seconds, where a profile takes this long."""
    lines, log = [], logging.getLogger("seqpar")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    start = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SEQPAR_CACHE", folder)
            patch.setattr(waiting, "FIRST_LINE_SECONDS", 0.5)
            patch.setattr(waiting, "NEXT_LINE_SECONDS", 1.0)
            patch.setattr(Cluster, "here", lambda: (time.sleep(sleep), NODES)[1])
            attn = seqpar.make_attention("auto", group, **(options or {}))
    finally:
        log.removeHandler(handler)
    return attn.cluster.name, lines, time.monotonic() - start


@pytest.mark.exhaustive
def test_a_long_measurement_outlasts_the_timeout(impatient, tmp_path):
    for name, lines, seconds in impatient(2, made, str(tmp_path), 3 * TIMEOUT):
        assert name == "measured slowly" and seconds >= 3 * TIMEOUT
        assert lines[0].startswith("rank 0 measures this machine: ")
        assert lines[0].endswith(" s so far, at most 60 s") and len(lines) >= 2


@pytest.mark.exhaustive
def test_a_measurement_is_bounded(impatient, tmp_path):
    answers = impatient(2, made, str(tmp_path), 600, {"measure_seconds": 3.0})
    assert [name for name, _, _ in answers] == ["assumed"] * 2
    assert "its speeds are assumed" in answers[0][1][-1]
    assert all(any("at most 3 s" in line for line in lines) for _, lines, _ in answers)


def dies(group, folder):
    """What rank 1 raises when rank 0 is killed while it measures."""
    if dist.get_rank(group) == 0:
        here = Cluster.here
        Cluster.here = lambda: os.kill(os.getpid(), signal.SIGKILL)
        try:
            made_or_killed(group)
        finally:
            Cluster.here = here
    with pytest.raises(seqpar.PeerError) as raised:
        seqpar.make_attention("auto", group)
    return str(raised.value)


def made_or_killed(group):
    seqpar.make_attention("auto", group)


def test_a_rank_that_dies_measuring_is_blamed(tmp_path):
    with Pool(2, 5.0) as pool:
        for pipe in pool._pipes:
            pipe.send((2, dies, (str(tmp_path),)))
        assert pool._pipes[1].poll(30)
        (kind, text), _ = pool._pipes[1].recv()
    assert kind == "result" and text.startswith("rank 0 died or was stopped")
    assert "rank 0 measures this machine" in text


def without_heartbeat(group, folder):
    """Wait as ranks of NCCL do, whose groups have no heartbeat."""
    comm = seqpar.comm.messages.comm.Comm.of(group)
    kept, comm._heartbeat = comm._heartbeat, None
    try:
        done = waiting.while_others_wait(comm, lambda: time.sleep(3) or "done", "work", 10)
    finally:
        comm._heartbeat = kept
    return done


def test_ranks_without_heartbeats_wait_too(impatient, tmp_path):
    assert impatient(2, without_heartbeat, str(tmp_path)) == ["done", None]


def in_halves(group, folder):
    """Modules of groups of one rank each, made at the same time as each other's."""
    halves = [dist.new_group([rank], timedelta(seconds=TIMEOUT)) for rank in range(2)]
    own = halves[dist.get_rank(group)]
    return made(own, folder, 0.1)[0]


def test_small_groups_measure_by_themselves(impatient, tmp_path):
    assert impatient(2, in_halves, str(tmp_path)) == ["measured slowly"] * 2


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "60", True])
def test_measure_seconds_must_be_finite(seconds):
    group = seqpar.comm.messages.comm.Comm("none", 0, 2)
    with pytest.raises(ValueError, match=r"^measure_seconds must be"):
        seqpar.make_attention("auto", group, cluster=NODES, measure_seconds=seconds)


def test_a_profile_stops_when_its_time_is_over():
    with machine.within(0.0), pytest.raises(TimeoutError, match="longer than allowed"):
        machine.profile()
