"""Groups of ranks. accelerate treats each group as one process.

In an evaluation, all groups together compute the batches that a single process would compute. In
each *turn*, every group computes one batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from seqpar.comm.messages.comm import Comm
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.huggingface_private import ACCELERATE, is_prepared

_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device", "in_order",
)  # a DataLoader's options, except its dataset and batches  # fmt: skip


class Groups:
    """The groups of an Accelerator's processes. The Accelerator treats each group as one process.

    All ranks of a group get the same batches, and values are gathered once for each group. An
    evaluation runs in turns, in each of which every group computes one batch. If the last turn has
    fewer batches than there are groups, the results of the groups without a batch are dropped.
    `firsts` are the first processes of the groups.
    """

    def __init__(self, accelerator: Any, firsts: list[int], index: int) -> None:
        self._accelerator, self._firsts = accelerator, firsts
        self.count, self.index = len(firsts), index
        self.evaluates = False
        self._gather_processes = accelerator.gather
        accelerator.prepare_data_loader = self.prepare_data_loader
        accelerator.gather = self.gather
        accelerator.gather_for_metrics = self.gather_for_metrics

    @classmethod
    def of(cls, comm: Comm, accelerator: Any) -> Groups:
        """Return the groups of all processes. `comm` is the group of this process."""
        from accelerate.utils import gather_object

        processes = comm.processes
        groups = gather_object([processes]) if accelerator.use_distributed else [processes]
        members = sorted(rank for group in {min(x): x for x in groups}.values() for rank in group)
        if members != list(range(accelerator.num_processes)):
            wanted = f"each of the {accelerator.num_processes} must be in one group"
            found = sorted(set(map(tuple, groups)))
            raise ValueError(f"group must divide all processes: {wanted}, got {found}")
        firsts = sorted({min(group) for group in groups})
        return cls(accelerator, firsts, firsts.index(min(processes)))

    @contextmanager
    def evaluating(self, evaluates: bool = True) -> Iterator[None]:
        before = self.evaluates
        self.evaluates = evaluates or before
        try:
            yield
        finally:
            self.evaluates = before

    @contextmanager
    def counted(self, trainer: Any) -> Iterator[None]:
        """Within this context, make a trainer of TRL count groups instead of processes, and gather
        the values of each group once.
        """
        if isinstance(trainer.accelerator, _AcceleratorOfGroups):
            yield
            return
        modules = {sys.modules[x.__module__] for x in type(trainer).__mro__ if _is_of_trl(x)}
        functions = {"gather": self.gather_firsts, "gather_object": self.gather_objects}
        with ExitStack() as stack:
            view = _AcceleratorOfGroups(self._accelerator, self)
            replaced: list[tuple[Any, str, Any]] = [(trainer, "accelerator", view)]
            for module in modules:
                names = functions.keys() & vars(module).keys()
                replaced += [(module, name, functions[name]) for name in names]
            for owner, name, value in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield

    def gather_firsts(self, x: Tensor) -> Tensor:
        parts = self._gather_processes(x).chunk(self._accelerator.num_processes)
        return torch.cat([parts[first] for first in self._firsts])

    def gather_objects(self, x: list[Any]) -> list[Any]:
        from accelerate.utils import gather_object

        parts = gather_object([x]) if self._accelerator.use_distributed else [x]
        return [value for first in self._firsts for value in parts[first]]

    def prepare_data_loader(
        self, loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        from accelerate.data_loader import prepare_data_loader

        accelerator = self._accelerator
        prepared = ACCELERATE.read(accelerator, "_dataloaders")
        if is_prepared(loader):
            if loader not in prepared:
                prepared.append(loader)
            return loader
        if device_placement is None:
            device_placement = accelerator.device_placement
        # By default, one process reads an iterable dataset, and accelerate dispatches the samples
        # to all processes.
        dispatches = accelerator.dispatch_batches is None and device_placement
        dispatches = dispatches and isinstance(loader.dataset, IterableDataset)
        alone = self.evaluates or dispatches
        _seed_workers(loader, 0 if alone else self.index)  # as the one process that reads
        made = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1 if alone else self.count,
            process_index=0 if alone else self.index,
            split_batches=accelerator.split_batches and not alone,
            put_on_device=device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        if self.evaluates:
            self._deal(made, dispatches)
        elif dispatches and self.count > 1:
            self._dispatch(made)
        if _draws_seeds(made.get_sampler()):
            made.rng_types = [*(made.rng_types or ()), "torch"]  # all ranks draw rank 0's numbers
        prepared.append(made)
        return made

    def gather(self, x: Any) -> Any:
        """Gather x (rows, …) from the groups, in the order of the groups."""
        from accelerate.utils import recursively_apply

        return x if self.count == 1 else recursively_apply(self._gather_rows, x)

    def gather_for_metrics(self, x: Any, use_gather_object: bool = False) -> Any:
        """Gather the rows of an evaluation. Repeated batches, and samples that repeat earlier ones
        to fill up the last batch, are dropped.
        """
        from accelerate.utils import gather_object

        objects = use_gather_object or not _only_tensors(x)
        turn, end = self._turn, self._accelerator.gradient_state.end_of_dataloader
        last = self._accelerator.gradient_state.remainder
        if end and turn is not None:
            last = turn.rows if turn.dispatches else last
            if self.index == turn.batches - 1 and last > 0:
                x = _first_rows(x, last, objects)
        if not objects:
            x = self.gather(x)
        elif self.count > 1:
            parts = gather_object([x])
            x = [value for first in self._counted for value in parts[first]]
        return _first_rows(x, last, objects) if end and turn is None and last > 0 else x

    @property
    def _turn(self) -> _Turn | None:
        return getattr(self._accelerator.gradient_state.active_dataloader, KEY, None)

    @property
    def _counted(self) -> list[int]:
        """The first processes of those groups whose batch does not repeat the batch of an earlier
        group.
        """
        turn = self._turn
        if turn is None or not self._accelerator.gradient_state.end_of_dataloader:
            return self._firsts
        return self._firsts[: turn.batches]

    def _gather_rows(self, x: Tensor) -> Tensor:
        x = x if x.dim() else x[None]
        rows = self._gather_processes(torch.tensor([len(x)], device=x.device)).tolist()
        missing = max(rows) - len(x)
        padded = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
        parts = self._gather_processes(padded.contiguous()).chunk(len(rows))
        return torch.cat([parts[first][: rows[first]] for first in self._counted])

    def _deal(self, made: Any, dispatches: bool) -> None:
        turn = _Turn(self.count, self.index, dispatches)
        base = made.base_dataloader
        make: Callable[..., DataLoader[Any]] = partial(DataLoader, base.dataset)
        if isinstance(base.dataset, IterableDataset):
            make = partial(_DealtLoader, turn, base.dataset)
            options = {"batch_size": base.batch_size, "drop_last": base.drop_last}
        elif isinstance(base.sampler, BatchSampler):
            options = {"sampler": _DealtSampler(turn, base.sampler), "batch_size": None}
        else:
            options = {"batch_sampler": _DealtSampler(turn, base.batch_sampler)}
        made.base_dataloader = make(**options, **_options_of(base))
        setattr(made, KEY, turn)

    def _dispatch(self, made: Any) -> None:
        """Make a data loader return the samples that accelerate would send to a process, with this
        group in place of the process.
        """
        base, size = made.base_dataloader, made.base_dataloader.batch_size
        if not self._accelerator.split_batches:
            size *= self.count
        elif size % self.count:
            what = f"a multiple of the number of groups, {self.count}, to be split"
            raise ValueError(f"per_device_train_batch_size must be {what}, got {size}")
        if base.num_workers > 1:
            made.base_dataloader = self._of_merged_workers(base)
            return
        dataset = _Dispatched(base.dataset, size, base.drop_last, self)
        options = {"batch_size": size // self.count, "drop_last": base.drop_last}
        made.base_dataloader = DataLoader(dataset, **options, **_options_of(base))

    def _of_merged_workers(self, base: Any) -> DataLoader[Any]:
        workers: DataLoader[Any] = DataLoader(
            base.dataset,
            batch_size=base.batch_size,
            drop_last=base.drop_last,
            **_options_of(base) | {"collate_fn": list, "pin_memory": False},
        )
        batches = 1 if self._accelerator.split_batches else self.count
        return DataLoader(
            _DispatchedBatches(workers, batches, self),
            batch_size=None,
            collate_fn=base.collate_fn,
            pin_memory=base.pin_memory,
            # So that only `workers` draws from the process's generator.
            generator=torch.Generator(),
        )


class _AcceleratorOfGroups:
    def __init__(self, accelerator: Any, groups: Groups) -> None:
        self._accelerator, self._groups = accelerator, groups
        self.num_processes, self.process_index = groups.count, groups.index

    def reduce(self, x: Tensor, reduction: str = "mean") -> Tensor:
        rows = self._groups.gather_firsts(x[None])
        return rows.sum(0) if reduction == "sum" else rows.mean(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


class _Turn:
    """A turn of an evaluation, in which each group computes a batch. Only the first `batches`
    batches are different, and the last of these has `rows` rows. All further batches are
    repetitions.
    """

    def __init__(self, groups: int, group: int, dispatches: bool) -> None:
        self.groups, self.group, self.dispatches = groups, group, dispatches
        self.batches, self.rows = groups, -1

    def deal(self, batches: Iterable[Any]) -> Iterator[Any]:
        from accelerate.utils import ignorant_find_batch_size

        remaining = iter(batches)
        while turn := list(islice(remaining, self.groups)):
            self.batches = len(turn)
            self.rows = ignorant_find_batch_size(turn[-1]) or -1
            yield turn[min(self.group, len(turn) - 1)]


class _DealtSampler(BatchSampler):
    def __init__(self, turn: _Turn, batches: Any) -> None:
        self._turn, self.batch_sampler = turn, batches
        self.drop_last = getattr(batches, "drop_last", False)
        if getattr(batches, "batch_size", None) is not None:
            self.batch_size = batches.batch_size

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The inner sampler, whose epoch accelerate sets."""
        return getattr(self.batch_sampler, "sampler", None)

    def __iter__(self) -> Iterator[list[int]]:
        return self._turn.deal(self.batch_sampler)

    def __len__(self) -> int:
        return math.ceil(len(self.batch_sampler) / self._turn.groups)


