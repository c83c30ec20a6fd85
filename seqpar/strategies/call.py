"""Parameters and Call: what an attention call says besides its tensors, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.attend import Scoring, accumulator_dtype, backend, current_backend
from seqpar.comm import Comm
from seqpar.geometry import CuSeqlens, Geometry, as_int_tensor
from seqpar.layout import Layout
from seqpar.mask import Mask, Slices, slices_between, slices_over

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Parameters(NamedTuple):
    """The operators' arguments that are not data, as their schema has them: the tail of `SCHEMA`."""

    layout: Tensor
    kv_layout: Tensor
    prefix_lens: Tensor | None
    tokens: int  # that come together on this rank
    kv_tokens: int
    engine: str
    backend: str
    causal: bool
    left: int
    right: int
    scale: float
    softcap: float
    return_lse: bool
    deterministic: bool

    @classmethod
    def of(
        cls,
        engine: str,
        q: Tensor,
        layout: Layout,
        row: slice,
        *,
        causal: bool,
        kv_layout: Layout | None = None,
        prefix_lens: CuSeqlens | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
        deterministic: bool = True,
        dropout_p: float = 0.0,
    ) -> Parameters:
        """From a user's arguments. Their types are checked here, for the operator's sake; their values in `check`.

        `row` has the ranks whose tokens come together on this one.
        """
        kv_layout = layout if kv_layout is None else kv_layout
        check_types(causal, layout=layout, kv_layout=kv_layout)
        if len(window_size) != 2 or not all(isinstance(bound, int) for bound in window_size):
            raise ValueError(f"window_size must be two integers, (left, right), got {window_size!r}")
        if dropout_p != 0:
            raise ValueError(f"dropout_p must be 0, got {dropout_p}: dropout is not offered over sharded keys")
        prefix = None if prefix_lens is None else as_int_tensor("prefix_lens", prefix_lens)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
        return cls(
            layout.key, kv_layout.key, prefix, sum(layout.held[row]), sum(kv_layout.held[row]),
            engine, current_backend(), causal, *window_size, scale, float(softcap), bool(return_lse), deterministic,
        )  # fmt: skip

    def call(self, comm: Comm, kv_heads: int, sinks: Tensor | None) -> Call:
        """What the strategies work from; raises a ValueError that names the argument if the mask is ill-formed."""
        layout, kv_layout = Geometry.of(self.layout), Geometry.of(self.kv_layout)
        prefix = None if self.prefix_lens is None else self.prefix_lens.numpy()
        mask = Mask.of(self.causal, (self.left, self.right), prefix, kv_layout)
        scoring = Scoring(self.scale, self.softcap, self.backend, self.deterministic)
        return Call(comm.rank, layout, kv_layout, mask, scoring, kv_heads, sinks, self.return_lse)

    def shared(self, sinks: Tensor | None) -> dict[str, Any]:
        """What all ranks must agree on, by the names that users know."""
        return {
            "layout": Geometry.of(self.layout).digest[:16],
            "kv_layout": Geometry.of(self.kv_layout).digest[:16],
            "causal": self.causal,
            "window_size": [self.left, self.right],
            "prefix_lens": None if self.prefix_lens is None else self.prefix_lens.tolist(),
            "softmax_scale": self.scale,
            "softcap": self.softcap,
            "backend": self.backend,
            "sinks": sinks is not None,
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
        }


SCHEMA = (
    "Tensor layout, Tensor kv_layout, Tensor? prefix_lens, SymInt tokens, SymInt kv_tokens, "
    "str engine, str backend, bool causal, int left, int right, float scale, float softcap, bool return_lse, bool deterministic"
)


