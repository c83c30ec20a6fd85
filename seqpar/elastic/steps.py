"""Run the steps of a training on changing groups, with checkpoints in memory and on disk."""

from __future__ import annotations

import gc
import io
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.comm.dtensor import is_dtensor
from seqpar.comm.launch import join, leave
from seqpar.comm.messages.comm import Comm, Group
from seqpar.elastic.lighthouse import VARIABLE as LIGHTHOUSE
from seqpar.elastic.lighthouse import LighthouseRendezvous
from seqpar.elastic.messages import VARIABLE, LauncherRendezvous, Place, ProcessReport

_log = logging.getLogger("seqpar")
R = TypeVar("R")


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


Build = Callable[[Group], tuple[Mapping[str, Stateful], Callable[[int], R]]]


@dataclass(frozen=True)
class _Checkpoint:
    """The states after a number of finished steps, as bytes (n,) uint8. The bytes are None before
    the first checkpoint.
    """

    finished: int = 0
    data: Tensor | None = None

    @classmethod
    def of(cls, finished: int, states: Mapping[str, Stateful]) -> _Checkpoint:
        content = {name: each.state_dict() for name, each in states.items()}
        for name, value in content.items():
            if _has_dtensor(value):
                reason = "each rank must hold the whole state, to survive the loss of other ranks"
                raise ValueError(f"states[{name!r}] must not have DTensors: {reason}")
        file = io.BytesIO()
        torch.save({"finished": finished, "states": content}, file)
        return cls(finished, torch.frombuffer(file.getbuffer(), dtype=torch.uint8))

    def check(self) -> None:
        """Raise a ValueError if the bytes cannot be read back."""
        try:
            self.parse(self._bytes)
        except UnpicklingError as error:
            reason = "torch.load with weights_only=True must be able to read them"
            raise ValueError(f"states must have only tensors and plain values: {reason}") from error

    @classmethod
    def parse(cls, data: bytes | memoryview) -> _Checkpoint:
        content = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        if not (isinstance(content, dict) and content.keys() == {"finished", "states"}):
            raise ValueError("not a checkpoint of seqpar.elastic.steps")
        return cls(content["finished"], torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @classmethod
    def read(cls, path: Path | None) -> _Checkpoint:
        """Return the checkpoint in a file, or an empty checkpoint if there is no file."""
        if path is None or not path.exists():
            return cls()
        data = path.read_bytes()
        try:
            return cls.parse(data)
        except MemoryError:
            raise
        except Exception as error:  # torch.load raises many types for a damaged file
            text = f"path must be a whole checkpoint of seqpar.elastic.steps, got {str(path)!r}"
            raise ValueError(f"{text}: move the file away, or choose a different path") from error

    def write(self, path: Path) -> None:
        """Replace the file. If this fails, keep the old file and log a warning."""
        new = path.with_name(f"{path.name}.new")
        try:
            with open(new, "wb") as file:
                file.write(self._bytes)
                file.flush()
                os.fsync(file.fileno())  # without this, a crash of the host can leave an empty file
            new.replace(path)
        except OSError as error:
            _log.warning("the checkpoint after %d steps was not written: %s", self.finished, error)

    @property
    def _bytes(self) -> memoryview:
        """A view of the data, without a copy."""
        assert self.data is not None
        # Copying would stop all threads of the process, including the one that sends heartbeats.
        return self.data.numpy().data

    def restore(self, states: Mapping[str, Stateful]) -> None:
        file = io.BytesIO(self._bytes)
        content = torch.load(file, weights_only=True, map_location="cpu")["states"]
        if content.keys() != states.keys():
            raise ValueError(
                f"build must return states named {list(content)}, as the checkpoint has them, got "
                f"{list(states)}: if a different training wrote the checkpoint, "
                "choose a different path"
            )
        for name, each in states.items():
            each.load_state_dict(content[name])

    def share(self, comm: Comm, place: Place) -> _Checkpoint:
        """Send this checkpoint to the ranks that do not have it, or receive the newest
        checkpoint.
        """
        comm, lacking = comm.call(), place.lacking
        if comm.rank == place.source and self.data is not None and lacking:
            for x in (torch.tensor([self.data.numel()]), self.data):
                comm.exchange([(peer, x) for peer in lacking], [], label="checkpoint").wait()
        if comm.rank not in lacking:
            return self
        size = torch.zeros(1, dtype=torch.int64)
        comm.exchange([], [(place.source, size)], label="checkpoint").wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        comm.exchange([], [(place.source, data)], label="checkpoint").wait()
        return _Checkpoint.parse(data.numpy().data)


def _share_initial_states(states: Mapping[str, Stateful], comm: Comm, place: Place) -> None:
    """Send the states of rank 0 to all ranks."""
    initial = _Checkpoint.of(0, states)
    initial.check()
    place = place._replace(source=0, lacking=range(1, place.ranks))
    initial.share(comm, place).restore(states)


def steps(
    build: Build[R],
    count: int,
    *,
    every: int = 1,
    path: str | Path | None = None,
    timeout: timedelta = timedelta(seconds=40),
) -> Iterator[tuple[int, R]]:
    """Run steps 0 to `count` − 1 on ranks that can die, and yield (step, result).

    Run the script with `python -m seqpar elastic`, or, on several hosts, with torchrun and the
    address of torchft's lighthouse in the variable `TORCHFT_LIGHTHOUSE`. When a rank dies, the step
    on all other ranks ends with a `PeerError`, which this function handles. The ranks form a new
    group, with spares if there are any, and continue from the newest checkpoint that one of them
    has. This checkpoint is sent once to the ranks that do not have it. These ranks skip the steps
    up to the checkpoint, and do not yield them. If a step raises an error and no rank was lost,
    this function raises the error. With a lighthouse, a new group is also formed after a checkpoint
    if new processes are waiting.

    Until there is a checkpoint, each group starts with the states that `build` makes on its rank 0.
    All ranks must hold the whole state, as with DDP or without a wrapper. If a step draws random
    numbers, seed them with the number of the step.

    If the number of ranks stays the same, the results have the same bits as without faults. If the
    number of ranks changes, the results differ as much as results with different numbers of ranks
    differ. If a rank dies before the first checkpoint, both statements hold only if `build` sets a
    seed.

    Args:
        build: a function that is called with each new group, which uses gloo and is the default
            group. It returns two values: a dictionary from names to states, objects with
            `state_dict` and `load_state_dict`; and the step, a function of the step's number. It
            must make the attention modules, because they belong to a group.
        count: the number of steps.
        every: the number of steps between two checkpoints, which are copied to host memory. After a
            fault, the steps since the last checkpoint run again, and are yielded again.
        path: a file in which rank 0 also keeps the last checkpoint. If the training ends early, or
            loses all ranks of a group, it continues from this file when it is started again.
        timeout: the timeout of the group. A dead rank is found within a quarter of this time, but
            at most within 10 s. `build`, and sending a checkpoint, must each take less than the
            timeout.

    Raises:
        ValueError: if a state contains DTensors or objects that torch.load refuses, if the file at
            `path` is damaged, if the names of the checkpoint's states differ from those of `build`,
            if `every` is below 1, or if no launcher started this process.
        RuntimeError: if a step raises it although no rank was lost, if too few ranks are left, or
            if the lighthouse does not answer.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    rendezvous = _rendezvous()
    try:
        yield from _steps(
            rendezvous, build, count, every, None if path is None else Path(path), timeout
        )
    finally:
        rendezvous.close()


def _rendezvous() -> LauncherRendezvous | LighthouseRendezvous:
    if (address := os.environ.get(VARIABLE)) is not None:
        return LauncherRendezvous(address)
    if (address := os.environ.get(LIGHTHOUSE)) is not None:
        return LighthouseRendezvous(address)
    raise ValueError(
        "steps needs a launcher: run this script with `python -m seqpar elastic`, or with torchrun "
        f"and the address of torchft's lighthouse in {LIGHTHOUSE}"
    )


def _steps(
    rendezvous: LauncherRendezvous | LighthouseRendezvous,
    build: Build[R],
    count: int,
    every: int,
    file: Path | None,
    timeout: timedelta,
) -> Iterator[tuple[int, R]]:
    checkpoint = _Checkpoint.read(file)
    failure: RuntimeError | None = None
    failed = 0.0

    def report() -> ProcessReport:
        return ProcessReport(checkpoint.finished, checkpoint.finished >= count, failure is not None)

    while True:
        place = rendezvous.place(report())
        leave()  # ranks leave only when all ranks have finished
        if place.end == "done":
            return
        if place.end:
            raise failure or RuntimeError("other ranks failed, or too few are left")
        try:
            name = f"generation {place.generation}"
            store, device = rendezvous.store(place), torch.device("cpu")
            comm = join(store, name, place.rank, place.ranks, device, timeout)
            checkpoint = checkpoint.share(comm, place)
            states, step = build(comm.process_group)
            if checkpoint.data is None:  # no rank has a checkpoint
                _share_initial_states(states, comm, place)
            else:
                checkpoint.restore(states)
            if failure is not None:
                later = time.monotonic() - failed
                text = "%s. Continued on %d ranks after %d steps, %.1f s later"
                _log.warning(text, failure, place.ranks, checkpoint.finished, later)
                failure = None
            for i in range(checkpoint.finished, count):
                result = step(i)
                if (i + 1) % every == 0 or i + 1 == count:
                    first, checkpoint = checkpoint.data is None, _Checkpoint.of(i + 1, states)
                    if first:
                        checkpoint.check()
                    if file is not None and place.rank == 0:
                        checkpoint.write(file)
                yield i, result
                if i + 1 == checkpoint.finished < count and rendezvous.regroups(report()):
                    break
        except RuntimeError as error:
            failed = time.monotonic()
            traceback.clear_frames(error.__traceback__)  # frames can keep the group alive
            leave(failed=True)
            failure = error
        comm = states = step = None  # type: ignore[assignment]
        gc.collect()


def _has_dtensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_dtensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_dtensor, value))
    return is_dtensor(value)
