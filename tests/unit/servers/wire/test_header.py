"""Headers of requests: caps, and tables of slices."""

import dataclasses

import numpy as np
import pytest

from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.header import check_tables, form_of
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.payload import RequestError
from tests.support.requests import random_request


@pytest.mark.parametrize(("changes", "said"), [
    ({"q_rows": 2**62}, "q_rows"),
    ({"k_rows": 4097}, "k_rows"),
    ({"batch": 0}, "batch"),
    ({"batch": 4096, "q_rows": 4096}, "q_rows"),
    ({"heads": 2**40}, "heads"),
    ({"heads": 0}, "heads"),
    ({"heads": 3}, "multiple"),
    ({"dim": 0}, "dim"),
    ({"value_dim": 2**32}, "value_dim"),
    ({"slices": 2**62}, "slices"),
    ({"scale": float("nan")}, "scale"),
    ({"scale": float("-inf")}, "scale"),
    ({"softcap": -1.0}, "softcap"),
    ({"softcap": float("inf")}, "softcap"),
    ({"q_rows": 4096, "heads": 1024, "kv_heads": 1, "dim": 1024}, "payload"),
    ({"q_rows": 2048, "heads": 1024, "kv_heads": 1, "dim": 1, "value_dim": 4}, "result"),
])  # fmt: skip
def test_headers_above_a_cap_are_refused_by_name(changes, said):
    task = dataclasses.replace(pack(random_request(0)).task, **changes)
    with pytest.raises(RequestError, match=said):
        form_of(task).check(Limits(tokens=4096, bytes=2**24))


def tables(**changes):
    table = {"q": (0, 4), "k": (0, 8), "band": (-9, 0)} | changes
    row = [*table["q"], *table["k"], *table["band"]]
    q = np.array(changes.get("q_positions", [4, 5, 6, 7]), np.int32)
    k = np.array(changes.get("k_positions", range(8)), np.int32)
    check_tables(np.array([row] * changes.get("times", 1), np.int64), q, k)


@pytest.mark.parametrize(("changes", "said"), [
    ({"q": (0, 5)}, "q rows"),
    ({"q": (-1, 4)}, "q rows"),
    ({"q": (2, 2)}, "q rows"),
    ({"k": (3, 2)}, "k rows"),
    ({"k": (0, 2**62)}, "k rows"),
    ({"q_positions": [4, 5, 5, 7]}, "q_positions"),
    ({"q_positions": [4, 6, 5, 7]}, "q_positions"),
    ({"q_positions": [-4, 5, 6, 7]}, "q_positions"),
    ({"k_positions": [0, 1, 2, 3, 4, 5, 7, 6]}, "k_positions"),
    ({"band": (1, 0)}, "bands"),
    ({"band": (-(2**62), 0)}, "bands"),
    ({"times": 3}, "overlap"),
])  # fmt: skip
def test_tables_that_leave_their_rows_are_refused(changes, said):
    tables()
    tables(times=2)  # as a causal mask and a prefix
    with pytest.raises(RequestError, match=said):
        tables(**changes)


def test_positions_may_fall_between_slices():
    check_tables(np.array([[0, 2, 0, 2, -9, 0], [2, 4, 2, 4, -9, 0]]),
                 np.array([0, 1, 0, 1], np.int32), np.array([0, 1, 0, 1], np.int32))  # fmt: skip
