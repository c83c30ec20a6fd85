"""The tiers of tests: `make test` is quick, and `make test-all`, which CI runs, tests everything.

A test marked `exhaustive` runs only in `make test-all`. If its property can be tested quickly, an
unmarked test does so. A property test has two numbers of examples: `make test-all` uses the larger
number, by hypothesis's profile "thorough". A row is a combination of the values of all parameters
of a test. `make test-all` runs rows in which every pair of values of two parameters occurs.
"""

import collections
import math

import hypothesis
import pytest
from allpairspy import AllPairs

# The files that take longest begin first, so that all workers end at about the same time.
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
    """Register both profiles of hypothesis; `--hypothesis-profile=thorough` chooses the second."""
    options = {"deadline": None, "derandomize": True, "print_blob": True}
    hypothesis.settings.register_profile("quick", max_examples=12, **options)
    hypothesis.settings.register_profile("thorough", max_examples=100, **options)
    hypothesis.settings.load_profile("quick")


def thorough():
    """Whether this is `make test-all`."""
    return hypothesis.settings.get_current_profile_name() == "thorough"


def examples(quick, all_of_them):
    """Decorate a property test with its numbers of examples for `make test` and `make test-all`."""
    return hypothesis.settings(max_examples=all_of_them if thorough() else quick)


def few_rows(pairs=True):
    """Decorate a test with several parameters, so that only some of its rows run.

    In `make test-all`, every pair of values of different parameters occurs. In `make test`, every
    value occurs; rows with an explicit mark `exhaustive` do not count. With `pairs=False`, for
    parameters that do not interact, every value occurs in both, but not every pair.
    """

    def decorate(test):
        test.few_rows = "pairs" if pairs else "values"
        return test

    return decorate


def pairs(factors, met=()):
    """Return rows so that every pair of values occurs in one of them or in a row of `met`.

    `factors` are the numbers of values of the parameters. A row is a tuple of indices of values.
    """
    values = [range(count) for count in factors]
    return [tuple(row) for row in AllPairs(values, previously_tested=[*map(list, met)])]


def each_value(factors):
    """Return the smallest number of rows in which every value occurs."""
    return [tuple(i % count for count in factors) for i in range(max(factors))]


def exhaustive_pairs(*factors):
    """Return rows for `parametrize` in which every pair of values occurs, for `make test-all`."""
    return [
        pytest.param(
            *(x[i] for x, i in zip(factors, row, strict=True)), marks=pytest.mark.exhaustive
        )
        for row in pairs([len(x) for x in factors])
    ]


def quickly(first, *others):
    """Return the values of a parameter; only the first value is in `make test`."""
    return [first, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in others)]


def every_third_pair(first, second):
    """Return every third pair of values for `parametrize`, shifted by one from value to value.

    `make test` runs one pair for each value of `first`.
    """
    return [
        pytest.param(x, y, marks=() if (j - i) % len(second) == 0 else pytest.mark.exhaustive)
        for i, x in enumerate(first)
        for j, y in enumerate(second)
        if (j - i) % 3 == 0
    ]


def exhaustive_seeds(quick, in_ci):
    """Return `in_ci` seeds for `parametrize`; `quick` of them are in `make test`."""
    marks = [()] * quick + [pytest.mark.exhaustive] * (in_ci - quick)
    return [pytest.param(seed, marks=marks[seed]) for seed in range(in_ci)]


def pytest_collection_modifyitems(config, items):
    """Move the longest files to the front, and drop rows of tests with `few_rows`."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    left_out = set(_rows_to_leave_out(items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _rows_to_leave_out(items):
    """Yield the rows that `few_rows` drops.

    Rows that only `make test` drops are marked `exhaustive` instead.
    """
    tests = collections.defaultdict(list)
    for item in items:
        if hasattr(getattr(item, "obj", None), "few_rows"):
            tests[item.obj].append(item)
    for test, rows in tests.items():
        yield from _rows_of_a_test(rows, test.few_rows == "pairs")


def _rows_of_a_test(items, with_pairs):
    values = [_values_of_row(item) for item in items]
    number = [
        {x: i for i, x in enumerate(dict.fromkeys(column))} for column in zip(*values, strict=True)
    ]
    numbered = {
        tuple(index[x] for index, x in zip(number, row, strict=True)): item
        for row, item in zip(values, items, strict=True)
    }
    factors = [len(index) for index in number]
    if len(factors) < 2 or len(numbered) < math.prod(factors):
        return  # rows that a user has named
    marked = {row for row, item in numbered.items() if item.get_closest_marker("exhaustive")}
    quick = _quick_rows(numbered.keys() - marked)
    chosen = {*quick, *(pairs(factors, quick) if with_pairs else each_value(factors))}
    for row, item in numbered.items():
        if row not in chosen:
            yield item
        elif row not in quick and row not in marked:
            item.add_marker("exhaustive")


def _quick_rows(rows):
    """Return a few of these rows, which are a product, so that every value occurs."""
    columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
    if not columns:
        return []
    chosen = each_value([len(column) for column in columns])
    return [tuple(x[i] for x, i in zip(columns, row, strict=True)) for row in chosen]


def _values_of_row(item):
    """Return the value, or tuple of values, that each `parametrize` of a test gives an item."""
    values = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # Rows share the objects, which need not be hashable.
        values.append(tuple(id(item.callspec.params[name.strip()]) for name in names))
    return values
