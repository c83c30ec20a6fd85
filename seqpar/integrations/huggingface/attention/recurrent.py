"""Recurrent layers of a model, and short convolutions, over the ranks of its group.

To mix tokens, the forward of such a layer calls global functions of its Python file. In an enabled
model, functions of this module replace these global functions (`Overlay` in `model/code.py`). The
new functions call `causal_conv1d` and `RecurrentAttention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqpar.attention.backend import DEFAULT, current_backend
from seqpar.comm.messages.comm import Comm, as_mesh
from seqpar.core.arguments import shown
from seqpar.core.compiling import is_traced
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.torch_private import version_of
from seqpar.halo.functions import ACTIVATIONS, causal_conv1d, halo_on
from seqpar.integrations.huggingface.attention.attention import (
    call_and_shape,
    enabled_layer,
    refuse_unknown,
    running_call,
)
from seqpar.integrations.huggingface.attention.call import EnabledModel, ShardedMask
from seqpar.integrations.huggingface.attention.counting import counted
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.model.code import Overlay, check_forward, named_in
from seqpar.integrations.huggingface.model.layers import CALLED, kind_of
from seqpar.layout.layout import Layout
from seqpar.linear.maps.backends import fla
from seqpar.strategies.recurrent import RecurrentAttention

_MASK = "create_recurrent_attention_mask"
_CACHES = ("cache_params", "past_key_values")


class PatchedRecurrence:
    """The functions that replace the global functions in the forward of a recurrent layer."""

    layout: Layout  # set only while the layer's forward runs
    dtype: torch.dtype  # the dtype of q in the layer's last call

    def __init__(
        self, module: nn.Module, kind: str, comm: Comm, attention: RecurrentAttention | None
    ) -> None:
        self.kind, self.comm, self.attention = kind, comm, attention
        self._halo = halo_on(comm)  # kept alive here, since compiled graphs hold only its key
        self.parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self._slopes: tuple[Tensor, int, Tensor] | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        known: dict[str, Callable[..., Any]] = {
            "causal_conv1d_fn": self._convolve,
            "chunk_kimi_delta_attention": self._delta,
            "mamba2_chunk_scan": self._scan,
            "mamba2_split_conv1d_scan_combined": _nothing,
            "torch_chunk_gated_delta_rule": self._delta,
        }
        return {name: known[name] for name in CALLED[self.kind]}

    def _convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> Tensor:
        refuse_unknown(others)
        x = hidden_states.transpose(1, 2).to(weight.dtype)
        out = causal_conv1d(x, weight, self.layout, self.comm, bias, activation)
        return out.transpose(1, 2).to(hidden_states.dtype)

    def _delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute the gated delta rule on tensors (1, T_local, H, D), with a decay per head or
        channel.
        """
        refuse_unknown(others, "chunk_size")
        self.dtype, exact = query.dtype, accumulator_dtype(query.dtype)
        q, k, v, log_decay, b = (x[0].to(exact) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = _normalised(q), _normalised(k)
        scale, dtype = q.shape[-1] ** -0.5, self.dtype_of_products(query, value)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out = self._recur(q, k, v, log_decay=log_decay, beta=b, scale=scale)
        return out[None].to(query.dtype), None

    def _scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute Mamba-2's scan: x (1, T_local, H, P), Δ (1, T_local, H), B and C (…, G, N)."""
        self.dtype, exact = C.dtype, accumulator_dtype(hidden_states.dtype)
        dt = _time_steps(dt, **options)[0].to(exact)
        x, keys, queries = (y[0].to(exact) for y in (hidden_states, B, C))
        dtype = self.dtype_of_products(C, hidden_states)
        q, k, v = (y.to(dtype) for y in (queries, keys, x * dt[..., None]))
        out = self._recur(q, k, v, log_decay=A.to(exact) * dt).to(exact)
        return (out if D is None else out + D[:, None] * x)[None]

    def dtype_of_products(self, q: Tensor, v: Tensor) -> torch.dtype:
        """Return the dtype in which the recurrence of q and v is computed.

        With fla's kernels, this is the dtype of q, except for Mamba-2 in fp16, whose products could
        overflow. All other backends compute half precision in fp32.
        """
        if self.kind == "constant_decay":
            return q.dtype
        chosen = current_backend("recurrent") in (DEFAULT, "fla")
        fits = self.kind != "scalar_decay" or q.dtype == torch.bfloat16
        half = chosen and fits and fla.refusal(q, v) is None
        return q.dtype if half else accumulator_dtype(q.dtype)

    def lightning(self, module: Any, hidden_states: Tensor) -> Tensor:
        """Compute the forward of a layer with MiniMax's lightning attention."""
        shape = hidden_states.shape[1], module.num_attention_heads, 3 * module.head_dim
        qkv = module.act_fn(module.qkv_proj(hidden_states)).reshape(shape)
        q, k, v = qkv.split(module.head_dim, -1)
        self.dtype = q.dtype
        out = self._recur(q, k, v, log_decay=self.log_decay(module.slope_rate))
        out = module.norm(out.flatten(1)[None])
        return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out)

    def log_decay(self, slopes: Tensor) -> Tensor:
        exact = torch.promote_types(slopes.dtype, torch.float32)
        if is_traced() or slopes.is_inference() or slopes.is_meta:
            return -slopes.flatten().to(exact)
        # Copying `slopes` to the CPU waits for the GPU, so the copy is reused until `slopes` is
        # written to.
        version = version_of(slopes)
        if self._slopes is None or self._slopes[0] is not slopes or self._slopes[1] != version:
            self._slopes = slopes, version, -slopes.flatten().to("cpu", exact)
        return self._slopes[2]

    def _recur(self, *operands: Tensor, **options: Any) -> Tensor:
        assert self.attention is not None
        return self.attention(*operands, self.layout, **options)


