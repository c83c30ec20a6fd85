"""Overrides of methods of TRL's GKDTrainer, which trains a model on the logits of a teacher."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.generate.generating import random_numbers_of_rank_0
from seqpar.integrations.huggingface.session import SequenceParallel
from seqpar.integrations.huggingface.train.over_ranks import OverRanks, sessions_of
from seqpar.integrations.huggingface.train.whole_batches import WholeBatches


class OverRanksGKD(OverRanks):
    """A mixin for GKDTrainer. Each rank computes TRL's divergence between the logits of its own
    tokens, and the loss is the sum of the divergences of all ranks.
    """

    aux_loss_enabled: bool
    beta: float
    lmbda: float
    seq_kd: bool
    generation_config: Any
    teacher_model: Any

    def __init__(
        self, model: Any = None, teacher_model: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, teacher_model, *args, **kwargs)
        if self.aux_loss_enabled:
            # TRL's SFTTrainer has switched this on. GKD's loss contains no router loss.
            self._sp.inner.config.get_text_config().output_router_logits = False
        if {*self.model.parameters()} & {*self.teacher_model.parameters()}:
            how = "load the teacher separately, or pass a copy"
            raise ValueError(f"teacher_model must not share parameters with the model: {how}")
        if isinstance(teacher_model, str):
            self._sp.enable_alike(self.teacher_model)
        self.teacher_model.eval()
        self._teacher_sp = self._session_of("teacher_model", self.teacher_model)
        if self.lmbda > 0:
            self._check_dropout()
            _check_cache(self._sp, "lmbda must be 0 for this model")
        if self.seq_kd and self.lmbda < 1 and self._teacher_sp is not None:
            _check_cache(self._teacher_sp, "seq_kd must be False for this enabled teacher_model")
        # For models with gradient checkpointing, TRL would generate without a cache. The cache can
        # be used, because TRL switches gradient checkpointing off while a model generates.
        self.generation_config.use_cache = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if 0 < self.lmbda < 1:
            # TRL draws from Python's generator whether the model generates this batch.
            _continue_generator_of_rank_0(self._sp.comm)
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def generate_on_policy_outputs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        comm = self._sp.comm
        with random_numbers_of_rank_0(comm):
            found = super().generate_on_policy_outputs(model, *args, **kwargs)  # type: ignore[misc]
        # With a model that is not enabled, each rank generates alone, and rounding may differ.
        return found if sessions_of(model) else _of_rank_0(torch.stack(found), comm).unbind()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        model = model.model if isinstance(model, WholeBatches) else model
        # As in TRL, these tensors are the only arguments of both models.
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        given = tokens | {"labels": inputs["labels"]}
        if self._teacher_sp is None:
            given["teacher_logits"] = self._teacher_logits(tokens)
        batch = self._labelled_shard(given)
        del given  # and with it the teacher's logits of the whole batch
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


def _check_cache(sp: SequenceParallel, expected: str) -> None:
    try:
        sp.cache()
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from error


def _continue_generator_of_rank_0(comm: Comm) -> None:
    """Set Python's random generator to the state of rank 0's."""
    version, words, last = random.getstate()
    state = torch.tensor(words, device=comm.device)
    first = comm.all_gather(state, label="random numbers")[0]
    random.setstate((version, tuple(first.tolist()), last))


def _of_rank_0(x: Tensor, comm: Comm) -> Tensor:
    """Return rank 0's tensor, whose last dimension may have another size."""
    size = torch.tensor([x.shape[-1]], device=comm.device)
    columns = int(comm.all_gather(size, label="completions")[0])
    own = x if comm.rank == 0 else x.new_zeros(*x.shape[:-1], columns)
    return comm.all_gather(own, label="completions")[0]
