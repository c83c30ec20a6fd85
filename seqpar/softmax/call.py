"""The arguments of an attention call, in the forms that operators and strategies take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import NamedTuple, TypedDict, TypeVar, Unpack

from torch import Tensor

from seqpar.attention.backend import current_backend
from seqpar.attention.operands import OperandShape, check_layouts, check_ranks_of
from seqpar.attention.operators import Count, schema_of
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import (
    CuSeqlens,
    WindowSize,
    as_bool,
    as_float,
    as_int_tensor,
    parse_window,
    shown,
)
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.geometry import Geometry
from seqpar.layout.handle import from_handle, name_of
from seqpar.layout.layout import Layout
from seqpar.layout.masks import mask_ranges
from seqpar.layout.masks.mask import Mask, Slices, slices_between
from seqpar.softmax.compute.call_options import (
    CallOptions,
    check_numbers,
    check_slopes,
    parse_slopes,
    parse_softcap,
)
from seqpar.softmax.compute.max_logits import MaxLogits

T = TypeVar("T")
Causal = bool | EllipsisType  # `...` if the call does not have the argument


class Operands(NamedTuple):
    """The tensors of a call, in the order in which the operators take them."""

    q: Tensor  # (B, T_local, Hq, D)
    k: Tensor  # (B, Tkv_local, Hkv, D)
    v: Tensor  # (B, Tkv_local, Hkv, Dv)
    sinks: Tensor | None = None  # (Hq,), or None

    @property
    def shape(self) -> OperandShape:
        """The dtype and sizes that are the same on all ranks."""
        return OperandShape.of(self.q, self.k, self.v)

    @property
    def differentiated(self) -> bool:
        return any(x is not None and x.requires_grad for x in self)


class DecodeKeywords(TypedDict, total=False):
    """Keyword arguments that calls and `Attention.decode` have in common; see `forward`."""

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
    sinks: Tensor | None


class CallArguments(NamedTuple):
    """A call's arguments other than q, k, v and sinks, in the form that the operator carries.

    `layout` and `kv_layout` are handles of geometries, and `strategy` is the key of a
    BoundStrategy. `ranges` is a handle of the ranges of `Mask.of_ranges`; the mask's other fields
    then allow every pair. `tokens` and `kv_tokens` are the numbers of query and key tokens that
    this rank computes with: its own tokens or, if the strategy merges ranks
    (`Strategy.merged_size`), the tokens of all ranks that are merged with it.
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
        deterministic: bool,
        **options: Unpack[ArgumentKeywords],
    ) -> CallArguments:
        """Make the arguments from a user's options.

        It checks types, because the operator only takes the right ones; `to_call` checks values.
        `merged` are the ranks whose tokens this rank computes with.
        """
        user: ArgumentKeywords = {**_DEFAULTS, **options}
        if len(user) > len(_DEFAULTS):
            unknown = next(name for name in user if name not in _DEFAULTS)
            raise TypeError(f"got an unexpected keyword argument {unknown!r}")
        kv_layout = layout if user["kv_layout"] is None else user["kv_layout"]
        check_layouts(layout=layout, kv_layout=kv_layout)
        if as_float("dropout_p", user["dropout_p"]) != 0:
            reason = "dropout is not offered over sharded keys"
            raise ValueError(f"dropout_p must be 0, got {user['dropout_p']}: {reason}")
        prefix_lens, ranges, causal, left, right = _parse_mask(user)
        scale = head_dim**-0.5 if user["softmax_scale"] is None else user["softmax_scale"]
        return cls(
            layout=layout._handle,
            kv_layout=kv_layout._handle,
            prefix_lens=prefix_lens,
            ranges=ranges,
            alibi_slopes=parse_slopes(user["alibi_slopes"]),
            tokens=layout._tokens_on(merged),
            kv_tokens=kv_layout._tokens_on(merged),
            strategy=strategy,
            backend=current_backend("softmax"),
            causal=causal,
            left=left,
            right=right,
            scale=as_float("softmax_scale", scale),
            softcap=parse_softcap(user["softcap"]),
            return_lse=as_bool("return_lse", user["return_lse"]),
            return_max_logits=as_bool("return_max_logits", user["return_max_logits"]),
            deterministic=deterministic,
        )

    @classmethod
    def restored(
        cls, saved: Sequence[T], settings: tuple[object, ...]
    ) -> tuple[CallArguments, list[T]]:
        """Split tensors that autograd saved, `tensors` first, into the arguments and the rest."""
        count = _TENSOR_FIELDS
        return cls(*saved[:count], *settings), list(saved[count:])  # type: ignore[arg-type]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the first fields, which autograd must save as tensors."""
        return self[:_TENSOR_FIELDS]  # type: ignore[return-value]

    def settings(self) -> tuple[object, ...]:
        return self[_TENSOR_FIELDS:]

    def to_call(self, comm: Comm, shape: OperandShape, has_sinks: bool) -> ResolvedCall:
        """Return the resolved call; raise a ValueError if a layout, the mask or a number is wrong.

        Checks and results that only depend on the settings are made once and kept with the layouts.
        """
        layout = from_handle(self.layout)
        kv_layout = layout if self.kv_layout is self.layout else from_handle(self.kv_layout)

        def check_settings() -> tuple[Mask, CallOptions, Memo]:
            _check_layouts(comm, layout, kv_layout)
            mask = self._mask(layout, kv_layout)
            if layout.cut.most_documents or kv_layout.cut.most_documents:
                _check_most_documents(layout, kv_layout, mask)
            options = CallOptions(self.scale, self.softcap, self.backend, self.deterministic)
            check_numbers(options, shape)
            return mask, options, _kept(layout, kv_layout, comm.rank, mask, options, shape)

        checked = layout.derived_with(kv_layout)(("settled",), lambda: Memo(MAX_KEPT_SETTINGS))
        key = comm.rank, comm.size, shape, *self.mask_contents(), *self.settings()
        mask, options, kept = checked(key, check_settings)
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

    def _mask(self, layout: Geometry, kv_layout: Geometry) -> Mask:
        """Return the mask; raise a ValueError that names an argument which does not fit."""
        if self.ranges is None:
            prefix = None if self.prefix_lens is None else self.prefix_lens.numpy()
            return Mask.of(self.causal, (self.left, self.right), prefix, kv_layout)
        mask = Mask(UNLIMITED, UNLIMITED, ranges=mask_ranges.from_handle(self.ranges))
        mask.check_fits(layout, kv_layout)
        return mask

    def mask_contents(self) -> tuple[bytes | None, bytes | None]:
        """Return a key of the contents of `prefix_lens` and `ranges`."""
        prefix = None if self.prefix_lens is None else self.prefix_lens.numpy().tobytes()
        return prefix, None if self.ranges is None else mask_ranges.key_of_handle(self.ranges)

    def shared(self, has_sinks: bool, canonical: bool) -> dict[str, object]:
        """Return the values that must be the same on all ranks, under their public names.

        Equal layouts that were made in different ways are only equal if `canonical`, which takes
        longer.
        """
        _, ranges = self.mask_contents()
        return {
            "layout": name_of(self.layout, canonical),
            "kv_layout": name_of(self.kv_layout, canonical),
            "causal": self.causal,
            "window_size": [self.left, self.right],
            "prefix_lens": None if self.prefix_lens is None else self.prefix_lens.tolist(),
            "mask": None if ranges is None else ranges.hex()[:16],
            "softmax_scale": self.scale,
            "softcap": self.softcap,
            "backend": self.backend,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": has_sinks,
            "return_lse": self.return_lse,
            "return_max_logits": self.return_max_logits,
            "deterministic": self.deterministic,
        }


