"""A model that takes and returns whole batches, computed by all ranks of a group together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqpar.integrations.huggingface.session import SequenceParallel


class WholeBatches:
    """An enabled model that every rank calls with the same whole batch.

    The call cuts the batch, and gathers the outputs of all ranks. A loss that is computed from
    these outputs is therefore the same on every rank. Pass the loss to `sp.total_of_whole_batch`.
    """

    def __init__(self, model: Any, sp: SequenceParallel, loss_only: bool = False) -> None:
        self.model, self.sp, self.loss_only = model, sp, loss_only

    def __call__(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        if input_ids is not None:
            inputs["input_ids"] = input_ids
        batch = self.sp.shard(inputs)
        if not inputs.get("fused_lm_head"):
            return self.sp.unshard(self.model(**batch), batch)
        # TRL's head takes shifted labels, and returns a value for each label.
        batch["shift_labels"] = batch.pop("labels")
        outputs = self.model(**batch)
        outputs.loss = None  # the model's loss is that of one rank's tokens only
        outputs = self.sp.unshard(outputs, batch)
        if "shift_labels" not in inputs:  # given unshifted labels, TRL's head returns (B, S − 1)
            for name, x in outputs.items():
                if isinstance(x, Tensor) and x.dim() > 1:
                    outputs[name] = x[:, :-1]
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
