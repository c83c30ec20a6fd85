"""A Trainer of transformers whose models run over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.exchange import Comm
from seqpar.integrations.huggingface.attention import session_of
from seqpar.integrations.huggingface.session import SequenceParallel


def trainer(base: type) -> type:
    """Return `base`, transformers' Trainer or a subclass, for models that are enabled.

    The ranks of a group read the same batches, and groups different ones: data parallelism is over
    groups. Losses, gradient accumulation, evaluation and checkpoints are as in one process for each
    group. `model` must be enabled before the trainer is made.
    """
    return type(base.__name__, (_Mixin, base), {"__doc__": base.__doc__})


class _Whole:
    """A model that takes whole batches and returns whole outputs."""

    def __init__(self, model: Any, sp: SequenceParallel) -> None:
        self.model, self._sp = model, sp

    def __call__(self, **inputs: Any) -> Any:
        return self._sp.unshard(self.model(**self._sp.shard(inputs)))


class _Mixin:
    """What a Trainer does otherwise. Its attributes are those of transformers' class."""

    args: Any
    accelerator: Any
    model: Any
    gather_function: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sp = _session_in(self.model)
        refused = {
            "label_smoothing_factor": bool(getattr(self.args, "label_smoothing_factor", 0)),
            "compute_loss_func": getattr(self, "compute_loss_func", None) is not None,
            "use_liger_kernel": bool(getattr(self.args, "use_liger_kernel", False)),
            "dispatch_batches": bool(self.accelerator.dispatch_batches),
        }
        for name, given in refused.items():
            if given:
                raise ValueError(f"{name} must not be set for a model that runs over ranks")
        self._groups, self._group = _groups_of(self._sp.comm, self.accelerator)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Make the ranks of a group read the same batches."""
        loader = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        for part in (loader, getattr(loader, "batch_sampler", None), loader.dataset):
            if part is not None and hasattr(part, "num_processes"):
                part.num_processes, part.process_index = len(self._groups), self._group
        return loader

    def get_total_train_batch_size(self, args: Any) -> int:
        """Count the samples of a step once for each group."""
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // self._sp.comm.size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the labels of a step, of all groups if their tokens are averaged."""
        if not self.model_accepts_loss_kwargs or not batch_samples:  # type: ignore[attr-defined]
            return None
        counts = [self._sp.count_labels(batch) for batch in batch_samples]
        if None in counts:
            return None
        count = torch.tensor(sum(counts), device=device)
        if self.args.average_tokens_across_devices and len(self._groups) > 1:
            count = self._once(self.accelerator.gather(count.reshape(1))).sum()
        return count

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean loss of all labels that this group's ranks have in `inputs`."""
        inner = model.model if isinstance(model, _Whole) else model
        extra = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = inner(**self._sp.shard(inputs), **extra)
        if "loss" not in outputs:
            raise ValueError("inputs must have labels, of which the loss is made")
        loss = outputs["loss"]
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * len(self._groups)  # what is divided by all groups' labels is averaged
        return (loss, self._sp.unshard(outputs)) if return_outputs else loss

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict with whole inputs and outputs."""
        whole = _Whole(model, self._sp)
        return super().prediction_step(whole, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, counting the predictions of a group once."""
        self.gather_function = self._gather
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _gather(self, x: Any) -> Any:
        """Return all groups' values, without those that the last batch repeats."""
        if isinstance(x, tuple | list):
            return type(x)(self._gather(part) for part in x)
        if len(self._groups) > 1:
            x = self._once(self.accelerator.gather(x))
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0 and len(self._groups) > 1:
            return x[: state.remainder]
        return x

    def _once(self, gathered: Tensor) -> Tensor:
        """Return what one rank of each group gave, of what all processes did."""
        parts = gathered.chunk(self.accelerator.num_processes)
        return torch.cat([parts[first] for first in self._groups])


def _session_in(model: nn.Module) -> SequenceParallel:
    """Return the session of a model that is enabled."""
    for x in model.modules():
        session = session_of(x)
        if isinstance(session, SequenceParallel):
            return session
    raise ValueError("model must be enabled before the trainer is made: huggingface.enable(model)")


def _groups_of(comm: Comm, accelerator: Any) -> tuple[list[int], int]:
    """Return the first process of each group, ascending, and which of them is this one's group.

    Raise a ValueError unless all processes are in groups of equally many.
    """
    from accelerate.utils import gather_object

    processes = comm.processes
    groups = gather_object([processes]) if accelerator.use_distributed else [processes]
    firsts = sorted({min(group) for group in groups})
    members = sorted(rank for group in {min(x): x for x in groups}.values() for rank in group)
    if members != list(range(accelerator.num_processes)):
        found = f"groups of {accelerator.num_processes} processes with members {members}"
        raise ValueError(f"group must divide all processes, got {found}")
    return firsts, firsts.index(min(processes))
