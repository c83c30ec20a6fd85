"""What headers tell apart, and what is said of those that differ. No messages are sent."""

import pytest
import torch

from seqpar.comm.messages.message_header import (
    AwaitedHeader,
    CallDigest,
    Exchange,
    Header,
    disagreement,
    listed,
)

FORWARD, BACKWARD = Exchange(7, "ring forward", 1), Exchange(7, "ring backward", 1)
X, Y = torch.zeros(4), torch.zeros(6, dtype=torch.float64)


def header(exchange, sends, recvs):
    return Header(exchange, listed(sends), listed(recvs))


def said(theirs, ours):
    """What rank 0 says, given what rank 1 sends and receives, and what rank 0 thinks it does."""
    awaited = AwaitedHeader(1, None, header(*ours).data, header(*theirs).data)
    return disagreement(awaited, "rank 1", "rank 0")


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (BACKWARD, "call 7, step 1 of ring backward"),
        (FORWARD._replace(call=8), "call 8, step 1 of ring forward"),
        (FORWARD._replace(step=2), "call 7, step 2 of ring forward"),
    ],
)
def test_other_exchanges_are_both_named(other, name):
    assert said((other, [X], [Y]), (FORWARD, [X], [Y])) == (
        f"rank 1 is in {name}, while rank 0 is in call 7, step 1 of ring forward: all ranks must "
        "make the same calls, and run their backwards, in the same order"
    )


def test_other_messages_of_the_same_exchange_are_listed():
    assert said((FORWARD, [Y, X], []), (FORWARD, [X], [])) == (
        "rank 1 and rank 0 are in call 7, step 1 of ring forward, but rank 1 sends (6 float64, "
        "4 float32) and receives nothing, while rank 0 receives (4 float32) and sends nothing: did "
        "all ranks make the same call? check_ranks=True, if it is not set, finds out"
    )


def test_a_cut_header_differs_beyond_the_cut():
    one, other = (header(FORWARD, [X] * 100 + last, []) for last in ([X], [Y]))
    assert len(one.data) == len(other.data) and one.data != other.data
    message = said((FORWARD, [X] * 101, []), (FORWARD, [X], []))
    assert "4 float32, 4 float32" in message and "and receives (…), while" in message


LARGE, SMALL = (
    CallDigest.of({"softmax_scale": scale, "softcap": 0.0, "sinks": True}) for scale in (1.0, 0.5)
)


def of_digests(theirs, ours, exchange=FORWARD):
    """What rank 0 says, given the digests of both ranks' arguments."""
    expected, received = (
        Header(FORWARD, listed([X]), "", ours.table),
        Header(exchange, listed([X]), "", theirs.table),
    )
    awaited = AwaitedHeader(1, None, expected.data, received.data)
    return disagreement(awaited, "rank 1", "rank 0", ours)


def test_arguments_that_differ_are_named():
    assert of_digests(SMALL, LARGE) == (
        "softmax_scale must be the same on all ranks: rank 1 and rank 0 differ in call 7, step 1 "
        "of ring forward, and rank 0 has 1.0. check_ranks=True shows what each rank has"
    )
    later = FORWARD._replace(step=2)
    assert of_digests(SMALL, LARGE, later) == (
        "rank 1 is in call 7, step 2 of ring forward, while rank 0 is in call 7, step 1 of ring "
        "forward: all ranks must make the same calls, and run their backwards, in the same order; "
        "softmax_scale must be the same on all ranks"
    )


def test_check_ranks_is_named_within_one_call_only():
    check = Exchange(7, "rank check", 0)
    assert "check_ranks must be the same" in of_digests(SMALL, LARGE, check)
    assert "check_ranks" not in of_digests(SMALL, LARGE, check._replace(call=8))


def test_another_call_is_named_before_its_arguments():
    message = of_digests(SMALL, LARGE, FORWARD._replace(call=8))
    assert message.startswith("rank 1 is in call 8")


def test_values_of_small_tensors_differ_in_their_entry():
    values = torch.zeros(4), torch.ones(4), torch.zeros(4, dtype=torch.float64), None
    digests = [LARGE.extended(sinks=x) for x in values]
    assert len({digest.table for digest in digests}) == 4
    assert all(digests[0].differing(x.table) == ["sinks"] for x in digests[1:])
    assert LARGE.extended(sinks=torch.empty(4, device="meta")) == LARGE
    assert LARGE.extended(sinks=torch.zeros(4)) == digests[0]


def test_headers_have_one_size_with_any_digest():
    assert len(Header(FORWARD, "", "", LARGE.table).data) == len(header(FORWARD, [X], []).data)


def test_different_messages_have_different_tags():
    headers = [
        header(exchange._replace(call=call, step=step), [x], [])
        for exchange in (FORWARD, BACKWARD)
        for call in range(5)
        for step in range(5)
        for x in (X, Y)
    ]
    tags = [each.tag(index) for each in headers for index in range(3)]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 2**30 and max(tags) < 2**31
