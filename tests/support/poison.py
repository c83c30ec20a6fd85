"""Messages that arrive at the worst time: memory is overwritten as soon as it is posted."""

import contextlib
import threading
from unittest import mock

import torch

from seqpar.softmax.wire.message_buffers import MessageBuffers


@contextlib.contextmanager
def poisoned(kind):
    """Within this context, ranks of a kind of Comm overwrite memory when they post a receive.

    Until its data arrive, a receive may write anything there. What reads the memory after the post
    and before the wait therefore gets NaN (85 in 8-bit messages). Yields a list of the exchanges
    that receive into memory of an exchange that was not waited for, or whose sent messages changed
    before the wait.
    """
    start, under_way, wrong, lock = kind.start, [], [], threading.Lock()

    def begin(comm, sends, recvs, exchange):
        sent, received = ([x for _, x in messages] for messages in (sends, recvs))
        with lock:
            if any(_overlap(x, y) for x in received for y in under_way):
                wrong.append(exchange)
            under_way.extend([*sent, *received])
        copies = [_bytes(x).clone() for x in sent]
        for x in received:
            x.fill_(torch.nan if x.is_floating_point() else 85)
        pending = start(comm, sends, recvs, exchange)
        wait = pending.wait

        def end():
            if not all(map(torch.equal, map(_bytes, sent), copies)):
                wrong.append(exchange)
            wait()
            with lock:
                for x in (*sent, *received):
                    # `wait` may call itself, and several exchanges may send one tensor.
                    place = next((i for i, y in enumerate(under_way) if x is y), None)
                    if place is not None:
                        del under_way[place]
                sent.clear(), received.clear(), copies.clear()

        pending.wait = end
        return pending

    with mock.patch.object(kind, "start", begin):
        yield wrong


@contextlib.contextmanager
def one_buffer_fewer(count):
    """Within this context, `MessageBuffers` of this count use a buffer again one message early."""
    make = MessageBuffers.__init__

    def fewer(buffers, wanted, *arguments, **options):
        make(buffers, wanted - (wanted == count), *arguments, **options)

    with mock.patch.object(MessageBuffers, "__init__", fewer):
        yield


def _bytes(x):
    return x.reshape(-1).view(torch.uint8)


def _overlap(x, y):
    starts, stops = zip(*((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (x, y)), strict=True)
    return max(starts) < min(stops)
