"""The Triton kernels against their reference.

On a CPU they run in Triton's interpreter (fp32, fp16), on a GPU in bf16 too.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.flash_attention import reference
from seqpar.kernels.flash_attention.configs import KernelConfigs
from seqpar.kernels.flash_attention.tables import MIN_PART

from tests.kernels.flash_cases import (
    DEVICE,
    DTYPES,
    HOPPER,
    SMALL,
    Operands,
    assert_close,
    causal,
    drawn,
    forward,
    joined,
    slice_tables,
    table,
    zigzag_hops,
)
from tests.kernels.operands import far_apart
from tests.support.tiers import examples, few_rows


@settings(max_examples=3)
@drawn(20)
def test_random_slice_tables(slices, dtype, heads, dims, options, config):
    x = Operands.draw(
        slices, dtype, heads=heads[0], kv_heads=heads[1], dim=dims[0], value_dim=dims[1], **options
    )
    assert_close(x.computed(slices, config), x.expected(slices), dtype)


@pytest.mark.exhaustive
@settings(max_examples=10)
@drawn(50)
def test_more_random_slice_tables(slices, dtype, heads, dims, options, config):
    x = Operands.draw(
        slices, dtype, heads=heads[0], kv_heads=heads[1], dim=dims[0], value_dim=dims[1], **options
    )
    assert_close(x.computed(slices, config), x.expected(slices), dtype)


@examples(50, 300)
@given(
    slices=slice_tables(),
    rows=st.sampled_from([1, 4, 16]),
    columns=st.sampled_from([1, 4, 16]),
    transposed=st.booleans(),
)
def test_tables_cover_each_visible_pair_once(slices, rows, columns, transposed):
    expected = reference.visible_mask(slices).numpy().astype(int)
    expected = expected.T if transposed else expected
    for separate in (False, True):
        count = np.zeros_like(expected)
        config = kernels.Config(rows, columns, 4, 1, cut_resources=(4, 1) if separate else None)
        launches = kernels.backward_launches(slices, config, torch.device("cpu"), transposed)
        assert len(launches) <= 2
        for launch in launches:
            positions = [
                x.numpy()[:n].astype(int)
                for x, n in zip(launch.arrays[3:], expected.shape, strict=True)
            ]
            full, cut = launch.full.numpy(), launch.cut.numpy()
            for tile in launch.tiles.numpy():
                start, stop, full_start, full_stop, cut_start, cut_stop, _flags, _part = tile
                assert 0 < stop - start <= rows
                for column in full[full_start:full_stop]:
                    count[start:stop, column : column + columns] += 1
                for entry in range(cut_start, cut_stop):
                    column, column_stop, low, high, row_start, row_stop = cut[entry]
                    assert start <= row_start < row_stop <= stop
                    keys = slice(column, min(column_stop, column + columns))
                    distance = positions[1][keys] - positions[0][row_start:row_stop, None]
                    count[row_start:row_stop, keys] += (distance >= low) & (distance <= high)
        np.testing.assert_array_equal(count, expected)


@few_rows()
@pytest.mark.parametrize(("dtype", "rank"), [(dtype, i % 2 * 2) for i, dtype in enumerate(DTYPES)])
@pytest.mark.parametrize("config", [SMALL, HOPPER])
@pytest.mark.parametrize(
    ("tokens", "batch", "heads"),
    [(84, 1, (2, 1)), pytest.param(144, 2, (4, 2), marks=pytest.mark.exhaustive)],
)
def test_hops_continue_one_partial(dtype, rank, config, tokens, batch, heads):
    """Each query tile is finished in its own last hop.

    What passes between hops starts as NaN, and so does the result.
    """
    hops = zigzag_hops(tokens, 3, rank)
    x = Operands.draw(hops[0], dtype, batch, *heads, sinks=True)
    assert_close(x.computed(joined(hops), config, hops=hops), x.expected(joined(hops)), dtype)


def test_windowed_hops_skip_tiles_that_nothing_touches():
    positions = np.arange(64)
    hops = [
        table([(0, 64, start, start + 16, -3, -2)], positions, positions) for start in (0, 16, 32)
    ]
    x = Operands.draw(hops[0])
    out, lse = forward(x, hops, SMALL)
    expected_out, expected_lse, *_ = x.expected(joined(hops))
    assert_close((out, lse), (expected_out, expected_lse), torch.float32, ("out", "lse"))
    assert lse.isneginf().any() and (out[lse.isneginf()] == 0).all()


@few_rows()
@pytest.mark.parametrize("config", [SMALL, HOPPER])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "batch", "heads"), [(2, 1, 1), pytest.param(3, 2, 2, marks=pytest.mark.exhaustive)]
)
def test_columns_are_split_where_tiles_are_few(dtype, config, count, batch, heads):
    """Few queries over many keys: parts of the keys in programs of their own.

    A second launch merges them, hop by hop.
    """
    keys = 4 * MIN_PART * config.block_columns + 44
    rows, columns, band = range(keys, keys + 20), range(keys * count), (-keys - 150, keys)
    hops = [table([(0, 20, j, j + keys, *band)], rows, columns) for j in columns[::keys]]
    x = Operands.draw(joined(hops), dtype, batch, heads, dim=40, value_dim=48, sinks=True)
    names = ("out", "lse")
    for order in (hops, [joined(hops)]):
        assert_close(
            forward(x, order, config, programs=9), x.expected(joined(hops))[:2], dtype, names
        )
    launches = kernels.forward_launches(hops, config, DEVICE, programs=9)
    assert any(launch.parts > 1 for hop in launches for launch in hop)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "dims"),
    [
        (50, (2, 1), (40, 48)),
        pytest.param(70, (4, 2), (16, 16), marks=pytest.mark.exhaustive),
    ],
)
def test_one_pass_backward(dtype, tokens, heads, dims):
    slices = causal(tokens)
    x = Operands.draw(slices, dtype, 2, *heads, *dims, softcap=2.0)
    assert_close(x.computed(slices, one_pass=True), x.expected(slices), dtype)


@few_rows()
@pytest.mark.parametrize(
    "dims", [(16, 16), (40, 72), (80, 80), (128, 96), (192, 128), (256, 256), (1, 3)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype, dims):
    slices = causal(33)
    x = Operands.draw(slices, dtype, dim=dims[0], value_dim=dims[1], scale=dims[0] ** -0.5)
    expected = x.expected(slices)
    for config in {kernels.choose(kind, x.q, x.v) for kind in KernelConfigs._fields}:
        assert_close(x.computed(slices, config), expected, dtype)


def test_the_same_bits_whatever_the_neighbours():
    """A document's bits, forward and backward, are those it has alone."""
    n, before = 41, 23
    alone = causal(n)
    x = Operands.draw(alone, heads=2, kv_heads=1)
    positions = np.r_[np.arange(before), np.arange(n)]
    entries = [(0, before, 0, before, -5, 0), (before, before + n, before, before + n, -(2**40), 0)]
    packed = table(entries, positions, positions)
    y = Operands.draw(packed, heads=2, kv_heads=1, seed=1)
    for name in ("q", "k", "v", "dout", "dlse"):
        getattr(y, name)[:, before:] = getattr(x, name)
    for a, b in zip(x.computed(alone), y.computed(packed), strict=True):
        assert torch.equal(a, b[:, before:])
    for a, b in zip(y.computed(packed), y.computed(packed), strict=True):
        assert torch.equal(a, b)


