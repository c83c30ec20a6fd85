"""Batches: the steps of a training, planned and read while the step before is computed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from seqpar.balance.data.collate import Documents, collate
from seqpar.balance.planning.epoch_order import steps_of_epoch
from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.balance.planning.plans import Plan
from seqpar.core.arguments import CuSeqlens, Ints, as_int, as_lengths, check_function, shown

VERSION = 1
_PLACE = ("seed", "epoch", "step")
_MAX_NUMBER = 2**62  # seeds, epochs and tokens fit in 63 bits

T = TypeVar("T", covariant=True)


class LocalStep(NamedTuple):
    """A step as one rank has it: its plan, and what `collate` returned of it."""

    plan: Plan
    micro_batches: list[dict[str, Any]]


class Batches:
    """The global batches of a training, each planned for the ranks that there are.

    Which documents a step has follows from the lengths, `tokens`, the seed, the epoch and the step,
    but not from the number of ranks. So a training may go on from a state on another number of
    ranks, with another planner, and no document is lost or repeated.

    Iterating yields the plan of each step that remains of the epoch, and then the state is at the
    next epoch. `read` also reads the documents. Both work ahead, in a process of their own.

    Args:
        lengths: (documents,) tokens of each document of the dataset. Empty ones are in no step.
        planner: returns the plan of the lengths that it is called with: `partial(balance.plan,
            cluster=cluster, model=model, capacity=capacity)`. All ranks need the same one.
        seed: of the order of documents, in each epoch another one.
        tokens: of a step, at most; a longer document has a step of its own.
        deferral: by how many steps a document may come later than it was drawn, so that steps take
            equally long. 0: by none.
        micro_batches: how many each plan has, if that must be equal: empty ones are added. A
            ValueError where a plan has more. None: as many as the planner makes.
        workers: processes that plan and read; 0: this one, when a step is asked for.
        ahead: steps that each of them is ahead.

    Attributes:
        epoch, step: of the next plan.
        dropped: how many documents are empty.
    """

    def __init__(
        self,
        lengths: CuSeqlens,
        planner: Callable[[Ints], Plan],
        seed: int = 0,
        *,
        tokens: int = 2**22,
        deferral: int = 0,
        micro_batches: int | None = None,
        workers: int = 1,
        ahead: int = 2,
    ) -> None:
        self._lengths = as_lengths("lengths", lengths)
        check_function("planner", planner)
        if micro_batches is not None:
            micro_batches = as_int("micro_batches", micro_batches, 1, 2**20)
        self._planner = _StepPlanner(self._lengths, planner, micro_batches)
        self._kept = np.flatnonzero(self._lengths)
        self.dropped = self._lengths.size - self._kept.size
        self._seed = as_int("seed", seed, 0, _MAX_NUMBER)
        self._tokens = as_int("tokens", tokens, 1, _MAX_NUMBER)
        self._deferral = as_int("deferral", deferral, 0, 2**20)
        self._workers = as_int("workers", workers, 0, 2**10)
        self._ahead = as_int("ahead", ahead, 1, 2**10)
        self.epoch = self.step = 0
        self._steps: tuple[int, list[Ints]] | None = None  # an epoch, and its steps

    def __len__(self) -> int:
        """Return how many steps the epoch has, those before `step` included."""
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[Plan]:
        """Yield the plans of the steps that remain of this epoch."""
        return self._ahead_of(self._planner.plan)

    def read(self, dataset: Documents, rank: int, **options: Any) -> Iterator[LocalStep]:
        """Yield the steps that remain of this epoch, with what a rank computes: see `collate`.

        `dataset[i]` has the document of `lengths[i]`; only those that the rank needs are read.
        `options` are those of `collate`.
        """

        return self._ahead_of(partial(self._planner.read, dataset, rank, options))

    def state_dict(self) -> dict[str, Any]:
        """Return the state: where the next step is, and of what, as numbers and text."""
        digest = hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest()
        options = {"tokens": self._tokens, "deferral": self._deferral, "lengths": digest}
        return {"version": VERSION} | self._place() | options

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another object's `state_dict` was, also on another number of ranks.

        Raise a ValueError that names what is missing, or what differs: then the steps would not be
        the same ones.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state must be a dict, as state_dict returns it, got {shown(state)}")
        for name, value in self.state_dict().items():
            if name not in state:
                raise ValueError(f"state lacks {name}")
            if name not in _PLACE and state[name] != value:
                found = shown(state[name])
                raise ValueError(f"state: {name} must be {value!r}, as it is here, got {found}")
        before = self._seed, self.epoch, self.step
        self._steps = None
        self._seed, self.epoch, self.step = (
            as_int(f"state: {name}", state[name], 0, _MAX_NUMBER) for name in _PLACE
        )
        if self.step > len(self):
            wrong = f"state: step must be at most {len(self)}, the epoch's, got {self.step}"
            self._seed, self.epoch, self.step = before
            self._steps = None
            raise ValueError(wrong)

    def _place(self) -> dict[str, int]:
        return {"seed": self._seed, "epoch": self.epoch, "step": self.step}

    def _of_epoch(self) -> list[Ints]:
        """Return the documents of each step of this epoch."""
        if self._steps is None or self._steps[0] != self.epoch:
            lengths, seed = self._lengths[self._kept], self._seed
            steps = steps_of_epoch(lengths, self._tokens, seed, self.epoch, self._deferral)
            self._steps = self.epoch, [self._kept[step] for step in steps]
        return self._steps[1]

    def _ahead_of(self, make: Callable[[Ints], T]) -> Iterator[T]:
        """Yield `make(documents)` for each step that remains, made while the caller computes."""
        epoch, steps = self.epoch, self._of_epoch()
        loader: DataLoader[T] = DataLoader(
            _Made(make),
            batch_size=None,
            sampler=steps[self.step :],
            num_workers=self._workers,
            prefetch_factor=self._ahead if self._workers else None,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # the caller's random numbers stay as they are
        )
        try:
            made_ahead = iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            found = f"planner and dataset must be picklable, to work in other processes: {error}"
            raise ValueError(f"{found}; with workers=0 they need not be") from None
        for step, made in enumerate(_of_workers(made_ahead), start=self.step + 1):
            # The state is behind the step that is yielded, and behind the last one at an epoch.
            self.epoch, self.step = (epoch, step) if step < len(steps) else (epoch + 1, 0)
            place = self._place()
            yield made
            if self._place() != place:
                found = f"the batches are at {self._place()} by now, and this iteration at {place}"
                raise RuntimeError(f"{found}: begin another one once a state is loaded")


@dataclass(frozen=True)
class _StepPlanner:
    """What plans a step; it can be sent to other processes."""

    lengths: Ints
    planner: Callable[[Ints], Plan]
    micro_batches: int | None

    def plan(self, documents: Ints) -> Plan:
        """Plan a step; the plan's documents are indices into all lengths."""
        try:
            plan = self.planner(self.lengths[documents])
        except Exception as error:
            error.add_note(f"document i of this step is the dataset's number [i] of {documents}")
            raise
        if not isinstance(plan, Plan):
            raise ValueError(f"planner must return a balance.Plan, got {shown(plan)}")
        parts = [replace(x, documents=documents[x.documents]) for x in plan.micro_batches]
        if self.micro_batches is not None:
            if len(parts) > self.micro_batches:
                wanted = f"micro_batches must be at least {len(parts)}, a step's"
                raise ValueError(f"{wanted}, got {self.micro_batches}: or lower tokens")
            parts += [MicroBatch.empty(plan.ranks)] * (self.micro_batches - len(parts))
        return replace(plan, micro_batches=tuple(parts))

    def read(self, dataset: Documents, rank: int, options: Any, documents: Ints) -> LocalStep:
        """Plan a step, and read what a rank computes in it."""
        plan = self.plan(documents)
        return LocalStep(plan, collate(plan, dataset, rank, **options))


class _Made(Dataset[T]):
    """What a function makes of each index."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __getitem__(self, index: Any) -> T:
        return self._make(index)


def _of_workers(made: Iterator[T]) -> Iterator[T]:
    """Yield what workers made, and pass on their errors without the frames that raised them here.

    These refer to each other in a circle. So workers would only be let go when garbage is collected
    and then in an order in which they are waited for, 5 seconds.
    """
    try:
        yield from made
    except Exception as error:
        raise error.with_traceback(None) from None


def _unchanged(made: Any) -> Any:
    return made
