"""The numbers that a server reports, in the table, the live line and the metrics page."""

from dataclasses import fields, replace

import pytest

from seqpar.servers.server.counters import COUNTERS, HEADINGS, Status, Totals, cells, live_line
from seqpar.servers.wire import versions

BEFORE = Status(
    library="1", device="cpu", transports=["grpc"], seconds=10.0, clients=2, waiting=3, tasks=8,
    tokens=1000, bytes=10**9, refused=2, busy_seconds=5.0, batches=4, caches=1,
    cache_bytes=2 * 10**9, draining=False,
)  # fmt: skip
AFTER = replace(
    BEFORE, seconds=12.0, tasks=11, tokens=5000, bytes=5 * 10**9, refused=3, busy_seconds=6.0
)


def test_each_number_of_a_status_is_listed():
    numbers = [x.name for x in fields(Status)][3:]
    assert sorted(x.name for x in COUNTERS) == sorted(numbers)
    assert {x.name for x in fields(Totals)} < {x.name for x in COUNTERS if x.grows}


def test_each_version_carries_every_number():
    for version in versions.VERSIONS:
        reply = version.messages.StatusReply.DESCRIPTOR
        assert {x.name for x in reply.fields} == {x.name for x in fields(Status)}


def test_the_table_shows_totals():
    assert cells(BEFORE) == ["2", "8", "1000", "1.00", "3", "2", "50%", "1", "2.00"]
    assert len(HEADINGS) == len(cells(BEFORE))


def test_the_live_line_shows_rates():
    assert live_line(AFTER, BEFORE) == (
        "2 clients  2 tasks/s  2,000 tokens/s  2.00 GB/s  3 waiting  25% refused  50% busy"
    )


def test_metrics_are_all_counters():
    metrics = pytest.importorskip("seqpar.servers.server.metrics")
    families = list(metrics._StatusCollector(lambda: AFTER).collect())
    assert {x.name: x.type for x in families} == {
        f"seqpar_{x.name}": "counter" if x.grows else "gauge" for x in COUNTERS
    }
    assert families[1].samples[0].value == 11
