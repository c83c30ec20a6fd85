"""Checkpointing on ranks: the same bits, and neither messages nor attention a second time.

`test_compile.py` has the same of compiled models.
"""

import pytest

from tests.support import ping_pong
from tests.support.cases import STRATEGIES
from tests.support.checkpointing import assert_nothing_is_repeated, compared


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_attention_nor_its_messages_are_repeated(pool, strategy):
    assert_nothing_is_repeated(pool(2, compared, strategy))


def test_nor_are_those_of_calls_in_two_parts(pool):
    ping_pong.assert_nothing_is_repeated(pool(2, ping_pong.compared))
