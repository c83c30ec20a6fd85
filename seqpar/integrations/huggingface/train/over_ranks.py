"""Overrides of methods of transformers' Trainer, for models that run over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.integrations.accelerate import sequence_mesh
from seqpar.integrations.huggingface.attention.attention import session_of
from seqpar.integrations.huggingface.batch.collator import COLUMNS, Collator
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.huggingface_private import (
    TRAINER,
    forget_prepared,
    is_prepared,
)
from seqpar.integrations.huggingface.loss.losses import keep_router_logits
from seqpar.integrations.huggingface.model.layers import loss_shifts, most_dropped
from seqpar.integrations.huggingface.session import SequenceParallel
from seqpar.integrations.huggingface.train.groups import Groups
from seqpar.integrations.huggingface.train.whole_batches import WholeBatches


class OverRanks:
    """A mixin for a Trainer. It reads and sets attributes of transformers' Trainer."""

    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    data_collator: Any
    gather_function: Any
    label_smoother: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sp = session_in(self.model)
        self._keep_router_logits(self._sp)
        # For a few models, such as GPT-2, transformers also counts the first label of each row.
        shifts = TRAINER.read(self, "_loss_shifts_labels")
        self._counts_firsts = not shifts and bool(loss_shifts(self._sp.inner))
        balanced = getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance"
        refused = {
            "compute_loss_func": getattr(self, "compute_loss_func", None) is not None,
            "use_liger_kernel": bool(getattr(self.args, "use_liger_kernel", False)),
            "dispatch_batches": bool(self.accelerator.dispatch_batches),
            "train_sampling_strategy='batch_rebalance'": balanced,
            "predict_with_generate": bool(getattr(self.args, "predict_with_generate", False)),
            "generate_during_eval": bool(getattr(self.args, "generate_during_eval", False)),
        }
        for name, given in refused.items():
            if given:
                raise ValueError(f"{name} must not be set for an enabled model")
        self._check_sizes()
        self._groups = Groups.of(self._sp.comm, self.accelerator)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    @staticmethod
    def _keep_router_logits(sp: SequenceParallel) -> None:
        """Keep the router logits of each call of a model."""
        sp.undo_on_disable(sp.inner.base_model.register_forward_hook(keep_router_logits))

    def _session_of(self, name: str, model: Any) -> SequenceParallel | None:
        """Return the session of another model of the trainer, or None if the model is not enabled.

        Raises a ValueError that begins with the argument's `name` if the model is enabled on other
        ranks than the trained model.
        """
        sessions = sessions_of(model)
        if not sessions:
            return None
        ranks, own = sessions[0].comm.processes, self._sp.comm.processes
        if ranks != own:
            raise ValueError(f"{name} must be enabled on the model's ranks, {own}, got {ranks}")
        return sessions[0]

    def _check_dropout(self) -> None:
        """Raise a ValueError if the model has a dropout and the trainer generates."""
        for name, x in self.model.named_modules():
            if (p := most_dropped(x)) > 0:
                what = f"disable_dropout must be True for a model with dropout, got {p} in {name}"
                reason = "ranks that generate together would drop different elements"
                how = "dropouts that TRL cannot disable are set to 0 in the model's config"
                raise ValueError(f"{what}: {reason}; {how}")

    def _check_router_loss(self) -> None:
        """Raise a ValueError if TRL adds a router loss that `memory` does not support."""
        if getattr(self, "aux_loss_enabled", False):
            self._sp.memory.check(True, "router_aux_loss_coef must be 0")

    def _check_sizes(self) -> None:
        """Raise a ValueError if the ranks that share a sequence in the trainer's
        `ParallelismConfig` are not the ranks on which the model was enabled.
        """
        sizes = getattr(self.accelerator, "parallelism_config", None)
        if sizes is None or not sizes.cp_enabled:
            return
        own, ranks = sequence_mesh(self.accelerator), self._sp.comm.processes
        if own.mesh.tolist() != ranks:
            what = f"cp_size must share sequences among the model's ranks, {ranks}"
            how = "enable the model on parallelism_config.get_device_mesh(device)['cp']"
            raise ValueError(f"{what}, got {own.mesh.tolist()}: {how}")

    def get_cp_size(self) -> int:
        """Return 1, the number by which transformers divides its counts of tokens. The counts of
        this class already include each group of ranks only once.
        """
        return 1

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return nullcontext, inputs  # `shard` cuts the inputs

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        self._keep_columns()

    def _keep_columns(self) -> None:
        """Make transformers keep the columns of the dataset that a `Collator` reads."""
        if isinstance(self.data_collator, Collator):
            columns = TRAINER.read(self, "_signature_columns")
            self._signature_columns = list(dict.fromkeys([*columns, *COLUMNS]))

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        with self._groups.evaluating(not is_training):
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # accelerate regards a model that was evaluated before as prepared, and would not wrap it in
        # DDP. Nothing would average its gradients.
        if self.model_wrapped is self.model and is_prepared(self.model):
            forget_prepared(self.model)
        with self._sp.comm.telling_errors():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._groups.evaluating(), self._sp.comm.telling_errors():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._groups.evaluating(), self._sp.comm.telling_errors():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // self._sp.comm.size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the labels of a step. If the loss is a mean over all tokens of the step, the labels
        of all groups are counted, and otherwise the labels of this group.
        """
        if not self.model_accepts_loss_kwargs or not batch_samples:  # type: ignore[attr-defined]
            return None
        counts = [self._sp.count_labels(batch) for batch in batch_samples]
        if None in counts:
            return None
        if self._counts_firsts:
            firsts = [batch["labels"][:, 0] for batch in batch_samples if "labels" in batch]
            counts += [int((x != -100).sum()) for x in firsts]
        count = torch.tensor(sum(counts), device=device)
        count = self.accelerator.gather(count).sum() if self._averages_tokens else count
        # In training the count is at least 1, so that the loss of a step without labels is 0.
        return count if self._groups.evaluates else count.clamp(min=1)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inner = model.model if isinstance(model, WholeBatches) else model
        batch = self._labelled_shard(inputs)
        wanted = return_outputs and not (isinstance(model, WholeBatches) and model.loss_only)
        with self._sp.memory.keeping_logits() if wanted else nullcontext():
            loss, outputs = self._loss_of(inner, batch, num_items_in_batch)
        if not return_outputs:
            return loss
        return loss, self._sp.unshard(outputs, batch) if wanted else outputs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        whole = WholeBatches(model, self._sp, prediction_loss_only)
        with self._groups.evaluating():
            return super().prediction_step(whole, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        found: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        return found // self._sp.comm.size

    @property
    def _averages_tokens(self) -> bool:
        """Whether the loss gives equal weight to the tokens of all groups."""
        return bool(self.args.average_tokens_across_devices) and not self._groups.evaluates

    def _labelled_shard(self, inputs: dict[str, Any]) -> dict[str, Any]:
        batch: dict[str, Any] = self._sp.shard(inputs)
        if "labels" not in batch:
            raise ValueError("inputs must have labels, from which the loss is computed")
        return batch

    def _loss_of(self, model: Any, batch: dict[str, Any], items: Any) -> tuple[Tensor, Any]:
        given = {} if items is None else {"num_items_in_batch": items}
        if self.label_smoother is None:
            outputs = model(**batch, **given)
            loss = outputs["loss"]
        else:
            labels = batch.pop("labels")  # this rank's labels, shifted already
            outputs = model(**batch)
            given = given or {"num_items_in_batch": max(1, batch[KEY].labels)}
            loss = self._sp.total(self.label_smoother(outputs, labels, **given))
        counted = batch[KEY].labels if items is None else items
        if self._groups.evaluates and not counted:
            loss = loss * torch.nan  # NaN as on one process, where the mean over batches ignores it
        return self._scaled(loss, items), outputs

    def _scaled(self, loss: Tensor, items: Any) -> Tensor:
        """Multiply a loss that was divided by the `items` of all groups by the number of groups."""
        return loss * self._groups.count if items is not None and self._averages_tokens else loss


def sessions_of(model: nn.Module) -> list[SequenceParallel]:
    found = dict.fromkeys(session_of(x) for x in model.modules())
    return [x for x in found if isinstance(x, SequenceParallel)]


def session_in(model: Any) -> SequenceParallel:
    sessions = sessions_of(model)
    if not sessions:
        how = "call huggingface.enable(model, group) first"
        raise ValueError(f"model must be enabled before the trainer is made: {how}")
    return sessions[0]
