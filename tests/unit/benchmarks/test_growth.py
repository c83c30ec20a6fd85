"""The benchmark of growing cost: its cases, a row in miniature, and the page."""

import pytest

from benchmarks.costs import growth, growth_page
from benchmarks.costs.growth import Case
from seqpar.strategies.registry import LINEAR, SOFTMAX


def test_all_strategies_reach_16384_ranks():
    found = growth.cases()
    assert {x.strategy for x in found if x.ranks == 16384} == {*SOFTMAX, *growth.TRANSPORTS}
    assert {*LINEAR} <= {*growth.TRANSPORTS}
    assert len({*found}) == len(found)
    assert all(max(x.observed) < x.ranks for x in found)


@pytest.mark.parametrize(
    ("strategy", "kind", "ranks"),
    [
        *((x, "dense", 8) for x in growth.SOFTMAX),
        *((x, "linear", 32) for x in growth.TRANSPORTS),
    ],
)
def test_predicted_time_is_near_the_simulated_time(strategy, kind, ranks, monkeypatch):
    """The observed rank sends what `traffic` lists, which `row_of` checks."""
    monkeypatch.setattr(growth, "PLAYED_RANKS", ranks)
    row = growth.row_of(Case(strategy, kind, ranks, ranks * 4096))
    assert 0.7 < row["seconds"] / row["played_seconds"] < 1.05
    assert 0 < row["ideal_seconds"] < row["seconds"]
    assert row["peak_bytes"] > 0 and row["messages"] > 0


def test_the_chain_of_zeco_grows_with_ranks():
    chains = [growth.chain_seconds(Case("zeco", "linear", n, n * 4096)) for n in (8, 64, 512)]
    assert chains[0] > 0 and chains[2] / chains[1] == pytest.approx(8, rel=0.05)
    assert growth.chain_seconds(Case("lasp2", "linear", 64, 2**20)) == 0


def test_the_page_is_the_committed_result():
    rows = growth_page.rows_of()
    assert growth_page.page(rows) == growth_page.PAGE.read_text()
    expected = {f"{name}.png" for name in (*growth.SOFTMAX, *growth.TRANSPORTS)}
    assert {x.name for x in growth_page.IMAGES.iterdir()} == expected
    found = {Case(*(row[name] for name in Case._fields)) for row in rows}
    assert found == {*growth.cases()}
