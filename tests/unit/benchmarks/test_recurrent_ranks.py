"""The benchmark of recurrent attention on ranks, in miniature."""

import pytest

from benchmarks.recurrent import ranks
from tests.support.commands import fork_spawned


@pytest.mark.exhaustive  # three processes start
def test_it_checks_and_times_both(tmp_path, monkeypatch):
    fork_spawned(monkeypatch, ranks)
    contenders = ranks.Contenders(str(tmp_path))
    rows = ranks.measure(contenders, "gated_delta", "tree", (96, 2, 8), rounds=1)
    contenders.end()
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    assert all(max(row["errors"].values()) <= ranks.LIMIT for row in rows)
    assert all(len(row["seconds"]["ranks"]) == 1 for row in rows)
