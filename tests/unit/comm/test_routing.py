"""Which way messages between nodes go, and what each rank relays of them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Routing
from seqpar.comm.routing import HELD, RECEIVED, SENT, Described, Nodes, Relaying, divided

WRONG = {
    "either node_size or nodes": [{}, {"node_size": 2, "nodes": [0, 0, 1, 1]}],
    "node_size must": [{"node_size": x} for x in (0, -1, 1.5, "2", True, 3, 8)],
    "nodes must": [{"nodes": x} for x in ("ab", [0.5], [0, 1], [0, 0, 0, 1], [], [[0, 1]], 7)],
    "nics must": [{"node_size": 2, "nics": x} for x in (0, -1, 3, 1.5, "all")],
    "least_bytes must": [{"node_size": 2, "least_bytes": x} for x in (0, -5, None, 1.5)],
}


@pytest.mark.parametrize(
    ("error", "options"), [(error, x) for error, found in WRONG.items() for x in found], ids=str
)
def test_what_makes_no_nodes_is_refused(error, options):
    with pytest.raises(ValueError, match=error):
        Nodes(Routing(**options), 4)


def test_a_routing_is_equal_to_one_that_says_the_same():
    one, other = Routing(nodes=[0, 1]), Routing(nodes=torch.tensor([0, 1]))
    assert one == other and hash(one) == hash(other) and str(one) == str(other)


@pytest.mark.parametrize(
    ("nics", "messages", "expected"),
    [  # messages: (size, NIC of the sender, NIC of the receiver)
        (2, [(8, 0, 0)], [(0, (0, 0), 4), (0, (1, 1), 4)]),
        (2, [(8, 0, 1)], [(0, (0, 0), 4), (0, (1, 1), 4)]),
        (3, [(8, 1, 1)], [(0, (1, 1), 3), (0, (0, 0), 3), (0, (2, 2), 2)]),
        (2, [(8, 0, 0), (8, 1, 1)], [(0, (0, 0), 8), (1, (1, 1), 8)]),  # as without routing
        (2, [(8, 0, 1), (8, 1, 0)], [(0, (0, 1), 8), (1, (1, 0), 8)]),
        (2, [(100, 0, 0), (104, 1, 1)], [(0, (0, 0), 100), (1, (1, 1), 104)]),  # nearly even
        (2, [(8, 0, 0), (4, 1, 1)], [(0, (0, 0), 6), (1, (1, 1), 4), (0, (1, 1), 2)]),
        (2, [(8, 0, 0), (8, 1, 0)], [(0, (0, 0), 8), (1, (1, 1), 8)]),  # one node relays
    ],
)
def test_messages_are_divided_among_nics(nics, messages, expected):
    sizes, used = [size for size, *_ in messages], [(a, b) for _, a, b in messages]
    assert divided(sizes, used, nics) == expected


@given(st.integers(1, 8), st.data())
def test_no_nic_carries_more_than_its_share(nics, data):
    nic = st.integers(0, nics - 1)
    drawn = st.lists(st.tuples(st.integers(1, 1000), nic, nic), min_size=1, max_size=20)
    messages = data.draw(drawn)
    sizes = [size for size, *_ in messages]
    pieces = divided(sizes, [(a, b) for _, a, b in messages], nics)
    for end in (0, 1):
        carried = [sum(n for _, ends, n in pieces if ends[end] == nic) for nic in range(nics)]
        assert max(carried) <= max(1.0625 * -(-sum(sizes) // nics), 1)
    for i, size in enumerate(sizes):
        assert sum(n for message, _, n in pieces if message == i) == size


def test_neighbours_share_nics():
    nodes = Nodes(Routing(node_size=4, nics=2), 8)
    assert [nodes.nic(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [nodes.proxy(rank, 0) for rank in range(8)] == [0, 1, 0, 1, 4, 5, 4, 5]
    assert [nodes.proxy(rank, 1) for rank in range(8)] == [2, 3, 2, 3, 6, 7, 6, 7]
    assert [Nodes(Routing(nodes=[7, 3, 7, 3]), 4).nic(rank) for rank in range(4)] == [0, 0, 1, 1]


@st.composite
def exchanges(draw):
    """Nodes, and messages between them: (sender, receiver, elements, dtype), in any order."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    nics = draw(st.sampled_from([x for x in range(1, size + 1) if size % x == 0]))
    numbers = draw(st.permutations([i for i in range(count) for _ in range(size)]))
    nodes = Nodes(Routing(nodes=numbers, nics=nics), size * count)
    ends = [(a, b) for a, b in itertools.permutations(range(size * count), 2)]
    ends = [(a, b) for a, b in ends if nodes.of[a] != nodes.of[b]]
    sizes = st.tuples(st.integers(1, 200), st.sampled_from(["uint8", "bfloat16", "float64"]))
    drawn = st.lists(st.tuples(st.sampled_from(ends), sizes), max_size=12) if ends else st.just([])
    return nodes, [(*pair, *size) for pair, size in draw(drawn)]


@given(exchanges())
def test_every_element_arrives_where_it_should(exchange):
    """Two ends post the parts between them in the same order; a part is sent on after it came."""
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
    for hop in range(3):
        for a, b in itertools.permutations(ranks, 2):
            sends = [at for peer, at in relaying[a].hops[hop].sends if peer == b]
            recvs = [at for peer, at in relaying[b].hops[hop].recvs if peer == a]
            for source, target in zip(sends, recvs, strict=True):
                sent = tables[a][source.table][source.number][source.start : source.stop]
                tables[b][target.table][target.number][target.start : target.stop] = sent
    for rank in ranks:
        expected = [x for (_, b, *_), x in zip(messages, contents, strict=True) if b == rank]
        assert all(map(torch.equal, tables[rank][RECEIVED], expected))
        sizes = [(at.stop - at.start) for hop in relaying[rank].hops for _, at in hop.sends]
        assert relaying[rank].messages == len(sizes)


def test_each_nic_carries_an_equal_part_of_one_message():
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
