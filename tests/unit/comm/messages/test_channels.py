"""Communicators beside a group's own: who makes them, for which groups, and when they end."""

import copy
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from seqpar import Layout
from seqpar.comm.messages import channels
from seqpar.comm.messages.comm import Comm, SubComm
from tests.support.cases import module
from tests.support.fakes import fake_group
from tests.support.ranks import virtual

LAYOUT = Layout.zigzag(8, 2)
CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0)


class Options:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config, self._timeout = "default", timedelta(seconds=1)


class FakeNccl:
    """A backend with the interface of torch's for NCCL, and a group with it; it notes what it is
    asked."""

    Options = Options
    supports_coalescing = True

    def __init__(self, store, rank, size, options):
        self.options, self.calls = options, []
        self.made.append(self)

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer))

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer))

    def end(self):
        self.calls.append("end")
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def nccl(monkeypatch):
    """Torch's fake groups, as if their backend were NCCL, with streams of high priority: `made` has
    theirs and those of channels, `used` the groups whose communicators were made."""
    monkeypatch.setattr(FakeNccl, "made", [], raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    options = Options(is_high_priority_stream=True)
    options.config, options._timeout, used = "users'", timedelta(seconds=7), []
    own = FakeNccl(None, 0, 4, options)
    monkeypatch.setattr(channels, "_use", lambda group, _: used.append(group))
    monkeypatch.setattr(channels, "backend_of", lambda *_: own)
    monkeypatch.setattr(channels, "group_of", lambda backend, *_: backend)
    monkeypatch.setattr(channels, "start_coalescing", lambda group, _: group.calls.append("start"))
    monkeypatch.setattr(channels, "end_coalescing", lambda group, _: group.end())
    return SimpleNamespace(made=FakeNccl.made, used=used)


def test_channel_messages_count_for_the_group(nccl):
    with fake_group(rank=1, ranks=4) as group:
        comm = Comm.of(group).call()
        comm.join(GPU)
        channel, x = comm.channel("results"), torch.zeros(3)
        channel.exchange([(2, x)], [(0, x)], label="test").wait()
        assert nccl.made[1].calls == ["start", ("recv", 0), ("send", 2), "end"]
        assert (comm.sent_bytes, comm.sent_messages) == (12, 1)
        assert channel.numbers is comm.numbers
        assert channel.process_group is group and copy.deepcopy(channel) is channel


def test_a_subgroups_channel_is_the_wholes(nccl):
    with fake_group(rank=1, ranks=4) as group:
        comm = Comm.of(group)
        comm.join(GPU)
        column = SubComm(comm, [1, 3], "ring", "usp forward").channel("outer")
        column.exchange([(1, torch.zeros(1))], [], label="test").wait()
        assert nccl.made[1].calls == ["start", ("send", 3), "end"]


def test_channels_end_with_their_group(nccl):
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        comm.join(GPU)
        comm.channel("results")
        nccl.used.clear()
        del group, comm
    assert nccl.made[1].calls == ["shutdown"]


def test_a_group_sends_from_its_first_gpu(nccl):
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        comm.join(GPU)
        comm.join(OTHER_GPU)
        assert nccl.used == [group]
        comm.check_device("q", GPU)
        comm.check_device("q", CPU)
        with pytest.raises(ValueError, match=r"^q must be on cuda:1, from which .* on cuda:0$"):
            comm.check_device("q", OTHER_GPU)


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", CPU), ("cpu:gloo,cuda:gloo", GPU), ("cpu:gloo", GPU)]
)
def test_tensors_that_no_backend_sends_are_refused(monkeypatch, backends, device):
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
        assert not comm.sends_from(device)
        with pytest.raises(ValueError, match=rf"^x must be on .*\({backends}\).* on {device}$"):
            comm.check_device("x", device)


def test_one_rank_and_meta_tensors_send_nothing(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo")
    with fake_group(rank=0, ranks=1) as group:
        comm = Comm.of(group)
        for device in (GPU, OTHER_GPU):
            comm.check_device("q", device)
            comm.join(device)
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm("two", 0, 2, group)
        comm.check_device("q", torch.device("meta"))


def test_helper_tensors_are_on_the_groups_device(monkeypatch, nccl):
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        assert comm.device == CPU
        monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        assert comm.device == torch.device("cuda", 3)
        group.bound_device_id = OTHER_GPU
        assert comm.device == OTHER_GPU
        with pytest.raises(ValueError, match="cuda:0"):
            comm.check_device("q", GPU)
        comm.join(OTHER_GPU)
        assert comm.device == OTHER_GPU


def no_channel(comm):
    return comm.channel("results") is comm


def test_without_nccl_a_channel_is_the_comm_itself():
    assert virtual(2, no_channel) == [True, True]
    with fake_group(rank=0, ranks=2) as group:
        comm = Comm.of(group)
        assert comm.channel("results") is comm  # no GPU has joined
        comm.join(CPU)
        assert comm.channel("results") is comm


def check_fault(attn, comm):
    with pytest.raises(ValueError, match="q must have the 4 tokens"):
        attn(torch.zeros(3, 1, 8), torch.zeros(4, 1, 8), torch.zeros(4, 1, 8), LAYOUT, causal=True)


def gather(attn, comm):
    comm.all_gather(torch.zeros(1), label="test")


def unshard(attn, comm):
    LAYOUT.unshard(torch.zeros(4, 2), comm)


def remap(attn, comm):
    LAYOUT.remap(torch.zeros(4, 2), to=Layout.contiguous(8, 2), group=comm)


@pytest.mark.parametrize("use", [check_fault, gather, unshard, remap])
def test_a_groups_first_use_makes_its_communicator(monkeypatch, use):
    events = []
    monkeypatch.setattr(channels, "_use", lambda group, device: events.append(device))
    monkeypatch.setattr(channels, "post", lambda *_: events.append("messages") or [])
    monkeypatch.setattr(torch, "equal", lambda *_: True)  # nothing arrives
    with fake_group(rank=0, ranks=2) as group:
        use(module("ring", group, check_ranks=True), Comm.of(group))
    assert events[:2] == [CPU, "messages"]
