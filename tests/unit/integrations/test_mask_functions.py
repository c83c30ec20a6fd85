"""Mask functions of transformers, understood as ranges, against what they say of every pair."""

import numpy as np
import pytest
import torch

from seqpar import Mask, masks
from seqpar.integrations.mask_functions import ranges_of
from tests.support.mask_cases import times_seen
from tests.support.tiers import few_rows

utils = pytest.importorskip("transformers.masking_utils")

TOKENS = 24
# Of two rows of a batch: images, left padding, and packed sequences with their positions.
IMAGES = torch.tensor([[-1] * 4 + [0] * 5 + [1] * 3 + [-1] * 12, [-1] * 20 + [0] * 4])
PADDING = torch.ones(2, TOKENS, dtype=torch.bool)
PADDING[1, :6], PADDING[1, 15:17] = False, False
LEFT = torch.tensor([0, 6])
PACKED = torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 4 + [2] * 17])
POSITIONS = torch.tensor([[*range(9), *range(15)], [*range(3), *range(4), *range(17)]])
CAUSAL, FULL = utils.causal_mask_function, utils.bidirectional_mask_function


def packed(function):
    return utils.packed_sequence_compatibility_function(function, POSITIONS, PACKED)


FUNCTIONS = {
    "causal": CAUSAL,
    "bidirectional": FULL,
    "window": utils.sliding_window_causal_mask_function(5),
    "bidirectional window": utils.sliding_window_bidirectional_mask_function(4),
    "chunks": utils.chunked_causal_mask_function(7, LEFT),
    "images": utils.or_masks(CAUSAL, utils.blockwise_overlay(IMAGES)),
    "images, window": utils.or_masks(
        utils.sliding_window_causal_mask_function(3), utils.blockwise_overlay(IMAGES)
    ),
    "padding": utils.and_masks(CAUSAL, utils.padding_mask_function(PADDING)),
    "packed": packed(CAUSAL),
    "packed windows": packed(utils.sliding_window_causal_mask_function(4)),
    "packed chunks": packed(utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=int))),
    "all": utils.and_masks(
        utils.or_masks(
            utils.sliding_window_overlay(4), utils.blockwise_overlay(IMAGES), FULL, CAUSAL
        ),
        utils.or_masks(CAUSAL, utils.blockwise_overlay(IMAGES)),
        utils.padding_mask_function(PADDING),
    ),
    "a cache": utils.add_offsets_to_mask_function(
        utils.sliding_window_causal_mask_function(9), 10, 3
    ),
    "nothing": utils.or_masks(),
}


@few_rows()
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranges_match_the_function_on_every_pair(name, batch):
    function, queries, keys = FUNCTIONS[name], TOKENS, TOKENS
    if name == "a cache":
        queries, keys = 6, 19
    q, k = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    expected = torch.broadcast_to(function(batch, 0, q, k), q.shape).numpy()
    ranges = ranges_of(function, queries, keys, batch=batch)
    Mask.of_ranges(ranges)
    np.testing.assert_array_equal(times_seen(ranges, [0, queries], [0, keys]), expected)


def test_packed_sequences_are_documents():
    cu = [0, 3, 7, TOKENS]
    ranges = ranges_of(FUNCTIONS["packed windows"], TOKENS, batch=1, cu_seqlens=cu)
    assert Mask.of_ranges(ranges) == Mask.of_ranges(masks.causal(cu, window=3))
    with pytest.raises(
        ValueError, match="mask_function must not let a document attend to a different one"
    ):
        ranges_of(CAUSAL, TOKENS, cu_seqlens=cu)


def test_many_blocks_take_no_square_of_the_tokens():
    tokens = 40_000
    blocks = torch.arange(tokens)[None] // 8
    function = utils.or_masks(CAUSAL, utils.blockwise_overlay(blocks))
    assert len(ranges_of(function, tokens)) == 1 + tokens // 8


def test_unknown_functions_are_refused_by_name():
    def own(batch, head, q, k):
        return q >= k

    for function in (own, utils.and_masks(CAUSAL, own), lambda *_: True):
        with pytest.raises(ValueError, match="mask_function must be composed of functions of tra"):
            ranges_of(function, 5)
    with pytest.raises(ValueError, match="mask_function must be a function"):
        ranges_of(3, 5)


def test_a_function_that_changed_is_refused():
    """It has the name of one that is known, but shows one key less."""

    def inner_mask(batch, head, q, k):
        return k > q - sliding_window + 1

    sliding_window = 5
    inner_mask.__module__ = utils.__name__
    inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    with pytest.raises(ValueError, match="mask_function must be one that is understood: at query"):
        ranges_of(inner_mask, TOKENS)
