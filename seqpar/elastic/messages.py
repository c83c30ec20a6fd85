"""A process's place in a group, and its messages to a launcher, in the launcher's store.

key                  written by      value
"report PROCESS N"   the process     its N-th `Report`: it needs a place in a group
"place PROCESS N"    the launcher    the `Place` in answer
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from seqpar.comm import launch

VARIABLE = "SEQPAR_ELASTIC"  # of the environment: "HOST PORT PROCESS"


class Store(Protocol):
    """The methods of torch.distributed's store that are used here; `get` waits for the key."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


@dataclass(frozen=True)
class Report:
    """A process needs a place in a group.

    Attributes:
        finished: the number of steps after which its checkpoint was made.
        done: whether these are all steps.
        failed: whether an error ended the process's last group.
    """

    finished: int
    done: bool
    failed: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> Report:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Place:
    """A process's place in the next group.

    Attributes:
        end: "" to continue; "done" if all steps are; "unchanged" if no process was lost; "too few"
            if too few are left; "lost" if none is.
        generation: the number of the group.
        rank, ranks: the process's rank in the group, and the number of ranks.
        source: the rank whose checkpoint counts.
        lacking: the ranks that need it.
        host, port: the group's store, or "" for the launcher's.
    """

    end: str = ""
    generation: int = 0
    rank: int = 0
    ranks: int = 0
    source: int = 0
    lacking: tuple[int, ...] = ()
    host: str = ""
    port: int = 0

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> Place:
        fields = json.loads(text)
        return cls(**fields | {"lacking": tuple(fields["lacking"])})


def report_key(process: int, number: int) -> str:
    return f"report {process} {number}"


def place_key(process: int, number: int) -> str:
    return f"place {process} {number}"


class LauncherRendezvous:
    """A process's side of a launcher that `python -m seqpar elastic` started."""

    def __init__(self, address: str) -> None:
        """`address` is the value of `VARIABLE`."""
        host, port, number = address.split()
        self._number, self._reports = int(number), 0
        # Two, because a group sets its timeout on its store.
        self._answers, self._groups = (launch.connect(host, int(port)) for _ in range(2))

    def place(self, report: Report) -> Place:
        self._reports += 1
        self._answers.set(report_key(self._number, self._reports), report.dumps())
        return Place.loads(self._answers.get(place_key(self._number, self._reports)))

    def regroups(self, report: Report) -> bool:
        return False  # spares wait for a failure

    def store(self, place: Place) -> launch.Store:
        return self._groups

    def close(self) -> None: ...
