"""The losses of a model's outputs, over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.attention.call import ModelCall
from seqpar.integrations.huggingface.loss.routers import RouterLoss


def losses_of(
    model: Any, call: ModelCall, outputs: Any, comm: Comm, total: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return the losses of a model's outputs, by name, the same on all ranks.

    They are the mean loss of all ranks' labels, if there are any, and what balances routers, if the
    model was asked for it; `total` sums the ranks' parts.
    """
    found: dict[str, Any] = {}
    if call.labels is not None and not (isinstance(outputs, Mapping) and "logits" in outputs):
        reason = f"its loss is made of them, got a {type(outputs).__name__}"
        raise ValueError(f"model must return logits by name for a batch with labels: {reason}")
    if not isinstance(outputs, Mapping):
        return found
    if call.labels is not None:
        found["loss"] = total(_of_labels(model, call, outputs["logits"]))
    if isinstance(outputs.get("aux_loss"), Tensor):
        routers = RouterLoss.of(model)
        assert routers is not None
        found["aux_loss"] = total(routers.share(outputs["router_logits"], call.sharding.main, comm))
        if "loss" in found:
            found["loss"] = found["loss"] + routers.coefficient * found["aux_loss"]
    return found


def _of_labels(model: Any, call: ModelCall, logits: Tensor) -> Tensor:
    """Return this rank's part of the mean loss of all ranks' labels."""
    labels, items = call.labels, call.items
    count = call.sharding.labels if items is None else items
    loss: Tensor = model.loss_function(
        logits=logits,
        labels=labels,
        shift_labels=labels,
        vocab_size=logits.shape[-1],
        config=model.config,
        num_items_in_batch=max(1, int(count)) if isinstance(count, int) else count,
    )
    return loss
