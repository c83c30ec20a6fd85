"""What each rank posts of messages that are divided among NICs."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Routing
from seqpar.comm.routing.routing import HELD, RECEIVED, SENT, Described, Nodes, RelayHop, Relaying


@st.composite
def exchanges(draw):
    """Nodes, and messages between them: (sender, receiver, elements, dtype), in any order."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    nics = draw(st.sampled_from([x for x in range(1, size + 1) if size % x == 0]))
    numbers = draw(st.permutations([i for i in range(count) for _ in range(size)]))
    chunk = draw(st.sampled_from([16, 100, 10_000]))
    nodes = Nodes(Routing(nodes=numbers, nics=nics, chunk_bytes=chunk), size * count)
    ends = [(a, b) for a, b in itertools.permutations(range(size * count), 2)]
    ends = [(a, b) for a, b in ends if nodes.of[a] != nodes.of[b]]
    sizes = st.tuples(st.integers(1, 200), st.sampled_from(["uint8", "bfloat16", "float64"]))
    drawn = st.lists(st.tuples(st.sampled_from(ends), sizes), max_size=12) if ends else st.just([])
    return nodes, [(*pair, *size) for pair, size in draw(drawn)]


@given(exchanges())
def test_every_element_arrives_where_it_should(exchange):
    """Two ends post the chunks between them in the same order; one is sent on after it came."""
    nodes, messages = exchange
    ranks = range(len(nodes.of))
    own = {
        rank: (
            [Described(b, n, dtype) for a, b, n, dtype in messages if a == rank],
            [Described(a, n, dtype) for a, b, n, dtype in messages if b == rank],
        )
        for rank in ranks
    }
    relaying = {
        rank: Relaying.of(nodes, rank, {mate: own[mate] for mate in nodes.mates(rank)})
        for rank in ranks
    }
    contents = [torch.rand(n, dtype=torch.float64) for *_, n, _ in messages]
    tables = {
        rank: {
            SENT: [x for (a, *_), x in zip(messages, contents, strict=True) if a == rank],
            RECEIVED: [
                torch.full_like(x, torch.nan)
                for (_, b, *_), x in zip(messages, contents, strict=True)
                if b == rank
            ],
            HELD: [torch.full((n,), torch.nan).double() for n, _ in relaying[rank].held],
        }
        for rank in ranks
    }
    hops = range(max(len(x.hops) for x in relaying.values()))
    padded = {rank: x.hops + [RelayHop([], [])] * len(hops) for rank, x in relaying.items()}
    for hop, (a, b) in itertools.product(hops, itertools.permutations(ranks, 2)):
        sends = [at for peer, at in padded[a][hop].sends if peer == b]
        recvs = [at for peer, at in padded[b][hop].recvs if peer == a]
        for source, target in zip(sends, recvs, strict=True):
            sent = tables[a][source.table][source.number][source.start : source.stop]
            tables[b][target.table][target.number][target.start : target.stop] = sent
    for rank in ranks:
        expected = [x for (_, b, *_), x in zip(messages, contents, strict=True) if b == rank]
        assert all(map(torch.equal, tables[rank][RECEIVED], expected))
        sizes = [(at.stop - at.start) for hop in relaying[rank].hops for _, at in hop.sends]
        assert relaying[rank].messages == len(sizes)


def test_each_nic_carries_an_equal_part():
    nodes, message = Nodes(Routing(node_size=4), 8), Described(6, 1 << 20, "bfloat16")
    carried, relayed = [], []
    for rank in range(4):
        known = {mate: ([message] if mate == 1 else [], []) for mate in range(4)}
        sends = [x for hop in Relaying.of(nodes, rank, known).hops for x in hop.sends]
        carried.append(sum(at.stop - at.start for peer, at in sends if peer >= 4))
    for rank in range(4, 8):
        known = {mate: ([], [Described(1, *message[1:])] * (mate == 6)) for mate in range(4, 8)}
        relayed.append(Relaying.of(nodes, rank, known).bytes)
    assert carried == [1 << 18] * 4
    assert sum(relayed) == 3 << 19 and relayed[2] == 0  # three quarters, to rank 6


def test_proxies_forward_chunks_while_receiving():
    """Rank 1 relays half of a message from rank 0 to rank 2, in 4 chunks."""
    nodes = Nodes(Routing(node_size=2, chunk_bytes=256), 4)
    known = {0: ([Described(2, 2048, "uint8")], []), 1: ([], [])}
    hops = Relaying.of(nodes, 1, known).hops
    assert [[peer for peer, _ in hop.recvs] for hop in hops] == [[0], [0], [0], [0], [], []]
    assert [[peer for peer, _ in hop.sends] for hop in hops] == [[], [3], [3], [3], [3], []]
