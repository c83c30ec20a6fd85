"""Checkpointing on ranks: the same bits, and neither messages nor attention a second time.

`test_compile.py` has the same of compiled models.
"""

import pytest

from tests.support.cases import STRATEGIES
from tests.support.checkpointing import assert_nothing_is_repeated, compared


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_attention_nor_its_messages_are_repeated(pool, strategy):
    assert_nothing_is_repeated(pool(2, compared, strategy))
