"""That a test which is too slow for `make test` fails, unless it is marked."""

import itertools
import re
from pathlib import Path

import hypothesis
import pytest

from tests.support import tiers

CONFTEST = """
from tests.support.tiers import pytest_runtest_makereport, register_profiles

register_profiles()
"""
SLOW = """
import time

import hypothesis
import pytest


def test_quick():
    pass


@hypothesis.given(hypothesis.strategies.booleans())
def test_slow_examples(_):
    time.sleep(0.15)


def test_slow():
    time.sleep(0.3)


def test_slow_and_wrong():
    time.sleep(0.3)
    assert False


@pytest.mark.exhaustive
def test_exhaustive():
    time.sleep(0.3)


@pytest.mark.alone
def test_alone():
    time.sleep(0.3)


@pytest.fixture
def slow():
    time.sleep(0.3)


def test_slow_setup(slow):
    pass
"""


@pytest.fixture
def outcomes(pytester, monkeypatch):
    """Run these tests where each may take 200 ms: how many pass and fail, and what is printed."""
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive\n    alone")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SLOW)

    def run(*options):
        profile = hypothesis.settings.get_current_profile_name()
        with monkeypatch.context() as patched:
            patched.setattr(tiers, "allowed_seconds", lambda: 0.2)
            result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
        hypothesis.settings.load_profile(profile)
        return result.parseoutcomes(), result.stdout.str()

    return run


def test_the_longest_files_exist():
    """They are known by their names alone, which no other file has."""
    names = [file.name for file in Path(tiers.__file__).parents[1].rglob("test_*.py")]
    assert [names.count(name) for name in tiers.LONGEST] == [1] * len(tiers.LONGEST)


def test_a_slow_test_fails_naming_the_marker(outcomes):
    counts, said = outcomes()
    assert counts == {"failed": 3, "passed": 4}
    slow = r"test_slow passed, but took \d\.\d s, and a test may take 0\.2 s in `make test`"
    assert re.search(slow, said)
    assert "mark it `@pytest.mark.exhaustive`" in said
    assert "test_slow_and_wrong passed" not in said


@pytest.mark.exhaustive
def test_only_property_tests_may_be_slow(outcomes):
    """They draw more examples there."""
    assert outcomes()[0] == {"failed": 3, "passed": 4}
    assert outcomes("--hypothesis-profile=thorough")[0] == {"failed": 2, "passed": 5}


@pytest.mark.parametrize("together", [1, 2, 3])
def test_so_many_values_meet_in_few_rows(together):
    factors = "abcdef", range(7), [True, False], [None, 1], "xy"
    rows = tiers.covering(*factors, together=together)
    assert {len(row) for row in rows} == {5} and len(rows) == len(set(rows))
    for some in itertools.combinations(range(5), together):
        met = {tuple(row[i] for i in some) for row in rows}
        assert met == set(itertools.product(*(factors[i] for i in some)))
    assert len(rows) <= {1: 7, 2: 48, 3: 110}[together]  # of 336


@pytest.mark.parametrize(("together", "passed"), [(1, 3), (2, 6)])
def test_few_rows_have_every_value(pytester, together, passed):
    """Rows with the value "w" are exhaustive by their own mark."""
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive\n    every_row")
    pytester.makeconftest("from tests.support.tiers import pytest_collection_modifyitems")
    pytester.makepyfile(
        f"""
        import pytest
        from tests.support.tiers import few_rows

        ran = []

        @few_rows({together})
        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", [*"xyz", pytest.param("w", marks=pytest.mark.exhaustive)])
        def test_product(a, b): ran.append((a, b))

        def test_values():
            assert {{a for a, _ in ran}} == {{1, 2}} and {{b for _, b in ran}} == set("xyz")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-m", "not exhaustive")
    result.assert_outcomes(passed=passed + 1, deselected=8 - passed)


def test_every_pair_occurs_outside_every_row(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive\n    every_row")
    pytester.makeconftest("from tests.support.tiers import pytest_collection_modifyitems")
    pytester.makepyfile(
        """
        import itertools
        import pytest
        from tests.support.tiers import few_rows

        ran = []

        @few_rows()
        @pytest.mark.parametrize("a", "xyz")
        @pytest.mark.parametrize("b", "xyz")
        @pytest.mark.parametrize("c", "xyz")
        def test_product(a, b, c): ran.append((a, b, c))

        def test_pairs():
            for i, j in itertools.combinations(range(3), 2):
                assert len({(row[i], row[j]) for row in ran}) == 9
        """
    )
    passed = [
        pytester.runpytest_inprocess("-p", "no:cacheprovider", "-m", rows).parseoutcomes()["passed"]
        for rows in ("not every_row", "every_row")
    ]
    assert 10 <= passed[0] <= 13 and sum(passed) == 27 + 1


@pytest.mark.parametrize(("load", "factor"), [(0.5, 1), (1, 1), (1.5, 1.5), (4, 4)])
def test_a_busy_machine_allows_more(monkeypatch, load, factor):
    """`load` is in processes a core."""
    monkeypatch.setattr(tiers.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(tiers.os, "getloadavg", lambda: (4 * load, 0.0, 0.0))
    assert tiers.allowed_seconds() == tiers.SECONDS * factor
