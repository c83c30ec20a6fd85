"""Run an unchanged model on one rank's tokens: its SDPA calls attend to the keys of all ranks."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from seqpar.attention.operands import check_layouts
from seqpar.comm.messages.comm import Group
from seqpar.core.arguments import as_bool, as_dim, as_float, as_int, check_tensor, shown
from seqpar.core.compiling import is_traced
from seqpar.core.torch_private import fast_encoder_layer, inlined_only, swap_contents, within_modes
from seqpar.integrations.sdpa import SdpaArguments, attend, attention_on, check_call
from seqpar.layout.layout import Layout
from seqpar.softmax.module import Attention

_backward = within_modes(torch.autograd.backward)


def _tensor_backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARDS: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _tensor_backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: within_modes(torch.autograd.grad),
}
# torch.compile cannot trace a function's name, so compiled code compares the functions themselves.
_SOFTMAXES = {torch.softmax, Tensor.softmax, F.softmax, torch.ops.aten.softmax.int}
_SOFTMAXES |= {torch.log_softmax, Tensor.log_softmax, F.log_softmax, torch.special.log_softmax}
_SOFTMAXES |= {torch.logsumexp, Tensor.logsumexp, torch.special.softmax, torch.special.logsumexp}
_ATTENTIONS = "attention", "attn", "transformer_encoder_layer"  # in the names of functions
_LOCAL_KEYS = (
    "within context_parallel attends to this rank's keys only, if the last dimension is keys: "
    "call F.scaled_dot_product_attention, which attends to the keys of all ranks"
)
_LOCAL_POSITIONS = (
    "within context_parallel counts this rank's tokens from 0, and gives wrong positions: take "
    "positions from layout.position_ids(rank), or from tables among the buffers"
)
_entered = threading.local()  # `active` is True while this thread is in a context


@contextmanager
def context_parallel(
    group: Group | None,
    layout: Layout,
    strategy: str | Attention = "ring",
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] = (),
    replicated_keys: Collection[int] = (),
    **options: Any,
) -> Iterator[Attention]:
    """Compute the calls of `F.scaled_dot_product_attention` in this context over all ranks.

    The model needs no changes: it computes the tokens that this rank holds. Each SDPA call of this
    thread becomes a call of `seqpar.sdpa`, however the model imported the function. Positions of
    tokens must come from `layout.position_ids(rank)`, or from RoPE tables among the `buffers`.
    Backward can run outside of the context, unless the model uses checkpoints. A checkpoint calls
    SDPA again in backward, and outside of the context torch then raises a CheckpointError.

    Args:
        group: the ranks: a process group or a mesh; None if `strategy` is a module.
        layout: which tokens of the packed batch each rank holds.
        strategy: its name, or a module of `make_attention`.
        buffers: tensors of whole batches, such as ids, labels and tables of positions. Within the
            context, each buffer contains only this rank's tokens. After the context, each buffer
            has its old contents in the same memory again. Buffers must not require gradients.
        buffer_seq_dims: for each buffer, the dimension whose entries are the layout's tokens,
            including padding.
        no_restore_buffers: buffers that keep only this rank's tokens after the context too, so that
            the memory of the whole batch is freed.
        replicated_keys: key counts by which calls with replicated keys are recognised, such as
            `[77]` for cross attention to 77 text tokens. If the number of keys of a call is in this
            list, every rank must hold all keys and values of the call, and torch computes the call
            on each rank without messages. No rank may hold exactly so many tokens of the layout.
        options: the strategy's options, if it is given by name.

    Yields:
        The attention module that computes the calls.

    Warns:
        UserWarning: if a softmax is computed over scores of shape (..., T_local, T_local), which is
            probably hand-written attention, or if `torch.arange(T_local)` is called, which is
            probably the code that counts positions.

    Raises:
        ValueError: if an argument is wrong, or if a context is entered within another one. Inside
            the context, a call raises it if the call cannot be computed exactly: with `attn_mask`
            or `dropout_p`, with a number of tokens that differs from the layout's, or in a
            checkpoint with `use_reentrant`. Other attention functions of torch, such as those of
            `nn.MultiheadAttention`, raise it too, because they would attend to this rank's keys
            only.
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
    replicated = _replicated(attn, layout, replicated_keys)
    for i, kept in enumerate(no_restore_buffers):
        if not any(kept is x for x in buffers):
            raise ValueError(f"no_restore_buffers[{i}] must be one of the tensors in buffers")
    _entered.active, swapped = True, []
    try:
        for x, part in zip(buffers, parts, strict=True):
            # After this, `part` holds the whole buffer. Setting `data` would also change what
            # autograd saved of the buffer, and torch's `swap_tensors` refuses saved tensors.
            swap_contents(x, part)
            if not any(x is kept for kept in no_restore_buffers):
                swapped.append((x, part))
        del parts
        # If one rank raises an error before a call, the other ranks would wait for the call.
        with attn._bound.comm.telling_errors(), _ToAllRanks(attn, layout, replicated):
            yield attn
    finally:
        _entered.active = False
        for x, whole in swapped:
            swap_contents(x, whole)


