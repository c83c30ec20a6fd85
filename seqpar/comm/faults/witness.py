"""Decide which rank of a group is at fault, given the beats that one rank has read."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from seqpar.comm.faults.process_state_server import ALIVE, GONE, STOPPED

MAX_SILENT_READS = 10  # after this number of reads of an unchanged beat, a rank counts as silent
# How many ranks' beats are always read, and how many more for each wait.
MAX_WATCHED = 16
CHECK_HINT = "check_ranks=True, if it is not set, finds out"
GRACE = "SEQPAR_GRACE_SECONDS"
LEFT = "left"  # the last beat of a rank that has ended normally or has dropped the group
# The beginning of the beat of a rank with an error. The number and the text of the error follow.
RAISED = "raised "
# After this number of reads of an error, the rank with the error is expected to send nothing more.
MAX_ERROR_READS = 3


class Witness:
    def __init__(
        self, rank: int, names: Sequence[str], interval: float, grace: float = 0.0
    ) -> None:
        """Create a witness, which decides whether a rank is at fault. It has not yet read any
        beats.

        Args:
            rank: the rank that reads beats. A beat is a count in the store of the group, which each
                living rank increases. In a large group, a rank reads only the beats of the next
                `MAX_WATCHED` ranks that have not left, and of ranks for which it waits.
            names: the name of each rank in errors.
            interval: the number of seconds between two reads.
            grace: the seconds for which a rank may be silent although its operating system says
                that it is alive. After this time, the rank is at fault.
        """
        self._names, self._interval, self._grace = names, interval, grace
        self._rank = rank
        self.watches_all = len(names) - 1 <= MAX_WATCHED
        # The last beat of each rank. Ranks that have not begun have no entry.
        self.beats: dict[int, str] = {}
        self.watched = self.watch(())
        # For each rank, how many reads in a row have found the same beat.
        self._unchanged: dict[int, int] = {}
        # For each rank, how many reads in a row have found an error.
        self._raised: dict[int, int] = {}
        # None until a wait of this rank has failed.
        self._heard_since_failure: set[int] | None = None
        self._reads_since_failure = 0

    def watch(self, waits: Iterable[frozenset[int]]) -> list[int]:
        """Return the ranks whose beats this rank reads next, given the peers of each running wait.
        A rank increases its beat, a count in the store, at intervals.
        """
        ranks = len(self._names)
        ahead = ((self._rank + step) % ranks for step in range(1, ranks))
        present = (peer for peer in ahead if self.watches_all or self.beats.get(peer) != LEFT)
        named = [peer for peers in waits if len(peers) <= MAX_WATCHED for peer in peers]
        self.watched = sorted({*islice(present, MAX_WATCHED), *named})
        return self.watched

    def hear(self, beats: dict[int, str]) -> None:
        changed = {peer for peer, text in beats.items() if text != self.beats.get(peer)}
        self._unchanged = {
            peer: 0 if peer in changed else self._unchanged.get(peer, 0) + 1
            for peer in self.watched
        }
        self.beats |= beats
        self._raised = {
            peer: self._raised.get(peer, 0) + 1
            for peer in self.watched
            if self._doing(peer).startswith(RAISED)
        }
        if self._heard_since_failure is not None:
            self._heard_since_failure |= changed

    def pause(self) -> None:
        """Forget for how long other ranks have been silent, because this rank stops reading."""
        self._unchanged.clear()
        self._raised.clear()

    def silent(self) -> dict[int, float]:
        """Return for how many seconds each silent rank has been silent. Ranks without a first beat
        are left out.
        """
        return {
            peer: reads * self._interval
            for peer, reads in self._unchanged.items()
            if reads >= MAX_SILENT_READS and self.beats.get(peer, LEFT) != LEFT
        }

    def judge(
        self,
        failed: Sequence[frozenset[int]],
        words: Mapping[int, str],
        waited: Collection[int] = (),
        errors: int = 0,
    ) -> str:
        """Return the beginning of an error that says which rank is at fault and why, or "" if no
        rank is.

        A rank is *silent* if it does not increase its count in the store of the group. Before a
        wait has failed, a rank is at fault in three cases: its process has died or is stopped; it
        has been silent for the grace time; or it has raised an error that this rank has not raised,
        and this rank waits for it. A rank that has not begun or has left is not yet at fault.

        After a wait has failed, further ranks may be at fault. The error names the first of these
        ranks that exists:

        1. a rank that has left, if all failed waits were for this rank;
        2. a rank that has never begun;
        3. a rank that is alive but silent;
        4. a rank that is in no exchange.

        If none of these ranks exists, all ranks wait for each other. A rank counts as alive if its
        count has changed since the failure, or if its operating system says that its process is
        alive. A rank that watches only some ranks of its group first waits for some time, in which
        other ranks can find a dead rank or a rank that is in no exchange.

        Args:
            failed: the peers of each failed wait.
            words: the state of each silent rank, as its operating system reports it.
            waited: the ranks for which this rank waits.
            errors: how many errors this rank has raised.
        """
        silent = self.silent()
        left = {peer for peer, text in self.beats.items() if text == LEFT}
        alive = {peer for peer in silent if words[peer] == ALIVE}
        if dead := {peer: silent[peer] for peer in silent if words[peer] in (STOPPED, GONE)}:
            seconds = min(dead.values())
            return f"{self.listed(dead)} died or was stopped: no heartbeat for {seconds:.1f} s"
        if late := {peer for peer in alive if silent[peer] >= self._grace}:
            return self._locked(late, silent)
        for peer in sorted(set(waited) & self._raised.keys()):
            number, _, error = self._doing(peer).removeprefix(RAISED).partition(" ")
            # All ranks may have raised the same error. This rank has continued after the error, and
            # the peer may not have continued yet.
            if self._raised[peer] >= MAX_ERROR_READS and int(number) > errors:
                return f"{self._names[peer]} raised an error, and did not send: {error}"
        if not failed:
            return ""
        if gone := left.intersection(*failed):
            return f"{self.listed(gone)} left the group"
        self._reads_since_failure += 1
        patience = 0 if self.watches_all else MAX_SILENT_READS
        if self._reads_since_failure < 2 * patience:
            return ""
        if absent := [
            peer
            for peer in self.watched
            if peer not in self.beats and self._unchanged[peer] >= MAX_SILENT_READS
        ]:
            return f"{self.listed(absent)} died, or never made a module for this group"
        if self._heard_since_failure is None:
            self._heard_since_failure = set()
        if not (self._heard_since_failure | alive).issuperset(set(self.watched) - left):
            return ""
        if alive:
            return self._locked(alive, silent)
        doing = {peer: self._doing(peer) for peer in self.watched if peer not in left}
        check = f"did all ranks make the same call? {CHECK_HINT}"
        if idle := [x for x in doing if not doing[x] or doing[x].startswith(RAISED)]:
            listed = self.listed(idle)
            return f"{listed} is alive but did not send, and is in no exchange: {check}"
        if self._reads_since_failure < 3 * patience:
            return ""
        waiting = "; ".join(f"{self._names[peer]} in {doing[peer]}" for peer in doing)
        ranks = "all ranks" if self.watches_all else f"{len(doing)} ranks"
        return f"{ranks} are alive but wait for each other ({waiting}): {check}"

    def _doing(self, peer: int) -> str:
        return self.beats.get(peer, "").partition(" ")[2]

    def listed(self, peers: Iterable[int]) -> str:
        return " and ".join(self._names[peer] for peer in sorted(set(peers)))

    def _locked(self, peers: Iterable[int], silent: Mapping[int, float]) -> str:
        seconds = min(silent[peer] for peer in peers)
        return (
            f"{self.listed(peers)} is alive, but no other thread of it could run Python for "
            f"{seconds:.1f} s: a call holds the interpreter's lock (a sort, a pickle, a call of C)"
        )


def grace_seconds() -> float | None:
    """Return for how many seconds a living rank may be silent, or None if the user has not set
    it.
    """
    text = os.environ.get(GRACE)
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"{GRACE} must be a number of seconds, 0 or more, got {text!r}")
    return seconds
