"""When home takes a task though servers are there."""

from types import SimpleNamespace

import pytest
import torch

from seqpar.servers.pool.local_worker import Home
from seqpar.servers.pool.work import PendingWork
from seqpar.servers.server.hardware import hardware_of
from tests.support.requests import random_request

OWN = hardware_of(torch.device("cpu"))


def link(outstanding=0, rate=1.0, attempts=4, state="ready", device=OWN):
    """What `helps` reads of a link; work and rate are in tasks, and tasks a second."""
    request = random_request(0)
    return SimpleNamespace(
        outstanding=outstanding * request.work,
        rate=None if rate is None else rate * request.work,
        attempts=[None] * attempts,
        state=state,
        device=device,
    )


@pytest.mark.parametrize(
    ("rate", "links", "expected"),
    [
        (None, [link(), link(attempts=2)], True),  # all have others: it is tried
        (None, [link(), link(attempts=1)], False),
        (1.0, [link(outstanding=1)], True),
        (1.0, [link(outstanding=0)], False),  # as soon
        (0.5, [link(outstanding=2), link(outstanding=1)], False),
        (0.5, [link(outstanding=2), link(outstanding=1.5, rate=0.9)], True),
        (1.0, [link(outstanding=1), link(rate=None, outstanding=0)], False),  # it is new
        (1.0, [link(outstanding=0, rate=9.0, state="draining"), link(outstanding=1)], True),
        (9.0, [link(outstanding=9, device="another GPU")], False),
        (9.0, [link(rate=None)], False),
    ],
)
def test_a_task_is_taken_if_finished_sooner(rate, links, expected):
    request = random_request(0)
    work = PendingWork.of(request)
    home = Home(lambda: None, depth=1)
    home._rate = None if rate is None else rate * request.work
    assert home.helps(work, links) == expected
    home.close()


def test_it_respects_its_depth_and_takes_tasks_once():
    works = [PendingWork.of(x) for x in (random_request(0), random_request(1))]
    home = Home(lambda: None, depth=1)
    home._executor.shutdown()
    home._executor = SimpleNamespace(submit=lambda *_: None)  # which never ends
    assert home.helps(works[0], [link()])
    home.take(works[0])
    assert not any(home.helps(work, [link()]) for work in works)
    assert not Home(lambda: None, depth=0).helps(works[1], [link()])