class _SdpaOptions(TypedDict, total=False):
    scale: float | None
    enable_gqa: bool


class _ToAllRanks(TorchFunctionMode):
    def __init__(
        self, attn: Attention, layout: Layout, replicated_keys: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.attn, self.layout, self.replicated_keys = attn, layout, replicated_keys
        self.encoder_layer = fast_encoder_layer()

    @inlined_only
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if is_traced():
            if func is F.multi_head_attention_forward:
                raise _refusal("multi_head_attention_forward")
            if func is self.encoder_layer:
                raise _refusal("_transformer_encoder_layer_fwd")
            if func in _SOFTMAXES:
                self._warn_of_local_keys(args, kwargs)
            if func is Tensor.unflatten:  # its super() call cannot be traced within modes
                return torch.unflatten(*args, **kwargs)
        elif func in _BACKWARDS:
            with self:  # the mode is off in this function, and checkpoints call SDPA again
                return _BACKWARDS[func](*args, **kwargs)
        else:
            name = getattr(func, "__name__", "")
            if "softmax" in name or "logsumexp" in name:
                self._warn_of_local_keys(args, kwargs)
            elif func is torch.arange:
                self._warn_of_local_positions(*args, **kwargs)
            elif any(x in name for x in _ATTENTIONS) and not str(func).startswith("seqpar."):
                raise _refusal(name)
        return func(*args, **kwargs)

    @inlined_only
    def _warn_of_local_keys(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
        dims = [x for x in (*args[1:], kwargs.get("dim")) if isinstance(x, int | tuple | list)]
        if not isinstance(scores, Tensor) or not dims or scores.dim() < 2:
            return
        dim = dims[0] if isinstance(dims[0], int) else (*dims[0], 0)[0]
        tokens = self.layout.tokens_on(self.attn.rank)
        if dim not in (-1, scores.dim() - 1) or tokens < 2:
            return
        if scores.shape[-1] == tokens and scores.shape[-2] == tokens:
            shape = tuple(scores.shape)
            warnings.warn(f"softmax of scores {shape} {_LOCAL_KEYS}", stacklevel=3)

    @inlined_only
    def _warn_of_local_positions(
        self, *bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any
    ) -> None:
        if len(bounds) == 1:
            end = bounds[0]
        elif len(bounds) > 1:
            start, end, step = (*bounds, step)[:3]
        if not all(isinstance(x, int) for x in (start, end, step)):
            return
        tokens = self.layout.tokens_on(self.attn.rank)
        if (start, end, step) == (0, tokens, 1) and 1 < tokens < self.layout.tokens:
            warnings.warn(f"torch.arange({tokens}) {_LOCAL_POSITIONS}", stacklevel=3)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Unpack[_SdpaOptions],
    ) -> Tensor:
        replicated = self.replicated_keys and self._is_replicated(key)
        if not (replicated or torch.is_grad_enabled() or is_traced()):
            _refuse_reentrant_checkpoint()
        operands = query, key, value
        with self.attn.agreeing():
            if replicated:
                self._check_replicated(query, attn_mask, dropout_p, is_causal)
            else:
                enable_gqa = options.get("enable_gqa", False)
                arguments = SdpaArguments(attn_mask, dropout_p, is_causal, enable_gqa, "bhsd")
                check_call(self.attn, operands, self.layout, None, arguments, self._advice)
        if not replicated:
            return attend(self.attn, operands, self.layout, is_causal, options.get("scale"))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, **options
        )

    def _is_replicated(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.shape[-2] in self.replicated_keys

    def _check_replicated(
        self, query: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool
    ) -> None:
        """Raise a ValueError if the result of a query would depend on the rank, in a call whose
        keys every rank holds.
        """
        if as_float("dropout_p", dropout_p) != 0:
            raise ValueError(f"dropout_p must be 0 within context_parallel, got {dropout_p}")
        if self._is_replicated(query):
            return
        tokens = self.layout.tokens_on(self.attn.rank)
        if query.dim() not in (3, 4) or query.shape[-2] != tokens:
            expected = f"(B, H, {tokens}, D) or (H, {tokens}, D), with this rank's tokens"
            raise ValueError(f"query must be {expected}, got {tuple(query.shape)}")
        if as_bool("is_causal", is_causal):
            raise ValueError("is_causal must be False for replicated_keys, got True")
        if attn_mask is not None:
            check_tensor("attn_mask", attn_mask)
            if attn_mask.dim() < 2 or (attn_mask.shape[-2] != 1 and attn_mask.stride(-2) != 0):
                expected = "of shape (..., 1, keys), which is the same for all queries,"
                got = f"for replicated_keys, got {tuple(attn_mask.shape)}"
                raise ValueError(f"attn_mask must be {expected} {got}")

    def _advice(self, query: Tensor, key: Tensor) -> str:
        tokens = self.layout.tokens_on(self.attn.rank)
        if query.shape[-2:-1] == (tokens,):
            keys = key.shape[-2] if key.dim() > 1 else 77
            whole = f"context_parallel takes replicated_keys=[{keys}]"
            return f"for cross attention to keys that every rank holds whole, {whole}"
        if query.shape[-2:-1] == (self.layout.tokens,):
            return (
                "the batch is whole: put it among the buffers, or compute patches and positions "
                "before the context, and give the blocks layout.shard(x, rank, dim)"
            )
        return (
            "the context is for attention between the layout's tokens: for joint attention over "
            "text and image, shard both, and give a layout of both, made by Layout.from_spans"
        )


def _refuse_reentrant_checkpoint() -> None:
    """Raise a ValueError in a reentrant checkpoint."""
    # Its backward would repeat the call outside of the context, with only this rank's keys.
    code = CheckpointFunction.forward.__code__
    if any(frame.f_code is code for frame, _ in traceback.walk_stack(None)):
        raise ValueError(
            "use_reentrant must be False for checkpoints within context_parallel, got True"
        )


def _refusal(name: str) -> ValueError:
    instead = "call F.scaled_dot_product_attention, or an attention module"
    where = "within context_parallel, where it would attend to this rank's keys only"
    return ValueError(f"{name} must not be called {where}: {instead}")


def _replicated(attn: Attention, layout: Layout, numbers: Collection[int]) -> tuple[int, ...]:
    """Return the checked argument `replicated_keys`, or raise a ValueError if one of its numbers is
    also the number of tokens of a rank.
    """
    if not isinstance(numbers, list | tuple | set | frozenset):
        expected = "a list, a tuple or a set of numbers of keys"
        raise ValueError(f"replicated_keys must be {expected}, got {shown(numbers)}")
    keys = tuple(sorted(as_int("replicated_keys", x, 1) for x in numbers))
    for count in keys:
        if count in layout.tokens_per_rank:
            rank = layout.tokens_per_rank.index(count)
            holder = f"rank {rank} holds {count} of the layout's tokens"
            way_out = "pad the keys and mask the padding, or use a different layout"
            raise ValueError(
                f"replicated_keys must not contain {count}, because {holder}: {way_out}"
            )
    if keys and attn.deterministic == "ranks":
        reason = "the bits of torch's results can depend on the number of queries of a rank"
        raise ValueError(f'replicated_keys must be empty with deterministic="ranks": {reason}')
    return keys


def _shards(
    attn: Attention, layout: Layout, buffers: Sequence[Tensor], dims: Sequence[int]
) -> list[Tensor]:
    if layout.ranks != attn.ranks:
        expected = f"the group's {attn.ranks} ranks"
        raise ValueError(f"layout must be for {expected}, got one for {layout.ranks}")
    if len(buffers) != len(dims):
        expected = f"one entry for each of the {len(buffers)} buffers"
        raise ValueError(f"buffer_seq_dims must have {expected}, got {shown(dims)}")
    parts = []
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        name = f"buffers[{i}]"
        check_tensor(name, x)
        if type(x) not in (Tensor, nn.Parameter) or x.requires_grad:
            expected = "a plain tensor that requires no gradient"
            found = f"a {type(x).__name__}{' that requires one' * x.requires_grad}"
            way_out = "detach it, or give the blocks layout.shard(x, rank, dim)"
            raise ValueError(f"{name} must be {expected}, got {found}: {way_out}")
        if any(x is other for other in buffers[:i]):
            raise ValueError(f"{name} must not be the same tensor as an earlier buffer")
        dim = as_dim(f"buffer_seq_dims[{i}]", dim)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != layout.tokens:
            expected = f"the layout's {layout.tokens} tokens, padding included, along dim {dim}"
            found = f"{tuple(x.shape)} and buffer_seq_dims[{i}] = {dim}"
            raise ValueError(f"{name} must have {expected}, got {found}")
        parts.append(layout.shard(x, attn.rank, dim))
    return parts
