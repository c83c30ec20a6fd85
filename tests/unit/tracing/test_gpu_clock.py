"""A GPU's clock in traces and exposure, on a made-up GPU whose streams lag behind the host."""

import time
from types import SimpleNamespace

import pytest
import torch

import seqpar
from seqpar.comm.messages.comm import Comm
from seqpar.core.hooks import hooks, moment
from tests.support.fakes import fake_group

DEVICE = torch.device("cuda", 1)


class Gpu:
    """Work that the host queues, in seconds, by device, and a clock of its own for each."""

    def __init__(self):
        self.host, self.done = 100.0, {}

    def queue(self, device, seconds):
        self.done[device] = max(self.done.get(device, 0.0), self.host) + seconds

    def synchronize(self, device):
        self.host = max(self.host, self.done.get(device, 0.0))


class FakeEvent:
    gpu = None

    def __init__(self, enable_timing=False):
        self.device = None

    def record(self, stream):
        self.device = stream.device
        self.at = max(self.gpu.host, self.gpu.done.get(self.device, 0.0))

    def synchronize(self):
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, other):
        assert self.device == other.device
        return (other.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(FakeEvent, "gpu", made)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda x: SimpleNamespace(device=x))
    monkeypatch.setattr(time, "perf_counter", lambda: made.host)
    monkeypatch.setattr(time, "time", lambda: made.host + 1000.0)
    return made


def test_events_have_the_gpus_seconds(gpu):
    gpu.queue(DEVICE, 50.0)  # the trace begins while the GPU is still at work
    with seqpar.trace() as trace:
        for device in (DEVICE, torch.device("cuda", 0)):
            start = moment(device)
            gpu.queue(device, 2.0)
            gpu.host += 0.25
            hooks().trace.compute(start, moment(device), SimpleNamespace(area=7))
        gpu.queue(DEVICE, 30.0)
    found = [(event.start, event.stop) for event in trace.events]
    assert found == [(1150.0, 1152.0), (1100.25, 1102.25)]


def test_ranks_of_an_exposure_begin_together(gpu, monkeypatch):
    """The other rank comes 40 seconds later: the exchange of the group waits for it on the GPU."""

    def gather(comm, x, label):
        gpu.queue(DEVICE, 40.0)
        return [x]

    monkeypatch.setattr(Comm, "all_gather", gather)
    with fake_group(rank=0, ranks=2) as group:
        group.bound_device_id = DEVICE
        found = seqpar.exposure(lambda: gpu.queue(DEVICE, 3.0), group, rounds=1)
    assert found.rounds == ((3.0, 3.0, 3.0),)
