"""The arguments of a call to softmax attention, in two forms.

`CallArguments` contains the arguments that torch's operator receives: tensors, numbers and strings.
A strategy reads a `ResolvedCall`, which contains layouts, the mask and options as objects that have
been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from seqpar.attention.backend import current_backend
from seqpar.attention.call_arguments import Carried, Count, Option
from seqpar.attention.operands import OperandShape, check_layouts, check_ranks_of
from seqpar.attention.unknown_arguments import unknown_argument
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_bool, as_float, as_int_tensor, parse_window, shown
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.geometry import Geometry
from seqpar.layout.handle import described, from_handle
from seqpar.layout.layout import Layout
from seqpar.layout.masks import mask_ranges
from seqpar.layout.masks.mask import Mask, Slices, slices_between
from seqpar.softmax.compute.call_options import CallOptions, check_slopes, parse_slopes
from seqpar.softmax.compute.max_logits import MaxLogits

T = TypeVar("T")
_CPU = torch.device("cpu")
Causal = bool | EllipsisType  # `...` means that the call has no argument `causal`


class Operands(NamedTuple):
    q: Tensor  # (B, T_local, Hq, D)
    k: Tensor  # (B, Tkv_local, Hkv, D)
    v: Tensor  # (B, Tkv_local, Hkv, Dv)
    sinks: Tensor | None = None  # (Hq,), or None


class CallArguments(NamedTuple):
    """All arguments of a call except q, k, v and sinks, in the form that torch's operator takes.

    Attributes:
        layout, kv_layout: tensors that stand for the layouts (`seqpar.layout.handle`).
        ranges: a tensor that stands for the ranges of `Mask.of_ranges`, or None. If the tensor is
            given, `causal`, `left`, `right` and `prefix_lens` have no effect.
        tokens, kv_tokens: the numbers of query tokens and key tokens with which this rank computes.
            If ranks exchange heads, these are the tokens of all ranks with which this rank
            exchanges heads. For all other strategies, these are the tokens of this rank.
        strategy: a string that stands for the strategy and its group (`BoundStrategy`).
    """

    layout: Tensor
    kv_layout: Tensor
    prefix_lens: Tensor | None
    ranges: Tensor | None
    alibi_slopes: Tensor | None
    tokens: Count
    kv_tokens: Count
    strategy: str
    causal: bool
    left: Count
    right: Count
    return_lse: Annotated[bool, Option(as_bool, False)]
    return_max_logits: Annotated[bool, Option(as_bool, False)]
    options: CallOptions

    @staticmethod
    def of(
        strategy: str,
        layout: Layout,
        head_dim: int,
        merged: slice,
        deterministic: bool,
        user: dict[str, Any],
    ) -> CallArguments:
        """Make the arguments from the keyword arguments that a user gave to `Attention.forward`.

        This function checks the types of the arguments, because torch's operator accepts only the
        right types. `to_call` checks the values.

        Args:
            strategy: the key of a `BoundStrategy`, a strategy with its group.
            layout: the layout of the queries.
            head_dim: D of q, from which the default softmax scale is computed.
            merged: the ranks with whose tokens this rank computes.
            deterministic: whether backward must have the same bits in each run.
            user: the keyword arguments.
        """
        if not user.keys() <= _KNOWN.keys():
            others = {name: x for name, x in user.items() if name not in _KNOWN}
            raise unknown_argument(others, [*_KNOWN, "sinks"])
        kv_layout = layout if user.get("kv_layout") is None else user["kv_layout"]
        check_layouts(layout=layout, kv_layout=kv_layout)
        if as_float("dropout_p", user.get("dropout_p", 0.0)) != 0:
            reason = "dropout is not offered over sharded keys"
            raise ValueError(f"dropout_p must be 0, got {user['dropout_p']}: {reason}")
        prefix_lens, ranges, causal, left, right = _parse_mask(user)
        if user.get("softmax_scale") is None:
            user = {**user, "softmax_scale": head_dim**-0.5}
        return CARRIED.of(
            user,
            layout=layout._handle,
            kv_layout=kv_layout._handle,
            prefix_lens=prefix_lens,
            ranges=ranges,
            alibi_slopes=parse_slopes(user.get("alibi_slopes")),
            tokens=layout._tokens_on(merged),
            kv_tokens=kv_layout._tokens_on(merged),
            strategy=strategy,
            causal=causal,
            left=left,
            right=right,
            backend=current_backend("softmax"),
            deterministic=deterministic,
        )

    def to_call(
        self, comm: Comm, shape: OperandShape, has_sinks: bool, device: torch.device
    ) -> ResolvedCall:
        """Return the checked call. Raise a ValueError if a layout, the mask or a number is wrong.

        The checks run once for each combination of arguments. Their result is cached with the
        layouts.
        """
        layout = from_handle(self.layout)
        kv_layout = layout if self.kv_layout is self.layout else from_handle(self.kv_layout)

        def check_settings() -> tuple[Mask, Memo]:
            _check_layouts(comm, layout, kv_layout)
            mask = self._mask(layout, kv_layout)
            if layout.cut.most_documents or kv_layout.cut.most_documents:
                _check_most_documents(layout, kv_layout, mask)
            self.options.check(shape.dtype)
            settings = comm.rank, mask, self.options, shape, device
            return mask, _kept(layout, kv_layout, *settings)

        checked = layout.derived_with(kv_layout)(("settled",), lambda: Memo(MAX_KEPT_SETTINGS))
        of_call = comm.rank, comm.size, shape, device
        key = *of_call, *self.mask_contents(), *self[CARRIED.tensors :]
        mask, kept = checked(key, check_settings)
        options = self.options
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
            device=device,
        )

    def _mask(self, layout: Geometry, kv_layout: Geometry) -> Mask:
        if self.ranges is None:
            prefix = None if self.prefix_lens is None else self.prefix_lens.numpy()
            return Mask.of(self.causal, (self.left, self.right), prefix, kv_layout)
        mask = Mask(UNLIMITED, UNLIMITED, ranges=mask_ranges.from_handle(self.ranges))
        mask.check_fits(layout, kv_layout)
        return mask

    def mask_contents(self) -> tuple[bytes | None, bytes | None]:
        """Return a key of the contents of `prefix_lens` and `ranges`. Equal contents have equal
        keys.
        """
        prefix = None if self.prefix_lens is None else self.prefix_lens.numpy().tobytes()
        return prefix, None if self.ranges is None else mask_ranges.key_of_handle(self.ranges)

    def agreed(self, has_sinks: bool, exact: bool) -> dict[str, object]:
        """Return the values that must be the same on all ranks, by argument name.

        With `exact`, a layout is described by its contents, which takes longer. Without `exact`,
        two equal layouts that were made in different ways may have different descriptions.
        """
        ranges = None if self.ranges is None else mask_ranges.described(self.ranges, exact)
        return {
            "layout": described(self.layout, exact),
            "kv_layout": described(self.kv_layout, exact),
            **CARRIED.agreed(self),
            "window_size": [self.left, self.right],
            "prefix_lens": None if self.prefix_lens is None else self.prefix_lens.tolist(),
            "mask": ranges,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": has_sinks,
        }


CARRIED: Carried[CallArguments] = Carried(CallArguments)
# The user's arguments that are not scalars, or from which several fields are made.
_OTHERS = "causal", "kv_layout", "prefix_lens", "window_size", "mask", "alibi_slopes", "dropout_p"
_KNOWN = dict.fromkeys((*_OTHERS, *CARRIED.options))


def _parse_mask(user: dict[str, Any]) -> tuple[Tensor | None, Tensor | None, bool, int, int]:
    causal, mask, prefix_lens = user.get("causal", ...), user.get("mask"), user.get("prefix_lens")
    left, right = parse_window(user.get("window_size", (-1, -1)))
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
    rank: int
    layout: Geometry
    kv_layout: Geometry
    options: CallOptions
    shape: OperandShape


@dataclass(frozen=True)
class ResolvedCall:
    """Everything that a strategy reads about a call, except the tensors of the call (`Operands`).

    Attributes:
        rank: this process's rank among the ranks of the layouts.
        shape: the dtype, batch, heads and head dims of the operands.
        kept: the results that are the same for all calls that differ only in their tensors.
        max_logits: the object that collects the largest scores of a forward, or None if the user
            did not request them.
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
    device: torch.device = _CPU  # the device of the operands

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result of `build`, which runs once for all calls that differ only in their
        tensors.

        The layouts of the call store the result. The result must not refer to the layouts or to the
        call, because this cycle of references would keep the layouts alive.
        """
        return self.kept(key, build)

    def once_for_ranks(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result of `build`, which runs once for all ranks that are in this process.

        The result may depend only on the layouts, the mask and the shape of the operands.
        """
        return _kept(self.layout, self.kv_layout, "ranks", self.mask, self.shape)(key, build)

    def altered(self, **changes: Unpack[CallChanges]) -> ResolvedCall:
        call = replace(self, **changes)
        settings = call.rank, call.mask, call.options.with_slopes(None), call.shape, call.device
        return replace(call, kept=_kept(call.layout, call.kv_layout, *settings))

    def with_heads_of(self, call: ResolvedCall, heads: slice) -> ResolvedCall:
        """Return this call with the slopes and max logits that `call` has for the query heads
        `heads`.
        """
        if call.max_logits is None and call.options.slopes is None:
            return self  # `call` has neither slopes nor max logits
        max_logits = None if call.max_logits is None else call.max_logits.of_heads(heads)
        return replace(self, options=call.options.of_heads(heads), max_logits=max_logits)

    @property
    def variant(self) -> tuple[Hashable, ...]:
        """The optional inputs and results that the call has, because tables for a GPU depend on
        them.
        """
        tracks = self.options.slopes is not None, self.max_logits is not None
        return self.has_sinks, self.return_lse, *tracks

    def without_documents(self) -> ResolvedCall:
        """Return the call for the worst case of a layout with `most_documents`."""
        worst = self.layout.worst_case
        return replace(self, layout=worst, kv_layout=worst, kept=Memo(), max_logits=None)

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def others(self, rank: int) -> list[int]:
        return [peer for peer in range(self.ranks) if peer != rank]

    def dlse_on_all_ranks(self, dlse: Tensor | None, dout: Tensor) -> Tensor | None:
        """Return the gradient of lse, or zeros if the call returned lse but `dlse` is None.

        autograd passes None on a rank whose loss does not use lse. With zeros in place of None, all
        ranks send the same messages.
        """
        if dlse is None and self.return_lse:
            return dout.new_zeros(dout.shape[:-1], dtype=accumulator_dtype(dout.dtype))
        return dlse

    def slices(self, q_rank: int, k_rank: int) -> Slices:
        """Return the slices of the queries of `q_rank` over the keys that `k_rank` sends to
        `q_rank`.
        """
        return slices_between(self.layout, q_rank, self.kv_layout, k_rank, self.mask)


def _kept(layout: Geometry, kv_layout: Geometry, *settings: Hashable) -> Memo:
    kept = layout.derived_with(kv_layout)(("once",), lambda: Memo(MAX_KEPT_SETTINGS))
    return kept(settings, Memo)


def _check_most_documents(layout: Geometry, kv_layout: Geometry, mask: Mask) -> None:
    reason = "because messages cannot depend on the documents of a layout with most_documents"
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
