"""The pairs of varlen calls, as the kernels read them, against the definition."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between, slices_over
from seqpar.softmax.backends import pieces
from seqpar.softmax.backends.kernel_operands import aligned_heads
from seqpar.softmax.backends.varlen import varlen_work
from seqpar.strategies.all_gather import AllGather
from tests.support.varlen_kernels import Segments
from tests.unit.softmax.backends.test_any_slices import POSITIONS, slices_of

CPU = torch.device("cpu")


def pairs_of(slices):
    """Return how often the slices have each pair, by position."""
    seen = np.zeros((slices.query_rows, slices.key_rows), int)
    for (q0, q1), (k0, k1), (low, high) in zip(
        slices.q_rows, slices.k_rows, slices.bands, strict=True
    ):
        distance = slices.k_positions[None, k0:k1] - slices.q_positions[q0:q1, None]
        seen[q0:q1, k0:k1] += (low <= distance) & (distance <= high)
    return seen


def check(slices, make):
    """For backward, in which calls read no row twice, and for forward."""
    check_calls(slices, make, *varlen_work(slices, repeats_keys=True))
    calls, remaining = varlen_work(slices)
    check_calls(slices, make, calls, remaining)
    for call in calls:
        for rows in (call.queries, call.keys):
            local = np.arange(rows.reach[1])[rows.local(CPU)]
            assert np.unique(local).size == local.size
    return remaining


def check_calls(slices, make, calls, remaining):
    seen = np.zeros((slices.query_rows, slices.key_rows), int)
    for call in calls:
        rows, keys = (
            np.arange(size)[side.local(CPU)]
            for side, size in zip((call.queries, call.keys), seen.shape, strict=True)
        )
        for q, k, mask in make(*call.tables(1, CPU)[:5], 1.0).each():
            seen[np.ix_(rows[q], keys[k])] += mask.numpy()
    if remaining is not None:
        seen += pairs_of(remaining)
    assert (seen == pairs_of(slices)).all()


READINGS = pytest.mark.parametrize("make", [Segments, Segments.of_version_2], ids=["3, 4", "2"])


@READINGS
@given(POSITIONS, POSITIONS, st.integers(-50, 20), st.integers(0, 60))
@example([*range(10, 22)], [*range(8)], -15, 30)  # more rows than keys, and a limit to the left
@example([0, 10, 20], [0, 1, 2, 3, 11, 12, 13, 21], -50, 50)  # rows gain several keys each
def test_calls_have_each_pair_once(make, q_positions, k_positions, low, width):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "_MIN_RUN_ROWS", 1)
        check(slices_of(q_positions, k_positions, (low, low + width)), make)


@READINGS
@pytest.mark.parametrize("bounds", [(6, 0), (8, 3), (3, UNLIMITED), (UNLIMITED, 0)])
def test_every_hop_of_zigzag_is_a_call(make, bounds):
    mask = Mask(*bounds)
    layout = Layout.zigzag([0, 64, 65, 160], 8).geometry
    for rank in range(8):
        for owner in range(8):
            remaining = check(slices_between(layout, rank, layout, owner, mask), make)
            assert remaining is None or bounds[1]


@READINGS
@pytest.mark.parametrize("bounds", [(6, 0), (UNLIMITED, 0), (UNLIMITED, UNLIMITED)])
def test_keys_of_several_ranks(make, bounds):
    mask = Mask(*bounds)
    layout = Layout.zigzag([0, 64, 65, 160], 8).geometry
    for rank in range(8):
        for first in range(1, 8):
            owners = tuple((rank - first - i) % 8 for i in range(3))
            slices = slices_over(layout, rank, layout, owners, mask)
            check(slices, make)


@pytest.mark.parametrize(
    ("documents", "forward", "backward"), [(1, 6, 6), (32, 5, 6)], ids=["1 document", "32"]
)
def test_all_gather_makes_few_calls(documents, forward, backward):
    """One for a rank's own keys and one for each exchange, with short documents. Only later rows of
    a rank attend to keys of ranks behind it. If an exchange also brings keys of ranks before it,
    forward reads these twice, and backward makes two calls, as both do with one document."""
    layout = Layout.zigzag([i * 4096 // documents for i in range(documents + 1)], 8).geometry
    distances, mask = AllGather().distances(8), Mask(UNLIMITED, 0)
    assert len(distances) == 4
    counts = {True: [], False: []}
    for rank in range(8):
        exchanges = [[rank], *([(rank - d) % 8 for d in step] for step in distances)]
        for repeats_keys, of_ranks in counts.items():
            works = [
                varlen_work(slices_over(layout, rank, layout, tuple(owners), mask), repeats_keys)
                for owners in exchanges
            ]
            assert all(work.remaining is None for work in works)
            of_ranks.append(sum(len(work.calls) for work in works))
    assert (max(counts[True]), max(counts[False])) == (forward, backward)


@pytest.mark.parametrize(("steps", "calls"), [(2, 1), (4, 4)])
def test_one_call_reads_each_key_twice_at_most(steps, calls):
    """In each of two documents, later rows attend to more keys, which begin with the same ones. In
    one call, 2 steps would read 1.5 times the keys, and 4 steps 2.5 times."""
    rows = 40 // steps
    ranges = [
        (document, i * rows, (i + 1) * rows, 0, (i + 1) * rows, None, None)
        for document in range(2)
        for i in range(steps)
    ]
    layout = Layout.contiguous([0, 40, 80], 1).geometry
    slices = slices_between(layout, 0, layout, 0, Mask.of_ranges(ranges))
    assert check(slices, Segments) is None
    assert len(varlen_work(slices, repeats_keys=True).calls) == calls
    assert len(varlen_work(slices).calls) == steps


@READINGS
def test_more_keys_than_queries(make):
    layout, keys = (Layout.zigzag(tokens, 8).geometry for tokens in (100, 1000))
    for rank in range(8):
        for owner in range(8):
            check(slices_between(layout, rank, keys, owner, Mask(UNLIMITED, 0)), make)


@pytest.mark.parametrize(
    ("first", "strides"),
    [(4, (128, 64, 64, 1)), (0, (128, 64, 4, 1))],
    ids=["begins at 8 bytes", "steps by 8 bytes along its only head"],
)
def test_contiguous_operands_are_copied_to_aligned_addresses(first, strides):
    """Kernels read 16 bytes at a time; messages may begin with numbers of 4 bytes."""
    x = torch.arange(1024.0).bfloat16().as_strided((1, 2, 1, 64), strides, first)
    assert x.is_contiguous()
    found = aligned_heads(x, 64)
    assert found.equal(x) and found.storage_offset() == 0 and found.stride() == (128, 64, 64, 1)
