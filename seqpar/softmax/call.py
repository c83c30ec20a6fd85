"""What an attention call says besides its tensors: carried by the operator, read by strategies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict, TypeVar

from torch import Tensor

from seqpar.attention.backend import current_backend
from seqpar.attention.operands import (
    OperandShape,
    check_layouts,
    check_ranks_of,
)
from seqpar.attention.operators import Count, schema_of
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import CuSeqlens, WindowSize, as_bool, as_float
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.layout.geometry import Geometry
from seqpar.layout.handle import from_handle, name_of
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask, Slices, slices_between, slices_over
from seqpar.softmax.compute.alibi import check_slopes, parse_slopes
from seqpar.softmax.compute.call_options import CallOptions, check_numbers, parse_softcap
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.masking import Causal, Masking

T = TypeVar("T")


class Operands(NamedTuple):
    """The tensors that a call attends with, in the order in which the operators take them.

    Attributes:
        q: (B, T_local, Hq, D).
        k: (B, Tkv_local, Hkv, D).
        v: (B, Tkv_local, Hkv, Dv).
        sinks: (Hq,), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None

    @property
    def shape(self) -> OperandShape:
        """The dtype and sizes that are the same on all ranks."""
        return OperandShape.of(self.q, self.k, self.v)


class DecodeKeywords(TypedDict, total=False):
    """Keyword arguments that a call and `Attention.decode` take alike; `forward` explains them."""

    prefix_lens: CuSeqlens | None
    window_size: WindowSize
    mask: Mask | None
    softcap: float | None
    alibi_slopes: Tensor | None
    return_max_logits: bool
    dropout_p: float


class DecodeOptions(DecodeKeywords, total=False):
    """The options of `Attention.decode` that `ShardedCache` passes on."""

    causal: Causal
    softmax_scale: float | Tensor | None
    sinks: Tensor | None
    return_lse: bool


class ArgumentKeywords(DecodeKeywords, total=False):
    """The keyword arguments that become `CallArguments`."""

    causal: Causal
    kv_layout: Layout | None
    softmax_scale: float | Tensor | None
    return_lse: bool


class CallKeywords(ArgumentKeywords, total=False):
    """The keyword arguments of a call."""

    sinks: Tensor | None


class CallArguments(NamedTuple):
    """A call's arguments besides q, k, v and sinks, as the operator carries them.

    `layout` and `kv_layout` are handles of geometries, `ranges` is one of a mask's ranges, and
    `strategy` is the key of a BoundStrategy. `tokens` and `kv_tokens` are how many query and key
    tokens this rank computes with: its own, or for strategies that merge ranks
    (`Strategy.merged_size`), those of all ranks merged with it.
    """

    layout: Tensor
    kv_layout: Tensor
    prefix_lens: Tensor | None
    ranges: Tensor | None
    alibi_slopes: Tensor | None
    tokens: Count
    kv_tokens: Count
    strategy: str
    backend: str
    causal: bool
    left: Count
    right: Count
    scale: float
    softcap: float
    return_lse: bool
    return_max_logits: bool
    deterministic: bool

    @classmethod
    def of(
        cls,
        strategy: str,
        head_dim: int,
        layout: Layout,
        merged: slice,
        *,
        causal: Causal = ...,
        kv_layout: Layout | None = None,
        prefix_lens: CuSeqlens | None = None,
        window_size: WindowSize = (-1, -1),
        mask: Mask | None = None,
        softmax_scale: float | Tensor | None = None,
        softcap: float | None = 0.0,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        deterministic: bool = True,
        dropout_p: float = 0.0,
    ) -> CallArguments:
        """Make them from a user's arguments.

        This checks types, since the operator takes no others; `to_call` checks values. `merged` are
        the ranks whose tokens this rank computes with.
        """
        kv_layout = layout if kv_layout is None else kv_layout
        check_layouts(layout=layout, kv_layout=kv_layout)
        if as_float("dropout_p", dropout_p) != 0:
            reason = "dropout is not offered over sharded keys"
            raise ValueError(f"dropout_p must be 0, got {dropout_p}: {reason}")
        masking = Masking.of(causal, window_size, prefix_lens, mask)
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        return cls(
            layout=layout._handle,
            kv_layout=kv_layout._handle,
            prefix_lens=masking.prefix_lens,
            ranges=masking.ranges,
            alibi_slopes=parse_slopes(alibi_slopes),
            tokens=layout._tokens_on(merged),
            kv_tokens=kv_layout._tokens_on(merged),
            strategy=strategy,
            backend=current_backend("softmax"),
            causal=masking.causal,
            left=masking.left,
            right=masking.right,
            scale=as_float("softmax_scale", scale),
            softcap=parse_softcap(softcap),
            return_lse=as_bool("return_lse", return_lse),
            return_max_logits=as_bool("return_max_logits", return_max_logits),
            deterministic=deterministic,
        )

    @property
    def masking(self) -> Masking:
        """Who sees whom."""
        return Masking(self.prefix_lens, self.ranges, self.causal, self.left, self.right)

    @classmethod
    def restored(
        cls, saved: Sequence[Tensor | None], settings: tuple[object, ...]
    ) -> tuple[CallArguments, list[Any]]:
        """Return them from what autograd saved, `tensors` first, and what else that is."""
        return cls(*saved[:_TENSORS], *settings), list(saved[_TENSORS:])  # type: ignore[arg-type]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the fields that autograd must save as tensors: the first ones."""
        return self[:_TENSORS]  # type: ignore[return-value]

    def settings(self) -> tuple[object, ...]:
        """Return all other fields."""
        return self[_TENSORS:]

    def to_call(self, comm: Comm, shape: OperandShape, has_sinks: bool) -> ResolvedCall:
        """Return the resolved call; raise a ValueError if a layout, the mask or a number is wrong.

        What is the same in all calls of these settings is checked and made once, and kept with the
        layouts.
        """
        layout = from_handle(self.layout)
        kv_layout = layout if self.kv_layout is self.layout else from_handle(self.kv_layout)
        masking = self.masking

        def settle() -> tuple[Mask, CallOptions, Memo]:
            _check_layouts(comm, layout, kv_layout)
            mask = masking.to_mask(layout, kv_layout)
            options = CallOptions(self.scale, self.softcap, self.backend, self.deterministic)
            check_numbers(options, shape)
            return mask, options, _kept(layout, kv_layout, comm.rank, mask, options, shape)

        settled = layout.derived_with(kv_layout)(("settled",), lambda: Memo(MAX_KEPT_SETTINGS))
        key = comm.rank, comm.size, shape, *masking.contents(), *self.settings()
        mask, options, kept = settled(key, settle)
        if self.alibi_slopes is not None:
            options = options.with_slopes(check_slopes(self.alibi_slopes, shape))
        return ResolvedCall(
            rank=comm.rank,
            layout=layout,
            kv_layout=kv_layout,
            mask=mask,
            options=options,
            shape=shape,
            has_sinks=has_sinks,
            return_lse=self.return_lse,
            kept=kept,
        )

    def shared(self, has_sinks: bool, canonical: bool) -> dict[str, object]:
        """Return what all ranks must agree on, by the names that users know.

        Unless it is to be `canonical`, equal layouts that were made in different ways differ.
        """
        return {
            "layout": name_of(self.layout, canonical),
            "kv_layout": name_of(self.kv_layout, canonical),
            **self.masking.shared(),
            "softmax_scale": self.scale,
            "softcap": self.softcap,
            "backend": self.backend,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": has_sinks,
            "return_lse": self.return_lse,
            "return_max_logits": self.return_max_logits,
            "deterministic": self.deterministic,
        }