def test_garbage_beyond_a_document_does_not_leak():
    """NaN in the rows of a neighbour, on both sides, reaches neither results nor gradients."""
    positions = np.r_[np.arange(19), np.arange(21), np.arange(19)]
    packed = table([(19, 40, 19, 40, -(2**40), 0)], positions, positions)
    x = Operands.draw(packed)
    expected = x.expected(packed)
    for name in ("q", "k", "v", "dout"):
        getattr(x, name)[:, :19] = torch.nan
        getattr(x, name)[:, 40:] = torch.nan
    out, lse, *gradients = x.computed(packed)
    for got, want in zip((out, lse, *gradients), expected, strict=True):
        assert_close([got[:, 19:40]], [want[:, 19:40]], torch.float32, ["packed"])


@pytest.mark.parametrize("tokens", [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs(tokens):
    slices = table([], range(tokens[0]), range(tokens[1]))
    x = Operands.draw(slices)
    out, lse, *gradients = x.computed(slices)
    assert (out == 0).all() and lse.isneginf().all() and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("stride", [2**22, 2**26])
def test_offsets_past_2_to_the_31(stride):
    """Rows so far apart that the last lies beyond 2**31 elements.

    Of the memory only what is touched is real.
    """
    n = 2**31 // stride + 8
    slices = table([(0, n, 0, n, -5, 0)], range(n), range(n))
    x = Operands.draw(slices, torch.float16, heads=1)
    y = far_apart(x, stride)
    config = kernels.Config(32, 32, 4, 1)
    for a, b in zip(x.computed(slices, config), y.computed(slices, config), strict=True):
        assert torch.equal(a, b)
