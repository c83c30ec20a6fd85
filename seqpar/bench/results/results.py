"""The results file of a sweep, which grows point by point, and with which a sweep goes on."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seqpar.bench.workloads.peers import PEERS
from seqpar.bench.workloads.workloads import Options, Workload
from seqpar.core.arguments import shown
from seqpar.costs.profile import harness

FORMAT = 1
_ROW = {"workload", "contender", "failed", "spent", "check", "costs", "seconds"}
NAME = "bench.json"
# Of the environment, what must be the same for figures to stand in one file.
SAME = ("device", "cpu", "cores", "capability", "matrix_units", "python", "versions", "commit")


class SweepResults:
    """What has been measured so far, and the file that it is in.

    Attributes:
        path: the file.
        found: what it says.
    """

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found
        self._rows = {_key(row["workload"], row["contender"]): row for row in found["rows"]}

    @classmethod
    def open(cls, folder: Path, options: Options, again: bool = False) -> SweepResults:
        """Read the file in a folder, or begin one; with `again`, forget points that failed.

        Raise a ValueError if the file is no results file, or one of another machine or of other
        options, or if the folder cannot be written to.
        """
        path = folder / NAME
        here, asked = environment(options.contenders), options.as_dict()
        found: dict[str, Any] = {"format": FORMAT, "environment": here, "options": asked}
        found |= {"links": None, "rows": []}
        try:
            text = path.read_text() if path.exists() else None
            with tempfile.TemporaryFile(dir=folder):
                pass
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"folder: {folder} cannot be used: {error}") from None
        if text is not None:
            found = _parsed(path, text)
            check_same(path, "of another machine", found["environment"], here, SAME)
            check_same(path, "of other options", found["options"], asked, tuple(asked))
        if again:
            found["rows"] = [row for row in found["rows"] if row["failed"] is None]
        return cls(path, found)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each contender on each workload, as far as it has been measured."""
        rows: list[dict[str, Any]] = self.found["rows"]
        return rows

    def row(self, workload: Workload, contender: str) -> dict[str, Any]:
        """Return the row of a point, which is new if nothing is known of it."""
        key = _key(workload.as_dict(), contender)
        if key not in self._rows:
            made = {"workload": workload.as_dict(), "contender": contender, "failed": None}
            self._rows[key] = made | {"spent": 0.0, "check": None, "costs": None, "seconds": []}
            self.rows.append(self._rows[key])
        return self._rows[key]

    def lacks(self, workload: Workload, contender: str, rounds: int) -> bool:
        """Return whether something of a point is still to be measured."""
        row = self.row(workload, contender)
        unknown = row["check"] is None or row["costs"] is None or len(row["seconds"]) < rounds
        return row["failed"] is None and unknown

    def check_places(self, then: list[dict[str, str]], now: list[dict[str, str]]) -> None:
        """Raise a ValueError if ranks were on other devices, or otherwise divided among hosts."""
        for what in ("devices", "first rank of each host"):
            before, after = ({what: _where(places)[what]} for places in (then, now))
            check_same(self.path, "of another machine", before, after, (what,))

    def write(self) -> None:
        """Replace the file at once: whoever reads it, or ends this, finds one that is whole."""
        fresh = self.path.with_suffix(".json.new")
        with open(fresh, "w") as file:
            file.write(json.dumps(self.found, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Have the folder for one sweep; raise a ValueError if another has it, or nobody can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"folder: {folder} cannot be used: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"folder: another sweep writes to {folder}") from None
    except OSError:  # some file systems have no locks
        pass
    try:
        yield
    finally:
        os.close(lock)


def environment(contenders: Sequence[str] = ()) -> dict[str, Any]:
    """Return the hardware, versions and commit; the cores are those that ranks may use.

    Versions are also those of the packages of contenders that are not ours.
    """
    found = harness.environment() | {"cores": len(os.sched_getaffinity(0))}
    packages = [x for name in contenders if name in PEERS for x in PEERS[name][2]]
    for package in ("seqpar", *packages):
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # it is used where it lies, or not there
            found["versions"][package] = None
    return found


def _where(places: list[dict[str, str]]) -> dict[str, Any]:
    """Return what must be the same of the places of ranks: a queue may give other hosts."""
    hosts = [place["host"] for place in places]
    firsts = [hosts.index(host) for host in hosts]
    return {"devices": [place["device"] for place in places], "first rank of each host": firsts}


def _key(workload: dict[str, Any], contender: str) -> str:
    return json.dumps([workload, contender])


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"results: {path} is not JSON: {error}") from None
    parts = {"environment": dict, "options": dict, "rows": list}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"results: {path} is not of a sweep, or of another version of seqpar")
    for name, kind in parts.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"results: {path} has no {name}")
    if not all(isinstance(row, dict) and set(row) >= _ROW for row in found["rows"]):
        raise ValueError(f"results: {path} has rows that are not of points")
    return found


def check_same(
    path: Path, what: str, then: dict[str, Any], now: dict[str, Any], names: tuple[str, ...]
) -> None:
    """Raise a ValueError if a file is of something else than what is measured now, by name."""
    for name in names:
        if then.get(name) != now[name]:
            raise ValueError(
                f"results: {path} is {what}: {name} is {shown(then.get(name))} there and "
                f"{shown(now[name])} here; go on there, or choose another --folder"
            )
