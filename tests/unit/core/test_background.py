"""What runs beside a rank's computation: in a thread, or on a GPU in a stream, which stay."""

import contextlib
import os
import signal
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from seqpar.core import background
from seqpar.core.background import run_async
from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES


def test_a_thread_has_the_callers_mode_and_stays():
    found = []

    def function():
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        found.append((threading.current_thread(), *modes))

    for inference in (False, True, False):
        with torch.inference_mode(inference):
            run_async(function, torch.zeros(1))()
    names, modes, gradients = zip(*found, strict=True)
    assert threading.current_thread() not in names and all(x.is_alive() for x in names)
    assert modes == (False, True, False) and not any(gradients)


def test_an_asynchronous_error_is_raised_on_waiting():
    wait = run_async(lambda: 1 / 0, torch.zeros(1))
    with pytest.raises(ZeroDivisionError):
        wait()


def test_any_number_may_wait_for_each_other():
    barrier = threading.Barrier(20)
    waits = [run_async(lambda: barrier.wait(30) and None, torch.zeros(1)) for _ in range(20)]
    for wait in waits:
        wait()


def test_a_forked_process_has_threads_of_its_own():
    run_async(lambda: None, torch.zeros(1))()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
    if not child:
        signal.alarm(20)  # which ends it, should it wait for ever
        try:
            run_async(lambda: None, torch.zeros(1))()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def raise_during_an_exchange():
    run_async(lambda: threading.Event().wait() and None, torch.zeros(1))
    sys.exit(3)


def test_a_process_ends_during_an_exchange():
    process = PROCESSES.Process(target=raise_during_an_exchange)
    process.start()
    process.join(LIMIT)
    ended = process.exitcode
    process.kill()
    process.join()
    assert ended == 3


class Stream:
    """A CUDA stream that notes what it is told."""

    def __init__(self, device=None, priority=0):
        self.device, self.priority, self.told = device, priority, []

    def wait_stream(self, other):
        self.told.append(("wait", other))


def test_each_device_has_one_synchronised_stream(monkeypatch):
    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    device = torch.device("cuda", 5)
    recorded = []
    states = SimpleNamespace(device=device, record_stream=recorded.append)
    try:
        for call in range(2):
            side = background.side_stream(device)
            wait = run_async(lambda side=side: side.told.append("function"), states)
            assert side.told[-2:] == [("wait", current), "function"]
            assert recorded == [side] * (call + 1) and len(current.told) == call
            wait()
            assert current.told == [("wait", side)] * (call + 1)
        assert len(side.told) == 4 and side.priority < 0
    finally:
        background.side_stream.cache_clear()
