"""The losses of a model's outputs, over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.integrations.huggingface.call import Call
from seqpar.integrations.huggingface.routers import RouterLoss


def with_losses(
    model: Any, call: Call, outputs: Any, comm: Comm, total: Callable[[Tensor], Tensor]
) -> Any:
    """Return a model's outputs with losses that are the same on all ranks.

    They are the mean loss of all ranks' labels, if there are any, and what balances routers, if the
    model was asked for it; `total` sums the ranks' parts.
    """
    found: dict[str, Any] = {}
    if call.labels is not None:
        found["loss"] = total(_of_labels(model, call, outputs["logits"]))
    if isinstance(outputs.get("aux_loss"), Tensor):
        routers = RouterLoss.of(model)
        assert routers is not None
        found["aux_loss"] = total(routers.share(outputs["router_logits"], call.sharding.main, comm))
        if "loss" in found:
            found["loss"] = found["loss"] + routers.coefficient * found["aux_loss"]
    return type(outputs)(**{**found, **outputs, **found}) if found else outputs


def _of_labels(model: Any, call: Call, logits: Tensor) -> Tensor:
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
