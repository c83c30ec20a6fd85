"""The losses of a model's outputs, over the tokens of all ranks.

The router loss (Fedus et al., "Switch Transformers", 2021, equations 4 to 6) is a sum over the
experts. Each summand is the number of tokens that chose the expert, times the sum of the expert's
probabilities. The number and the sum are taken over all tokens and layers. The ranks exchange the
numbers of tokens, which have no gradient. Each rank then multiplies these numbers by the sums of
its own tokens' probabilities. The router loss is the sum of the results of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.messages.comm import Comm
from seqpar.integrations.huggingface.attention.call import ModelCall, current
from seqpar.integrations.huggingface.batch.sharding import Side
from seqpar.integrations.huggingface.huggingface_private import TRANSFORMERS
from seqpar.integrations.huggingface.model.code import ROUTER_LOSS, global_of
from seqpar.integrations.huggingface.model.layers import configs_of

_TERMS = ("z_loss_coefficient",)  # settings of a config that add a term to the loss


def losses_of(
    model: Any,
    call: ModelCall,
    outputs: Any,
    comm: Comm,
    total: Callable[[Tensor], Tensor],
    chunked: Callable[[ModelCall, Tensor], Tensor | None],
) -> dict[str, Any]:
    """Return the mean loss of the labels and, if the call asks for it, the router loss.

    `total` sums a loss over the ranks. `chunked(call, logits)` returns this rank's sum of losses if
    the model's head has computed it in chunks, and otherwise None.
    """
    found: dict[str, Any] = {}
    if call.labels is not None and not (isinstance(outputs, Mapping) and "logits" in outputs):
        reason = f"got a {type(outputs).__name__}: seqpar computes the loss from the logits"
        raise ValueError(f"model must return logits by name for a batch with labels, {reason}")
    if not isinstance(outputs, Mapping):
        return found
    if call.labels is not None:
        if outputs.get("loss") is not None:
            reason = "the model returned a loss of its own, of one rank's tokens, without labels"
            how = "compute your own loss from outputs.logits, and pass it to sp.total"
            raise ValueError(f"labels must be None: {reason}; {how}")
        sum_of_losses = chunked(call, outputs["logits"])
        if sum_of_losses is not None:
            found["loss"] = total(sum_of_losses / _count_of(call))
        elif call.sharding.last_tokens is None:
            found["loss"] = total(_of_labels(model, call, outputs["logits"]))
        else:
            found["loss"] = total(_of_rows(model, call, outputs["logits"]) / comm.size)
    if isinstance(outputs.get("aux_loss"), Tensor):
        routers = RouterLoss.of(model)
        if routers is None:
            raise ValueError(_unknown_router_loss(model))
        logits = outputs.get("router_logits", call.router_logits)
        if logits is None:
            reason = "seqpar computes the router loss of all ranks from them"
            raise ValueError(f"model must return router_logits beside aux_loss: {reason}")
        found["aux_loss"] = total(routers.share(logits, call.sharding.main, comm))
        call.router_logits = None  # frees the logits before backward
        if "loss" in found:
            found["loss"] = found["loss"] + routers.coefficient * found["aux_loss"]
    return found


def keep_router_logits(model: Any, args: Any, outputs: Any) -> None:
    """Keep the router logits of a call, as a forward hook of the model without its head."""
    if current.call is not None and isinstance(outputs, Mapping):
        current.call.router_logits = outputs.get("router_logits")


def check_loss_function(model: Any) -> None:
    """Raise a ValueError if a user has replaced the model's loss function."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    default = LOSS_MAPPING.get(kind, LOSS_MAPPING["ForCausalLM"])
    own = TRANSFORMERS.read_if_set(model, "_loss_function", default)
    while isinstance(own, partial):
        own = own.func
    if own is not default:
        given = getattr(own, "__name__", type(own).__name__)
        what = f"loss_function must be the model's default, {default.__name__}, got {given}"
        reason = "a different function possibly does not divide by the labels of all ranks"
        how = "compute your own loss from outputs.logits, and pass it to sp.total"
        raise ValueError(f"{what}: {reason}; {how}")


def check_loss_terms(model: Any) -> None:
    """Raise a ValueError if a setting of the model adds an unknown term to the loss."""
    for config in configs_of(model):
        for name in _TERMS:
            if value := getattr(config, name, 0):
                what = f"{name} of the model's config is {value}, which adds a term to the loss"
                how = "set it to 0, or compute your own loss from the outputs for sp.total"
                raise ValueError(f"labels must be None: {what} that seqpar does not know; {how}")