def check_recurrent(layers: Iterable[nn.Module], body: nn.Module) -> None:
    kinds = _recurrent_kinds(layers)
    for x, kind in kinds.items():
        check_forward(x, CALLED[kind])
        activation = getattr(x, "activation", None)
        if activation not in ACTIVATIONS:
            found = f"a {type(x).__name__} has {shown(activation)}"
            raise ValueError(f"model must have SiLU after its short convolutions: {found}")
    for x in _making_masks(body) if kinds else ():
        check_forward(x, [_MASK])


def patch_recurrent_layers(session: EnabledModel, body: nn.Module) -> list[Overlay]:
    comm, overlays = session.comm, []
    attentions: dict[str, RecurrentAttention | None] = {"convolution": None}
    for module, kind in _recurrent_kinds(session.layers).items():
        if len(comm.shape) > 1:
            comm = as_mesh(comm, comm.size)
        if kind not in attentions:
            attentions[kind] = RecurrentAttention(comm, kind, check_ranks=session.check_ranks)
        recurrence = PatchedRecurrence(module, kind, comm, attentions[kind])
        layer = session.layers[module]
        layer.recurrence, layer.comm = recurrence, comm
        overlays.append(Overlay(module, recurrence.functions(), _forward))
    if overlays:
        overlays += [Overlay(x, {_MASK: _mask_of_call}) for x in _making_masks(body)]
    return overlays


def _recurrent_kinds(layers: Iterable[nn.Module]) -> dict[nn.Module, str]:
    return {x: kind for x in layers if (kind := kind_of(type(x))) is not None}


def _making_masks(body: nn.Module) -> list[nn.Module]:
    return [x for x in body.modules() if _MASK in named_in(x)]


def _forward(own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    session, layer = enabled_layer(module)
    recurrence: PatchedRecurrence = layer.recurrence
    given = dict(zip(recurrence.parameters, args, strict=False)) | kwargs
    with session.faults(layer.name):
        call, _ = call_and_shape(module, session, given.get("attention_mask"), True)
        if any(given.get(name) is not None for name in _CACHES):
            raise ValueError(
                "it must be called without a cache: states of sharded tokens have none"
            )
        side, hidden = call.side(layer.in_encoder), given["hidden_states"]
        if hidden.dim() != 3 or hidden.shape[0] != 1 or hidden.shape[1] != side.tokens:
            expected = f"(1, {side.tokens}, channels), the tokens of the sharded batch"
            raise ValueError(f"its hidden states must be {expected}, got {tuple(hidden.shape)}")

    def computed(hidden: Tensor) -> Tensor:
        if recurrence.kind == "constant_decay":
            return recurrence.lightning(module, hidden)
        return own(module, **given | {"hidden_states": hidden, "attention_mask": None})

    recurrence.layout = side.layout
    try:
        out = counted(layer, hidden, computed, decodes=False)
    finally:
        del recurrence.layout
    return (out, None) if recurrence.kind == "constant_decay" else out


def _mask_of_call(*_: Any, attention_mask: Any = None, **__: Any) -> ShardedMask:
    if isinstance(attention_mask, ShardedMask):
        return attention_mask  # a `PreparedMask` of a compiled model
    return ShardedMask(running_call(), MaskShape(causal=True))


def _time_steps(
    dt: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    refuse_unknown(others, "chunk_size")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _nothing(*_: Any, **__: Any) -> None:
    """A function that takes the place of a fused kernel, so that a layer calls separate functions
    instead of the kernel.
    """