_TENSORS = 5  # the first fields: layout, kv_layout, prefix_lens, ranges and alibi_slopes
SCHEMA = schema_of(CallArguments)


@dataclass(frozen=True)
class ResolvedCall:
    """What a strategy knows of a call besides its `Operands`.

    `rank` is this process's rank in the layouts' group; `kept` is what `once` keeps of such calls,
    and `max_logits` takes over the scores of a forward, if they were asked for.
    """

    rank: int
    layout: Geometry
    kv_layout: Geometry
    mask: Mask
    options: CallOptions
    shape: OperandShape
    has_sinks: bool
    return_lse: bool
    kept: Memo = field(repr=False)
    max_logits: MaxLogits | None = None

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return `build()`, called once for all calls that differ in their tensors alone.

        What it returns is kept with the layouts, so it must hold neither them nor the call.
        """
        return self.kept(key, build)

    def altered(self, **changes: Any) -> ResolvedCall:
        """Return the call of another rank, other layouts or another shape."""
        call = replace(self, **changes)
        settings = call.rank, call.mask, call.options.with_slopes(None), call.shape
        return replace(call, kept=_kept(call.layout, call.kv_layout, *settings))

    @property
    def ranks(self) -> int:
        """How many ranks the layouts are for."""
        return self.layout.ranks

    def others(self, rank: int) -> list[int]:
        """Return all ranks but one, ascending."""
        return [peer for peer in range(self.ranks) if peer != rank]

    def dlse_on_all_ranks(self, dlse: Tensor | None, dout: Tensor) -> Tensor | None:
        """Return the gradient of lse, zeros where autograd has none but the call returned lse.

        So all ranks send it or none: a rank may have none because its loss does not use its lse,
        while other ranks send theirs.
        """
        if dlse is None and self.return_lse:
            return dout.new_zeros(dout.shape[:-1], dtype=accumulator_dtype(dout.dtype))
        return dlse

    def slices(self, q_rank: int, k_rank: int) -> Slices:
        """Return the slices of `q_rank`'s queries over those keys of `k_rank` that travel to it."""
        return slices_between(self.layout, q_rank, self.kv_layout, k_rank, self.mask)

    def visitors(self, q_rank: int, k_rank: int) -> Slices:
        """Return the slices of those queries of `q_rank` that travel to `k_rank`, over its keys."""
        return slices_between(
            self.layout, q_rank, self.kv_layout, k_rank, self.mask, queries_travel=True
        )

    def slices_over(self, q_rank: int, k_ranks: Sequence[int]) -> Slices:
        """Return the slices of `q_rank`'s queries over the keys of several ranks, in one block."""
        return slices_over(self.layout, q_rank, self.kv_layout, tuple(k_ranks), self.mask)


def _kept(layout: Geometry, kv_layout: Geometry, *settings: Hashable) -> Memo:
    """Return what is kept of calls of these layouts and settings."""
    kept = layout.derived_with(kv_layout)(("once",), lambda: Memo(MAX_KEPT_SETTINGS))
    return kept(settings, Memo)


def _check_layouts(comm: Comm, layout: Geometry, kv_layout: Geometry) -> None:
    """Check the layouts, before a mask over them is made."""
    check_ranks_of(comm, layout=layout, kv_layout=kv_layout)
    expected, documents = layout.lengths.size, kv_layout.lengths.size
    if documents != expected:
        raise ValueError(f"kv_layout must have layout's {expected} documents, got {documents}")
