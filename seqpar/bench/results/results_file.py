"""The results file of a sweep. An interrupted sweep continues after the points in its file."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from seqpar.bench.workers.links import LinksReport
from seqpar.bench.workloads.contenders import PEERS
from seqpar.bench.workloads.workloads import SweepOptions, Workload, WorkloadFields
from seqpar.core.arguments import shown
from seqpar.costs.profile import harness

FORMAT = 1
_NONE = type(None)
_ROW: dict[str, tuple[type, ...]] = {
    "workload": (dict,),
    "contender": (str,),
    "failed": (str, _NONE),
    "spent": (int, float),
    "check": (dict, _NONE),
    "costs": (dict, _NONE),
    "seconds": (list,),
}
_LINKS, _COSTS = {"places", "pairs", "slow"}, {"memory", "bytes", "exposure"}
NAME = "bench.json"
# The properties of the environment that must be the same for all figures of a file.
SAME = ("device", "cpu", "cores", "capability", "matrix_units", "python", "versions", "commit")


Figures = dict[str, Any]  # name -> a number, a pair of numbers, or None


class Check(TypedDict, total=False):
    errors: dict[str, float] | None
    relative: float | None
    of_one_device: float
    spot: float


class PointCosts(TypedDict):
    """The costs of a step on each rank."""

    memory: list[int | None]
    bytes: list[int | None]
    exposure: harness.ExposedCommunication | None


class Row(TypedDict):
    workload: WorkloadFields
    contender: str
    failed: str | None
    spent: float
    check: Check | None
    costs: PointCosts | None
    seconds: list[float]
    figures: NotRequired[Figures | None]


class SweepFile(TypedDict):
    format: int
    environment: harness.Environment
    options: dict[str, Any]
    links: LinksReport | None
    rows: list[Row]
    broken: NotRequired[list[str]]


class SweepResults:
    """The measurements so far, and their file."""

    def __init__(self, path: Path, content: SweepFile) -> None:
        self.path = path
        self.content = content
        self._rows = {_key(row["workload"], row["contender"]): row for row in content["rows"]}

    @classmethod
    def open(cls, folder: Path, options: SweepOptions, again: bool = False) -> SweepResults:
        """Read the results file of a folder, or start a new file.

        The file has one row for each measured point, which is a batch that one strategy or library
        computes. With `again`, the rows of points that failed are removed, so that these points are
        measured again. Raises a ValueError if the file cannot be written, or if its measurements
        are from a different machine or have different options.
        """
        path = folder / NAME
        here, requested = environment(options.contenders), options.as_dict()
        content: SweepFile = {
            "format": FORMAT,
            "environment": here,
            "options": requested,
            "links": None,
            "rows": [],
        }
        try:
            text = path.read_text() if path.exists() else None
            with tempfile.TemporaryFile(dir=folder):
                pass
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"folder: {folder} cannot be used: {error}") from None
        if text is not None:
            content = _parsed(path, text)
            check_same(path, "of a different machine", content["environment"], here, SAME)
            check_same(path, "of other options", content["options"], requested, tuple(requested))
        if again:
            content["rows"] = [row for row in content["rows"] if row["failed"] is None]
        return cls(path, content)

    @property
    def rows(self) -> list[Row]:
        """A row for each strategy or library on each batch, including those that were not
        measured.
        """
        return self.content["rows"]

    def row(self, workload: Workload, contender: str) -> Row:
        key = _key(workload.as_dict(), contender)
        if key not in self._rows:
            self._rows[key] = {
                "workload": workload.as_dict(),
                "contender": contender,
                "failed": None,
                "spent": 0.0,
                "check": None,
                "costs": None,
                "seconds": [],
            }
            self.rows.append(self._rows[key])
        return self._rows[key]

    def lacks(self, workload: Workload, contender: str, rounds: int) -> bool:
        row = self.row(workload, contender)
        unknown = row["check"] is None or row["costs"] is None or len(row["seconds"]) < rounds
        return row["failed"] is None and unknown

    def check_places(self, then: list[dict[str, str]], now: list[dict[str, str]]) -> None:
        """Raise a ValueError if ranks have different devices than before, or if hosts have
        different ranks than before.
        """
        before, after = _where(then), _where(now)
        check_same(self.path, "of a different machine", before, after, tuple(after))

    def write(self) -> None:
        """Replace the file atomically, so that an interruption never leaves a partial file."""
        fresh = self.path.with_suffix(".json.new")
        with open(fresh, "w") as file:
            file.write(json.dumps(self.content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder for this sweep, or raise a ValueError if the folder cannot be locked."""
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
    except OSError:  # raised if the file system has no locks
        pass
    try:
        yield
    finally:
        os.close(lock)


def environment(contenders: Sequence[str] = ()) -> harness.Environment:
    """Return the hardware, the versions of packages, the commit and the usable cores."""
    here = harness.environment()
    here["cores"] = len(os.sched_getaffinity(0))
    packages = [x for name in contenders if name in PEERS for x in PEERS[name][2]]
    for package in ("seqpar", *packages):
        try:
            here["versions"][package] = importlib.metadata.version(package)
        # The package is missing, or is used without installation.
        except importlib.metadata.PackageNotFoundError:
            here["versions"][package] = None
    return here


def _where(places: list[dict[str, str]]) -> dict[str, object]:
    """Return the properties of the ranks' devices that must be the same when an interrupted sweep
    continues.

    The names of hosts are left out.
    """
    # A queue can assign different hosts when a sweep continues.
    hosts = [place["host"] for place in places]
    firsts = [hosts.index(host) for host in hosts]
    return {"devices": [place["device"] for place in places], "first rank of each host": firsts}


def _key(workload: Mapping[str, object], contender: str) -> str:
    return json.dumps([workload, contender])


def _parsed(path: Path, text: str) -> SweepFile:
    try:
        parsed: SweepFile = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"results: {path} is not JSON: {error}") from None
    content: object = parsed
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"results: {path} is not the file of a sweep, or was written by a "
            "different version of seqpar"
        )
    for name, kind in {"environment": dict, "options": dict, "rows": list}.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"results: {path} has no {name}")
    if not all(map(_is_row, content["rows"])):
        raise ValueError(f"results: {path} has rows that no sweep has written")
    links = content.get("links", ...)
    if links is not None and not (isinstance(links, dict) and links.keys() >= _LINKS):
        raise ValueError(f"results: {path} has no links")
    return parsed


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or not row.keys() >= _ROW.keys():
        return False
    if not all(isinstance(row[name], kinds) for name, kinds in _ROW.items()):
        return False
    workload, costs = row["workload"], row["costs"]
    return (
        workload.keys() == {field.name for field in fields(Workload)}
        and all(isinstance(value, int | str) for value in workload.values())
        and all(isinstance(value, int | float) for value in row["seconds"])
        and (costs is None or costs.keys() >= _COSTS)
    )


def check_same(
    path: Path,
    what: str,
    then: Mapping[str, object],
    now: Mapping[str, object],
    names: tuple[str, ...],
) -> None:
    for name in names:
        if then.get(name) != now[name]:
            raise ValueError(
                f"results: {path} is {what}: {name} is {shown(then.get(name))} there and "
                f"{shown(now[name])} here; use a different --folder"
            )
