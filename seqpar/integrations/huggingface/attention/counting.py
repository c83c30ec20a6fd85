"""Count the calls of attention layers, and the bytes that a rank sends for each layer.

In eager mode, autograd hooks count. A compiled graph contains an operator that counts, because
torch.compile runs the Python code of a layer only once, when it traces the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operators import implementation, register_autograd
from seqpar.comm.messages.comm import Comm
from seqpar.core.compiling import is_traced
from seqpar.integrations.huggingface.model.layers import AttentionLayer

_BEGIN, _END, _BACKWARD_BEGIN, _BACKWARD_END = range(4)
_BACKWARD = {_BEGIN: _BACKWARD_END, _END: _BACKWARD_BEGIN}

_layers: weakref.WeakValueDictionary[int, AttentionLayer] = weakref.WeakValueDictionary()


def track(layer: AttentionLayer) -> None:
    """Give a layer a tensor by which a compiled graph identifies the layer. The tensor is an input
    of the graph, so several layers can share one graph.
    """
    layer.handle = torch.tensor(id(layer))
    _layers[id(layer)] = layer


torch.library.define("seqpar::counted", "(Tensor x, Tensor handle, int event) -> Tensor[] results")


@implementation("seqpar::counted")
def _counted(x: Tensor, handle: Tensor, event: int) -> list[Tensor]:
    if (layer := _layers.get(int(handle))) is not None:
        sent = layer.comm.sent_bytes
        if event == _BEGIN:
            layer.forward_bytes -= sent
        elif event == _END:
            layer.calls += 1
            layer.forward_bytes += sent
        else:
            _add(layer, sent if event == _BACKWARD_END else -sent)
    return [x.clone()]  # an operator must not return an argument


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


def counted(
    layer: AttentionLayer, q: Tensor, attend: Callable[[Tensor], Tensor], decodes: bool
) -> Tensor:
    """Return `attend(q)`, and count this call and the bytes that it sends in forward and
    backward.
    """
    if is_traced():
        (q,) = torch.ops.seqpar.counted(q, layer.handle, _BEGIN)
        (out,) = torch.ops.seqpar.counted(attend(q), layer.handle, _END)
        return out
    comm: Comm = layer.comm
    before = comm.sent_bytes
    if q.requires_grad and torch.is_grad_enabled():
        q = q.view_as(q)
        # Runs at the end of the layer's backward.
        q.register_hook(lambda _: _add(layer, comm.sent_bytes))
    out = attend(q)
    sent = comm.sent_bytes - before
    lse_bytes = out.shape[:-1].numel() * (8 if out.dtype == torch.float64 else 4)
    layer.kept_bytes = out.nbytes + lse_bytes
    layer.calls += 1
    layer.forward_bytes += sent
    if decodes:
        layer.steps += 1
        layer.step_bytes += sent
    if out.requires_grad:
        # Runs at the beginning of the layer's backward.
        out.register_hook(lambda _: _add(layer, -comm.sent_bytes))
    return out


def _add(layer: AttentionLayer, size: int) -> None:
    layer.backward_bytes += size
