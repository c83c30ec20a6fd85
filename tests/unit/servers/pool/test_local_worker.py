"""When this process takes a task although servers are ready."""

from types import SimpleNamespace

import pytest
import torch

from seqpar.servers.pool.connection import PendingWork
from seqpar.servers.pool.local_worker import LocalWorker
from seqpar.servers.server.compute import hardware_of
from tests.support.requests import random_request

OWN = hardware_of(torch.device("cpu"))


def server(outstanding=0, rate=1.0, attempts=4, state="ready", device=OWN):
    """The attributes of a connection that `helps` reads, in tasks and tasks per second."""
    request = random_request(0)
    return SimpleNamespace(
        outstanding=outstanding * request.work,
        rate=None if rate is None else rate * request.work,
        attempts=[None] * attempts,
        state=state,
        device=device,
    )


@pytest.mark.parametrize(
    ("rate", "servers", "expected"),
    [
        (None, [server(), server(attempts=2)], True),  # all have others: it is tried
        (None, [server(), server(attempts=1)], False),
        (1.0, [server(outstanding=1)], True),
        (1.0, [server(outstanding=0)], False),  # as soon
        (0.5, [server(outstanding=2), server(outstanding=1)], False),
        (0.5, [server(outstanding=2), server(outstanding=1.5, rate=0.9)], True),
        (1.0, [server(outstanding=1), server(rate=None, outstanding=0)], False),  # it is new
        (1.0, [server(outstanding=0, rate=9.0, state="draining"), server(outstanding=1)], True),
        (9.0, [server(outstanding=9, device="another GPU")], False),
        (9.0, [server(rate=None)], False),
    ],
)
def test_a_task_is_taken_if_finished_sooner(rate, servers, expected):
    request = random_request(0)
    work = PendingWork.of(request)
    worker = LocalWorker(lambda: None, depth=1)
    worker._rate = None if rate is None else rate * request.work
    assert worker.helps(work, servers) == expected
    worker.close()


def test_it_respects_its_depth_and_takes_tasks_once():
    works = [PendingWork.of(x) for x in (random_request(0), random_request(1))]
    worker = LocalWorker(lambda: None, depth=1)
    worker._executor.shutdown()
    worker._executor = SimpleNamespace(submit=lambda *_: None)  # which never ends
    assert worker.helps(works[0], [server()])
    worker.take(works[0])
    assert not any(worker.helps(work, [server()]) for work in works)
    assert not LocalWorker(lambda: None, depth=0).helps(works[1], [server()])
