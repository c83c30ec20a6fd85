"""A memo makes each result once, and keeps as many as it may."""

from types import SimpleNamespace

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


def test_threads_that_build_a_result_at_once_get_the_first_one():
    """The second thread would otherwise replace a memo in which the first one keeps results."""
    memo, first = Memo(), Memo()

    def build():  # meanwhile, another thread builds it too
        assert memo("a", lambda: first) is first
        return Memo()

    assert memo("a", build) is first
    assert memo("a", Memo) is first


def test_joined_memos_join_what_their_results_derived():
    """As when a prepared batch arrives whose layout is here already, with fewer tables."""
    memos = Memo(), Memo()
    for rank, memo in enumerate(memos):
        routes = memo("routes", lambda: SimpleNamespace(derived=Memo()))
        routes.derived(rank, lambda rank=rank: f"tables of rank {rank}")
    here, arrived = memos
    kept = here("routes", dict)
    here.update(arrived)
    assert here("routes", dict) is kept
    assert [rank in kept.derived for rank in range(2)] == [True, True]
