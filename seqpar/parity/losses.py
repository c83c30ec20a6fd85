"""Observe the losses and labels of a step, and the steps of optimizers, without changes to the
training code.

During a recording, PyTorch's `cross_entropy` and `backward` are replaced by functions that call the
original ones and record the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from seqpar.comm.dtensor import is_dtensor
from seqpar.core.compiling import is_traced
from seqpar.core.torch_private import in_backward, without_function_modes
from seqpar.parity.sharding import Batch

IGNORED = -1  # the label that is recorded for a token without a label
# The arguments of `cross_entropy` after the target, in the order of its signature.
_OPTIONS = "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"


@dataclass
class Labelled:
    """One call of `cross_entropy`.

    Attributes:
        value: the result of the call, or its sum if `reduction` is "none".
        count: the number of labels that are not ignored.
        tokens: (rows, tokens, 2) in fp64: the label of each token, or `IGNORED`, and its loss. None
            if the call was not made with the labels of a rank's tokens.
    """

    value: Tensor
    count: Tensor
    tokens: Tensor | None


@dataclass
class Losses:
    labelled: list[Labelled] = field(default_factory=list)
    backwards: list[Tensor] = field(default_factory=list)
    _observes: bool = False

    @contextmanager
    def observed(self, batch: Callable[[], Batch | None]) -> Iterator[None]:
        """Record the calls of `cross_entropy` and of `backward` that are made in this context.

        `batch()` returns the shape of the rank's tokens, or None if the shape is unknown.
        """
        cross_entropy, backward = functional.cross_entropy, torch.autograd.backward

        @wraps(cross_entropy)
        def observed_cross_entropy(
            input: Tensor, target: Tensor, *arguments: Any, **options: Any
        ) -> Tensor:
            hidden = is_traced() or in_backward() or is_dtensor(input)
            if hidden or self._observes:
                return cross_entropy(input, target, *arguments, **options)
            self._observes = True  # a function mode can call this function again
            try:
                loss = cross_entropy(input, target, *arguments, **options)
                with without_function_modes(), torch.no_grad():
                    named = dict(zip(_OPTIONS, arguments, strict=False)) | options
                    self._label(cross_entropy, input.detach(), target, named, batch(), loss)
            finally:
                self._observes = False
            return loss

        def observed_backward(tensors: Any, *arguments: Any, **options: Any) -> None:
            if not in_backward():
                roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                with without_function_modes():
                    self.backwards += [x.detach().double() for x in roots if x.numel() == 1]
            backward(tensors, *arguments, **options)

        functional.cross_entropy = observed_cross_entropy
        torch.autograd.backward = observed_backward
        try:
            yield
        finally:
            functional.cross_entropy = cross_entropy
            torch.autograd.backward = backward

    def _label(
        self,
        cross_entropy: Callable[..., Tensor],
        logits: Tensor,
        target: Tensor,
        options: Mapping[str, Any],
        batch: Batch | None,
        loss: Tensor,
    ) -> None:
        if target.is_floating_point():
            return
        ignored = target == options.get("ignore_index", -100)
        tokens = None
        if batch is not None and (shape := _shape_of(target.numel(), batch)) is not None:
            options = {**options, "reduction": "none", "size_average": None, "reduce": None}
            each = torch.stack(
                [
                    torch.where(ignored, IGNORED, target).double(),
                    cross_entropy(logits, target, **options).double(),
                ],
                -1,
            ).reshape(*shape, 2)
            tokens = each.new_zeros((*batch, 2))
            tokens[..., 0] = IGNORED
            tokens[:, : shape[1]] = each
        self.labelled.append(Labelled(loss.detach().double().sum(), (~ignored).sum(), tokens))


def _shape_of(labels: int, batch: Batch) -> tuple[int, int] | None:
    """Return the (rows, tokens) of labels, or None if the number of labels does not fit the batch.

    Each row must have a label for every token, or for every token except the last one.
    """
    shapes = [(batch.rows, batch.tokens), (batch.rows, batch.tokens - 1)]
    return next((x for x in shapes if x[0] * x[1] == labels), None)


@contextmanager
def before_optimizer_steps(call: Callable[[Optimizer], None]) -> Iterator[None]:
    """Within this context, call a function with an optimizer before each of its steps."""
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: call(optimizer))
    try:
        yield
    finally:
        handle.remove()
