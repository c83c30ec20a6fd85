"""Requests and results as bytes and back."""

import numpy as np
import pytest
import torch

from seqpar.servers.server.compute import compute
from seqpar.servers.wire.codec import KeptSlices, pack, unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.payload import Incoming, RequestError, bytes_of, checksum
from seqpar.servers.wire.versions import VERSIONS
from tests.support.requests import CASES, backward, forward, random_request

CPU, V1 = torch.device("cpu"), VERSIONS[0]


def unpacked(packed, buffers=None, kept=None):
    """What a server makes of a request."""
    buffers = [x.tobytes() for x in packed.parts] if buffers is None else buffers
    return unpack(packed.task, packed.checksum, buffers, "default", kept or KeptSlices())


@pytest.mark.parametrize("name", CASES)
def test_requests_and_results_survive(name):
    request = forward(CASES[name], exact_out=True)
    out, lse = same_after_travel(request)
    same_after_travel(backward(CASES[name], out.to(request.q.dtype), lse))


def same_after_travel(request):
    """Its results, which are the same for what arrives."""
    packed = pack(request)
    header, data = V1.read_request(V1.request(packed.header(b"s"), packed.parts))
    incoming = Incoming(form_of(header.task).request)
    incoming.take(data)
    arrived = unpack(header.task, header.checksum, incoming.parts, "default", KeptSlices())
    assert arrived.options == request.options and arrived.exact_out == request.exact_out
    results, expected = compute([arrived], CPU)[0], compute([request], CPU)[0]
    buffers, payload = bytes_of(results), packed.form.result
    payload.check(buffers, checksum(buffers))
    back = payload.tensors(buffers)
    for x, y, z in zip(back, results, expected, strict=True):
        assert x.shape == y.shape and torch.equal(x, y) and torch.equal(x, z)
    with pytest.raises(RequestError, match="checksum"):
        payload.check(buffers, checksum(buffers) ^ 1)
    return back


@pytest.mark.parametrize("change", [lambda parts: parts[:-1], lambda parts: [*parts, b""]])
def test_a_payload_of_other_parts_is_refused(change):
    packed = pack(random_request(0))
    with pytest.raises(RequestError, match="payload must have 6 parts"):
        unpacked(packed, change([x.tobytes() for x in packed.parts]))


def test_tasks_of_one_layout_share_tables():
    first, second, other = (pack(random_request(i, 8 + i // 2)) for i in range(3))
    kept = KeptSlices()
    arrived = [unpacked(x, kept=kept) for x in (first, second)]
    assert arrived[0].slices is arrived[1].slices and arrived[0].slices.q_rows.flags.writeable
    assert first.form is second.form and other.form is not first.form
    tables = pack(random_request(5)).parts[:3]
    assert not any(np.shares_memory(x, arrived[0].slices.q_positions) for x in tables)


def test_a_part_of_wrong_size_is_refused():
    packed = pack(random_request(0))
    for i, name in enumerate(["slices", "q_positions", "k_positions", "q", "k", "v"]):
        buffers = [x.tobytes() for x in packed.parts]
        buffers[i] += b"\0"
        with pytest.raises(RequestError, match=f"^{name} must have"):
            unpacked(packed, buffers)