def _of_labels(model: Any, call: ModelCall, logits: Tensor) -> Tensor:
    labels = call.labels
    return model.loss_function(
        logits=logits,
        labels=labels,
        shift_labels=labels,
        vocab_size=logits.shape[-1],
        config=model.config,
        num_items_in_batch=_count_of(call),
    )


def _of_rows(model: Any, call: ModelCall, results: Tensor) -> Tensor:
    """Return the loss of a model that classifies whole rows. Every rank computes the loss from the
    results of all rows.
    """
    loss: Tensor = model.loss_function(
        logits=results, labels=call.labels, pooled_logits=results, config=model.config
    )
    return loss


def _count_of(call: ModelCall) -> Any:
    """Return the divisor of the loss. It is at least 1, so that the loss of a batch without labels
    is 0.
    """
    count: Any = call.sharding.labels if call.items is None else call.items
    return count + (count == 0)


@dataclass(frozen=True)
class RouterLoss:
    top: int
    coefficient: float

    @classmethod
    def of(cls, model: Any) -> RouterLoss | None:
        """Return the router loss of a model, or None if the model does not compute this loss."""
        own = global_of(model, ROUTER_LOSS)
        top = _setting(model, "num_experts_per_tok")
        coefficient = _setting(model, "router_aux_loss_coef", "aux_loss_coef")
        if own is None or top is None or coefficient is None or not _is_this(own):
            return None
        return cls(int(top), float(coefficient))

    def share(self, logits: tuple[Tensor, ...], side: Side, comm: Comm) -> Tensor:
        """Return this rank's summand () of the router loss, which is the sum over all ranks.

        `logits` are (T_local, experts) for each layer. Each rank sends 4 bytes per expert to every
        other rank.
        """
        held = (side.index >= 0).to(logits[0].device)
        chosen, likely = _sums(logits, held, self.top)
        ranks = comm.all_gather(chosen.to(comm.device), label="router loss")
        everywhere = torch.stack(ranks).sum(0).to(likely.device)
        return _balance(everywhere, likely, len(logits) * side.documents.kept.size)


def router_faults(model: nn.Module, asked: bool, padded: bool = False) -> list[str]:
    """Return the reasons why the router loss would be wrong.

    `padded` is whether the model receives a whole batch that has padding.
    """
    asked = asked or any(getattr(x, "output_router_logits", False) for x in configs_of(model))
    if not asked or global_of(model, ROUTER_LOSS) is None:
        return []
    if padded:
        return [
            "output_router_logits must not be set for images in rows with padding: pack the rows"
        ]
    return [] if RouterLoss.of(model) is not None else [_unknown_router_loss(model)]


def _unknown_router_loss(model: nn.Module) -> str:
    what = f"{type(model).__name__} computes a router loss that seqpar does not know"
    return (
        f"output_router_logits is set, and {what}: it would differ between ranks; leave "
        "output_router_logits unset"
    )


def _setting(model: Any, *names: str) -> Any:
    places = model, model.config, model.config.get_text_config()
    values = (getattr(place, name, None) for place in places for name in names)
    return next((x for x in values if x is not None), None)


def _sums(logits: tuple[Tensor, ...], held: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return, for each expert, the number of tokens that chose it and the sum of its
    probabilities.
    """
    weights = held.float()
    chosen = likely = weights.new_zeros(logits[0].shape[-1])
    for layer in logits:
        chances = layer.to(weights.device).reshape(held.numel(), -1).softmax(-1)
        choices = chances.topk(top, -1).indices.flatten()
        chosen = chosen.scatter_add(0, choices, weights.repeat_interleave(top))
        likely = likely + (chances.float() * weights[:, None]).sum(0)
    return chosen, likely


def _balance(chosen: Tensor, likely: Tensor, rows: int) -> Tensor:
    return (chosen / rows * (likely / rows)).sum() * chosen.numel()


@cache
def _is_this(own: Callable[..., Any]) -> bool:
    """Return whether a model's own function `own` computes the router loss of this file. Both are
    compared on random logits.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, 5, generator=generator).unbind()
    held = torch.arange(8) < 7
    try:
        found = own(logits, 5, 2, held.long())
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return torch.allclose(found, _balance(*_sums(logits, held, 2), 2 * 7))
