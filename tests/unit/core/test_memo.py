"""A memo makes each result once, and keeps as many as it may."""

from seqpar.core.memo import Memo


def test_a_result_of_none_is_made_once():
    memo, made = Memo(), []
    for _ in range(2):
        assert memo("a", lambda: made.append(1)) is None
    assert made == [1]


def test_the_newest_are_kept():
    memo, made = Memo(2), []
    for key in "abcba":
        memo(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c", "a"]


def test_a_build_that_raises_is_tried_again():
    memo = Memo()
    for _ in range(2):
        try:
            memo("a", lambda: 1 // 0)
        except ZeroDivisionError:
            continue
        raise AssertionError
    assert memo("a", lambda: 3) == 3
