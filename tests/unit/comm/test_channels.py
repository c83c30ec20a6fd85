"""Communicators beside a group's own: who makes them, for which groups, and when they end."""

import copy
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from seqpar.comm.exchange import Comm
from seqpar.comm.subgroup import SubComm
from tests.support.fakes import fake_group
from tests.support.ranks import virtual

CPU = torch.device("cpu")


class Options:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config, self._timeout = "default", timedelta(seconds=1)


class FakeNccl:
    """A backend with the interface of torch's for NCCL, which notes what it is asked."""

    Options = Options
    supports_coalescing = True

    def __init__(self, store, rank, size, options):
        self.options, self.calls = options, []
        self.made.append(self)

    def allreduce(self, tensors):
        self.calls.append("allreduce")
        return SimpleNamespace(wait=lambda: None)

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer))

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer))

    def _start_coalescing(self):
        self.calls.append("start")

    def _end_coalescing(self):
        self.calls.append("end")
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def nccl(monkeypatch):
    """Torch's fake groups, as if their backend were NCCL; what was made, the groups' own first."""
    monkeypatch.setattr(FakeNccl, "made", [], raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    own, options = FakeNccl(None, 0, 4, Options()), Options()
    own.options, options.config, options._timeout = options, "users'", timedelta(seconds=7)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: own)
    return FakeNccl.made


def test_a_channel_is_made_once_by_all_ranks_with_the_groups_options(nccl):
    with fake_group(rank=1, ranks=4) as group:
        comm = Comm.of(group)
        comm.join(CPU)
        first, again = (comm.call().channel("results") for _ in range(2))
        assert first._channel is again._channel is nccl[1]
        assert nccl[0].calls == nccl[1].calls == ["allreduce"]
        options = nccl[1].options
        assert options.is_high_priority_stream
        assert (options.config, options._timeout) == ("users'", timedelta(seconds=7))
        assert options.global_ranks_in_group == [0, 1, 2, 3]
        assert comm.channel("other")._channel is nccl[2]


def test_a_channels_messages_go_through_it_and_count_as_the_groups(nccl):
    with fake_group(rank=1, ranks=4) as group:
        comm = Comm.of(group).call()
        comm.join(CPU)
        channel, x = comm.channel("results"), torch.zeros(3)
        channel.exchange([(2, x)], [(0, x)], label="test").wait()
        assert nccl[1].calls[1:] == ["start", ("recv", 0), ("send", 2), "end"]
        assert nccl[0].calls == ["allreduce"]
        assert (comm.sent_bytes, comm.sent_messages) == (12, 1)
        assert channel.numbers is comm.numbers
        assert channel.process_group is group and copy.deepcopy(channel) is channel


def test_a_subgroups_channel_is_the_wholes(nccl):
    with fake_group(rank=1, ranks=4) as group:
        comm = Comm.of(group)
        comm.join(CPU)
        column = SubComm(comm, [1, 3], "ring", "usp forward").channel("outer")
        column.exchange([(1, torch.zeros(1))], [], label="test").wait()
        assert nccl[1].calls[1:] == ["start", ("send", 3), "end"]


def test_channels_end_with_their_group(nccl):
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        comm.join(CPU)
        comm.channel("results")
        del group, comm
    assert nccl[1].calls == ["allreduce", "shutdown"]


def no_channel(comm):
    return comm.channel("results") is comm


def test_without_nccl_a_channel_is_the_comm_itself():
    assert virtual(2, no_channel) == [True, True]
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        assert comm.channel("results") is comm  # nobody has joined
        comm.join(CPU)
        assert comm.channel("results") is comm
