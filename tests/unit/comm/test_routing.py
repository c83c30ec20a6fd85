"""Which way messages between nodes go, and what each rank relays of them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Routing
from seqpar.comm.routing import HELD, RECEIVED, SENT, Described, Nodes, Relaying

WRONG = {
    "either node_size or nodes": [{}, {"node_size": 2, "nodes": [0, 0, 1, 1]}],
    "node_size must": [{"node_size": x} for x in (0, -1, 1.5, "2", True, 3, 8)],
    "nodes must": [{"nodes": x} for x in ("ab", [0.5], [0, 1], [0, 0, 0, 1], [], [[0, 1]], 7)],
    "proxies must": [{"node_size": 2, "proxies": x} for x in (0, -1, 3, 1.5, "all")],
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
    ("options", "ranks", "ends", "expected"),
    [
        ({"node_size": 2}, 4, (0, 2), [[0, 2], [0, 1, 3, 2]]),
        ({"node_size": 2}, 4, (0, 3), [[0, 2, 3], [0, 1, 3]]),
        ({"node_size": 2}, 6, (5, 0), [[5, 4, 0], [5, 1, 0]]),
        ({"nodes": [7, 3, 7, 3]}, 4, (0, 3), [[0, 1, 3], [0, 2, 3]]),
        ({"node_size": 4, "proxies": 2}, 8, (1, 4), [[1, 5, 4], [1, 3, 7, 4]]),  # 2 ranks a NIC
        ({"node_size": 4, "proxies": 1}, 8, (1, 4), [[1, 5, 4]]),
        ({"node_size": 1}, 2, (0, 1), [[0, 1]]),
    ],
)
def test_parts_pass_the_proxies_of_both_nodes(options, ranks, ends, expected):
    paths = Nodes(Routing(**options), ranks).paths(*ends)
    assert sorted(paths) == sorted(expected)


@st.composite
def exchanges(draw):
    """Nodes, and messages between them: (sender, receiver, elements, dtype), in any order."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    proxies = draw(st.sampled_from([x for x in range(1, size + 1) if size % x == 0]))
    numbers = draw(st.permutations([i for i in range(count) for _ in range(size)]))
    nodes = Nodes(Routing(nodes=numbers, proxies=proxies), size * count)
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


def test_each_proxy_sends_as_much_to_the_other_node():
    """What the NIC of each proxy carries of one message: its bytes, divided by the proxies."""
    nodes, message = Nodes(Routing(node_size=4), 8), Described(6, 1 << 20, "bfloat16")
    back = Described(1, *message[1:])
    carried = []
    for rank in range(4):
        known = {mate: ([message] if mate == 1 else [], []) for mate in range(4)}
        relaying = Relaying.of(nodes, rank, known)
        sends = [x for hop in relaying.hops for x in hop.sends]
        carried.append(sum(at.stop - at.start for peer, at in sends if peer >= 4))
    assert carried == [1 << 18] * 4
    known = {mate: ([], [back] if mate == 6 else []) for mate in range(4, 8)}
    assert [Relaying.of(nodes, rank, known).bytes for rank in range(4, 8)] == [
        0 if rank == 6 else 1 << 19 for rank in range(4, 8)
    ]
