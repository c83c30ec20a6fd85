"""Count the calls of attention layers, and the bytes that a rank sends for each.

In eager mode, hooks count. In a compiled graph, an operator counts when the graph runs, because
Python code of the layer runs only once, when the graph is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operators import implementation, register_autograd
from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.model.layers import AttentionLayer

_BEGIN, _END, _BACKWARD_BEGIN, _BACKWARD_END = range(4)
_BACKWARD = {_BEGIN: _BACKWARD_END, _END: _BACKWARD_BEGIN}

_counters: weakref.WeakValueDictionary[int, Counter] = weakref.WeakValueDictionary()


class Counter:
    """Counts in compiled graphs, which hold its `handle`, a tensor, so that layers share them."""

    def __init__(self, layer: AttentionLayer, comm: Comm) -> None:
        self._layer, self._comm = layer, comm
        self.handle = torch.tensor(id(self))
        _counters[id(self)] = self

    def count(self, event: int) -> None:
        sent, layer = self._comm.sent_bytes, self._layer
        if event == _BEGIN:
            layer.forward_bytes -= sent
        elif event == _END:
            layer.calls += 1
            layer.forward_bytes += sent
        else:
            _add(layer, sent if event == _BACKWARD_END else -sent)


torch.library.define("seqpar::counted", "(Tensor x, Tensor handle, int event) -> Tensor[] results")


@implementation("seqpar::counted")
def _counted(x: Tensor, handle: Tensor, event: int) -> list[Tensor]:
    if (counter := _counters.get(int(handle))) is not None:
        counter.count(event)
    return [x.clone()]  # an operator must not return what it was given


@torch.library.register_fake("seqpar::counted")  # type: ignore[untyped-decorator]
def _counted_fake(x: Tensor, handle: Tensor, event: int) -> list[Tensor]:
    return [torch.empty_like(x)]


def _save(ctx: Any, inputs: tuple[Any, ...], results: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.event = inputs[2]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    return (torch.ops.seqpar.counted(gradient, handle, _BACKWARD[ctx.event])[0],)


register_autograd("seqpar::counted", 1, _differentiate, _save)


@contextmanager
def counting(layer: AttentionLayer, comm: Comm, q: Tensor, decodes: bool) -> Iterator[Tensor]:
    """Count a call of a layer. Yields its queries, whose gradient hook ends the backward count."""
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


def counted_backward(layer: AttentionLayer, comm: Comm, out: Tensor) -> Tensor:
    """Return a layer's output, whose gradient hook begins the backward's count."""
    if out.requires_grad:
        out.register_hook(lambda _: _add(layer, -comm.sent_bytes))
    return out


def counted(counter: Counter, q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `attend(q)`, counted each time that a compiled graph runs it."""
    (q,) = torch.ops.seqpar.counted(q, counter.handle, _BEGIN)
    (out,) = torch.ops.seqpar.counted(attend(q), counter.handle, _END)
    return out


def _add(layer: AttentionLayer, size: int) -> None:
    layer.backward_bytes += size
