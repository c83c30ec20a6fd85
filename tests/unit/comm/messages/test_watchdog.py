"""Errors of a backend that has its own watchdog, such as NCCL, are PeerErrors where torch raises
them: when messages are posted, and when they are waited for."""

import pytest
import torch
import torch.distributed as dist

from seqpar import PeerError
from seqpar.comm.messages import channels
from seqpar.comm.messages.comm import Comm

FAULT = dist.DistBackendError("NCCL communicator was aborted on rank 0")


def fail(*_):
    raise FAULT


class Aborted:
    wait = fail


@pytest.fixture
def comm(monkeypatch):
    monkeypatch.setattr(Comm, "process_group", None)
    monkeypatch.setattr(channels.Communicators, "coalesces", lambda *_: True)
    return Comm("nccl", 0, 2)


@pytest.mark.parametrize("post", [fail, lambda *_: [Aborted()]], ids=["posting", "waiting"])
def test_a_watchdogs_error_is_a_peer_error(comm, monkeypatch, post):
    monkeypatch.setattr(channels, "post", post)
    words = "rank 0 was in .* of ring forward of 2 ranks.*NCCL communicator was aborted"
    with pytest.raises(PeerError, match=words) as error:
        comm.exchange([(1, torch.zeros(3))], [], label="ring forward").wait()
    assert error.value.__cause__ is FAULT
