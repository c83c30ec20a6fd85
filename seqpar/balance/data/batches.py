"""The batches of a training run. Worker processes plan the batches and read the documents in
advance.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from seqpar.balance.data.collate import Documents, LocalBatch, collate
from seqpar.balance.planning.divide import steps_of_epoch
from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.balance.planning.plans import Plan
from seqpar.core.arguments import CuSeqlens, Ints, as_int, as_lengths, check_function, shown
from seqpar.layout.layout import Layout

VERSION = 1
_PLACE = ("seed", "epoch", "step")
_MAX_NUMBER = 2**62  # seeds, epochs and tokens fit in 63 bits

T = TypeVar("T", covariant=True)


class LocalStep(NamedTuple):
    """A step on one rank: its plan, and the rank's micro-batches as `collate` returns them."""

    plan: Plan
    micro_batches: list[LocalBatch]


class Batches:
    """The global batches of a training run, with a plan of each batch for the current ranks.

    The documents of a step depend neither on the number of ranks nor on the planner. A training run
    can therefore be resumed with a different number of ranks or a different planner, without losing
    or repeating a document.

    Iteration yields the plans of the steps that remain in the epoch. `read` also reads the
    documents of these steps. When an iteration has ended, `epoch` and `step` are the start of the
    next epoch, even if no step remained. Iteration and `read` prepare steps in advance in separate
    processes.

    Args:
        lengths: (documents,) integers. The number of tokens of each document of the dataset. Empty
            documents are skipped.
        planner: a function from the lengths of a step's documents to their `Plan`, for example
            `partial(balance.plan, cluster=cluster, model=model, capacity=capacity)`. All ranks need
            the same planner.
        seed: the seed of the random order of documents. Each epoch has a different order.
        tokens: the largest number of tokens in a step. A longer document is alone in its step.
        deferral: the largest number of steps by which a document is deferred, so that all steps
            take about the same time. With 0, no document is deferred.
        micro_batches: the number of micro-batches of every plan, if it must be constant. Empty
            micro-batches are added to plans with fewer, and a plan with more raises a ValueError.
            None stands for the number that the planner chooses.
        workers: the number of processes that plan and read. With 0, the calling process plans a
            step when the step is requested.
        ahead: the number of steps that each worker prepares in advance.
        prepare: a function that builds the tables of a layout for this rank, for example
            `attn.preparation(…)`. Workers call it for each micro-batch's layout, and send the
            tables to the training process together with the layouts.

    Attributes:
        epoch, step: the epoch and the step of the next plan.
        dropped: number of empty documents.
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
        prepare: Callable[[Layout], object] | None = None,
    ) -> None:
        self._lengths = as_lengths("lengths", lengths)
        check_function("planner", planner)
        if micro_batches is not None:
            micro_batches = as_int("micro_batches", micro_batches, 1, 2**20)
        if prepare is not None:
            check_function("prepare", prepare)
        self._planner = _StepPlanner(self._lengths, planner, micro_batches, prepare)
        self._pins = prepare is not None and torch.cuda.is_available()
        self._kept = np.flatnonzero(self._lengths)
        self.dropped = self._lengths.size - self._kept.size
        self._seed = as_int("seed", seed, 0, _MAX_NUMBER)
        self._tokens = as_int("tokens", tokens, 1, _MAX_NUMBER)
        self._deferral = as_int("deferral", deferral, 0, 2**20)
        self._workers = as_int("workers", workers, 0, 2**10)
        self._ahead = as_int("ahead", ahead, 1, 2**10)
        self.epoch = self.step = 0
        self._steps: tuple[int, list[Ints]] | None = (
            None  # cache: an epoch, and the documents of its steps
        )

    def __len__(self) -> int:
        """Return the number of steps in the epoch, including the steps before `step`."""
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[Plan]:
        """Yield the plans of the steps that remain in this epoch.

        Raises a RuntimeError if `load_state_dict` or another iteration changes the position during
        this iteration.
        """
        return self._ahead_of(self._planner.plan)

    def read(
        self,
        dataset: Documents,
        rank: int,
        *,
        label_tokens: CuSeqlens | None = None,
        per_token: Collection[str] | None = None,
    ) -> Iterator[LocalStep]:
        """Yield the steps that remain in this epoch, each with this rank's micro-batches.

        `dataset[i]` is the document whose length is `lengths[i]`. Only documents of which this rank
        holds tokens are read. The micro-batches are the results of `collate`, to which `per_token`
        is passed.

        `label_tokens` (documents,) is the number of labels of each document. The label of a
        document's first token must not be counted, because no token predicts it. The argument is
        required if documents have labels of −100. The number of labels in a step, which is the sum
        over the documents of the step, is passed to `collate`.
        """
        counts = None if label_tokens is None else self._label_counts(label_tokens)
        prepared = getattr(self._planner.prepare, "rank", rank)
        if prepared != rank:
            raise ValueError(f"prepare must be for rank {rank}, got one for rank {prepared}")
        return self._ahead_of(partial(self._planner.read, dataset, rank, counts, per_token))

    def state_dict(self) -> dict[str, int | str]:
        """Return the position of the next step, and the options on which the order of documents
        depends.
        """
        digest = hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest()
        state: dict[str, int | str] = {"version": VERSION, **self._place()}
        return state | {"tokens": self._tokens, "deferral": self._deferral, "lengths": digest}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the position that `state_dict` has saved, with any number of ranks.

        Raises a ValueError that names an entry if the entry is missing. The same error is raised if
        the order of documents depends on an entry, and the entry differs from the option of this
        object.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state must be a dict, as state_dict returns it, got {shown(state)}")
        for name, value in self.state_dict().items():
            if name not in state:
                raise ValueError(f"state must have {name!r}, as state_dict returns it")
            if name not in _PLACE and state[name] != value:
                found = shown(state[name])
                raise ValueError(
                    f"state: {name} must be {value!r}, as in the object that loads it, got {found}"
                )
        before = self._seed, self.epoch, self.step
        self._steps = None
        self._seed, self.epoch, self.step = (
            as_int(f"state: {name}", state[name], 0, _MAX_NUMBER) for name in _PLACE
        )
        if (step := self.step) > (most := len(self)):
            (self._seed, self.epoch, self.step), self._steps = before, None
            raise ValueError(
                f"state: step must be at most {most}, the number of steps in the epoch, got {step}"
            )

    def _label_counts(self, label_tokens: CuSeqlens) -> Ints:
        if isinstance(label_tokens, int | np.integer):
            wanted = "(documents,), one number of labels per document"
            raise ValueError(f"label_tokens must be {wanted}, got {shown(label_tokens)}")
        counts = as_lengths("label_tokens", label_tokens)
        if counts.shape != self._lengths.shape:
            wanted = f"{self._lengths.shape}, as lengths is"
            raise ValueError(f"label_tokens must be {wanted}, got {counts.shape}")
        return counts

    def _place(self) -> dict[str, int]:
        return {"seed": self._seed, "epoch": self.epoch, "step": self.step}

    def _of_epoch(self) -> list[Ints]:
        if self._steps is None or self._steps[0] != self.epoch:
            lengths, seed = self._lengths[self._kept], self._seed
            steps = steps_of_epoch(lengths, self._tokens, seed, self.epoch, self._deferral)
            self._steps = self.epoch, [self._kept[step] for step in steps]
        return self._steps[1]

    def _ahead_of(self, make: Callable[[Ints], T]) -> Iterator[T]:
        """Yield the result of `make(documents)` for each remaining step. If there are worker
        processes, they compute the results in advance.
        """
        epoch, steps = self.epoch, self._of_epoch()
        # This is the case if there are no documents, or if the loaded state is at the end of an
        # epoch.
        if self.step >= len(steps):
            self.epoch, self.step = epoch + 1, 0
            return
        loader: DataLoader[T] = DataLoader(
            _Made(make),
            batch_size=None,
            sampler=steps[self.step :],
            num_workers=self._workers,
            prefetch_factor=self._ahead if self._workers else None,
            collate_fn=_unchanged,
            pin_memory=self._pins,
            generator=torch.Generator(),  # so that the caller's generator does not change
        )
        try:
            made_ahead = iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            found = f"planner and dataset must be picklable, to work in other processes: {error}"
            raise ValueError(f"{found}; with workers=0 they need not be") from None
        for step, made in enumerate(_of_workers(made_ahead), start=self.step + 1):
            # Before a step is yielded, the position is set to the step after it.
            self.epoch, self.step = (epoch, step) if step < len(steps) else (epoch + 1, 0)
            place = self._place()
            yield made
            if self._place() != place:
                found = f"the batches are now at {self._place()}, but this iteration is at {place}"
                raise RuntimeError(f"{found}: begin a new iteration after load_state_dict")


@dataclass(frozen=True)
class _StepPlanner:
    lengths: Ints
    planner: Callable[[Ints], Plan]
    micro_batches: int | None
    prepare: Callable[[Layout], object] | None

    def plan(self, documents: Ints) -> Plan:
        """Plan a step. The plan's document indices refer to the whole dataset."""
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
                wanted = f"micro_batches must be at least {len(parts)}, the number in a step's plan"
                got = f"got {self.micro_batches}: raise micro_batches, or lower tokens"
                raise ValueError(f"{wanted}, {got}")
            parts += [MicroBatch.empty(plan.ranks)] * (self.micro_batches - len(parts))
        if self.prepare is not None:
            for part in parts:
                self.prepare(part.layout)
        return replace(plan, micro_batches=tuple(parts))

    def read(
        self,
        dataset: Documents,
        rank: int,
        label_counts: Ints | None,
        per_token: Collection[str] | None,
        documents: Ints,
    ) -> LocalStep:
        plan = self.plan(documents)
        labels: int | None = None
        if label_counts is not None:
            labels = sum(int(label_counts[x.documents].sum()) for x in plan.micro_batches)
        batches = collate(plan, dataset, rank, label_tokens=labels, per_token=per_token)
        return LocalStep(plan, batches)


class _Made(Dataset[T]):
    def __init__(self, make: Callable[[Ints], T]) -> None:
        self._make = make

    def __getitem__(self, index: Ints) -> T:
        return self._make(index)


def _of_workers(made: Iterator[T]) -> Iterator[T]:
    """Yield the results of workers; raise errors without the traceback of this process."""
    try:
        yield from made
    except Exception as error:
        # The traceback and the workers refer to each other. Only Python's garbage collector would
        # free the workers, and then each of them would take 5 seconds to end.
        raise error.with_traceback(None) from None


def _unchanged(made: object) -> object:
    return made
