"""Damage messages to an attention server at random: each is refused, or means what it says.

Run it as `python -m tests.tools.fuzz_protocol`.

Every frame is read as a server reads it. Of a damaged task either the refusal is a ProtocolError or
a RequestError, and shows nothing of the payload, or the task is the one that was sent: a flip that
two checksums miss would be a wrong answer. Memory must not grow. Message i of a seed is always the
same, so that `--only i` repeats it alone.
"""

import argparse
import functools
import pickle
import resource
import sys
from pathlib import Path

import msgspec
import numpy as np

from seqpar.servers.codec import pack, unpack
from seqpar.servers.header import check_header
from seqpar.servers.limits import Limits
from seqpar.servers.payload import RequestError
from seqpar.servers.protocol import ProtocolError, Task, decode, encode
from tests.support.requests import random_request

LIMITS = Limits(tokens=4096, bytes=2**24)
HUGE = [0, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]


SIZES = ["batch", "q_rows", "k_rows", "heads", "kv_heads", "dim", "value_dim", "slices"]


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
    packed = pack(random_request(seed, *random.integers(1, 40, 2).tolist(), dim=4))
    return packed.numbered(5, 1), packed.parts


def damage(random, task, parts, canary):
    """Damage one frame, the header's fields or the list of frames; return all frames."""
    kind = random.integers(9)
    frames = [np.frombuffer(encode(task), np.uint8), *parts]
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
        name = str(random.choice(SIZES))
        value = int(random.choice([*HUGE, int(random.integers(0, 99))]))
        changed = msgspec.structs.replace(task, **{name: value})
        frames[0] = np.frombuffer(encode(changed), np.uint8)
    return frames


def read(frames):
    """What a server reads, or None if it reads a message of another kind."""
    if not frames:
        raise ProtocolError("message: no frames")
    message = decode(frames[0].tobytes())
    if not isinstance(message, Task):
        return None
    check_header(message, LIMITS)
    return message, unpack(message, [x.tobytes() for x in frames[1:]], "default")


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
    expected = unpack(message, [x.tobytes() for x in parts], "default")
    for x, y in zip(request.tensors(), expected.tensors(), strict=True):
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
    counts = fuzz(arguments.seed, range(1000, arguments.messages))
    grown = resident() - before
    print(f"{counts}, memory grew by {grown / 2**20:.1f} MiB")
    return int(grown > 2**24)


if __name__ == "__main__":
    sys.exit(main())
