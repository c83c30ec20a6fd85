"""A Trainer of transformers whose models run over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.exchange import Comm
from seqpar.integrations.huggingface.attention import session_of
from seqpar.integrations.huggingface.session import SequenceParallel
from seqpar.integrations.huggingface.sft import OverRanksSFT
from seqpar.integrations.huggingface.sharding import KEY


def trainer(base: type) -> type:
    """Return `base`, transformers' Trainer or a subclass, for models that are enabled.

    TRL's SFTTrainer is one, with its packing. The ranks of a group read the same batches, and
    groups different ones: data parallelism is over groups. Losses, gradient accumulation,
    evaluation and checkpoints are as in one process for each group. `model` must be enabled before
    the trainer is made. What a subclass overrides is kept: it runs before what is done here, and a
    `compute_loss` that calls the model itself is refused when it does so.

    Raises:
        TypeError: if `base` is no Trainer.
    """
    from transformers import Trainer

    if not (isinstance(base, type) and issubclass(base, Trainer)):
        raise TypeError(f"base must be transformers.Trainer or a subclass of it, got {base!r}")
    made: type = type("Trainer", (OverRanks, Trainer), {"__doc__": Trainer.__doc__})
    root: type = Trainer
    for kind in base.__mro__:
        if kind.__name__ == "SFTTrainer" and kind.__module__.startswith("trl."):
            root, made = kind, type(kind.__name__, (OverRanksSFT, kind, made), {})
    if base is root:
        return type(base.__name__, (made,), {"__doc__": base.__doc__})
    return type(base.__name__, (base, made), {"__doc__": base.__doc__})


class _Whole:
    """A model that takes whole batches and returns whole outputs."""

    def __init__(self, model: Any, sp: SequenceParallel, loss_only: bool) -> None:
        self.model, self._sp, self.loss_only = model, sp, loss_only

    def __call__(self, **inputs: Any) -> Any:
        return self._sp.unshard(self.model(**self._sp.shard(inputs)))


class OverRanks:
    """What a Trainer does otherwise. Its attributes are those of transformers' class."""

    args: Any
    accelerator: Any
    model: Any
    gather_function: Any
    label_smoother: Any
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sp = _session_in(self.model)
        balanced = getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance"
        refused = {
            "compute_loss_func": getattr(self, "compute_loss_func", None) is not None,
            "use_liger_kernel": bool(getattr(self.args, "use_liger_kernel", False)),
            "dispatch_batches": bool(self.accelerator.dispatch_batches),
            "train_sampling_strategy='batch_rebalance'": balanced,
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
        return self._of_groups(count).sum() if self.args.average_tokens_across_devices else count

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean loss of all labels that this group's ranks have in `inputs`."""
        inner = model.model if isinstance(model, _Whole) else model
        batch = self._sp.shard(inputs)
        if "labels" not in batch:
            raise ValueError("inputs must have labels, of which the loss is made")
        loss, outputs = self._loss_of(inner, batch, num_items_in_batch)
        if not return_outputs:
            return loss
        wanted = not (isinstance(model, _Whole) and model.loss_only)
        return loss, self._sp.unshard(outputs) if wanted else outputs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Predict with whole inputs, and with whole outputs if they are wanted."""
        whole = _Whole(model, self._sp, prediction_loss_only)
        return super().prediction_step(whole, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Count a batch's operations once for its group."""
        found: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        return found // self._sp.comm.size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count a batch's tokens once for its group."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self._sp.comm.size

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, counting the predictions of a group once."""
        self.gather_function = self._gather
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _loss_of(self, model: Any, batch: dict[str, Any], items: Any) -> tuple[Tensor, Any]:
        """Return the loss of a sharded batch, divided by `items` if given, and the outputs."""
        given = {} if items is None else {"num_items_in_batch": items}
        if self.label_smoother is None:
            outputs = model(**batch, **given)
            return self._scaled(outputs["loss"], items), outputs
        labels = batch.pop("labels")  # of this rank, and next tokens already if they are shifted
        outputs = model(**batch)
        given = given or {"num_items_in_batch": max(1, batch[KEY].labels)}
        return self._scaled(
            self._sp.total(self.label_smoother(outputs, labels, **given)), items
        ), outputs

    def _scaled(self, loss: Tensor, items: Any) -> Tensor:
        """Return a loss that was divided by `items` as Trainers do: they average over groups."""
        across = items is not None and self.args.average_tokens_across_devices
        return loss * len(self._groups) if across else loss

    def _gather(self, x: Any) -> Any:
        """Return all groups' values, without those that the last batch repeats."""
        if isinstance(x, tuple | list):
            return type(x)(self._gather(part) for part in x)
        if len(self._groups) == 1:
            return x
        parts = self.accelerator.gather(x).chunk(self.accelerator.num_processes)
        x = torch.cat([parts[first] for first in self._groups])
        state = self.accelerator.gradient_state
        return x[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else x

    def _of_groups(self, x: Tensor) -> Tensor:
        """Return (groups, …): what each group has, which is the same on its ranks."""
        if len(self._groups) == 1:
            return x[None]
        return self.accelerator.gather(x[None])[self._groups]


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
