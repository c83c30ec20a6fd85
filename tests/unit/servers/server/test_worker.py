"""The order in which a server computes jobs, and in which thread."""

import asyncio
import threading

import pytest
import torch

from seqpar.servers.server.account import Client
from seqpar.servers.server.caches import CacheLost, Caches
from seqpar.servers.server.worker import ComputeJob, ThreadsByName, Worker
from seqpar.servers.wire.codec import pack
from tests.support.requests import random_request
from tests.unit.servers.server.test_caches import step

CPU = torch.device("cpu")
TASK = pack(random_request(0)).task


def job(name, session=0, request=None, task=TASK, **fields):
    client = Client(bytes([session]), name)
    return ComputeJob(client, task, request, 1, "kind", lambda: None, asyncio.Event(), **fields)


@pytest.fixture
def worker():
    """A worker whose threads do not run."""
    return Worker(CPU, 2**10)


def name_of(jobs):
    """Whose jobs a thread takes; it has then computed them."""
    (name,) = {each.client.name for each in jobs}
    return name


def test_a_name_waits_one_job_per_other_name(worker):
    """The order of turns follows from the jobs alone, whatever a machine's speed."""
    for session in range(128):
        worker.add(job("greedy", session))
    worker.add(job("honest"))
    turns = [worker._take(False) for _ in range(3)]
    assert [len(jobs) for jobs in turns] == [1, 1, 1]
    assert "honest" in map(name_of, turns[:2])
    for name in "bcd":
        for session in range(9):
            worker.add(job(name, session))
    worker.add(job("honest"))
    order = [name_of(worker._take(False)) for _ in range(len("bcd") + 2)]
    assert "honest" in order and len(set(order)) == len(order)


def test_sessions_of_a_name_take_turns(worker):
    jobs = [job("", session) for session in (0, 0, 0, 1, 2)]
    for each in jobs:
        worker.add(each)
    taken = worker._take(False)
    assert [each.client.session for each in taken] == [b"\0", b"\1", b"\2", b"\0", b"\0"]
    assert [each for each in taken if each.client.session == b"\0"] == jobs[:3]
    assert not worker.waiting


def test_new_names_do_not_overtake_waiting_ones(monkeypatch):
    clock = iter(range(0, 1000, 10))  # each turn takes longer than a name counts as active
    monkeypatch.setattr("seqpar.servers.server.worker.time.monotonic", lambda: next(clock))
    turns = ThreadsByName("", 1, print, threading.Lock())
    clients = {name: Client(b"", name) for name in "xyh"}
    turns.take({"h": clients["h"]})
    served = []
    for others in ("x", "y", "x", "y"):
        served.append(turns.take({name: clients[name] for name in (*others, "h")})[0].name)
    assert served.index("h") <= 2


def test_long_jobs_have_turns_of_their_own(worker):
    """A name that has short jobs all the time does not wait longer with its long ones."""
    for _ in range(4):
        worker.add(job("a", 1, cost=2**60))
        worker.add(job("b", 1, cost=2**60))
    order = []
    for _ in range(4):
        worker.add(job("a", 2))
        order += [name_of(worker._take(False)), name_of(worker._take(True))]
    assert order[1::2].count("a") == order[1::2].count("b") == 2


def test_a_job_is_withdrawn_until_it_begins(worker):
    first, second = job("a"), job("b")
    worker.add(first)
    worker.add(second)
    assert worker.withdraw(second) and not worker.withdraw(second) and worker.waiting == 1
    assert worker._take(False) == [first]
    assert not worker.withdraw(first) and worker.waiting == 0


def test_a_failing_step_fails_no_other_cache(worker):
    """Steps of one call: two of one cache, and one whose earlier step was not computed."""
    caches, jobs = Caches(2**20, CPU, "default"), []
    for name in ("honest", "cancelled"):
        for writes in range(2):
            packed = step(9, writes=writes, start=9 * writes)
            made = job(name, task=packed.task)
            parts = [x.tobytes() for x in packed.parts]
            made.request = caches.admit(made.client, packed.task, packed.step, parts)
            jobs.append(made)
    del jobs[2]
    worker._compute(jobs)
    assert [type(each.error) for each in jobs] == [type(None), type(None), CacheLost]
