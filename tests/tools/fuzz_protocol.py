"""Damage messages to an attention server at random: each is refused, or means what it says.

Run it as `python -m tests.tools.fuzz_protocol`.

Every frame is read as a server reads it: of tasks, and of steps of a cache. Of a damaged one either
the refusal is a ProtocolError or a RequestError, and shows nothing of the payload, or it is the one
that was sent: a flip that two checksums miss would be a wrong answer. A step that is refused leaves
its cache as it was. Memory must not grow. Message i of a seed is always the same, so that `--only
i` repeats it alone.
"""

import argparse
import functools
import pickle
import resource
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from seqpar.servers.server.caches import Caches
from seqpar.servers.transport.peers import Peer
from seqpar.servers.wire.codec import pack, pack_step, unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.pages import Seen
from seqpar.servers.wire.payload import RequestError
from seqpar.servers.wire.protocol import (
    SECRET_BYTES,
    ProtocolError,
    StepRequest,
    Task,
    decode,
    encode,
)
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.requests import random_request

LIMITS = Limits(tokens=4096, bytes=2**24, cache_bytes=2**20)
CLIENT = Peer(b"")
CPU, ROWS, CACHE = torch.device("cpu"), 20, 7  # rows that a cache has, and its number
HUGE = [0, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]


SIZES = ["batch", "q_rows", "k_rows", "heads", "kv_heads", "dim", "value_dim"]
FIELDS = {Task: [*SIZES, "slices"], StepRequest: [*SIZES, "cache", "writes", "start"]}


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@functools.cache
def sane(seed):
    """A request that is right: its header, and the bytes of its payload."""
    random = np.random.default_rng(seed)
    if seed % 2:
        packed = pack(random_request(seed, *random.integers(1, 40, 2).tolist(), dim=4))
    else:
        packed = step(seed, 1, ROWS - int(random.integers(5)), *random.integers(1, 40, 2).tolist())
    return packed.numbered(5, 1), packed.parts


def step(seed, writes, start, queries, rows, cache=CACHE):
    """A step of the cache that has had so many."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, queries, 4, 4), (1, rows, 2, 4), (1, rows, 2, 4)
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    seen = Seen(start + rows - queries, 2**40, 0)
    return pack_step(cache, writes, start, operands, seen, CallOptions(0.5, 0.0, "default", True))


def caches(client=CLIENT):
    """A server's caches, with one of some rows."""
    found = Caches(LIMITS.cache_bytes, CPU, "default")
    first = step(0, 0, 0, 1, ROWS)
    found.admit(client, first.header, [x.tobytes() for x in first.parts])
    return found


def damage(random, task, parts, canary, secret=bytes(SECRET_BYTES)):
    """Damage one frame, the header's fields or the list of frames; return all frames."""
    kind = random.integers(9)
    frames = [np.frombuffer(encode(task, secret), np.uint8), *parts]
    frames = [frame.copy() for frame in frames]
    i = int(random.integers(len(frames)))
    if kind == 0 and frames[i].size:  # a bit
        frames[i][random.integers(frames[i].size)] ^= np.uint8(1 << random.integers(8))
    elif kind == 1:  # cut short, or longer
        cut = frames[i][: random.integers(frames[i].size + 1)]
        frames[i] = np.r_[frames[i], cut] if random.integers(2) else cut
    elif kind == 2:  # bytes of nothing
        frames[i] = random.integers(0, 256, int(random.integers(0, 4000)), dtype=np.uint8)
    elif kind == 3:
        frames = frames[: random.integers(len(frames))]
    elif kind == 4:
        frames.insert(i, frames[random.integers(len(frames))])
    elif kind == 5:
        random.shuffle(frames)
    elif kind == 6:
        frames[i] = np.frombuffer(pickle.dumps(Canary(canary)), np.uint8)
    else:  # a field that promises something else, with a right checksum
        name = str(random.choice(FIELDS[type(task)]))
        value = int(random.choice([*HUGE, int(random.integers(0, 99))]))
        changed = msgspec.structs.replace(task, **{name: value})
        frames[0] = np.frombuffer(encode(changed, secret), np.uint8)
    return frames


def read(frames):
    """What a server reads, or None if it reads a message of another kind."""
    if not frames:
        raise ProtocolError("message: no frames")
    message = decode(frames[0].tobytes())
    if not isinstance(message, Task | StepRequest):
        return None
    form_of(message).check(LIMITS)
    return message, tensors(message, [x.tobytes() for x in frames[1:]])


def tensors(message, buffers):
    """What a request says."""
    if isinstance(message, Task):
        return unpack(message, buffers, "default").tensors()
    held = caches()
    (cache,) = held._caches[CLIENT].values()
    before = held.nbytes, cache.length, cache.writes
    try:
        taken = held.admit(CLIENT, message, buffers)
    except RequestError:
        assert before == (held.nbytes, cache.length, cache.writes) and len(held) == 1
        raise
    assert taken.cache is cache, "another cache"
    return [torch.tensor([taken.start, taken.length]), taken.q, taken.k, taken.v]


def attempt(seed, i, canary):
    """Damage and read message i; raise an AssertionError if the outcome is wrong."""
    random = np.random.default_rng((seed, i))
    task, parts = sane(int(random.integers(50)))
    frames = damage(random, task, parts, canary)
    try:
        found = read(frames)
    except (ProtocolError, RequestError) as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert len(refusal) < 200, refusal
        return "refused"
    assert found is not None, "a message of another kind"
    message, request = found
    assert type(message) is type(task)
    if isinstance(task, StepRequest):  # fewer rows of the cache may be kept
        assert 0 <= message.start <= ROWS
        task = msgspec.structs.replace(task, start=message.start)
    expected = tensors(task, [x.tobytes() for x in parts])
    for x, y in zip(request, expected, strict=True):
        assert x.numpy().tobytes() == y.numpy().tobytes(), "a wrong payload was taken"
    return "right"


def fuzz(seed, numbers, canary="/nonexistent/canary"):
    """Count the outcomes of so many messages."""
    counts = {"refused": 0, "right": 0}
    for i in numbers:
        counts[attempt(seed, i, canary)] += 1
    assert not Path(canary).exists(), "a pickle was executed"
    return counts


def resident():
    """How many bytes this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(fuzz(arguments.seed, [arguments.only]))
        return 0
    fuzz(arguments.seed, range(1000))
    before = resident()
    counts = dict.fromkeys(["refused", "right"], 0)
    for start in range(1000, arguments.messages, 10_000):
        stop = min(start + 10_000, arguments.messages)
        for outcome, count in fuzz(arguments.seed, range(start, stop)).items():
            counts[outcome] += count
        print(f"{stop} messages", flush=True)
    grown = resident() - before
    print(f"{counts}, memory grew by {grown / 2**20:.1f} MiB")
    return int(grown > 2**24)


if __name__ == "__main__":
    sys.exit(main())
