"""Which way messages between nodes go."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Routing
from seqpar.comm.routing.routing import Nodes, divided

WRONG = {
    "either node_size or nodes": [{}, {"node_size": 2, "nodes": [0, 0, 1, 1]}],
    "node_size must": [{"node_size": x} for x in (0, -1, 1.5, "2", True, 3, 8)],
    "nodes must": [{"nodes": x} for x in ("ab", [0.5], [0, 1], [0, 0, 0, 1], [], [[0, 1]], 7)],
    "nics must": [{"node_size": 2, "nics": x} for x in (0, -1, 3, 1.5, "all")],
    "least_bytes must": [{"node_size": 2, "least_bytes": x} for x in (0, -5, None, 1.5)],
    "chunk_bytes must": [{"node_size": 2, "chunk_bytes": x} for x in (0, -5, None, True)],
}


@pytest.mark.parametrize(
    ("error", "options"), [(error, x) for error, found in WRONG.items() for x in found], ids=str
)
def test_what_makes_no_nodes_is_refused(error, options):
    with pytest.raises(ValueError, match=error):
        Nodes(Routing(**options), 4)


def test_routings_with_equal_content_are_equal():
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