_TENSOR_FIELDS = 5  # layout, kv_layout, prefix_lens, ranges and alibi_slopes
SCHEMA = schema_of(CallArguments)
_DEFAULTS: ArgumentKeywords = {
    "causal": ...,
    "kv_layout": None,
    "prefix_lens": None,
    "window_size": (-1, -1),
    "mask": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_lse": False,
    "return_max_logits": False,
    "dropout_p": 0.0,
}


def _parse_mask(user: ArgumentKeywords) -> tuple[Tensor | None, Tensor | None, bool, int, int]:
    """Return prefix_lens, ranges, causal, left and right; raise an error that names a wrong one."""
    causal, mask, prefix_lens = user["causal"], user["mask"], user["prefix_lens"]
    left, right = parse_window(user["window_size"])
    if mask is None:
        if causal is ...:
            raise TypeError("causal must be given, True or False, unless there is a mask")
        prefix = None if prefix_lens is None else as_int_tensor("prefix_lens", prefix_lens)
        return prefix, None, as_bool("causal", causal), left, right
    if not isinstance(mask, Mask) or mask.ranges is None:
        expected = "made by seqpar.Mask.of_ranges; causal and other arguments make other masks"
        raise ValueError(f"mask must be {expected}, got {shown(mask)}")
    reason = "because mask has all ranges"
    if causal is not ... and as_bool("causal", causal):
        raise ValueError(f"causal must be left out, or False, {reason}")
    if (left, right) != (-1, -1):
        raise ValueError(f"window_size must be unlimited, {reason}; got ({left}, {right})")
    if prefix_lens is not None:
        raise ValueError(f"prefix_lens must be None, {reason}; got {shown(prefix_lens)}")
    return None, mask.ranges.handle, False, left, right


