"""Heartbeats with a fake store and a fake clock, without threads, processes or real time.

A round is one pass of a rank's heartbeat: it writes its beat and checks the other ranks.
"""

import pytest

from seqpar.comm.faults.heartbeat import Clock, Heartbeat, Membership, PeerError

TIMEOUT = 10.0
INTERVAL = TIMEOUT / 40
FORWARD = "step 1 of ring forward"
KEEPER = "global rank 0"
LOST = f"the store does not answer: {KEEPER}, which keeps it, died, left or was stopped"
CHECK = "did all ranks make the same call? check_ranks=True, if it is not set, finds out"


class Hung(BaseException):
    """A call of the store never returns, so the round that makes the call never ends."""


class FakeStore:
    """A store that keeps its keys in a dict.

    Attributes:
        trouble: an exception that every call raises, as if the store were gone or hung; or None.
        reads: how many checks were made.
        operations: the number of keys of all calls.
    """

    def __init__(self):
        self.values, self.trouble, self.reads, self.operations = {}, None, 0, 0

    def set(self, key, value):
        self._answer(1)
        self.values[key] = value

    def check(self, keys):
        self._answer(len(keys))
        self.reads += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self._answer(len(keys))
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key, expected, desired):
        self._answer(1)
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def _answer(self, keys):
        self.operations += keys
        if self.trouble is not None:
            raise self.trouble


class World(Clock):
    """Ranks of a group. As time passes, each rank in `running` makes one round per interval.

    `most` is the largest number of store operations that each rank has made in one round.
    """

    def __init__(self, begun=(0, 1, 2), words=(), ranks=3):
        self.names, self.most = [f"rank {i}" for i in range(ranks)], {}
        self.time, self.store, self.interrupted = 1000.0, FakeStore(), []
        self.words, self.asked = dict(words), []  # what the ranks' state servers answer
        self.ranks = {rank: self.begin(rank) for rank in begun}
        self.running = set(begun)

    def begin(self, rank):
        interrupt = lambda: self.interrupted.append(rank)  # noqa: E731
        state_server = f"state server of {rank}" if rank in self.words else ""
        member = Membership(rank, self.names, TIMEOUT)
        return Heartbeat(
            self.store, LOST, member, interrupt, state_server, ask=self.ask, clock=self
        )

    def ask(self, addresses, seconds):
        assert all(address == f"state server of {rank}" for rank, address in addresses.items())
        self.asked.append(set(addresses))
        return {rank: self.words[rank] for rank in addresses}

    def rounds(self, count):
        for _ in range(count):
            self.time += INTERVAL
            for rank in sorted(self.running):
                before = self.store.operations
                try:
                    if not self.ranks[rank].round():
                        self.running.discard(rank)
                except Hung:
                    self.running.discard(rank)
                used = self.store.operations - before
                self.most[rank] = max(used, self.most.get(rank, 0))

    def leave(self, rank):
        self.ranks[rank].stop()
        self.rounds(1)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.rounds(round(seconds / INTERVAL))

    def wait_for(self, changed, done, seconds):
        end = self.time + seconds
        while not done() and self.time < end:
            self.rounds(1)

    def waiting(self, rank, peers, doing=FORWARD):
        return self.ranks[rank].blame_on_failure(doing, peers)

    def failure(self, rank, peers, doing=FORWARD):
        """Return the error of a wait that gloo makes fail."""
        with pytest.raises(PeerError) as caught, self.waiting(rank, peers, doing):
            raise RuntimeError("connection closed")
        return str(caught.value)
