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


def test_overlapping_traces_end_independently():
    """Two threads may have them. The trace that began last records."""
    first, second = seqpar.trace(), seqpar.trace()
    first.__enter__()
    two = second.__enter__()
    assert hooks.trace is two
    first.__exit__(None, None, None)
    assert hooks.trace is two
    second.__exit__(None, None, None)
    assert hooks.trace is None
    with seqpar.trace() as outer:
        with seqpar.trace() as inner:
            assert hooks.trace is inner
        assert hooks.trace is outer
    with hooks.set(trace=outer.events):
        with seqpar.trace():
            pass
        assert hooks.trace is outer.events
