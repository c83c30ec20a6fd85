"""Damaged, repeated, reordered and foreign replies of servers, and what clients make of them."""

import pytest

from seqpar.servers.wire.payload import Payload
from tests.support.tiers import exhaustive_seeds
from tests.tools.fuzz_replies import fuzz_replies


def test_changed_replies_give_no_wrong_result():
    fuzz_replies(0, 200, right=40)


@pytest.mark.parametrize("seed", exhaustive_seeds(0, 1))
def test_many_changed_replies_give_no_wrong_result(seed):
    fuzz_replies(seed, 400)


def test_a_client_that_compares_no_checksums_is_found(monkeypatch):
    monkeypatch.setattr(Payload, "check", lambda self, buffers, expected: self.check_sizes(buffers))
    with pytest.raises(AssertionError, match=r"result was wrong"):
        fuzz_replies(0, 1000)
