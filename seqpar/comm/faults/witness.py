"""Judge which rank of a group is to blame, by what one rank has heard of the others."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence

from seqpar.comm.faults.watcher import ALIVE, GONE, STOPPED

MAX_SILENT_READS = 10  # of an unchanged beat; then the rank counts as silent
GRACE = "SEQPAR_GRACE_SECONDS"
LEFT = "left"  # the last beat of a rank that ended, or dropped the group, without an accident


class Witness:
    """What one rank has heard of the others, and whom that shows to be to blame."""

    def __init__(
        self, rank: int, names: Sequence[str], interval: float, grace: float = 0.0
    ) -> None:
        """Listen for `rank`.

        `names` is what messages call each rank, and `interval` the seconds between two reads. A
        rank that is silent but alive is to blame after `grace` seconds.
        """
        self._names, self._interval, self._grace = names, interval, grace
        self.others = [peer for peer in range(len(names)) if peer != rank]
        self.beats: dict[int, str] = {}  # of those that have begun, as last heard
        # In how many reads in a row a rank's beat has not changed.
        self._unchanged: dict[int, int] = {}
        # None until one of this rank's waits has failed.
        self._heard_since_failure: set[int] | None = None

    def hear(self, beats: dict[int, str]) -> None:
        """Note the beats that the store has now, of those other ranks that have written one."""
        changed = {peer for peer, text in beats.items() if text != self.beats.get(peer)}
        self._unchanged = {
            peer: 0 if peer in changed else self._unchanged.get(peer, 0) + 1 for peer in self.others
        }
        self.beats = beats
        if self._heard_since_failure is not None:
            self._heard_since_failure |= changed

    def pause(self) -> None:
        """Forget the silence counted so far, since this rank stops listening."""
        self._unchanged.clear()

    def silent(self) -> dict[int, float]:
        """Return for how many seconds each silent rank has been so, of those that have begun."""
        return {
            peer: reads * self._interval
            for peer, reads in self._unchanged.items()
            if reads >= MAX_SILENT_READS and self.beats.get(peer, LEFT) != LEFT
        }

    def judge(self, failed: Sequence[frozenset[int]], words: Mapping[int, str]) -> str:
        """Return who is to blame, and why, as the beginning of an error message; "" if nobody is.

        `words` has what the operating systems say of the silent ranks: one that lives, or may live,
        is not dead. `failed` has the peers of each failed wait.

        Before a wait has failed, a rank is to blame if it has died, or been silent beyond the
        grace: others may yet begin, or have left because they had nothing more to do. Afterwards,
        in this order: one that has left, if all failed waits were for it; one that never began; one
        that is alive but silent, and then one that is in no exchange; and if there is no such rank,
        all wait for each other. A rank is alive if its beat has changed since the failure, or if
        the operating system says so.
        """
        silent = self.silent()
        left = {peer for peer, text in self.beats.items() if text == LEFT}
        alive = {peer for peer in silent if words[peer] == ALIVE}
        if dead := {peer: silent[peer] for peer in silent if words[peer] in (STOPPED, GONE)}:
            seconds = min(dead.values())
            return f"{self.listed(dead)} died or was stopped: no heartbeat for {seconds:.1f} s"
        if late := {peer for peer in alive if silent[peer] >= self._grace}:
            return self._locked(late, silent)
        if not failed:
            return ""
        if gone := left.intersection(*failed):
            return f"{self.listed(gone)} left the group"
        if absent := [
            peer
            for peer in self.others
            if peer not in self.beats and self._unchanged[peer] >= MAX_SILENT_READS
        ]:
            return f"{self.listed(absent)} died, or never made a module for this group"
        if self._heard_since_failure is None:
            self._heard_since_failure = set()
        if not (self._heard_since_failure | alive).issuperset(set(self.others) - left):
            return ""
        if alive:
            return self._locked(alive, silent)
        doing = {
            peer: text.partition(" ")[2] for peer, text in self.beats.items() if peer not in left
        }
        check = "did all ranks make the same call? check_ranks=True finds out"
        if idle := [peer for peer in doing if not doing[peer]]:
            listed = self.listed(idle)
            return f"{listed} is alive but did not send, and is in no exchange: {check}"
        waiting = "; ".join(f"{self._names[peer]} in {doing[peer]}" for peer in doing)
        return f"all ranks are alive but wait for each other ({waiting}): {check}"

    def listed(self, peers: Iterable[int]) -> str:
        """Return the names of some ranks, as in "rank 1 and rank 3"."""
        return " and ".join(self._names[peer] for peer in sorted(set(peers)))

    def _locked(self, peers: Iterable[int], silent: Mapping[int, float]) -> str:
        seconds = min(silent[peer] for peer in peers)
        return (
            f"{self.listed(peers)} is alive, but no other thread of it could run Python for "
            f"{seconds:.1f} s: a call holds the interpreter's lock (a sort, a pickle, a call of C)"
        )


def grace_seconds() -> float | None:
    """Return how long a rank may be silent that lives, if the user has said so."""
    text = os.environ.get(GRACE)
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"{GRACE} must be a number of seconds, 0 or more, got {text!r}")
    return seconds
