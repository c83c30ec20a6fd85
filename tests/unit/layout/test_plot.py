"""Pictures: the arrays behind them hold what the layout and the mask say, and files are written."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask
from seqpar.layout.plot import (
    causal_work,
    computing_ranks,
    held_fractions,
    plot_layouts,
    plot_masks,
)
from tests.support.cases import cu_seqlens, layouts, visible


@given(st.data())
def test_a_short_batch_has_one_column_per_token(data):
    layout = data.draw(layouts(data.draw(cu_seqlens(max_tokens=60)), data.draw(st.integers(1, 4))))
    drawn = held_fractions(layout)
    assert drawn.shape == (layout.ranks, layout.tokens)
    for rank in range(layout.ranks):
        assert np.flatnonzero(drawn[rank]).tolist() == layout.token_indices(rank).tolist()
        assert set(drawn[rank].tolist()) <= {0.0, 1.0}


def test_a_long_batch_shares_columns():
    layout = Layout.zigzag([0, 700, 1001], 3)
    drawn = held_fractions(layout, columns=100)
    size = np.bincount(np.arange(1001) * 100 // 1001)
    assert drawn.shape == (3, 100)
    np.testing.assert_allclose(drawn.sum(0), 1)
    np.testing.assert_allclose(drawn @ size, [layout.tokens_on(rank) for rank in range(3)])
    assert ((drawn > 0) & (drawn < 1)).any()


@given(st.data())
def test_a_drawn_mask_matches_brute_force(data):
    cu = data.draw(cu_seqlens(max_tokens=24))
    layout = data.draw(layouts(cu, data.draw(st.integers(1, 4))))
    causal = data.draw(st.booleans())
    window = data.draw(st.tuples(st.integers(-1, 9), st.integers(-1, 9)))
    lengths = [int(length) for length in np.diff(cu)]
    prefix = data.draw(st.none() | st.tuples(*[st.integers(0, length) for length in lengths]))
    left, right = (UNLIMITED if bound < 0 else bound for bound in window)
    drawn = computing_ranks(Mask(left, 0 if causal else right, prefix), layout)
    np.testing.assert_array_equal(drawn >= 0, visible(cu, cu, causal, window, prefix))
    for rank in range(layout.ranks):
        assert (drawn[layout.token_indices(rank).numpy()] <= rank).all()
        assert not (drawn == rank)[
            np.setdiff1d(np.arange(layout.tokens), layout.token_indices(rank))
        ].any()


def test_bars_show_the_area_of_a_mask():
    layout = Layout.striped([0, 30, 31, 90], 4, 4)
    drawn = computing_ranks(Mask(UNLIMITED, 0), layout)
    assert causal_work(layout).tolist() == [int((drawn == rank).sum()) for rank in range(4)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout.zigzag([0, 30, 90], 4),
        Layout.striped(np.arange(300) * 40, 48, 3),
        Layout.contiguous(1, 3),
        Layout.contiguous(0, 2),
    ],
    ids=["few", "many", "one token", "none"],
)
def test_any_layout_can_be_drawn(layout, tmp_path):
    layout.plot(tmp_path / "layout.png")
    assert (tmp_path / "layout.png").stat().st_size > 1000


def test_several_can_be_drawn_in_one_picture(tmp_path):
    layout = Layout.zigzag([0, 30, 90], 4)
    masks = {"causal": Mask(UNLIMITED, 0), "window": Mask(3, 3)}
    plot_masks(masks, layout, tmp_path / "masks.png")
    plot_layouts({"one": layout, "two": Layout.contiguous(90, 4)}, str(tmp_path / "layouts.png"))
    Mask(UNLIMITED, 0).plot(tmp_path / "mask.png", layout)
    assert all(
        (tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("masks", "layouts", "mask")
    )


def test_a_mask_over_a_long_batch_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="layout must have at most 2000 tokens to draw a mask, got 2001"
    ):
        Mask(UNLIMITED, 0).plot(tmp_path / "mask.png", Layout.contiguous(2001, 2))


def test_matplotlib_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib.*seqpar\[bench\]"):
        Layout.contiguous(4, 2).plot(tmp_path / "layout.png")
