"""A process's place in a group, and the messages between a process and its launcher. Messages are
entries of the launcher's store:

key                  written by      value
"report PROCESS N"   the process     its N-th `ProcessReport`, as a JSON list
"place PROCESS N"    the launcher    the `Place` that answers the report, as a JSON list
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from seqpar.comm import launch
from seqpar.comm.private_store import PrivateStore

# The environment variable with the value "PROCESS FOLDER"; FOLDER has the store.
VARIABLE = "SEQPAR_ELASTIC"


class ProcessReport(NamedTuple):
    """The report of a process that needs a place in a group."""

    finished: int  # the number of finished steps in the process's checkpoint
    done: bool  # whether the process has finished all steps
    failed: bool = False  # whether the process left its last group because of an error


class Place(NamedTuple):
    """A process's place in the next group.

    `end` is "" if the training continues. If the training ends, `end` is the reason: "done" if all
    steps are done, "unchanged" if no process was lost, "too few" if too few processes are left, or
    "lost" if no process is left.
    """

    end: str = ""
    generation: int = 0  # the number of the group
    rank: int = 0
    ranks: int = 0
    source: int = 0  # the rank with the newest checkpoint
    lacking: Sequence[int] = ()  # the ranks that do not have this checkpoint
    host: str = ""  # the host of the group's store, or "" if the launcher keeps the store
    port: int = 0


def newest(held: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the rank with the newest checkpoint, and the ranks that do not have this checkpoint.

    `held` are the numbers of finished steps in the ranks' checkpoints.
    """
    source = held.index(max(held))
    return source, tuple(rank for rank, finished in enumerate(held) if finished != held[source])


def report_key(process: int, number: int) -> str:
    return f"report {process} {number}"


def place_key(process: int, number: int) -> str:
    return f"place {process} {number}"


class LauncherRendezvous:
    """A process's connection to a launcher that `python -m seqpar elastic` started."""

    def __init__(self, address: str) -> None:
        """`address` is the value of `VARIABLE`."""
        number, folder = address.split(maxsplit=1)
        self._number, self._reports = int(number), 0
        # The group has a separate connection, because it sets a timeout on its store.
        self._answers, self._groups = PrivateStore(folder), PrivateStore(folder)
        self._answers.set_timeout(launch.FOREVER)

    def place(self, report: ProcessReport) -> Place:
        self._reports += 1
        self._answers.set(report_key(self._number, self._reports), json.dumps(report))
        return Place(*json.loads(self._answers.get(place_key(self._number, self._reports))))

    def regroups(self, report: ProcessReport) -> bool:
        return False  # with a launcher, spares join only after a failure

    def store(self, place: Place) -> launch.Store:
        return self._groups

    def close(self) -> None: ...
