"""Overrides of methods of TRL's trainers for rewards and preferences, for models over ranks.

TRL computes each of their losses from a few numbers per row or token, such as rewards and
log-probabilities. The ranks gather these numbers, and then every rank runs TRL's own code for the
loss of the whole batch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from seqpar.integrations.huggingface.train.over_ranks import OverRanks, sessions_of
from seqpar.integrations.huggingface.train.whole_batches import WholeBatches


class OverRanksPreferences(OverRanks):
    """A mixin for TRL's trainers for rewards and preferences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_router_loss()
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module):
            if self._sp.has_attention_of_ranks(reference) and not sessions_of(reference):
                # TRL loaded the reference model with seqpar's attention.
                self._sp.enable_alike(reference)
            for sp in sessions_of(reference):
                self._keep_router_logits(sp)
            self.ref_model = self._whole(reference)
        elif hasattr(self, "ref_model") and not getattr(self, "precompute_ref_logps", True):
            how = "give a ref_model, or set precompute_ref_log_probs"
            raise ValueError(
                f"ref_model must not be None for an enabled model with adapters: {how}"
            )

    def _whole(self, model: Any) -> Any:
        """Return a model that is called with whole batches. An enabled model is wrapped in
        `WholeBatches`, and all other models are returned unchanged.
        """
        if isinstance(model, WholeBatches):
            return model
        sp = self._session_of("ref_model", model)
        return model if sp is None else WholeBatches(model, sp)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        return None  # TRL's losses divide by their own counts

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with self._groups.counted(self):
            found = super().compute_loss(
                self._whole(model), inputs, return_outputs, num_items_in_batch
            )
        loss, *outputs = found if return_outputs else (found,)
        loss = self._sp.total_of_whole_batch(loss)
        return (loss, *outputs) if return_outputs else loss

    def compute_ref_log_probs(self, model: Any, *args: Any) -> Any:
        return super().compute_ref_log_probs(self._whole(model), *args)  # type: ignore[misc]

    def get_batch_loss_metrics(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().get_batch_loss_metrics(self._whole(model), *args, **kwargs)  # type: ignore[misc]
