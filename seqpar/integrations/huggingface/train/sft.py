"""The loss and the metrics of TRL's SFTTrainer, each rank's of its own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.session import SequenceParallel


class OverRanksSFT:
    """What an SFTTrainer of TRL does otherwise, besides what every Trainer does.

    Its model returns log-probabilities and no logits, by TRL's fused head, here of a rank's tokens.
    """

    args: Any
    model: Any
    label_smoother: Any
    aux_loss_enabled: bool
    _sp: SequenceParallel
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    _scaled: Any
    _loss_of: Any
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.aux_loss_enabled:
            reason = "each rank would have another auxiliary loss"
            raise ValueError(f"router_aux_loss_coef must be 0: {reason}")

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean loss of all labels that this group's ranks have, and note the metrics."""
        batch = self._sp.shard(inputs)
        if "labels" not in batch:
            raise ValueError("inputs must have labels, of which the loss is made")
        smoothed = self.label_smoother is not None and self.args.loss_type == "nll"
        if smoothed:  # which needs logits
            loss, _ = self._loss_of(model, dict(batch), num_items_in_batch)
        labels = batch.pop("labels")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not smoothed):
            outputs = model(**batch, shift_labels=labels, fused_lm_head=True)
        if not smoothed:
            losses = -outputs.log_probs  # 0 where there is no label
            if self.args.loss_type == "dft":
                losses = losses * outputs.log_probs.exp().detach()
            count = max(1, batch[KEY].labels) if num_items_in_batch is None else num_items_in_batch
            loss = self._scaled(self._sp.total(losses.sum() / count), num_items_in_batch)
        self._note(outputs, inputs)
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, self._sp.unshard(model(**batch))

    def _note(self, outputs: Any, inputs: dict[str, Any]) -> None:
        """Add a batch to the means that the trainer logs."""
        found = outputs.label_mask, outputs.is_top1, outputs.entropy.detach()
        comm = self._sp.comm
        local = torch.stack([x.sum().double() for x in found]).to(comm.device)
        sums: Tensor = torch.stack(comm.all_gather(local, label="metrics")).sum(0)
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        mode = "train" if self.model.training else "eval"
        batches = self.accelerator.gather(torch.cat([sums, sums.new_tensor([tokens])])[None])
        if mode == "train":
            batches = batches.sum(0, keepdim=True)
        metrics = self._metrics[mode]
        for labels, right, entropy, _ in batches.tolist():
            metrics["entropy"].append(entropy / labels if labels else 0.0)
            metrics["mean_token_accuracy"].append(right / labels if labels else 0.0)
        if mode == "train":
            self._total_train_tokens += int(batches[0, 3])
        metrics["num_tokens"] = [self._total_train_tokens]
