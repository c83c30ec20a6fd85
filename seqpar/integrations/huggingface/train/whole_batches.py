"""A model that takes and returns whole batches, and that the ranks of a group compute together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqpar.integrations.huggingface.session import SequenceParallel


class WholeBatches:
    """An enabled model, or a wrapper of it, that every rank calls with the same whole batch.

    It cuts the batch, and puts the outputs of all ranks together. A loss that is computed from
    these outputs is therefore the same on every rank: divide it by the number of ranks, and pass it
    to `sp.total`.
    """

    def __init__(self, model: Any, sp: SequenceParallel, loss_only: bool = False) -> None:
        self.model, self.sp, self.loss_only = model, sp, loss_only

    def __call__(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        if input_ids is not None:
            inputs["input_ids"] = input_ids
        batch = self.sp.shard(inputs)
        if not inputs.get("fused_lm_head"):
            return self.sp.unshard(self.model(**batch), batch)
        # TRL's head takes labels that are shifted already, and returns a value for each of them.
        batch["shift_labels"] = batch.pop("labels")
        outputs = self.model(**batch)
        outputs.loss = None  # of one rank's tokens
        outputs = self.sp.unshard(outputs, batch)
        if "shift_labels" not in inputs:  # from whole labels, TRL's head returns (B, S - 1)
            for name, x in outputs.items():
                if isinstance(x, Tensor) and x.dim() > 1:
                    outputs[name] = x[:, :-1]
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
