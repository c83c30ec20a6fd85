"""The loss of a model's head, computed for one chunk of tokens at a time.

A transformers model computes logits by its head, `get_output_embeddings()`. Some models then
multiply or cap the logits. `ChunkedHead` replaces the head's forward, because FSDP gathers the
head's weight only while this forward runs. In a call with labels, the new forward computes the sum
of losses, and assumes that the model will multiply and cap the logits in the usual way.

To check this assumption, the new forward returns a *probe* in place of logits: a few known numbers.
The model multiplies and caps the probe as it would multiply and cap logits. If the result is not
the expected one, the model is refused.
"""

from __future__ import annotations

import ast
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqpar.integrations.huggingface.attention.call import EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.loss.losses import check_loss_function, check_loss_terms
from seqpar.integrations.huggingface.model.code import changes_of_logits
from seqpar.integrations.huggingface.model.layers import loss_shifts
from seqpar.integrations.huggingface.model.replaced import Replaced
from seqpar.memory.cross_entropy import chunked_cross_entropy

CHUNK = 4096  # tokens
_LOSSES = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")
_PROBES = 8  # number of different values in a probe
_INSTEAD = 'leave "loss" out of memory, and compute your own loss for sp.total'


class _LogitRule(NamedTuple):
    scale: float
    softcap: float


