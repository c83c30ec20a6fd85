"""The softmax primitive: (q, k, v, slices, partial) -> partial, and its backward.

A *partial* (out, lse) summarises attention over a set of keys; partials over disjoint sets merge
associatively. Strategies decide what moves between ranks. All of them compute only with `attend`,
`attend_blocks` and `attend_backward`.

A *backend* computes a block of keys. Users may force one. Otherwise CPUs use `aten`, and CUDA
devices the first kernel of `backends/kernel_order.py` that computes a block completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from torch import Tensor

from seqpar.attention.backend import DEFAULT, load_backend
from seqpar.core.device_tables import device_of, is_on_cuda, rehearsing
from seqpar.core.hooks import Hooks, hooks
from seqpar.core.memo import LOCAL
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.softmax.backends import aten_cuda, reference
from seqpar.softmax.backends.kernel_order import best_backend
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

# (q, blocks, slices of the blocks, options, sinks, tensors to write to or None) -> out, lse
ForwardBlocks = Callable[
    [
        Tensor,
        Iterable[Sequence[Tensor]],
        Blocks,
        CallOptions,
        Tensor | None,
        tuple[Tensor, Tensor] | None,
    ],
    tuple[Tensor, Tensor],
]


class Backend(Protocol):
    """A module or an object that computes attention over the keys that a rank has.

    A module may have the function `prepared(q, v, slices, options)`. It returns an object that
    computes a block of keys with these slices, for tensors like q and v, or None.
    """

    @property
    def forward_blocks(self) -> ForwardBlocks | None:
        """A function that computes all blocks of keys in turn, if the backend has one."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        partial: Partial,
        options: CallOptions,
    ) -> None:
        """Merge into `partial` the attention of q (B, T, Hq, D) over k and v."""

    def backward(
        self,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        gradients: PartialGradients,
        options: CallOptions,
    ) -> None:
        """Add to `gradients` what flows through the slices."""


def choose_backend(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions
) -> Backend:
    """Return the backend of a block of keys; it is chosen and prepared once per slices."""

    def choose() -> Backend | str:
        name = options.backend
        if name == DEFAULT:
            name = default_backend(q, k, v, slices, options)
        prepared = getattr(load_backend("softmax", name), "prepared", None)
        return name if prepared is None else prepared(q, v, slices, options) or name

    if options.slopes is not None:  # which differ in each call
        chosen = choose()
    else:
        device = device_of(q), is_on_cuda(q)  # where meta tensors pass for CUDA's, only one of them
        key = LOCAL, "backend", *device, q.dtype, q.shape[3], v.shape[3], options
        chosen = slices.derived(key, choose)
    return load_backend("softmax", chosen) if isinstance(chosen, str) else chosen


def default_backend(q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> str:
    """Return the name of the backend for a block of keys, if users force none.

    It depends only on the type of the device, the dtype, the head dims, the options and the slices.
    Backward therefore uses the same backend for a block as forward.
    """
    if options.rank_invariant:  # `rank_invariant_refusal` has checked the call
        return "triton" if is_on_cuda(q) else "aten"
    if not is_on_cuda(q):
        return "aten"
    if slices.most_runs and aten_cuda.computes(q):
        return "triton"  # no other kernel's launches are the same for all documents
    return best_backend(q, v, slices, options)


class SoftmaxWork(NamedTuple):
    """The work of one backend call, for hooks that measure or simulate it.

    `heads` is the number of query heads, and `batch` the number of batch entries.
    """

    slices: Slices
    batch: int
    heads: int
    dims: tuple[int, int]  # head dim of q and k, head dim of v
    backward: bool

    @property
    def area(self) -> int:
        """The number of (query, key) pairs of the slices, times query heads."""
        return self.slices.area * self.heads

    @classmethod
    def of(cls, q: Tensor, value_dim: int, slices: Slices, backward: bool = False) -> SoftmaxWork:
        return cls(slices, q.shape[0], q.shape[2], (q.shape[3], value_dim), backward)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    partial: Partial,
    options: CallOptions,
    max_logits: MaxLogits | None = None,
) -> None:
    """Merge into `partial`, in place, the attention of q over a block of keys and values.

    q is (B, T, Hq, D), k (B, Tk, Hkv, D), v (B, Tk, Hkv, Dv): batch, rows, heads, head dim. If
    `max_logits` is given, it is updated with the scores of the slices.
    """
    if not slices.are_computed or not q.numel():
        return
    if max_logits is not None and hooks().replace_compute is None:
        max_logits.update(reference.max_logits(q, k, slices, options))
    chosen = choose_backend(q, k, v, slices, options)
    with hooks().computing(q.device, lambda: SoftmaxWork.of(q, v.shape[3], slices)) as computes:
        if computes:
            chosen.forward(q, k, v, slices, partial, options)
        else:
            partial.allocate()
    partial.empty = False


