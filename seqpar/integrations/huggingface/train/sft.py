"""Overrides of methods of TRL's SFTTrainer, for models that run over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.huggingface_private import TRL
from seqpar.integrations.huggingface.train.over_ranks import OverRanks


class OverRanksSFT(OverRanks):
    """A mixin for SFTTrainer.

    The model computes log-probabilities of a rank's tokens by TRL's fused head, and this class
    computes the loss from the log-probabilities.
    """

    aux_loss_enabled: bool
    router_aux_loss_coef: float
    current_gradient_accumulation_steps: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_router_loss()

    def _set_signature_columns_if_needed(self) -> None:
        # TRL's method, which does not call the one of OverRanks.
        super()._set_signature_columns_if_needed()
        self._keep_columns()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        batch = self._labelled_shard(inputs)
        smoothed = self.label_smoother is not None and self.args.loss_type == "nll"
        if smoothed:  # label smoothing needs logits
            loss, _ = self._loss_of(model, dict(batch), num_items_in_batch)
        labels = batch.pop("labels")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not smoothed):
            outputs = model(**batch, shift_labels=labels, fused_lm_head=True)
        if not smoothed:
            losses = -outputs.log_probs  # 0 for tokens without a label
            if self.args.loss_type == "dft":
                losses = losses * outputs.log_probs.exp().detach()
            count = batch[KEY].labels if num_items_in_batch is None else num_items_in_batch
            count = torch.as_tensor(count).clamp(
                min=1
            )  # so the loss is 0 without labels, as in TRL
            local = losses.sum() / count
            loss = self._scaled(self._sp.total(local), num_items_in_batch)
            if self.aux_loss_enabled:
                given = num_items_in_batch is not None
                steps = self.current_gradient_accumulation_steps if given else 1
                loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._note(outputs, inputs)
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, self._sp.unshard(model(**batch))

    def _note(self, outputs: Any, inputs: dict[str, Any]) -> None:
        found = outputs.label_mask, outputs.is_top1, outputs.entropy.detach()
        comm = self._sp.comm
        local = torch.stack([x.sum().double() for x in found]).to(comm.device)
        sums: Tensor = torch.stack(comm.all_gather(local, label="metrics")).sum(0)
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        aux_loss = float(outputs.aux_loss) if self.aux_loss_enabled else 0.0
        mode = "train" if self.model.training else "eval"
        of_batch = torch.cat([sums, sums.new_tensor([tokens, aux_loss, 1])])
        batches = self.accelerator.gather(of_batch[None])
        if mode == "train":
            batches = batches.sum(0, keepdim=True)
        metrics = TRL.read(self, "_metrics")[mode]
        for labels, right, entropy, _, aux_loss, count in batches.tolist():
            metrics["entropy"].append(entropy / labels if labels else 0.0)
            metrics["mean_token_accuracy"].append(right / labels if labels else 0.0)
            if self.aux_loss_enabled:
                metrics["aux_loss"].append(aux_loss / count)
        total = TRL.read(self, "_total_train_tokens")
        if mode == "train":
            self._total_train_tokens = total = total + int(batches[0, 3])
        metrics["num_tokens"] = [total]
