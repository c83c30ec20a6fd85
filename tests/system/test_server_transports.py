"""The comparison of two checkouts' servers, in miniature: with this checkout itself."""

import pytest

from benchmarks.servers import transport

SIDES = {"ours": transport.ROOT, "theirs": transport.ROOT}


def row(kind, ours, theirs):
    return transport.with_target({"kind": kind, "seconds": {"ours": ours, "theirs": theirs}})


@pytest.mark.parametrize(
    ("kind", "ours", "found", "met"),
    [
        ("payload", [2.0, 4.0, 2.0], 0.5, False),
        ("payload", [1.0, 1.5, 1.0], 1.0, True),
        ("task", [1.0004, 9.0, 1.0004], 0.0004, True),
        ("task", [1.0006, 1.0006, 1.0], 0.0006, False),
        ("training", [1.2, 1.0, 1.2], 1.2, False),
    ],
)
def test_medians_of_rounds_are_held_to_bounds(kind, ours, found, met):
    result = row(kind, ours, [1.0, 1.0, 1.0])
    assert result["found"] == pytest.approx(found) and result["met"] == met


@pytest.mark.exhaustive
def test_a_checkout_is_compared_with_itself(monkeypatch):
    monkeypatch.setattr(transport, "BLOCKS", {"payload": 1, "task": 2})
    monkeypatch.setattr(transport, "PLACES", {"TCP with keys": True})
    begun = []
    rows = list(transport.calls(SIDES, 1, begun.append))
    assert len(begun) == 2 * 2 * 2
    assert [(x["place"], x["kind"]) for x in rows] == [
        ("TCP with keys", kind) for kind in ("payload", "task")
    ]
    for each in rows:
        assert set(each["transports"].values()) == {"grpc"}
        assert all(len(x) == 1 and x[0] > 0 for x in each["seconds"].values())
    text = transport.table([transport.with_target(each) for each in rows])
    assert "| TCP with keys | seconds more per task |" in text
