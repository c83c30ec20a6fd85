"""Messages on the links of fat trees and tori, worked out by hand."""

import dataclasses
import json
import math

import pytest

from seqpar.balance import Cluster, FatTree, Torus
from seqpar.simulate.recording.program import ShardExchange, Wait
from tests.unit.simulate.playback.test_play import FAST, cluster, ends, receive, send


def alone(*messages, on):
    """Return when each message of 10 seconds ends, of (source, target), all at once."""
    programs = [[] for _ in range(on.ranks)]
    for source, target in messages:
        programs[source], programs[target] = send(10, target), receive(10, source)
    found = ends(programs, on)
    return [found[target] for _, target in messages]


@pytest.mark.parametrize(("oversubscription", "end"), [(1.0, 10.0), (2.0, 10.0), (4.0, 20.0)])
def test_messages_share_the_uplinks_of_a_leaf(oversubscription, end):
    """Four nodes per leaf: uplinks carry four, two or one message at full rate."""
    on = dataclasses.replace(cluster(8, 1), fabric=FatTree(4, oversubscription))
    assert alone((0, 4), (1, 5), on=on) == [end, end]
    assert alone((0, 1), (2, 3), (4, 5), on=on) == [10.0] * 3  # within a leaf
    assert alone((0, 1), (2, 6), on=on) == [10.0, 10.0]


def test_uplinks_may_be_slower_than_one_nic():
    on = dataclasses.replace(cluster(4, 1), fabric=FatTree(2, 8.0))
    assert alone((0, 2), on=on) == [40.0]
    assert alone((0, 2), (3, 1), on=on) == [40.0, 40.0]  # full duplex


def test_rails_are_leaves_of_their_own():
    """Two devices and NICs per node, two nodes per leaf: a rail's uplinks carry half a message."""
    on = dataclasses.replace(cluster(2, 2, nics=2), fabric=FatTree(2, 4.0, rails=True))
    assert alone((0, 2), (1, 3), on=on) == [10.0, 10.0]
    assert alone((0, 3), on=on) == [20.0]
    on = dataclasses.replace(on, fabric=FatTree(2, 4.0))
    assert alone((0, 3), on=on) == [10.0]


def test_shards_use_all_rails():
    """Each rank's NIC carries the shards of its rail, as without a fabric."""
    shards = [tuple((peer, 8) for peer in range(8) if peer != rank) for rank in range(8)]
    programs = [[ShardExchange(0, x, x), Wait(0)] for x in shards]
    on = dataclasses.replace(cluster(4, 2, nics=2), inside=FAST)
    found = [
        ends(programs, dataclasses.replace(on, fabric=fabric))
        for fabric in (None, FatTree(2), FatTree(2, rails=True))
    ]
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


def test_a_torus_takes_the_shortest_way():
    on = dataclasses.replace(cluster(8, 1, latency=1.0), fabric=Torus((8,)))
    for target, hops in ((1, 1), (3, 3), (4, 4), (5, 3), (7, 1)):
        assert alone((0, target), on=on) == [hops + 10.0]
    on = dataclasses.replace(on, fabric=Torus((2, 4)))
    assert alone((0, 6), on=on) == [3 + 10.0]  # one row, two columns


def test_messages_share_a_torus_link():
    on = dataclasses.replace(cluster(6, 1, nics=4), fabric=Torus((6,)))
    assert alone((0, 2), (1, 3), on=on) == [20.0, 20.0]  # both on the link from 1 to 2
    assert alone((0, 2), (3, 1), on=on) == [10.0, 10.0]  # full duplex
    assert alone((0, 2), (3, 5), on=on) == [10.0, 10.0]
    none = dataclasses.replace(on, fabric=None)
    assert alone((0, 2), (1, 3), on=none) == [10.0, 10.0]


def test_a_fabric_is_read_from_files(tmp_path):
    for fabric in (None, FatTree(4, 2.0, rails=True), Torus((2, 2))):
        made = dataclasses.replace(cluster(4, 2), fabric=fabric)
        path = tmp_path / "cluster.json"
        made.to_json(path)
        assert Cluster.from_json(path) == made
    values = json.loads(cluster(4, 2).to_json())
    del values["fabric"]  # as in files of earlier versions
    assert Cluster.from_text(json.dumps(values)).fabric is None


@pytest.mark.parametrize(
    ("fabric", "message"),
    [
        ({"kind": "ring"}, "fabric.kind must be one of"),
        (["torus"], "fabric.kind must be one of"),
        ({"kind": "torus"}, "fabric: .*shape"),
        ({"kind": "torus", "shape": [3]}, "fabric.shape must have 4 nodes, .*got .3,"),
        ({"kind": "torus", "shape": [-4]}, "fabric.shape must be at least 1"),
        ({"kind": "fat_tree", "nodes_per_leaf": 0}, "fabric.nodes_per_leaf must be at least 1"),
        ({"kind": "fat_tree", "nodes_per_leaf": 2, "oversubscription": 0.5}, "at least 1, got 0.5"),
        ({"kind": "fat_tree", "nodes_per_leaf": 2, "oversubscription": math.inf}, "finite"),
        ({"kind": "fat_tree", "nodes_per_leaf": 2, "oversubscription": math.nan}, "finite"),
        ({"kind": ["torus"]}, r"fabric\.kind must be one of"),
        ({"kind": "fat_tree", "nodes_per_leaf": 2, "rail": True}, "fabric: .*rail"),
    ],
)
def test_a_wrong_fabric_is_named(fabric, message):
    values = json.loads(cluster(4, 2).to_json()) | {"fabric": fabric}
    with pytest.raises(ValueError, match=message):
        Cluster.from_text(json.dumps(values))


def test_only_fabrics_are_fabrics():
    with pytest.raises(TypeError, match="fabric must be a FatTree, a Torus or None"):
        dataclasses.replace(cluster(), fabric="torus")
