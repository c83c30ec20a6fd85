"""Messages of several tensors: nothing between them, and each aligned."""

import itertools

import pytest
import torch

from seqpar.softmax.wire.row_messages import Packing, RowFormat

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
KINDS = ((5,), HALF), ((), SINGLE), ((3,), DOUBLE)


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS)))
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 7, 3), (2, 5, 1), (1, 0, 3)])
def test_tensors_fill_the_message_and_are_aligned(sizes, kinds):
    message, tensors = Packing(sizes, [RowFormat(*x) for x in kinds]).empty(torch.device("cpu"))
    for i, (x, (shape, dtype)) in enumerate(zip(tensors, kinds, strict=True)):
        assert x.shape == (*sizes, *shape) and x.dtype == dtype and x.is_contiguous()
        assert x.data_ptr() % dtype.itemsize == 0
        x.fill_(i + 1)
    for i, x in enumerate(tensors):
        assert (x == i + 1).all()
    assert message.nbytes == sum(x.nbytes for x in tensors)
    copy = message.clone()
    assert copy.dtype == message.dtype and message.is_contiguous()


@pytest.mark.parametrize("kinds", [[((4,), HALF)], [((4,), SINGLE), ((), SINGLE)]])
def test_a_message_of_one_dtype_has_it(kinds):
    message, tensors = Packing((1, 2, 3), [RowFormat(*x) for x in kinds]).empty(torch.device("cpu"))
    assert message.dtype == kinds[0][1]
    assert message.untyped_storage()._cdata == tensors[0].untyped_storage()._cdata


def test_planes_of_a_message_are_contiguous():
    """So kernels, which read a number a row and head, take them as they are."""
    kinds = [RowFormat((5,), HALF), RowFormat((2,), SINGLE, planes=True)]
    message, (rows, pairs) = Packing((2, 3, 4), kinds).empty(torch.device("cpu"))
    assert pairs.shape == (2, 3, 4, 2)
    assert all(plane.is_contiguous() for plane in pairs.unbind(-1))
    rows.fill_(1.0)
    pairs.copy_(torch.arange(48.0).view(2, 3, 4, 2))
    assert (rows == 1).all() and (pairs.flatten() == torch.arange(48.0)).all()
    assert message.nbytes == rows.nbytes + pairs.nbytes
