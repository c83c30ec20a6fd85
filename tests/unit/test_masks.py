"""Common masks: each against its definition, pair by pair in a dense table of a document."""

import enum
import itertools

import numpy as np
import pytest
import torch

from seqpar import Mask, masks
from tests.support.mask_cases import times_seen

LENGTHS = (0, 1, 12, 23)
CU = np.r_[0, np.cumsum(LENGTHS)]
BLOCKS = [(2, 0, 3), (2, 3, 5), (3, 4, 15), (3, 22, 23), (1, 0, 0)]


def of_image(document, i, j):
    return any(d == document and a <= i < b and a <= j < b for d, a, b in BLOCKS)


# What is called, and whether query i of a document of n tokens sees key j.
DEFINITIONS = {
    "causal": (masks.causal(CU), lambda d, n, i, j: j <= i),
    "causal window": (masks.causal(CU, 3), lambda d, n, i, j: 0 <= i - j <= 3),
    "full": (masks.full(CU), lambda d, n, i, j: True),
    "chunked": (masks.chunked(CU, 5), lambda d, n, i, j: j <= i and i // 5 == j // 5),
    "full chunks": (masks.chunked(CU, 5, causal=False), lambda d, n, i, j: i // 5 == j // 5),
    "images": (masks.image_blocks(CU, BLOCKS), lambda d, n, i, j: j <= i or of_image(d, i, j)),
    "images, window": (
        masks.image_blocks(CU, BLOCKS, window=2),
        lambda d, n, i, j: 0 <= i - j <= 2 or of_image(d, i, j),
    ),
    "global keys": (
        masks.global_keys(CU, window=3, keys=2),
        lambda d, n, i, j: j <= i and (i - j <= 3 or j < 2),
    ),
    "no global keys": (masks.global_keys(CU, 0, 0), lambda d, n, i, j: i == j),
    "frames": (masks.block_causal(CU, 4), lambda d, n, i, j: j // 4 <= i // 4),
    "frames, window": (
        masks.block_causal(CU, 4, window=1),
        lambda d, n, i, j: 0 <= i // 4 - j // 4 <= 1,
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_masks_are_their_definitions(name):
    ranges, sees = DEFINITIONS[name]
    Mask.of_ranges(ranges)  # they are disjoint
    expected = np.zeros((CU[-1], CU[-1]), int)
    for d, n in enumerate(LENGTHS):
        for i, j in itertools.product(range(n), repeat=2):
            expected[CU[d] + i, CU[d] + j] = sees(d, n, i, j)
    np.testing.assert_array_equal(times_seen(ranges, CU), expected)


# Parents and lengths of texts in depth-first order; one is empty.
TREES = [
    ([], []),
    ([-1], [4]),
    ([-1, 0, 1, 1, 0, -1, 5], [3, 2, 0, 4, 1, 2, 3]),
    ([-1, -1, -1], [2, 2, 2]),
    ([-1, 0, 1, 2, 3], [1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("parents", "lengths"), TREES)
def test_tree_texts_see_their_ancestors(parents, lengths):
    ranges, edges = masks.tree(parents, lengths), np.r_[0, np.cumsum(lengths)].astype(int)
    Mask.of_ranges(ranges)
    expected = np.zeros((edges[-1], edges[-1]), int)
    for j, length in enumerate(lengths):
        rows = slice(edges[j], edges[j + 1])
        expected[rows, rows] = np.tril(np.ones((length, length), int))
        above = parents[j]
        while above != -1:
            expected[rows, edges[above] : edges[above + 1]] = 1
            above = parents[above]
    np.testing.assert_array_equal(times_seen(ranges, [0, edges[-1]]), expected)
    assert len(ranges) <= len(parents)


def test_a_shared_prefix_is_a_two_level_tree():
    found = masks.shared_prefix(5, [3, 4], document=2)
    assert found == masks.tree([-1, 0, 0], [5, 3, 4], document=2)
    assert {row[0] for row in found} == {2}


class AttnMaskType(enum.Enum):
    """Named as MagiAttention's."""

    FULL = "full"
    CAUSAL = "causal"
    INVCAUSAL = "inv_causal"
    BICAUSAL = "bi_causal"


def magi(q_range, k_range, kind, tokens):
    """(T, T): a slice of MagiAttention, by its published definition."""
    (q0, q1), (k0, k1) = q_range, k_range
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    seen = (i >= q0) & (i < q1) & (j >= k0) & (j < k1)
    if kind in (1, 3):  # aligned at the bottom right
        seen &= j - (k1 - 1) <= i - (q1 - 1)
    if kind in (2, 3):  # and at the top left
        seen &= j - k0 >= i - q0
    return seen.astype(int)


@pytest.mark.parametrize("kind", range(4))
def test_magi_attentions_tables_are_understood(kind):
    names = ["full", "causal", "inv_causal", "bi_causal"]
    for q_range, k_range in itertools.product([(3, 9), (0, 4), (5, 5)], [(2, 12), (4, 7), (0, 1)]):
        expected = magi(q_range, k_range, kind, 12)
        for said in (kind, np.int32(kind), names[kind], list(AttnMaskType)[kind]):
            ranges = masks.from_magi([q_range], torch.tensor([k_range]), [said])
            if not isinstance(said, str | AttnMaskType):
                assert masks.from_magi([q_range], [k_range], torch.tensor([said])) == ranges
            np.testing.assert_array_equal(times_seen(ranges, [0, 12]), expected)
            Mask.of_ranges(ranges)


def test_magi_attention_tables_have_the_stated_documents():
    q, k = [(0, 4), (4, 10)], [(0, 4), (4, 8)]
    assert masks.from_magi(q, k, [1, 0], [0, 4, 10]) == [
        (0, 0, 4, 0, 4, None, 0),
        (1, 0, 6, 0, 4, None, None),
    ]
    with pytest.raises(ValueError, match=r"q_ranges\[1\] and k_ranges\[1\] must lie within one"):
        masks.from_magi(q, [(0, 4), (3, 8)], [1, 0], [0, 4, 10])


@pytest.mark.parametrize(("call", "message"), [
    (lambda: masks.causal(5, -1), "window must be at least 0, got -1"),
    (lambda: masks.chunked(5, 0), "chunk must be at least 1, got 0"),
    (lambda: masks.chunked(5, 2, None), "causal must be True or False, got None"),
    (lambda: masks.image_blocks(5, [(0, 3, 6)]), r"blocks\[0\] must lie within document 0, which"),
    (lambda: masks.image_blocks(5, [(1, 0, 1)]), r"blocks\[0\] must be of one of 1 documents"),
    (lambda: masks.image_blocks(5, [(0, 1)]), r"blocks\[0\] must be \(document, start, stop\)"),
    (lambda: masks.global_keys(5, 1, -1), "keys must be at least 0"),
    (lambda: masks.block_causal(5, 2, window=1.5), "window must be an integer, got 1.5"),
    (lambda: masks.tree([-1, 3], [1, 1]), r"parents\[1\] must be -1, .*depth-first.*got 3"),
    (lambda: masks.tree([-1, 0, -1, 0], [1] * 4), r"parents\[3\] must be -1, the text bef.*got 0"),
    (lambda: masks.tree([-1], [1, 2]), "parents must have 2 entries, one per text, got 1"),
    (lambda: masks.tree([-1], [-1]), "lengths must not be negative"),
    (lambda: masks.shared_prefix(3, [-1]), "branches must not be negative"),
    (lambda: masks.from_magi([(0, 1)], [], [0]), "must be equally long, got 1, 0 and 1"),
    (lambda: masks.from_magi([(3, 1)], [(0, 1)], [0]), "q_ranges must be pairs 0 <= start <= st"),
    (lambda: masks.from_magi([(0, 1)], 5, [0]), "k_ranges must be pairs 0 <= start <= stop"),
    (lambda: masks.from_magi([(0, 1)], [(0, 1)], [4]), r"attn_types\[0\] must be at most 3"),
    (lambda: masks.from_magi([(0, 1)], [(0, 1)], ["up"]), r"attn_types\[0\] must be one of"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_overlapping_images_are_refused_as_ranges():
    with pytest.raises(ValueError, match=r"ranges\[1\].* and ranges\[2\].* both have"):
        Mask.of_ranges(masks.image_blocks(9, [(0, 1, 5), (0, 3, 7)]))