class _DealtLoader(DataLoader[Any]):
    def __init__(self, turn: _Turn, *args: Any, **kwargs: Any) -> None:
        self._turn = turn
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Any:
        return self._turn.deal(super().__iter__())

    def __len__(self) -> int:
        return math.ceil(super().__len__() / self._turn.groups)


class _Dispatched(IterableDataset[Any]):
    """The samples that accelerate's DataLoaderDispatcher would give one process in an epoch.

    The dataset is read in turns. A turn has `size` samples, which are divided equally among the
    groups of ranks. If the samples do not fill the last turn, the first samples are repeated.
    """

    def __init__(self, dataset: Any, size: int, drop_last: bool, groups: Groups) -> None:
        self.dataset, self._size, self._drop_last = dataset, size, drop_last
        self._groups, self._group = groups.count, groups.index

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        first = list(islice(samples, self._groups))
        samples = chain(first, samples)
        while turn := list(islice(samples, self._size)):
            if len(turn) < self._size:
                if self._drop_last:
                    return
                turn += islice(cycle(first), -len(turn) % self._groups)
            part = len(turn) // self._groups
            yield from turn[self._group * part : (self._group + 1) * part]

    def __len__(self) -> int:
        turns, samples = divmod(len(self.dataset), self._size)
        last = 0 if self._drop_last else math.ceil(samples / self._groups)
        return turns * (self._size // self._groups) + last


class _DispatchedBatches(IterableDataset[list[Any]]):
    """The batches, as lists, that accelerate's DataLoaderDispatcher would give one process.

    `workers` loads lists of samples in several processes. The lists are read in turns. A turn has
    `batches` lists, whose samples are divided equally among the groups of ranks. If the samples do
    not fill the last turn, the first samples are repeated, or with `drop_last` the turn is left
    out. This process makes the turns, because a worker has only some of the samples.
    """

    # This class is a Dataset, because accelerate makes another loader from it when training
    # resumes.

    def __init__(self, workers: DataLoader[Any], batches: int, groups: Groups) -> None:
        self._workers, self._batches = workers, batches
        self._groups, self._group = groups.count, groups.index

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._workers.dataset, "set_epoch"):
            self._workers.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        loaded = iter(self._workers)
        turn = list(islice(loaded, self._batches))
        first = list(islice(chain(*turn), self._groups))
        while turn:
            following = list(islice(loaded, self._batches))
            samples = list(chain(*turn))
            if not following:
                if self._workers.drop_last and len(turn) < self._batches:
                    return
                samples += islice(cycle(first), -len(samples) % self._groups)
            # As in accelerate, if the samples of any other turn cannot be divided equally, the rest
            # is left out.
            part = len(samples) // self._groups
            if part:
                yield samples[self._group * part : (self._group + 1) * part]
            turn = following

    def __len__(self) -> int:
        full, remaining = divmod(len(self._workers), self._batches)
        return full + bool(remaining and not self._workers.drop_last)


def _is_of_trl(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "trl"


def _options_of(loader: Any) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _OPTIONS}


def _seed_workers(loader: Any, group: int) -> None:
    from transformers.trainer_utils import seed_worker

    seed = loader.worker_init_fn
    if isinstance(seed, partial) and seed.func is seed_worker:
        loader.worker_init_fn = partial(seed_worker, **{**seed.keywords, "rank": group})


def _draws_seeds(sampler: Any) -> bool:
    from accelerate.data_loader import SeedableRandomSampler

    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return False
    return sampler.generator is None


def _only_tensors(x: Any) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda x: x, x, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _first_rows(x: Any, rows: int, objects: bool) -> Any:
    from accelerate.utils import recursively_apply

    if objects:
        return x[:rows] if isinstance(x, list | tuple | Tensor) else x
    return recursively_apply(lambda x: x[:rows] if x.dim() else x, x)
