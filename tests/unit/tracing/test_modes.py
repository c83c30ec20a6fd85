"""The modes of tracing end with their blocks."""

import pytest

import seqpar
from seqpar.core.hooks import Hooks, hooks


def test_nothing_is_recorded_outside_and_modes_end(pool):
    with (
        pytest.raises(KeyError),
        seqpar.trace() as trace,
        hooks.set(skip_messages=True),
        hooks.set(replace_compute=print),
    ):
        raise KeyError
    assert vars(hooks) == vars(Hooks()) and trace.events == []


def test_traces_that_overlap_end_each_by_itself():
    """As two threads may have them: the one that began last records."""
    first, second = seqpar.trace(), seqpar.trace()
    one = first.__enter__()
    two = second.__enter__()
    assert hooks.trace is two
    first.__exit__(None, None, None)
    assert hooks.trace is two
    second.__exit__(None, None, None)
    assert hooks.trace is None
    with seqpar.trace() as outer:
        with seqpar.trace():
            assert hooks.trace is not one
        assert hooks.trace is outer
