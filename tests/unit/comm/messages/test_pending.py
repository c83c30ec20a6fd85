"""Messages that are under way hold their tensors no longer than until they have arrived."""

import weakref

import torch

from seqpar.comm.messages.comm import Arriving, Pending


def test_what_has_arrived_is_its_takers_alone():
    x = torch.zeros(3)
    arriving, known = Arriving([x], Pending([], [[(1, x)]])), weakref.ref(x)
    del x
    (taken,) = arriving.wait()
    assert taken is known()
    del taken
    assert known() is None
