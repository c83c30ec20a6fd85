"""Overwrite the memory of messages as soon as they are posted, to find reads that come too
early."""

import contextlib
import threading
from unittest import mock

import torch

from seqpar.softmax.wire.message_buffers import MessageBuffers


@contextlib.contextmanager
def poisoned(kind):
    """Within this context, ranks of a kind of Comm overwrite memory when they post a receive.

    A receive may write anything to its memory until its data arrive. Code that reads the memory
    after the post and before the wait therefore gets NaN (85 in 8-bit messages). Yields a list of
    wrong exchanges. An exchange is wrong if it receives into memory of an exchange that nobody has
    waited for yet, or if the messages that it sends change before its wait.
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
    """Within this context, `MessageBuffers` of this count have one buffer fewer.

    They reuse a buffer one message too early.
    """
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
