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
