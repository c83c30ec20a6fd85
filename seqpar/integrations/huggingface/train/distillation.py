"""Overrides of methods of TRL's GKDTrainer, which trains a model on the logits of a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.generate.generating import random_numbers_of_rank_0
from seqpar.integrations.huggingface.train.over_ranks import OverRanks
from seqpar.integrations.huggingface.train.whole_batches import WholeBatches


class OverRanksGKD(OverRanks):
    """A mixin for GKDTrainer. Each rank computes TRL's divergence between the logits of its own
    tokens, and the loss is the sum of the divergences of all ranks.
    """

    beta: float
    lmbda: float
    generation_config: Any
    teacher_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.lmbda > 0:
            self._check_dropout()
        self._teacher_sp = self._session_of("teacher_model", self.teacher_model)
        # For models with gradient checkpointing, TRL would generate without a cache. The cache can
        # be used, because TRL switches gradient checkpointing off while a model generates.
        self.generation_config.use_cache = True

    def generate_on_policy_outputs(self, *args: Any, **kwargs: Any) -> Any:
        with random_numbers_of_rank_0(self._sp.comm):
            return super().generate_on_policy_outputs(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        model = model.model if isinstance(model, WholeBatches) else model
        self.teacher_model.eval()
        # As in TRL, these tensors are the only arguments of both models.
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        given = tokens | {"labels": inputs["labels"]}
        if self._teacher_sp is None:
            given["teacher_logits"] = self._teacher_logits(tokens)
        batch = self._labelled_shard(given)
        labels, teacher_logits = batch.pop("labels"), batch.pop("teacher_logits", None)
        if self._teacher_sp is not None:
            part = self._teacher_sp.shard(tokens, batch[KEY].main.layout)
            teacher_logits = self._teacher_logits(part)
        outputs = model(**batch)
        # The count is at least 1, so that the loss of a batch without labels is 0.
        count = max(1, batch[KEY].labels) if num_items_in_batch is None else num_items_in_batch
        local = self.generalized_jsd_loss(  # type: ignore[attr-defined]
            outputs.logits,
            teacher_logits,
            labels,
            beta=self.beta,
            num_items_in_batch=count,
        )
        loss = self._scaled(self._sp.total(local), num_items_in_batch)
        return (loss, self._sp.unshard(outputs, batch)) if return_outputs else loss

    @torch.no_grad()
    def _teacher_logits(self, batch: dict[str, Any]) -> Tensor:
        logits: Tensor = self.teacher_model(**batch).logits
        return logits
