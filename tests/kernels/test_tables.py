"""The tables of tiles: their blocks in order, their bytes, and the time to build them."""

import gc
import itertools
import time
import weakref

import numpy as np
import pytest
import torch
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.flash_attention import configs

from seqpar import Layout
from seqpar.layout.masks.mask import Mask, slices_between, slices_over
from tests.kernels.flash_cases import SMALL, Operands, assert_close

HOPPER = configs.TABLE["sm_90", "half", 128]
CPU = torch.device("cpu")
SEPARATE = kernels.Config(16, 32, 4, 1, cut_resources=(4, 1))


def causal(geometry, window=(-1, -1), prefix=None):
    return Mask.of(True, window, None if prefix is None else np.array(prefix), geometry)


def between(layout, q_rank, k_rank, **options):
    geometry = layout.geometry
    return slices_between(geometry, q_rank, geometry, k_rank, causal(geometry, **options))


def one_rank(edges, **options):
    return between(Layout.contiguous(edges, 1), 0, 0, **options)


def gathered(layout, rank):
    """One rank's queries over the keys of all other ranks."""
    geometry, others = layout.geometry, tuple(x for x in range(layout.ranks) if x != rank)
    return slices_over(geometry, rank, geometry, others, causal(geometry))


def of_ranges(tokens):
    """Queries attend to the first keys, to keys some way back, and to a window."""
    geometry, third = Layout.contiguous([0, tokens], 1).geometry, tokens // 3
    ranges = [
        (0, third, tokens, 0, third // 2, None, None),
        (0, 2 * third, tokens, third // 2, third, None, None),
        (0, 0, tokens, third, tokens, -third // 2, 0),
    ]
    return slices_between(geometry, 0, geometry, 0, Mask.of_ranges(ranges))


# name -> the slices of a mask over about that many tokens
MASKS = {
    "causal": lambda n: one_rank([0, n]),
    "window": lambda n: one_rank([0, n], window=(n // 4 + 3, 0)),
    "prefix": lambda n: one_rank([0, n], prefix=[n // 5]),
    "packed": lambda n: one_rank([0, n // 3 + 1, n // 2, n]),
    "ranges": of_ranges,
    "zigzag, own": lambda n: between(Layout.zigzag([0, n], 3), 1, 1),
    "zigzag, another rank's": lambda n: between(Layout.zigzag([0, n // 5, n], 3), 1, 2),
    "zigzag, gathered": lambda n: gathered(Layout.zigzag([0, n], 3), 1),
    "striped": lambda n: between(Layout.striped([0, n], 3, stripe=4), 1, 2),
    "striped, gathered": lambda n: gathered(Layout.striped([0, n // 5, n], 3, stripe=4), 1),
}
# Tiles have several runs of full blocks, and from tile to tile more than the last count changes.
SEPARATE_LISTS = {"ranges", "striped, gathered"}


def full_blocks(slices, tile, columns, transposed):
    """Return the full blocks of a tile, slice by slice and in the order of columns."""
    bands, sides = slices.bands, (slices.q_rows, slices.k_rows)
    positions = slices.q_positions.astype(np.int64), slices.k_positions.astype(np.int64)
    if transposed:
        sides, positions, bands = sides[::-1], positions[::-1], -bands[:, ::-1]
    blocks = []
    for rows, (first, stop), (low, high) in zip(*sides, bands, strict=True):
        if rows[0] <= tile[0] and tile[1] <= rows[1]:
            of_slice, (top, bottom) = positions[1][first:stop], positions[0][[tile[0], tile[1] - 1]]
            start = first + np.searchsorted(of_slice, bottom + low)
            end = first + np.searchsorted(of_slice, top + high, side="right")
            blocks += range(start, end - columns + 1, columns)
    return blocks


def walked(launch):
    """Return the full blocks of each tile."""
    full = launch.full.tolist()
    return {(a, b): full[first:stop] for a, b, first, stop, *_ in launch.tiles.tolist()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_walk_full_blocks_in_order(name, transposed):
    slices, entries = MASKS[name](500), 0
    for rows, columns in itertools.product([4, 16], [1, 8, 32]):
        config = kernels.Config(rows, columns, 4, 1)
        (launch,) = kernels.backward_launches(slices, config, CPU, transposed)
        tiles = walked(launch)
        for tile, blocks in tiles.items():
            assert blocks == full_blocks(slices, tile, columns, transposed)
        assert launch.full.numel() <= sum(map(len, tiles.values()))
        entries += launch.full.numel()
    assert entries > 100


@pytest.mark.parametrize("name", MASKS)
def test_masks_equal_the_reference(name):
    slices = MASKS[name](80)
    x = Operands.draw(slices)
    for config in (SMALL, SEPARATE):
        assert_close(x.computed(slices, config), x.expected(slices), torch.float32)


def built(slices):
    """Return all launches of forward and backward, with Hopper's configurations."""
    (forward,) = kernels.forward_launches([slices], HOPPER.forward, CPU)
    backward = kernels.backward_launches(slices, HOPPER.backward_kv, CPU, True)
    return *forward, *backward, *kernels.backward_launches(slices, HOPPER.backward_q, CPU, False)


def table_bytes(launches):
    storages = [x.untyped_storage() for launch in launches for x in launch.arrays]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def test_tables_of_a_million_tokens_are_small():
    """A list of full blocks per tile took 1.9 GB and a minute."""
    slices = one_rank([0, 2**20])
    start = time.process_time()
    launches = built(slices)
    assert time.process_time() - start < 1  # 0.03 s on one core of an AMD EPYC
    assert table_bytes(launches) < 16e6


@pytest.mark.parametrize("name", sorted(MASKS.keys() - SEPARATE_LISTS))
def test_table_bytes_grow_linearly(name):
    small, middle, large = (table_bytes(built(MASKS[name](n))) for n in (2**15, 2**16, 2**17))
    assert middle < 2.1 * small and large < 2.1 * middle


def test_launches_have_only_lists_they_walk():
    for launch in built(one_rank([0, 2000])):
        assert launch.has_full == (launch.full.numel() > 0)
        assert launch.has_cut == (launch.cut.numel() > 0)


def test_launches_share_positions_until_freed():
    slices = one_rank([0, 300])
    launches = built(slices)
    positions = {x.data_ptr() for y in launches for x in (y.row_positions, y.column_positions)}
    assert len(positions) == 1
    freed = weakref.ref(launches[0].row_positions)
    gc.collect()
    gc.disable()
    try:
        del launches, slices
        assert freed() is None
    finally:
        gc.enable()
