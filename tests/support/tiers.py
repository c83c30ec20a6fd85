"""The tiers of tests: `make test` is cheap, and `make test-all`, which CI runs, tests everything.

A test marked `exhaustive` runs only in `make test-all`. If its property can be tested cheaply, an
unmarked test does so. A property test has two numbers of examples. `make test-all` chooses the
larger ones by the profile "thorough" of hypothesis. Of a product of parameters, `make test-all`
runs rows in which every pair of values occurs, and `make test-every-row` the other rows, marked
`every_row`.
"""

import collections
import heapq
import itertools
import os

import hypothesis
import pytest

# That a test may take in `make test`. Most take less than 5 s on two cores of an AMD EPYC, but
# machines differ in speed, and a slow one must not fail a test.
SECONDS = float(os.environ.get("SEQPAR_TEST_SECONDS", "20"))
MARKERS = ("exhaustive", "alone")  # of tests that may take longer
# Files that take longest, which begin first, so that all workers end at about the same time.
LONGEST = [
    *("test_demo.py", "test_compile.py", "test_families.py", "test_huggingface.py"),
    *("test_triton_backend.py", "test_huggingface_gradients.py", "test_huggingface_compile.py"),
    *("test_gpu_steps.py", "test_disagreements.py", "test_flash_attention.py"),
    *("test_images.py", "test_huggingface_sft.py"),
    *("test_launching.py", "test_lightning_attention.py", "test_nccl_rules.py"),
    *("test_aot.py", "test_recording.py", "test_liveness.py", "test_servers.py"),
    *("test_mistakes.py", "test_reliability.py", "test_emulated.py", "test_tracing.py"),
]


def register_profiles():
    """Make known both profiles of hypothesis; `--hypothesis-profile=thorough` chooses the other."""
    options = {"deadline": None, "derandomize": True, "print_blob": True}
    hypothesis.settings.register_profile("quick", max_examples=12, **options)
    hypothesis.settings.register_profile("thorough", max_examples=100, **options)
    hypothesis.settings.load_profile("quick")


def thorough():
    """Whether this is `make test-all`."""
    return hypothesis.settings.get_current_profile_name() == "thorough"


def examples(quick, all_of_them):
    """Decorate a property test: how many examples it draws in `make test` and `make test-all`."""
    return hypothesis.settings(max_examples=all_of_them if thorough() else quick)


def few_rows(together=1):
    """Decorate a test with several parameters: `make test` runs only some of its rows.

    In these rows every value of every parameter occurs, or with `together=2` every pair of values
    of different parameters. Other rows are exhaustive. `make test-all` runs those in which one more
    value meets the others for the first time: each pair, or with `together=2` each triple.
    """

    def decorate(test):
        test.together_in_quick_tier = together
        return test

    return decorate


def _choose_rows(rows, together, chosen=()):
    """Return those of `rows`, tuples of (parameter, value), that cover all combinations.

    Rows that are `chosen` already are among them.
    """
    met_in = {row: set(itertools.combinations(row, min(together, len(row)))) for row in rows}
    chosen = set(chosen)
    missing = set().union(*met_in.values()).difference(*(met_in[row] for row in chosen))
    # What a row adds only shrinks: a row that still adds the number by which it is first is best.
    queue = [(-len(met_in[row] & missing), i, row) for i, row in enumerate(rows)]
    heapq.heapify(queue)
    while missing:
        added, i, best = queue[0]
        adds = -len(met_in[best] & missing)
        if adds != added:
            heapq.heapreplace(queue, (adds, i, best))
            continue
        heapq.heappop(queue)
        chosen.add(best)
        missing -= met_in[best]
    return chosen


def covering(*factors, together=2):
    """Return rows of a product in which any `together` values of different factors meet."""
    rows = list(itertools.product(*map(range, map(len, factors))))
    numbered = {tuple(enumerate(row)): row for row in rows}
    chosen = {numbered[row] for row in _choose_rows(numbered, together)}
    return [
        tuple(factor[i] for factor, i in zip(factors, row, strict=True))
        for row in rows
        if row in chosen
    ]


def exhaustive_rows(*factors, together=None):
    """Return rows of a product for `parametrize`, of which those in CI have every pair of values.

    The other rows are for `make test-every-row`, or with `together` those of `covering`.
    """
    in_ci = covering(*factors)
    every_row = covering(*factors, together=together or len(factors))
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in in_ci] + [
        pytest.param(*row, marks=[pytest.mark.exhaustive, pytest.mark.every_row])
        for row in every_row
        if row not in in_ci
    ]


def quickly(first, *others):
    """Return the values of a parameter, of which only the first is in `make test`."""
    return [first, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in others)]


def exhaustive_seeds(quick, in_ci, all_of_them):
    """Return seeds for `parametrize`: `quick` of them are in `make test`, `in_ci` in CI."""
    exhaustive, every_row = pytest.mark.exhaustive, pytest.mark.every_row
    marks = [()] * quick + [exhaustive] * (in_ci - quick)
    marks += [(exhaustive, every_row)] * (all_of_them - in_ci)
    return [pytest.param(seed, marks=marks[seed]) for seed in range(all_of_them)]


def allowed_seconds():
    """Return what a test may take: more while several processes share a core."""
    return SECONDS * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items):
    """Let the longest files be first, and apply `few_rows`."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    _mark_rows(items)


def _mark_rows(items):
    """Apply `few_rows`. Rows that are marked already count for nothing."""
    tests = collections.defaultdict(dict)
    for item in items:
        test = getattr(item, "obj", None)
        if hasattr(test, "together_in_quick_tier") and not item.get_closest_marker("exhaustive"):
            tests[test][_values_of_row(item)] = item
    for test, rows in tests.items():
        together = test.together_in_quick_tier
        quick = _choose_rows(rows, together)
        for row in rows.keys() - quick:
            rows[row].add_marker("exhaustive")
        for row in rows.keys() - _choose_rows(rows, together + 1, quick):
            rows[row].add_marker("every_row")


def _values_of_row(item):
    """Return an item's value, or tuple of values, of each `parametrize` above its test."""
    values = []
    for i, mark in enumerate(item.iter_markers("parametrize")):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # Rows share the objects, which need not be hashable.
        values.append((i, tuple(id(item.callspec.params[name.strip()]) for name in names)))
    return tuple(values)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test that passed but took too long for `make test`, unless it is marked."""
    report = yield
    marked = any(item.get_closest_marker(name) for name in MARKERS)
    draws_more = thorough() and getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    if call.when != "call" or not report.passed or marked or draws_more:
        return report
    if call.duration > (allowed := allowed_seconds()):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} passed, but took {call.duration:.1f} s, and a test may take "
            f"{allowed:.1f} s in `make test`: make it cheaper, or mark it "
            "`@pytest.mark.exhaustive` and keep a cheaper test of the same property unmarked"
        )
    return report