@dataclass(frozen=True)
class Call:
    """What a strategy knows of a call besides q, k and v."""

    rank: int
    layout: Geometry
    kv_layout: Geometry
    mask: Mask
    scoring: Scoring
    kv_heads: int
    sinks: Tensor | None
    return_lse: bool

    def shared_dlse(self, dlse: Tensor | None, dout: Tensor) -> Tensor | None:
        """The gradient of lse, on all ranks or on none: autograd has none for a rank whose loss does not use its lse."""
        if dlse is None and self.return_lse:
            return dout.new_zeros(dout.shape[:-1], dtype=accumulator_dtype(dout.dtype))
        return dlse

    def slices(self, own: int, peer: int) -> Slices:
        """The slices of rank own's queries over rank peer's keys."""
        return slices_between(self.layout, own, self.kv_layout, peer, self.mask)

    def visitors(self, own: int, peer: int) -> Slices:
        """The slices of those of rank own's queries that see any key of rank peer's, over all of that rank's keys."""
        return slices_between(self.layout, own, self.kv_layout, peer, self.mask, queries_travel=True)

    def slices_over(self, own: int, peers: Sequence[int]) -> Slices:
        """The slices of rank own's queries over the key rows of several peers, one after another."""
        return slices_over(self.layout, own, self.kv_layout, tuple(peers), self.mask)


def check(comm: Comm, parameters: Parameters, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Call:
    """The call, or a ValueError naming the argument, its value, what was expected and the rank."""
    with naming_rank(comm):
        call = parameters.call(comm, k.shape[2], sinks)
        _check_shared(call, comm)
        _check_tensors(call, q, k, v)
    return call


@contextmanager
def naming_rank(comm: Comm) -> Iterator[None]:
    """Say in a ValueError which rank raises it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (rank {comm.rank} of {comm.size})") from None


def check_types(causal: object, **layouts: object) -> None:
    for name, value in layouts.items():
        if not isinstance(value, Layout):
            raise ValueError(f"{name} must be a seqpar.Layout, got {type(value).__name__}")
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")


def check_layouts(comm: Comm, **layouts: Geometry) -> None:
    for name, layout in layouts.items():
        if len(layout.holdings) != comm.size:
            raise ValueError(f"{name} must be for the group's {comm.size} ranks, got one for {len(layout.holdings)}")


def _check_shared(call: Call, comm: Comm) -> None:
    check_layouts(comm, layout=call.layout, kv_layout=call.kv_layout)
    expected, documents = call.layout.lengths.size, call.kv_layout.lengths.size
    if documents != expected:
        raise ValueError(f"kv_layout must have layout's {expected} documents, got {documents}")
    if not math.isfinite(call.scoring.scale):
        raise ValueError(f"softmax_scale must be finite, got {call.scoring.scale}")
    if not 0 <= call.scoring.softcap < math.inf:
        raise ValueError(f"softcap must be finite and not negative (0 is none), got {call.scoring.softcap}")


def _check_tensors(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    tokens, kv_tokens = (layout.holdings[call.rank].tokens for layout in (call.layout, call.kv_layout))
    check_operands(q, k, v, tokens, kv_tokens)
    reason = getattr(backend(call.scoring.backend), "refusal", lambda q, v: None)(q, v)
    if reason:
        raise ValueError(reason)
    sinks, heads = call.sinks, q.shape[2]
    if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in DTYPES):
        raise ValueError(f"sinks must be ({heads},) floats, one a query head, got {tuple(sinks.shape)} of {sinks.dtype}")


def check_operands(q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> None:
    """Raise unless q (B, tokens, Hq, D), k (B, kv_tokens, Hkv, D) and v (B, kv_tokens, Hkv, Dv) fit each other."""
    for name, x, expected in (("q", q, tokens), ("k", k, kv_tokens), ("v", v, kv_tokens)):
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(f"{name} must be of q's dtype, one of {DTYPES}, got {x.dtype} beside {q.dtype}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have q's batch size, {q.shape[0]}, got {x.shape[0]}")
        if x.shape[1] != expected:
            raise ValueError(f"{name} must have the {expected} tokens its layout gives this rank, got {x.shape[1]}")
        if 0 in x.shape[2:]:
            raise ValueError(f"{name} must have at least one head and a head dim of at least 1, got {tuple(x.shape)}")
    heads, kv_heads = q.shape[2], k.shape[2]
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dim, {q.shape[3]}, got {k.shape[3]}")
    if v.shape[2] != kv_heads:
        raise ValueError(f"v must have k's number of heads, {kv_heads}, got {v.shape[2]}")
    if heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads, got {heads}")