def attend_blocks(
    q: Tensor,
    blocks: Iterable[Sequence[Tensor]],
    slices_of_blocks: Blocks,
    options: CallOptions,
    sinks: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
    max_logits: MaxLogits | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention over blocks of keys and values that arrive one after another.

    Returns out (B, T, Hq, Dv), in q's dtype, and lse (B, T, Hq). With `into`, out and lse are
    written to these two tensors, in their dtypes; they may be views of some heads. `blocks`
    yields (k, v) of each block.

    If one backend computes all blocks and has `forward_blocks`, it gets the slices of all blocks in
    advance. It can then finish a query after the last block that the query attends to, instead of
    keeping its partial.
    """
    arriving = iter(blocks)
    k, v = next(arriving)
    value_dim = v.shape[3]
    common = _backend_of_all(q, k, v, slices_of_blocks, options)
    blocks = chain([(k, v)], arriving)
    del k, v  # only `blocks` holds them now
    forward_blocks = None if common is None else common.forward_blocks
    if forward_blocks is not None and q.numel() and hooks().replace_compute is None:
        if (trace := hooks().trace) is not None and not rehearsing():
            works = [SoftmaxWork.of(q, value_dim, slices) for slices in slices_of_blocks.slices]
            blocks = Hooks.computes_between(trace, blocks, works, q.device)
        if max_logits is not None:
            blocks = _update_max_logits(max_logits, q, blocks, slices_of_blocks, options)
        out, lse = forward_blocks(q, blocks, slices_of_blocks, options, sinks, into)
        return out, lse
    partial: Partial | None = None
    arriving = iter(blocks)
    for slices in slices_of_blocks.slices:  # built while their block of keys travels
        k, v = next(arriving)  # `zip` would keep the block while the next one arrives
        if partial is None:
            single = len(slices_of_blocks.slices) == 1
            partial = Partial.nothing(q, v, None if into is None else into[0], single=single)
        attend(q, k, v, slices, partial, options, max_logits)
        del k, v  # frees the block before the next one arrives and its successor is posted
    assert partial is not None
    next(arriving, None)  # ends the exchange, which frees the last block
    return partial.finish(sinks, q.dtype, into)


def _update_max_logits(
    max_logits: MaxLogits,
    q: Tensor,
    blocks: Iterable[Sequence[Tensor]],
    slices_of_blocks: Blocks,
    options: CallOptions,
) -> Iterator[Sequence[Tensor]]:
    """Yield the blocks, each after the max logits were updated with its scores."""
    remaining = iter(slices_of_blocks.slices)
    for k, v in blocks:
        max_logits.update(reference.max_logits(q, k, next(remaining), options))
        yield k, v
        del k, v  # as in `attend_blocks`


def _backend_of_all(
    q: Tensor, k: Tensor, v: Tensor, slices_of_blocks: Blocks, options: CallOptions
) -> Backend | None:
    """Return the one backend of all blocks that have slices, which are all shaped like this one.

    Return None if there are several backends, if no block has slices, or if the backend of the
    first slices has no `forward_blocks`: slices of later blocks are then built when needed.
    """
    nonempty: Iterator[Slices] = (x for x in slices_of_blocks.slices if x.are_computed)
    first = next(nonempty, None)
    if first is None:
        return None
    backend = choose_backend(q, k, v, first, options)
    if backend.forward_blocks is None or options.backend != DEFAULT:
        return backend
    same = all(choose_backend(q, k, v, slices, options) is backend for slices in nonempty)
    return backend if same else None


def attend_backward(
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
) -> None:
    """Add to `gradients`, in place, the gradients that flow through these slices.

    `output` is the output of the queries q over all of their keys, with its gradient. k and v are
    one block, as in `attend`.
    """
    if slices.are_computed and q.numel():
        chosen = choose_backend(q, k, v, slices, options)
        work = lambda: SoftmaxWork.of(q, v.shape[3], slices, backward=True)  # noqa: E731
        with hooks().computing(q.device, work) as computes:
            if computes:
                chosen.backward(output, q, k, v, slices, gradients, options)
            else:
                gradients.allocate()
