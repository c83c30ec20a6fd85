"""Run a model as it is on a rank's part of a batch: its calls of SDPA go to all ranks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from seqpar.arguments import as_dim, check_tensor, shown
from seqpar.comm.exchange import Group
from seqpar.integrations.sdpa import attention_on, sdpa
from seqpar.layout.layout import Layout
from seqpar.operands import check_layouts
from seqpar.softmax.module import Attention
from seqpar.torch_private import swap_contents, within_modes

_backward = within_modes(torch.autograd.backward)


def _tensor_backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do what `Tensor.backward` does."""
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARDS: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _tensor_backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: within_modes(torch.autograd.grad),
}
_entered = threading.local()  # `active` while a context is, in this thread


@contextmanager
def context_parallel(
    group: Group | None,
    layout: Layout,
    strategy: str | Attention = "ring",
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] = (),
    **options: Any,
) -> Iterator[Attention]:
    """Send the calls of `F.scaled_dot_product_attention` in this context to all ranks.

    A model that knows nothing of ranks then computes with the tokens that this rank holds: each
    call of SDPA is one of `seqpar.sdpa`, however the model imported it, in this thread alone. It
    must take the positions of tokens from outside: `layout.position_ids(rank)`, or tables of RoPE
    that are among the `buffers`. Backward may follow outside of the context, but for that of
    checkpoints, which call SDPA again: outside torch raises a CheckpointError.

    Args:
        group: the ranks: a process group or a mesh; None if `strategy` is a module.
        layout: which tokens of the packed batch each rank holds.
        strategy: its name, or a module of `make_attention`.
        buffers: tensors of whole batches, such as ids, labels and tables of positions. In the
            context each is this rank's part of it, with nothing sent; behind it, it is as before,
            every bit and its memory. They must not require gradients.
        buffer_seq_dims: for each the dimension that has the layout's tokens, padding included.
        no_restore_buffers: those of them that remain this rank's part, so that nothing keeps the
            whole.
        options: those of the strategy, if it is named.

    Yields:
        The attention module that the calls go to.

    Raises:
        ValueError: if an argument is wrong, or if a context is entered within another one; in the
            context, if a call cannot be computed exactly: with `attn_mask` or `dropout_p`, of other
            tokens than the layout's, in a checkpoint with `use_reentrant`, or by another of torch's
            functions or operators that are named for attention, such as `nn.MultiheadAttention`'s,
            which would see this rank's keys alone.
    """
    if getattr(_entered, "active", False):
        raise ValueError("context_parallel must not be entered again within itself")
    attn = attention_on(group, strategy, **options)
    check_layouts(layout=layout)
    for name, values, kinds in (
        ("buffers", buffers, (list, tuple)),
        ("buffer_seq_dims", buffer_seq_dims, (list, tuple)),
        ("no_restore_buffers", no_restore_buffers, (list, tuple, set, frozenset)),
    ):
        if not isinstance(values, kinds):
            expected = " or ".join(f"a {kind.__name__}" for kind in kinds)
            raise ValueError(f"{name} must be {expected}, got {shown(values)}")
    parts = _shards(attn, layout, buffers, buffer_seq_dims)
    for i, kept in enumerate(no_restore_buffers):
        if not any(kept is x for x in buffers):
            raise ValueError(f"no_restore_buffers[{i}] must be one of buffers")
    _entered.active, swapped = True, []
    try:
        for x, part in zip(buffers, parts, strict=True):
            swap_contents(x, part)  # which has the whole from here on
            if not any(x is kept for kept in no_restore_buffers):
                swapped.append((x, part))
        del parts
        with _ToAllRanks(attn, layout):
            yield attn
    finally:
        _entered.active = False
        for x, whole in swapped:
            swap_contents(x, whole)


class _ToAllRanks(TorchFunctionMode):
    """Sends calls of SDPA to `seqpar.sdpa`; refuses other attention, which it cannot send there."""

    def __init__(self, attn: Attention, layout: Layout) -> None:
        super().__init__()
        self.attn, self.layout = attn, layout

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if torch.compiler.is_compiling():
            if func is F.multi_head_attention_forward:
                raise _refusal("multi_head_attention_forward")
            if func is Tensor.unflatten:  # it calls super(), which torch cannot trace within modes
                return torch.unflatten(*args, **kwargs)
        elif func in _BACKWARDS:
            with self:  # it is off in the functions that it sees, and checkpoints call SDPA again
                return _BACKWARDS[func](*args, **kwargs)
        else:
            name = getattr(func, "__name__", "")
            if ("attention" in name or "attn" in name) and not str(func).startswith("seqpar."):
                raise _refusal(name)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute a call of SDPA; its axes are in SDPA's order, whatever their sizes."""
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            _refuse_reentrant_checkpoint()
        out: Tensor = sdpa(
            query,
            key,
            value,
            self.layout,
            strategy=self.attn,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            axes="bhsd",
        )
        return out


def _refuse_reentrant_checkpoint() -> None:
    """Raise within a checkpoint that is computed again whole, in silence, wherever backward is.

    Outside of the context it would attend to this rank's keys alone. Other checkpoints notice.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise ValueError("use_reentrant must be False of checkpoints within context_parallel")
        frame = frame.f_back


def _refusal(name: str) -> ValueError:
    instead = "call F.scaled_dot_product_attention, or an attention module"
    where = "within context_parallel, where it would see this rank's keys alone"
    return ValueError(f"{name} must not be called {where}: {instead}")


def _shards(
    attn: Attention, layout: Layout, buffers: Sequence[Tensor], dims: Sequence[int]
) -> list[Tensor]:
    """Return this rank's part of each buffer; raise for what is no buffer of the layout's."""
    if layout.ranks != attn.ranks:
        raise ValueError(
            f"layout must be for the group's {attn.ranks} ranks, got one for {layout.ranks}"
        )
    if len(buffers) != len(dims):
        expected = f"one entry for each of the {len(buffers)} buffers"
        raise ValueError(f"buffer_seq_dims must have {expected}, got {shown(dims)}")
    parts = []
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        name = f"buffers[{i}]"
        check_tensor(name, x)
        if type(x) not in (Tensor, nn.Parameter) or x.requires_grad:
            what = "a plain tensor that requires no gradient"
            raise ValueError(f"{name} must be {what}, got {shown(type(x))}")
        if any(x is other for other in buffers[:i]):
            raise ValueError(f"{name} must not be among the buffers twice")
        dim = as_dim(f"buffer_seq_dims[{i}]", dim)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != layout.tokens:
            expected = f"the layout's {layout.tokens} tokens, padding included, along dim {dim}"
            found = f"{tuple(x.shape)} and buffer_seq_dims[{i}] = {dim}"
            raise ValueError(f"{name} must have {expected}, got {found}")
        parts.append(layout.shard(x, attn.rank, dim))
    return parts