class CallChanges(TypedDict, total=False):
    """The fields of a `ResolvedCall` that `altered` changes."""

    rank: int
    layout: Geometry
    kv_layout: Geometry
    options: CallOptions
    shape: OperandShape


@dataclass(frozen=True)
class ResolvedCall:
    """Everything about a call that a strategy reads, except its `Operands`.

    `rank` is this process's rank in the layouts' group. `kept` holds the results of `once`, and
    `max_logits` collects the largest scores of a forward, if requested.
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
        """Return `build()`, called once for all calls that differ only in their tensors.

        Its result is kept with the layouts, so it must not hold the layouts or the call.
        """
        return self.kept(key, build)

    def once_for_ranks(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return `build()`, called once for all ranks of this process that make the same call.

        It depends on the layouts, the mask and the operands' shape alone.
        """
        return _kept(self.layout, self.kv_layout, "ranks", self.mask, self.shape)(key, build)

    def altered(self, **changes: Unpack[CallChanges]) -> ResolvedCall:
        """Return the call of another rank, with other layouts or another shape."""
        call = replace(self, **changes)
        settings = call.rank, call.mask, call.options.with_slopes(None), call.shape
        return replace(call, kept=_kept(call.layout, call.kv_layout, *settings))

    def with_heads_of(self, call: ResolvedCall, heads: slice) -> ResolvedCall:
        """Return this call with the slopes and max logits of query heads of another call."""
        if call.max_logits is None and call.options.slopes is None:
            return self  # which has neither
        max_logits = None if call.max_logits is None else call.max_logits.of_heads(heads)
        return replace(self, options=call.options.of_heads(heads), max_logits=max_logits)

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def others(self, rank: int) -> list[int]:
        return [peer for peer in range(self.ranks) if peer != rank]

    def dlse_on_all_ranks(self, dlse: Tensor | None, dout: Tensor) -> Tensor | None:
        """Return the gradient of lse, or zeros if autograd has none but the call returned lse.

        All ranks then send this gradient or none does. A rank may have none because its loss does
        not use its lse, while other ranks send theirs.
        """
        if dlse is None and self.return_lse:
            return dout.new_zeros(dout.shape[:-1], dtype=accumulator_dtype(dout.dtype))
        return dlse

    def slices(self, q_rank: int, k_rank: int) -> Slices:
        """Return the slices of `q_rank`'s queries over the keys of `k_rank` that travel to it."""
        return slices_between(self.layout, q_rank, self.kv_layout, k_rank, self.mask)


def _kept(layout: Geometry, kv_layout: Geometry, *settings: Hashable) -> Memo:
    kept = layout.derived_with(kv_layout)(("once",), lambda: Memo(MAX_KEPT_SETTINGS))
    return kept(settings, Memo)


def _check_most_documents(layout: Geometry, kv_layout: Geometry, mask: Mask) -> None:
    reason = "because its messages would depend on the documents of a layout with most_documents"
    if kv_layout is not layout:
        raise ValueError(f"kv_layout must be left out, {reason}")
    if mask.prefix is not None or mask.ranges is not None:
        name = "mask" if mask.prefix is None else "prefix_lens"
        raise ValueError(f"{name} must be left out, {reason}")


def _check_layouts(comm: Comm, layout: Geometry, kv_layout: Geometry) -> None:
    check_ranks_of(comm, layout=layout, kv_layout=kv_layout)
    expected, documents = layout.lengths.size, kv_layout.lengths.size
    if documents != expected:
        raise ValueError(f"kv_layout must have layout's {expected} documents, got {documents}")
