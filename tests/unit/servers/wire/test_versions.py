"""Messages of the service: what is right survives, and all else is refused by name."""

import re
from pathlib import Path

import pytest

from seqpar.servers.wire.codec import pack, pack_step
from seqpar.servers.wire.messages import Places, ReplyHeader
from seqpar.servers.wire.pages import Seen
from seqpar.servers.wire.payload import RequestError
from seqpar.servers.wire.versions import VERSIONS, data_of, joined
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.requests import CASES, forward, random_request

ROOT = Path(__file__).parents[4]
V1 = VERSIONS[0]
SESSION = bytes(range(16))


def packed_step():
    request = random_request(0)
    options = CallOptions(0.5, 2.0, "default", True)
    return pack_step(9, 3, 16, (request.q, request.k, request.v), Seen(-5, 2**40, 0), options)


def test_there_are_at_most_two_versions_with_names_of_their_own():
    names = [version.service for version in VERSIONS]
    assert len(names) == len(set(names)) <= 2 and names[-1] == "seqpar.attention.v1.Attention"


@pytest.mark.parametrize("places", [None, Places(2**40, 0)])
def test_requests_survive(places):
    for packed in (*[pack(forward(case)) for case in CASES.values()], packed_step()):
        header = packed.header(SESSION, places)
        data = [x.tobytes() for x in packed.parts]
        assert V1.read_request(V1.request(header)) == (header, b"")
        assert V1.read_request(V1.request(header, data)) == (header, b"".join(data))


def test_replies_survive():
    header = ReplyHeader(2**64 - 1, 0.25, True)
    assert V1.read_reply(V1.reply(header)) == (header, b"")
    assert V1.read_reply(V1.reply(header, [b"ab", b"", b"c"])) == (header, b"abc")


@pytest.mark.parametrize("size", [1, 127, 128, 2**14 - 1, 2**14, 2**21])
def test_data_survives_without_a_copy(size):
    raw = joined(b"", [bytes(size - 1), b"x"])
    data = data_of(raw)
    assert data.obj is raw and bytes(data) == bytes(size - 1) + b"x"
    assert V1.messages.ComputeRequest.FromString(raw).data == data


@pytest.mark.parametrize("raw", [
    b"",
    b"\x0a\x01x",  # another field
    b"\x7a",
    b"\x7a\x00",  # nothing, which could come for ever
    b"\x7a\x05abcd",
    b"\x7a\x03abcd",
    b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x7a" + b"\xff" * 2**22,  # numbers of any length would take hours
    joined(b"", [b"a"]) + joined(b"", [b"b"]),
])  # fmt: skip
def test_other_messages_than_data_are_refused(raw):
    with pytest.raises(RequestError, match=r"^data: "):
        data_of(raw)


def request_with(**changes):
    """An encoded request whose message has these fields in place of its own, or without them."""
    message = V1.messages.ComputeRequest.FromString(V1.request(packed_step().header(SESSION)))
    for name, value in changes.items():
        owner, _, field = name.rpartition("__")
        found = getattr(message, owner) if owner else message
        found.ClearField(field) if value is None else setattr(found, field, value)
    return message.SerializeToString()


@pytest.mark.parametrize(("raw", "said"), [
    (b"\xff", "ComputeRequest: it cannot be decoded"),
    (b"secret", "ComputeRequest: it cannot be decoded"),
    (b"\x12\x7fsecret", "ComputeRequest: it cannot be decoded"),
    (b"\x12" * 5000, "ComputeRequest: it cannot be decoded"),
    (b"", "task: "),
    (request_with(task=None), "task: "),
    (request_with(step=None), "step: "),
    (request_with(task__operation=1), "step: "),
    (request_with(task__operation=None), "operation, dtype: "),
    (request_with(task__operation=99), "operation, dtype: "),
    (request_with(task__dtype=None), "operation, dtype: "),
    (request_with(task__dtype=5), "operation, dtype: "),
])  # fmt: skip
def test_an_undecodable_request_is_refused_without_showing_it(raw, said):
    with pytest.raises(RequestError, match=f"^{said}") as caught:
        V1.read_request(raw)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["SessionRequest", "FreeRequest", "StatusReply", "SessionEvent"])
def test_any_message_that_cannot_be_decoded_is_named(kind):
    with pytest.raises(RequestError, match=f"^{kind}: it cannot be decoded$"):
        V1.read(getattr(V1.messages, kind), b"\x0a\x7fsecret")


def test_nothing_is_unpickled():
    forbidden = re.compile(r"\b(pickle|cloudpickle|marshal|torch\.load|eval)\b")
    for folder in ("servers", "commands"):
        for file in (ROOT / "seqpar" / folder).rglob("*.py"):
            assert not forbidden.search(file.read_text()), file
