"""Which rows of tests with several parameters run in `make test` and in `make test-all`."""

import itertools
from pathlib import Path

import pytest

from tests.support import tiers


def test_the_longest_files_exist():
    """They are known by their names alone, which no other file has."""
    names = [file.name for file in Path(tiers.__file__).parents[1].rglob("test_*.py")]
    assert [names.count(name) for name in tiers.LONGEST] == [1] * len(tiers.LONGEST)


def test_every_pair_of_values_meets():
    factors = 6, 7, 2, 2, 3
    quick = tiers.each_value(factors)
    rows = [*quick, *tiers.pairs(factors, quick)]
    assert len(quick) == 7 and len(rows) < 60  # of 504
    for i, j in itertools.combinations(range(5), 2):
        met = {(row[i], row[j]) for row in rows}
        assert met == set(itertools.product(range(factors[i]), range(factors[j])))


@pytest.mark.parametrize(("options", "passed"), [(["-m", "not exhaustive"], 4), ([], 13)])
def test_few_rows_have_every_value_and_every_pair(pytester, options, passed):
    """Rows with the value "w" are exhaustive by their own mark."""
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive")
    pytester.makeconftest("from tests.support.tiers import pytest_collection_modifyitems")
    pytester.makepyfile(
        """
        import pytest
        from tests.support.tiers import few_rows

        ran = []

        @few_rows()
        @pytest.mark.parametrize("a", [1, 2, 3])
        @pytest.mark.parametrize("b", [*"xyz", pytest.param("w", marks=pytest.mark.exhaustive)])
        @pytest.mark.parametrize("c", [None, True])
        def test_product(a, b, c): ran.append((a, b, c))

        def test_values():
            assert {a for a, *_ in ran} == {1, 2, 3} and {c for *_, c in ran} == {None, True}
            assert {b for _, b, _ in ran} in (set("xyz"), set("xyzw"))
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=passed, deselected=result.parseoutcomes()["deselected"])
