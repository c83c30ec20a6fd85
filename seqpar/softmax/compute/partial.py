"""Results of attention, and gradients, that are summed over one block of keys after another.

In forward, a `Partial` contains out and lse over the keys that were computed so far. In backward,
an `OutputGradient` contains the tensors that backward reads, and `PartialGradients` contains the
sums of dq, dk and dv.

Letters of shapes: B is the batch, T the number of query rows, Tk the number of key rows, n the
number of rows of one result, Hq and Hkv the numbers of query heads and KV heads, D the head dim of
q and k, and Dv the head dim of v. Functions for queries and for keys write H for the number of
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqpar.core.device_tables import rehearsing
from seqpar.core.dtypes import accumulator_dtype
from seqpar.softmax.compute.waiting_results import Result, WaitingResults
from seqpar.softmax.wire.row_messages import Rows, add_rows


class Sums:
    """Sums of the results that several kernel calls return for the same rows.

    Memory for the sums is allocated only when a second call returns a result. If there is only one
    call, its result is used in place of sums.
    """

    def __init__(self, make: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Store the function `make`, which later allocates the tensors of the sums.

        The argument of `make` is the results of the first kernel call, and `make` returns sums that
        are equal to these results. If the argument is an empty sequence, the returned sums are 0.
        """
        self._make = make
        self._kept: tuple[Tensor, ...] = ()  # torch.compile cannot trace `tuple[Tensor, ...]()`
        self._made: Sequence[Tensor] | None = None

    @classmethod
    def of(cls, *tensors: Tensor) -> Sums:
        sums = cls(lambda _: tensors)
        sums.allocate()
        return sums

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The sums, which callers may change in place."""
        if self._made is None:
            self._made, self._kept = self._make(self._kept), ()
        return self._made

    @property
    def results(self) -> Sequence[Tensor]:
        """The sums. If there was only one kernel call, these are the results as the kernel returned
        them.
        """
        return self._kept or self.tensors

    def keep(self, *results: Tensor) -> bool:
        """Store the results of the first kernel call, and return True. The results must have all
        rows.

        If there was an earlier call, nothing is stored, and False is returned.
        """
        if self._kept or self._made is not None:
            return False
        self._kept = results
        return True

    def allocate(self) -> None:
        _ = self.tensors

    def release(self) -> None:
        """Copy stored results into the sums, so that the next kernel call can reuse the results'
        memory.
        """
        if self._kept:
            self.allocate()


_MIN_COPIED_ROWS = 1024  # products are computed for at least this number of rows at a time


class Partial(WaitingResults):
    """The attention of some queries over the keys that were computed so far.

    Results over further keys can be merged into the object. A row without keys has out 0 and lse
    −inf. On CUDA, results are stored until one Triton kernel merges several of them, if the sums
    are in fp32 and `rank_invariant` is False. The bits are the same as if results were merged one
    by one.
    """

    # 12 bytes suffice for six results in half precision, or for the sums in fp32 and four such
    # results. With four query heads per KV head, backward needs as much memory for the fp32
    # gradients of a group of heads.
    most_bytes = 12

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, rank_invariant: bool = False
    ) -> None:
        """Make a partial result over no keys. No tensors are allocated yet.

        Args:
            shape: (B, T, Hq, Dv).
            dtype: the dtype of out.
            like: any tensor on the device of out and lse.
            rank_invariant: with True, the bits of a merged row do not depend on the rows around it.
        """
        super().__init__(shape, dtype, like, by_kernel=not rank_invariant)
        self._sums: tuple[Tensor, Tensor] | None = None
        self._into: Tensor | None = None  # the memory for out, if the caller passed some
        self.empty = True  # whether no row has keys yet
        # Whether the bits of a merged row must not depend on its position in the tensor.
        self.rank_invariant = rank_invariant
        # Whether one backend call computes everything, so that nothing is merged.
        self.single = False
        self.prepared: object = None  # a backend's own state between two blocks of keys

    @classmethod
    def of(cls, out: Tensor, lse: Tensor) -> Partial:
        """Make a partial from existing tensors. Merging changes these tensors in place."""
        partial = cls(tuple(out.shape), out.dtype, out)
        partial._sums, partial._may_wait, partial.empty = (out, lse), False, False
        return partial

    @classmethod
    def nothing(
        cls,
        q: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        rank_invariant: bool = False,
        single: bool = False,
    ) -> Partial:
        """Make a partial result for the queries q, over no keys yet.

        Args:
            q: (B, T, Hq, D).
            v: a tensor with the head dim of the values.
            out: a tensor whose memory this object uses if the tensor has the accumulator's dtype,
                or None.
            rank_invariant: with True, the bits of a merged row do not depend on the rows around it.
            single: whether one backend call computes everything, so that nothing is merged.
        """
        dtype = accumulator_dtype(q.dtype)
        partial = cls((*q.shape[:-1], v.shape[-1]), dtype, q, rank_invariant)
        partial._into = out if out is not None and out.dtype == dtype else None
        partial.single = single
        return partial

    @property
    def out(self) -> Tensor:
        """out (B, T, Hq, Dv) in fp32 (fp64 for fp64). Reading out merges all stored results."""
        return self.sums[0]

    @property
    def lse(self) -> Tensor:
        """The natural logarithm of the softmax's denominator, (B, T, Hq), in fp64.

        Reading lse merges all stored results.
        """
        return self.sums[1]

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        """The tensors out and lse, which callers may change in place.

        Reading this property merges all stored results. Results that are added later are merged
        immediately.
        """
        self._may_wait = False
        return self._sum_up()

    def allocate(self) -> None:
        _ = self.sums

    def put(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Write the result of rows that have no results yet.

        From now on, only this object may use `out` and `lse`.
        """
        if not self._keep(Result(rows, out, lse, is_owned=True)):
            self.out[:, rows], self.lse[:, rows] = out, lse

    def merge(
        self,
        rows: slice | Rows,
        out: Tensor,
        lse: Tensor,
        is_owned: bool = False,
        heads: slice | None = None,
    ) -> None:
        """Merge a result, which is the attention of `rows` over further keys.

        Args:
            rows: the rows of the result.
            out: (B, n, H, Dv).
            lse: (B, n, H). out and lse must not change until `finish` is called or `sums` is read.
            is_owned: whether only this object uses the two tensors from now on.
            heads: the heads of the result, which are one of the groups that were passed to
                `divide`. None means all heads.
        """
        result = Result(rows, out, lse, is_owned, heads)
        if rehearsing():
            self.request_tables(rows)
        elif self._by_kernel:
            self._wait(result)
        elif not self._keep(result):
            self._merge_in_torch(rows, out, lse, heads)

    def finish(
        self,
        sinks: Tensor | None,
        dtype: torch.dtype,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out, rounded once to `dtype`, and lse.

        Args:
            sinks: (Hq,) or None. The exponentials of the sinks are added to the denominator of out.
                They are not added to lse.
            dtype: the dtype of out.
            into: two tensors to which out and lse are written, in the dtypes of these tensors.
        """
        if self._by_kernel and self._waiting and not self._all_wait:
            self._sum_up()
        if self._by_kernel and self._waiting:
            is_result = into is None and sinks is None and self._is_one_result
            if not is_result:
                if into is None:
                    out = torch.empty(self._shape, dtype=dtype, device=self._device)
                    into = out, out.new_empty(self._shape[:-1], dtype=accumulator_dtype(dtype))
                self._merge_by_kernel(*into, self._sums, sinks)
                return into
        out, lse = self._only_result() if self._waiting else self.sums
        if into is None:
            lse = lse.to(accumulator_dtype(dtype)).contiguous()
        else:
            lse, dtype = into[1].copy_(lse), into[0].dtype
        if sinks is not None:
            fraction = key_fraction(lse, sinks, self.rank_invariant)
            return _scaled(out, fraction, dtype, None if into is None else into[0]), lse
        return out.to(dtype) if into is None else into[0].copy_(out), lse

    @property
    def _has_sums(self) -> bool:
        return self._sums is not None

    def _only_result(self) -> tuple[Tensor, Tensor]:
        ((_, out, lse, *_),) = self._waiting
        assert lse is not None
        return out, lse

    def _sum_up(self) -> tuple[Tensor, Tensor]:
        if self._waiting and self._sums is None and not self._all_wait:
            self._sums = self._without_keys()
        into, sums = self._into, self._sums
        if self._waiting and self._by_kernel:
            if sums is None:
                out = (
                    torch.empty(self._shape, dtype=self.dtype, device=self._device)
                    if into is None
                    else into
                )
                sums = out, out.new_empty(self._shape[:-1], dtype=torch.float64)
            self._merge_by_kernel(*sums, self._sums)
        elif self._waiting:
            out, lse = self._only_result()
            out = out.to(self.dtype) if into is None else into.copy_(out)
            sums = out, lse.to(torch.float64).contiguous()
        elif sums is None:
            sums = self._without_keys()
        self._sums = sums
        self._drop_waiting()
        return sums

    def _without_keys(self) -> tuple[Tensor, Tensor]:
        device, rows = self._device, self._shape[:-1]
        if self._into is None:
            out = torch.zeros(self._shape, dtype=self.dtype, device=device)
        else:
            out = self._into.zero_()
        return out, torch.full(rows, -torch.inf, dtype=torch.float64, device=device)

    def _merge_in_torch(
        self, rows: slice | Rows, out: Tensor, lse: Tensor, heads: slice | None
    ) -> None:
        local = rows.local(self._device) if isinstance(rows, Rows) else rows
        sums = self.sums
        if heads is not None:
            sums = sums[0][:, :, heads], sums[1][:, :, heads]
        if isinstance(local, Tensor):
            old_out, old_lse = (x.index_select(1, local) for x in sums)
        else:
            old_out, old_lse = (x[:, local] for x in sums)
        # Only the difference of the two lse needs fp64. −∞ is replaced by a finite number in one of
        # them. If neither side has keys for a row, the row then gets the weight 0, and keeps its
        # out of 0. A weight is NaN only if one of the lse is NaN.
        weight = torch.empty_like(lse, dtype=old_out.dtype)
        torch.sub(lse, _finite(old_lse), out=weight)
        out = out if out.dtype == old_out.dtype else out.to(old_out.dtype)
        if self.rank_invariant:
            weight = sigmoid_anywhere(weight).unsqueeze(-1)
            old_out.mul_(1 - weight).add_(out * weight)
            old_lse.copy_(logaddexp_anywhere(old_lse, lse))
        else:
            old_out.lerp_(out, weight.sigmoid_().unsqueeze(-1))
            torch.logaddexp(old_lse, lse, out=old_lse)
        if isinstance(local, Tensor):
            sums[0].index_copy_(1, local, old_out)
            sums[1].index_copy_(1, local, old_lse)


class Zeros:
    """A tensor of zeros that is allocated once and read by several kernel calls."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def like(self, x: Tensor) -> Tensor:
        """Return zeros with the shape, dtype and device of x. Callers must not write to them."""
        buffer = self._buffer
        if buffer is None or buffer.numel() < x.numel():
            self._buffer = None  # frees the smaller buffer first
            self._buffer = buffer = x.new_zeros(x.numel())
        return buffer[: x.numel()].view(x.shape)


@dataclass
class OutputGradient:
    """The output of some queries over all keys on all ranks, and the gradients of this output.

    With this output, backward can compute the gradients of one block of keys without reading the
    keys of other blocks.
    """

    dout: Tensor  # (B, T, Hq, Dv)
    # Shaped like dout. None for rows from another rank, which sends delta instead.
    out: Tensor | None
    lse: Tensor  # (B, T, Hq); finite, also in rows without keys
    dlse: Tensor | None  # (B, T, Hq), or None if lse has no gradient
    delta: Tensor | None = None  # (B, T, Hq), out·dout − dlse, or None until it is computed
    prepared: object = None  # a backend's own state between two blocks of keys
    zeros: Zeros = field(default_factory=Zeros)

    @classmethod
    def of(
        cls,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        rank_invariant: bool = False,
    ) -> OutputGradient:
        """Make the object from `out` and `lse`, the results of forward.

        `out` includes the sinks, and `lse` excludes them. The gradient of a score with probability
        p is

            p (g·dout·v − g·dout·out + dlse)

        where g is the fraction of the softmax's denominator that does not come from the sinks. dout
        is therefore multiplied by g.
        """
        if sinks is not None:
            dout = _scaled(dout, key_fraction(lse, sinks, rank_invariant), out.dtype)
        # Any finite lse gives a row without keys probabilities of 0.
        finite = lse.nan_to_num(torch.nan, torch.inf, 0.0)
        return cls(dout, out, finite, dlse)

    def received(
        self, dout: Tensor, lse: Tensor, delta: Tensor, dlse: Tensor | None
    ) -> OutputGradient:
        """Return an object for rows that another rank sent during the same backward pass."""
        return OutputGradient(dout, None, lse, dlse, delta, zeros=self.zeros)

    def ensure_delta(self) -> Tensor:
        """Return delta, which is computed in the first call.

        On CUDA, one Triton kernel computes delta without copies in fp32.
        """
        if self.delta is None:
            assert self.out is not None
            if self.out.is_cuda and self.lse.dtype == torch.float32:
                from seqpar.kernels.flash_attention import delta  # imports Triton

                self.delta = delta(self.out, self.dout, self.dlse)
            else:
                products = _products(self.out, self.dout, self.lse.dtype)
                self.delta = products if self.dlse is None else products - self.dlse
        return self.delta

    def ensure_out(self) -> Tensor:
        """Return out or, if out is None, a tensor that kernels can read in its place.

        Kernels read out only to compute the product out·dout. The returned tensor is a multiple of
        dout that gives the same product.
        """
        if self.out is None:
            assert self.delta is not None
            product = self.delta if self.dlse is None else self.delta + self.dlse
            dout = self.dout.to(product.dtype)
            largest = dout.abs().amax(-1, keepdim=True)
            direction = dout / largest  # its length is 1 to √Dv
            multiple = product[..., None] / largest / direction.square().sum(-1, keepdim=True)
            out = (direction * multiple).masked_fill(largest == 0, 0.0)
            self.out = out.to(self.dout.dtype)
        return self.out


class QuerySums(WaitingResults):
    """Sums of dq over several blocks of keys. Results of kernels are stored as in `Partial`."""

    # Less than in `Partial`, because backward also holds the gradients of keys.
    most_bytes = 8

    def __init__(self, like: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> None:
        """Prepare sums of 0 in `dtype`, with the shape of `like` (B, T, Hq, D).

        If `into` has the dtype `dtype`, its memory is used for the sums.
        """
        super().__init__(tuple(like.shape), dtype, like, by_kernel=True)
        self._rounded_to = like.dtype
        self._sums: Tensor | None = None
        self._into = into if into is not None and into.dtype == dtype else None

    @classmethod
    def of(cls, dq: Tensor) -> QuerySums:
        """Make the object from existing sums. Adding changes them in place."""
        made = cls(dq, dq.dtype)
        made._sums, made._may_wait = dq, False
        return made

    @property
    def sums(self) -> Tensor:
        """The tensor dq, which callers may change in place.

        Reading this property adds all stored results. Results that come later are added
        immediately.
        """
        self._may_wait = False
        return self._sum_up()

    def allocate(self) -> None:
        _ = self.sums

    def request_tables(self, rows: slice | Rows) -> None:
        if self.waits:
            self._place(rows)
        elif isinstance(rows, Rows):
            rows.local(self._device)

    def add(
        self,
        rows: slice | Rows,
        part: Tensor,
        sign: int = 1,
        heads: slice | None = None,
        is_owned: bool = True,
    ) -> None:
        """Add sign · part to some rows of dq.

        Args:
            rows: the rows of `part`.
            part: (B, n, H, D). A result of a kernel.
            sign: −1, 0 or 1.
            heads: the heads of `part`, which are one of the groups that were passed to `divide`.
                None means all heads.
            is_owned: whether only this object uses `part` from now on. If False, the caller must
                not change `part` until `sums` are read or `finish` is called.
        """
        if sign != 1 and self._may_wait:
            part, sign = part.mul_(sign), 1
        result = Result(rows, part, None, is_owned, heads)
        if rehearsing():
            self.request_tables(rows)
        elif self.waits:
            self._wait(result)
        elif not self._keep(result):
            local = rows.local(self._device) if isinstance(rows, Rows) else rows
            sums = self.sums if heads is None else self.sums[:, :, heads]
            add_rows(part, sums, local, sign)

    def finish(self, into: Tensor | None = None) -> Tensor:
        """Return dq, which is either in the dtype of the sums or rounded once to the dtype of
        `like`.

        If `into` is given, dq is written to `into`, in the dtype of `into`.
        """
        if self._by_kernel and self._waiting and not self._all_wait:
            self._sum_up()
        if self._by_kernel and self._waiting and not (into is None and self._is_one_result):
            if into is None:
                into = torch.empty(self._shape, dtype=self._rounded_to, device=self._device)
            self._merge_by_kernel(into, None, None if self._sums is None else (self._sums, None))
            return into
        dq = self._waiting[0].out if self._waiting else self.sums
        return dq if into is None else into.copy_(dq)

    @property
    def _has_sums(self) -> bool:
        return self._sums is not None

    def _sum_up(self) -> Tensor:
        if self._waiting and self._sums is None and not self._all_wait:
            self._sums = self._zeros()
        into, sums, dtype, device = self._into, self._sums, self.dtype, self._device
        if self._waiting and self._by_kernel:
            before = None if sums is None else (sums, None)
            if sums is None:
                sums = (
                    torch.empty(self._shape, dtype=dtype, device=device) if into is None else into
                )
            self._merge_by_kernel(sums, None, before)
        elif self._waiting:
            dq = self._waiting[0].out
            sums = dq.to(self.dtype) if into is None else into.copy_(dq)
        elif sums is None:
            sums = self._zeros()
        self._sums = sums
        self._drop_waiting()
        return sums

    def _zeros(self) -> Tensor:
        if self._into is not None:
            return self._into.zero_()
        return torch.zeros(self._shape, dtype=self.dtype, device=self._device)


@dataclass
class PartialGradients:
    """The sums of dq, dk and dv to which backward adds, in fp32 (fp64 for fp64)."""

    queries: QuerySums  # dq (B, T, Hq, D)
    keys: Sums  # dk (B, Tk, Hkv, D) and dv (B, Tk, Hkv, Dv)

    @classmethod
    def of(cls, dq: Tensor, dk: Tensor, dv: Tensor) -> PartialGradients:
        """Make the object from existing sums. Backward changes them in place."""
        return cls(QuerySums.of(dq), Sums.of(dk, dv))

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor, v: Tensor) -> PackedGradients:
        return PackedGradients(QuerySums(q, accumulator_dtype(q.dtype)), _sums_like(k, v))

    @property
    def dq(self) -> Tensor:
        return self.queries.sums

    @property
    def dk(self) -> Tensor:
        return self.keys.tensors[0]

    @property
    def dv(self) -> Tensor:
        return self.keys.tensors[1]

    def allocate(self) -> None:
        self.queries.allocate()
        self.keys.allocate()

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv. Each tensor is in the dtype of the sums or in the dtype of q."""
        dk, dv, *_ = self.keys.results
        return self.queries.finish(), dk, dv


@dataclass
class PackedGradients(PartialGradients):
    """Gradients whose dk and dv are views of one tensor, so that one message can contain both.

    Attributes:
        keys: the sums dk and dv, and the tensor of which dk and dv are views.
    """

    @classmethod
    def over(cls, dq: Tensor, shape: tuple[int, int, int], dims: list[int]) -> PackedGradients:
        """Return an object with the given dq, and with dk and dv of 0.

        `shape` is (Tk, B, Hkv), and `dims` are the head dims D and Dv.
        """
        packed = dq.new_zeros((*shape, sum(dims)))
        return cls(QuerySums.of(dq), Sums.of(*_split(packed, dims), packed))

    @property
    def packed(self) -> Tensor:
        return self.keys.tensors[2]

    def message(self, dtype: torch.dtype) -> Tensor:
        """Return dk and dv as one tensor (Tk, B, Hkv, D + Dv) of the dtype `dtype`, to be sent.

        If a single kernel call returned dk and dv in this dtype, they are not converted.
        """
        dk, dv, *sums = self.keys.results
        if sums or dk.dtype != dtype:
            return self.packed.to(dtype)
        return torch.cat([dk.transpose(0, 1), dv.transpose(0, 1)], -1)

    def of_block(self, k: Tensor, v: Tensor) -> PackedGradients:
        """Return an object for a block k, v of keys. dq is shared with this object, and dk and dv
        are 0.
        """
        return PackedGradients(self.queries, _sums_like(k, v))


def _sums_like(k: Tensor, v: Tensor) -> Sums:
    """Return sums dk and dv of 0, shaped like k and v, and the tensor of which both are views."""
    (batch, rows, heads, dim), value_dim = k.shape, v.shape[3]
    dtype, device = accumulator_dtype(k.dtype), k.device

    def make(kept: Sequence[Tensor]) -> list[Tensor]:
        fill = torch.empty if kept else torch.zeros
        packed = fill((rows, batch, heads, dim + value_dim), dtype=dtype, device=device)
        views = _split(packed, [dim, value_dim])
        for view, x in zip(views, kept, strict=False):
            view.copy_(x)
        return [*views, packed]

    return Sums(make)


def _split(packed: Tensor, dims: list[int]) -> Sequence[Tensor]:
    """Split a tensor (Tk, B, Hkv, D + Dv) into views dk (B, Tk, Hkv, D) and dv (B, Tk, Hkv, Dv)."""
    return packed.transpose(0, 1).split_with_sizes(dims, -1)


def cast_each(gradients: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients as contiguous tensors of the dtype `dtype`, which share no memory.

    A gradient is freed before the next gradient is cast.
    """
    remaining = list(gradients)
    del gradients
    contiguous = torch.contiguous_format
    # dk and dv may be views of one tensor. torch requires that results share no memory.
    cast = lambda x: x.to(dtype, memory_format=contiguous).contiguous()  # noqa: E731
    return [cast(remaining.pop(0)) for _ in range(len(remaining))]


def key_weight(lse: Tensor, total: Tensor) -> Tensor:
    """Return the fraction of a softmax's weights that some of its keys have, exp(lse − total).

    `lse` is over these keys, and `total` over all keys. The result is (…, 1). It is 0 in rows
    without any keys, and NaN in rows whose lse is NaN.
    """
    return torch.exp(lse - _finite(total))[..., None]


def key_fraction(lse: Tensor, sinks: Tensor, rank_invariant: bool = False) -> Tensor:
    """Return the fraction of the softmax's denominator that comes from the keys, (B, T, Hq, 1).

    The remaining fraction comes from the sinks (Hq,). lse (B, T, Hq) excludes the sinks. If lse and
    the sink are both −∞, the row has no keys, and its fraction is 1.
    """
    difference = _finite(lse) - sinks.to(lse.dtype)
    return (sigmoid_anywhere if rank_invariant else torch.sigmoid)(difference)[..., None]


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks (Hq,), summed over the rows of `dout`.

    The gradient is −Σ f · (dout · out), where f is the fraction of the softmax's denominator that
    comes from the sink. dout and out are (B, T, Hq, Dv), and lse (B, T, Hq) excludes the sinks.
    """
    delta = _products(dout, out, lse.dtype)
    sink_fraction = torch.sigmoid(sinks.to(lse.dtype) - _finite(lse))
    return -(sink_fraction * delta).flatten(0, -2).sum(0).to(sinks.dtype)


def _finite(lse: Tensor) -> Tensor:
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """Return x · factor, rounded once to `dtype`, without a temporary tensor larger than the
    result.

    If `into` is given, the product is written to `into`, which has the dtype `dtype`.
    """
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype) if into is None else into)


def _products(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot products (B, T, H) of the rows of x and y, which are (B, T, H, D).

    The products are computed in `dtype`. To save memory, a quarter of the rows is cast at a time.
    """
    result = x.new_empty(x.shape[:-1], dtype=dtype)
    step = max(_MIN_COPIED_ROWS, -(-x.shape[1] // 4))
    for first in range(0, x.shape[1], step):
        rows = slice(first, first + step)
        torch.sum(x[:, rows].to(dtype) * y[:, rows], -1, out=result[:, rows])
    return result


# On CPUs, torch computes the last elements of a tensor with different code than the elements
# before. sigmoid and logaddexp round differently in the two codes. exp, log1p, and single additions
# and multiplications do not. The next two functions use only these operations, so an element has
# the same bits wherever it is in a tensor.


def sigmoid_anywhere(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def logaddexp_anywhere(x: Tensor, y: Tensor) -> Tensor:
    """Return log(exp(x) + exp(y)). x and y may be infinite."""
    larger, distance = torch.maximum(x, y), (x - y).abs()
    return torch.where(larger.isinf(), larger, larger + torch.log1p(torch.exp(-distance)))
