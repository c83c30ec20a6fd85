"""Layouts from positions, and from all that holds integers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from tests.support.cases import cu_seqlens

KINDS = ["contiguous", "zigzag", "striped"]


@given(st.data())
def test_documents_are_found_by_their_positions(data):
    rows = [data.draw(cu_seqlens(max_tokens=12)) for _ in range(data.draw(st.integers(1, 3)))]
    length = max(cu[-1] for cu in rows)
    rows = [[*cu, length] for cu in rows]  # the last document fills the row
    ids = [np.concatenate([np.arange(n) for n in np.diff(cu)]) for cu in rows]
    borders = np.concatenate([row * length + np.array(cu) for row, cu in enumerate(rows)])
    cu, kind, ranks = np.unique(borders), data.draw(st.sampled_from(KINDS)), 3
    layout = Layout.from_position_ids(torch.from_numpy(np.stack(ids)), ranks, kind)
    assert layout.cu_seqlens.tolist() == cu.tolist()
    expected = getattr(Layout, kind)(cu, ranks)
    assert all(layout.spans(rank) == expected.spans(rank) for rank in range(ranks))
    positions = torch.from_numpy(np.concatenate(ids))
    for rank in range(ranks):
        assert layout.shard(positions, rank).equal(layout.position_ids(rank))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("as_type", [list, np.asarray, torch.from_numpy])
def test_positions_and_cu_seqlens_take_any_integer_type(as_type, dtype):
    positions, cu = (np.array(x, dtype=dtype) for x in ([0, 1, 2, 0, 1, 0], [0, 3, 5, 6]))
    assert Layout.from_position_ids(as_type(positions), 2).cu_seqlens.tolist() == cu.tolist()
    for kind in KINDS:
        layout = getattr(Layout, kind)(as_type(cu), 2)
        assert layout.cu_seqlens.tolist() == cu.tolist() and layout.cu_seqlens.dtype == np.int64


def test_options_go_to_the_kind():
    layout = Layout.from_position_ids([0, 1, 2, 0, 1], 2, "striped", stripe=1, equal=True)
    assert layout.tokens_per_rank == [3, 3] and layout.documents == 3
    with pytest.raises(TypeError, match="stripe"):
        Layout.from_position_ids([0, 1], 2, "zigzag", stripe=1)
    assert Layout.from_position_ids([], 2).documents == 0


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1, 2, 3], "count up from 0 in each document, got 1 at index 0"),
        ([0, 1, 5, 6], "got 5 behind 1 at index 2"),
        ([0, 1, -1, 0], "got -1 behind 1 at index 2"),
        ([[0, 1, 2], [3, 4, 5]], "got 3 at row 1, column 0"),
        ([[0, 1], [0, 2]], "got 2 behind 0 at row 1, column 1"),
        ([[[0, 1]]], "of shape \\(T,\\) or \\(B, S\\), got shape \\(1, 1, 2\\)"),
        ([[0, 1], [0]], "of shape"),
        ([0.0, 1.0], "must be integers"),
        (torch.zeros(2, dtype=torch.bfloat16), "must be integers"),
        (torch.zeros(2, dtype=torch.bool), "must be integers"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "must be integers"),
        (None, "must be integers"),
        (3, "must be integers"),
        ("012", "must be integers"),
        ({0: 1}, "must be integers"),
    ],
)
def test_positions_must_count_up_from_0(positions, message):
    with pytest.raises(ValueError, match=f"position_ids.*{message}"):
        Layout.from_position_ids(positions, 2)


@pytest.mark.parametrize("kind", ["spans", "from_spans", None, "Zigzag", ["zigzag"]])
def test_a_kind_that_is_none_is_refused(kind):
    with pytest.raises(ValueError, match="kind must be one of contiguous, zigzag, striped"):
        Layout.from_position_ids([0, 1], 2, kind)
