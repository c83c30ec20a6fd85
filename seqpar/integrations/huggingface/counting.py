"""Count the calls of attention layers, and what a rank sends for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.integrations.huggingface.layers import Layer


@contextmanager
def counting(layer: Layer, comm: Comm, q: Tensor, decodes: bool) -> Iterator[Tensor]:
    """Count a call of a layer; yield its queries, whose gradient ends the count in backward."""
    before = comm.sent_bytes
    if q.requires_grad and torch.is_grad_enabled():
        q = q.view_as(q)
        q.register_hook(lambda _: _add(layer, comm.sent_bytes))
    yield q
    layer.calls += 1
    layer.forward_bytes += comm.sent_bytes - before
    if decodes:
        layer.steps += 1
        layer.step_bytes += comm.sent_bytes - before


def counted_backward(layer: Layer, comm: Comm, out: Tensor) -> Tensor:
    """Return a layer's output, whose gradient begins the count in backward."""
    if out.requires_grad:
        out.register_hook(lambda _: _add(layer, -comm.sent_bytes))
    return out


def _add(layer: Layer, size: int) -> None:
    layer.backward_bytes += size
