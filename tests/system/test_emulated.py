"""Messages on links of a known rate, and messages of every size."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.network.emulated import Network, lacking
from benchmarks.network.nics import Hosts, sent_bytes
from seqpar import Routing
from seqpar.comm.messages.comm import Comm
from seqpar.comm.routing.relays import Relays

pytestmark = pytest.mark.alone

MIB = 1 << 20
BOTH_NICS = Routing(2, least_bytes=1)


def content(sender, receiver, index, count):
    return torch.arange(count, dtype=torch.int32) * (2 * index + 3) + sender * 31 + receiver


def everything(group, counts):
    """Send every peer a message of each count; return how many arrived changed."""
    comm = Comm.of(group)
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    sends = [
        (peer, content(comm.rank, peer, i, count))
        for i, count in enumerate(counts)
        for peer in peers
    ]
    recvs = [(peer, torch.zeros(count, dtype=torch.int32)) for count in counts for peer in peers]
    comm.exchange(sends, recvs, label="test").wait()
    expected = [
        content(peer, comm.rank, i, count) for i, count in enumerate(counts) for peer in peers
    ]
    return sum(not torch.equal(x, y) for (_, x), y in zip(recvs, expected, strict=True))


def both_ways(size):
    """Whether a message to the other rank and one from it arrived, and how long they took."""
    comm = Comm.of(dist.group.WORLD)
    sent, received = (
        torch.full((size,), comm.rank + 1, dtype=torch.uint8),
        torch.zeros(size, dtype=torch.uint8),
    )
    peer = 1 - comm.rank
    comm.exchange([(peer, sent[:1])], [(peer, received[:1])], label="test").wait()
    start = time.perf_counter()
    comm.exchange([(peer, sent)], [(peer, received)], label="test").wait()
    return bool((received == 2 - comm.rank).all()), time.perf_counter() - start


def fail():
    raise ValueError("as it should")


def test_messages_of_every_size_arrive_intact(pool):
    for counts in [
        (0,),
        (1, 0, 3),
        (MIB // 4 - 1, MIB // 4, MIB // 4 + 1),
        (5, 3 * MIB + 7, 0, 65_537),
    ]:
        assert pool(4, everything, counts) == [0] * 4


@pytest.mark.skipif(lacking() != "", reason=f"limited links need {lacking()}")
@pytest.mark.parametrize("topology", ["mesh", "switch"])
def test_a_link_reaches_its_configured_rate(topology):
    """Whatever else the machine does makes messages slower, never faster: the fastest one tells."""
    with Network(topology, ranks=2, rate_mbit=100) as network:
        rounds = [network(both_ways, 4 * MIB) for _ in range(3)]
        with pytest.raises(RuntimeError, match="as it should"):
            network(fail)
    assert all(arrived for messages in rounds for arrived, _ in messages)
    fastest = min(max(seconds for _, seconds in messages) for messages in rounds)
    # Headers take a few percent. Twice as long is a link that both directions share.
    assert 0.9 <= fastest / (4 * MIB * 8 / 100e6) <= 1.5, rounds


def test_unknown_topologies_are_refused():
    with pytest.raises(ValueError, match="topology"):
        Network("torus", 4)


def sent_by_nics(routing, size):
    """Send the other host a message from the first rank; the seconds that this rank needs, what
    arrives, and the bytes that its NIC sends."""
    comm = Comm.of(dist.group.WORLD)
    of_pass = comm.call()
    if routing is not None:
        of_pass = Relays.of(comm, routing).in_pass(of_pass, torch.device("cpu"), str(size))
    message = content(0, 2, 0, size // 4) if comm.rank == 0 else torch.zeros(size // 4).int()
    sends, recvs = {0: ([(2, message)], []), 2: ([], [(0, message)])}.get(comm.rank, ([], []))
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    of_pass.exchange(sends, recvs, label="test").wait()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, message, sent_bytes() - before


@pytest.mark.skipif(lacking() != "", reason=f"limited links need {lacking()}")
def test_a_routed_message_uses_both_nics_simultaneously():
    with Hosts(hosts=2, nics=2, rate_mbit=100) as network:
        network(sent_by_nics, BOTH_NICS, MIB)  # they ask what to relay
        rounds = [[network(sent_by_nics, x, MIB) for x in (None, BOTH_NICS)] for _ in range(3)]
    # Whatever else the machine does makes messages slower, never faster: the fastest ones tell.
    one_nic, both_nics = (
        min(max(seconds for seconds, *_ in ranks) for ranks in results)
        for results in zip(*rounds, strict=True)
    )
    assert one_nic >= 1.4 * both_nics, rounds
    straight, routed = rounds[0]
    assert straight[0][2] >= MIB > 20 * straight[1][2]  # headers and barriers
    assert all(MIB // 2 <= routed[rank][2] < 0.6 * MIB for rank in (0, 1))
    for _, message, _ in (straight[2], routed[2]):
        assert torch.equal(message, content(0, 2, 0, MIB // 4))