class ChunkedHead:
    """A head whose forward computes the sum of losses, in calls with labels.

    Attributes:
        saved_bytes: the bytes that the last call did not allocate. Without chunks, the logits of
            all tokens would exist in the hidden states' dtype and in fp32. With chunks, the logits
            of one chunk exist in fp32.
        keeps_logits: whether calls return logits and compute the loss from them.
    """

    def __init__(self, session: EnabledModel, head: nn.Module) -> None:
        self._session, self._head = session, head
        self._rule = _rule_of(session.inner)
        self._is_checked = False
        self.saved_bytes, self.keeps_logits = 0, False
        self.handle = Replaced(head, "forward", self._forward)

    def loss(self, call: ModelCall, logits: Tensor) -> Tensor | None:
        """Return this rank's sum of losses (), or None if the head returned logits."""
        if call.chunked_loss is None:
            return None
        loss, call.chunked_loss = call.chunked_loss, None
        joined: Tensor = _Joined.apply(self._checked(loss, logits), logits)
        return joined

    def _forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call, head = current.call, self._head
        chunks = call is not None and call.session is self._session and call.labels is not None
        # The check of the user's code runs on a sample of tokens.
        chunks = chunks and not self._session.silent
        if not chunks or call is None or call.cache is not None or self.keeps_logits:
            out: Tensor = type(head).forward(head, hidden, *args, **kwargs)
            return out
        assert call.labels is not None
        if call.chunked_loss is not None:
            reason = f"{type(self._session.inner).__name__} calls its head twice"
            raise ValueError(f'memory must not include "loss": {reason}; {_INSTEAD}')
        labels = call.labels.to(hidden.device)
        if hidden.shape[:-1] != labels.shape:
            found = f"shape {tuple(hidden.shape[:-1])} for labels {tuple(labels.shape)}"
            raise ValueError(f"the model's head must get all tokens of its batch, got {found}")
        weight: Any = head.weight
        bias: Any = getattr(head, "bias", None)
        call.chunked_loss = chunked_cross_entropy(
            hidden,
            weight,
            labels,
            CHUNK,
            bias=bias,
            softcap=self._rule.softcap,
            logit_scale=self._rule.scale,
        )
        tokens, words = labels.numel(), len(weight)
        plain, chunk = tokens * (hidden.element_size() + 4), 4 * min(tokens, CHUNK)
        self.saved_bytes = words * max(plain - chunk, 0)
        return _Probe.apply(call.chunked_loss, self._probe(hidden, labels.shape))

    def _probe(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Return a probe (1, T, 1), which takes the place of logits (1, T, V)."""
        reach = 2 * self._rule.softcap / self._rule.scale if self._rule.softcap else 4.0
        of_token = torch.arange(shape.numel(), device=like.device) % _PROBES
        numbers = (of_token - (_PROBES - 1) / 2) * (2 * reach / (_PROBES - 1))
        return numbers.to(like.dtype).view(*shape, 1)

    def _checked(self, loss: Tensor, logits: Tensor) -> Tensor:
        """Return the loss if the model changed the probe as expected, and otherwise raise a
        ValueError. The probe is a few known numbers that were returned in place of logits.

        If the comparison would have to wait for a GPU, only the first call raises the error. In
        later calls, the loss becomes NaN instead.
        """
        scale, softcap = self._rule
        is_probe = logits.shape[-1:] == (1,)
        if is_probe and logits.is_meta:
            return loss
        if is_probe:
            assumed = self._probe(logits, logits.shape[:-1]).float() * scale
            if softcap:
                assumed = softcap * torch.tanh(assumed / softcap)
            bound = 0.02 * max(4 * abs(scale), softcap)  # allows for rounding in half precision
            differs = ((logits.detach().float() - assumed).abs() > bound).any()
            if self._is_checked and not logits.is_cpu:
                return torch.where(differs, torch.nan, loss)
            if not differs:
                self._is_checked = True
                return loss
        raise ValueError(
            f'memory must not include "loss": {type(self._session.inner).__name__} changes its '
            f"logits in a way that a chunked loss does not know; {_INSTEAD}"
        )


def find_head(session: EnabledModel) -> nn.Module | None:
    """Return the head whose loss can be chunked, or None if the model does not predict tokens.

    Raises a ValueError with the reason if the model predicts tokens but its loss cannot be chunked.
    """
    model = session.inner
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return None
    name = type(model).__name__
    if loss_shifts(model) is None or (getattr(model, "loss_type", None) or _LOSSES[0]) not in (
        _LOSSES
    ):
        reason = f"{name} has no loss by its loss_function"
        raise ValueError(f'memory must not include "loss": {reason}; {_INSTEAD}')
    check_loss_function(model)
    check_loss_terms(model)
    if type(head).forward is not nn.Linear.forward:
        kind = f"{type(head).__module__}.{type(head).__name__}"  # PEFT's LoRA is a Linear too
        reason = f"its head is a {kind}, and not a torch.nn.Linear"
        way_out = 'leave "loss" out of memory, or merge what changes the head into its weight'
        raise ValueError(f'memory must not include "loss": {reason}; {way_out}')
    if "forward" in vars(head):
        reason = "something has replaced the forward of its head"
        raise ValueError(f'memory must not include "loss": {reason}; undo that, or {_INSTEAD}')
    _rule_of(model)
    return head


def _rule_of(model: Any) -> _LogitRule:
    """Return by which factor and cap a model changes its logits, according to the source code of
    its forward.
    """
    scale, softcap = 1.0, 0.0
    for value in changes_of_logits(type(model)):
        text = ast.unparse(value)
        if "final_logit_softcapping" in text or "tanh" in text:
            config = model.config.get_text_config()
            softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
            continue
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            try:
                factor = float(attrgetter(ast.unparse(value.right).removeprefix("self."))(model))
            except (AttributeError, TypeError, ValueError):
                factor = 0.0
            if factor:
                scale *= factor if isinstance(value.op, ast.Mult) else 1 / factor
                continue
        raise ValueError(
            f'memory must not include "loss": {type(model).__name__} computes {text} from its '
            f"logits, which a chunked loss does not know; {_INSTEAD}"
        )
    return _LogitRule(scale, softcap)


class _Probe(torch.autograd.Function):
    """An autograd function that returns a few known numbers in place of logits. In autograd's
    graph, these numbers depend on the loss, because DDP and FSDP search the graph of the outputs
    for parameters.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, probe: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return probe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(ctx.like), None


class _Joined(torch.autograd.Function):
    """An autograd function that makes the loss depend on the model's outputs. The outputs receive
    zeros as gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Tensor:
        ctx.like = logits.detach()
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(ctx.like)
