"""Which thread of a server computes what."""

import threading

import pytest
import torch

from seqpar.servers.server import worker
from seqpar.servers.server.compute import compute, kind_of
from seqpar.servers.server.worker import ComputeJob, Worker
from seqpar.servers.transport.peers import Peer
from seqpar.servers.wire.codec import pack
from tests.support.requests import random_request
from tests.tools.fuzz_protocol import caches, step

CPU = torch.device("cpu")


def job(seed, rows=48):
    request = random_request(seed, rows)
    return ComputeJob(Peer(b"client"), pack(request).header, request, 0, kind_of(request, CPU))


@pytest.fixture
def watched(monkeypatch):
    """A worker whose thread does not run, and which thread has computed what."""
    calls = []
    monkeypatch.setattr(
        worker,
        "compute",
        lambda *x: (calls.append(threading.current_thread()), compute(*x))[1],
    )
    return Worker(CPU, 2**10, lambda: None), calls


def learn(made, rows, seconds):
    made._learn(job(0).kind, rows, seconds)


def test_a_brief_job_runs_in_the_reading_thread(watched):
    made, calls = watched
    made.add(job(1))
    made.proceed()
    assert not calls and made.waiting == 1  # nothing is known of its kind
    made.withdraw(lambda each: True)
    learn(made, 112, 0.0001)
    made.add(job(2))
    made.proceed()
    assert calls == [threading.current_thread()] and made.done.pop().brief and not made.waiting


def test_long_or_queued_jobs_run_in_the_worker(watched):
    made, calls = watched
    learn(made, 112, 0.0001)
    made.add(job(1, 49))  # longer than what is known
    made.proceed()
    made.withdraw(lambda each: True)
    for seed in (1, 2):
        made.add(job(seed))
    made.proceed()
    made.withdraw(lambda each: True)
    made._threads[False].served.add("another key")
    made.add(job(3))
    made.proceed()
    assert not calls and made.waiting == 1


def test_a_brief_kind_that_takes_long_is_forgotten(watched):
    made, calls = watched
    learn(made, 112, 0.0001)
    learn(made, 500, 1.0)  # more rows may take longer
    assert made._is_brief(job(1))
    learn(made, 100, 1.0)
    assert not made._is_brief(job(1))
    for i in range(1000):
        made._learn(i, 1, 0.0)
    assert len(made._brief) <= 256 and not calls


def test_a_failing_step_fails_no_other_cache():
    """Steps of one call: two of one cache, and one whose earlier step was not computed."""
    made, jobs = Worker(CPU, 2**10, lambda: None), []
    for name, count in ((b"honest", 2), (b"cancelled", 2)):
        held = caches(Peer(name))
        for writes in range(1, 1 + count):
            packed = step(writes, writes, 19 + writes, 1, 1)
            parts = [x.tobytes() for x in packed.parts]
            taken = held.admit(Peer(name), packed.header, parts)
            jobs.append(ComputeJob(Peer(name), packed.header, taken, 0, "kind"))
        held._caches[Peer(name)][7].done = 1
    del jobs[2]
    made._compute(jobs)
    assert [each.error for each in jobs] == [None, None, "the computation failed: CacheLost"]
