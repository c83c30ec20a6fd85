"""Compute attention of some queries over some keys on one rank, forward and backward.

Strategies decide which tensors are sent between ranks. To compute attention, all strategies call
the three functions of this file: `attend`, `attend_blocks` and `attend_backward`.

* A *block* is the keys and values that are computed together, for example the keys and values of
  one rank.
* *Slices* (`seqpar.layout.masks.mask.Slices`) say which query rows attend to which key rows of a
  block.
* A *partial* is the result (out, lse) of attention over some of the keys. Partials over disjoint
  sets of keys can be merged in any grouping.
* A *backend* is a module of `backends/` that computes one block. Users can force a backend with
  `use_backend`. By default, CPUs use `aten`, and GPUs use the first kernel of
  `backends/kernel_order.py` that can compute the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, load_backend
from seqpar.core.device_tables import device_of, is_on_cuda, rehearsing
from seqpar.core.hooks import Hooks, hooks
from seqpar.core.memo import LOCAL, MAX_KEPT_SETTINGS, Memo
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.softmax.backends import aten_cuda, reference
from seqpar.softmax.backends.kernel_order import best_backend
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

# The arguments are q, the blocks, the slices of each block, options, sinks, and the tensors to
# which the result is written, or None. The result is (out, lse).
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
    """The interface of a backend, a module or an object that computes attention over one block of
    keys.

    A module may also have a function `prepared(q, v, slices, options)`, which returns None or an
    object with the interface of a backend. The object is used in place of the module, for tensors
    with the shapes of q and v.
    """

    @property
    def forward_blocks(self) -> ForwardBlocks | None:
        """A function that computes attention over several blocks that arrive one after another.

        It is None for a backend without such a function.
        """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        partial: Partial,
        options: CallOptions,
    ) -> None:
        """Merge the attention of q (B, T, Hq, D) over one block, k and v, into `partial`."""

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
        """Add the gradients of q and of one block, k and v, to `gradients`."""


def choose_backend(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions
) -> Backend:
    chosen = _chosen(q, k, v, slices, options)
    return load_backend("softmax", chosen) if isinstance(chosen, str) else chosen


def _chosen(q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> Backend | str:
    # Slopes are tensors that differ between calls, so a choice for them is not kept.
    if options.slopes is not None:
        return _choose(q, k, v, slices, options)
    kept = slices.derived((LOCAL, "backends"), lambda: Memo(MAX_KEPT_SETTINGS))
    # On a meta device, whether it stands for CUDA also matters. Users may turn off cuDNN between
    # two calls.
    device = device_of(q), is_on_cuda(q), torch.backends.cuda.cudnn_sdp_enabled()
    key = LOCAL, *device, q.dtype, q.shape[3], v.shape[3], options
    return kept(key, lambda: _choose(q, k, v, slices, options))


def _choose(q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> Backend | str:
    name = options.backend
    if name == DEFAULT:
        name = default_backend(q, k, v, slices, options)
    prepared = getattr(load_backend("softmax", name), "prepared", None)
    return name if prepared is None else prepared(q, v, slices, options) or name


def default_backend(q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> str:
    """Return the name of the backend that computes one block, if the user does not force a backend.

    The result does not depend on the values of the tensors. `slices` says which queries attend to
    which keys of the block.
    """
    # `rank_invariant_refusal` has already refused calls that these two backends cannot compute.
    if options.rank_invariant:
        return "triton" if is_on_cuda(q) else "aten"
    if not is_on_cuda(q):
        return "aten"
    if slices.most_runs and aten_cuda.computes(q):
        # With `most_documents`, launches must not depend on the documents. Of all kernels, only our
        # Triton kernels have such launches.
        return "triton"
    return best_backend(q, v, slices, options)


class SoftmaxWork(NamedTuple):
    """One call of a backend, as described to hooks that measure or simulate such calls.

    `heads` is the number of query heads, and `batch` the number of batch entries.
    """

    slices: Slices
    batch: int
    heads: int
    dims: tuple[int, int]  # D of q and k, and Dv of v
    backward: bool

    @property
    def area(self) -> int:
        """The number of (query, key) pairs of the slices, times the number of query heads."""
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
    """Compute attention of q over one block of keys and values, and merge it into `partial`.

    Args:
        q: (B, T, Hq, D).
        k, v: the block, (B, Tk, Hkv, D) and (B, Tk, Hkv, Dv).
        slices: which rows of q attend to which rows of k.
        partial: the attention of q over earlier blocks, which is changed in place.
        options: how scores are computed, and the name of the backend.
        max_logits: if given, an object that is updated with the largest scores of the block.
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
    """Return the attention of q over blocks of keys and values that arrive one after another.

    Args:
        q: (B, T, Hq, D).
        blocks: an iterator over k and v of each block.
        slices_of_blocks: which queries attend to which keys, for each block.
        options, max_logits: as in `attend`.
        sinks: (Hq,) or None.
        into: two tensors to which out and lse are written, in the dtypes of these tensors. With
            None, the function makes new tensors.

    Returns:
        out (B, T, Hq, Dv), in q's dtype unless `into` is given, and lse (B, T, Hq).
    """
    arriving = iter(blocks)
    k, v = next(arriving)
    value_dim = v.shape[3]
    common = _backend_of_all(q, k, v, slices_of_blocks, options)
    blocks = chain([(k, v)], arriving)
    del k, v  # now only `blocks` refers to them, so they can be freed early
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
    # These slices are built while their block of keys is still arriving.
    for slices in slices_of_blocks.slices:
        # not `zip`, which would keep this block alive while the next one arrives
        k, v = next(arriving)
        if partial is None:
            single = len(slices_of_blocks.slices) == 1
            partial = Partial.nothing(q, v, None if into is None else into[0], single=single)
        attend(q, k, v, slices, partial, options, max_logits)
        del k, v  # frees this block before the next one arrives and another exchange is posted
    assert partial is not None
    next(arriving, None)  # ends the generator of the exchange, which frees the last block
    return partial.finish(sinks, q.dtype, into)


def _update_max_logits(
    max_logits: MaxLogits,
    q: Tensor,
    blocks: Iterable[Sequence[Tensor]],
    slices_of_blocks: Blocks,
    options: CallOptions,
) -> Iterator[Sequence[Tensor]]:
    remaining = iter(slices_of_blocks.slices)
    for k, v in blocks:
        max_logits.update(reference.max_logits(q, k, next(remaining), options))
        yield k, v
        del k, v  # frees the block, as in `attend_blocks`


def _backend_of_all(
    q: Tensor, k: Tensor, v: Tensor, slices_of_blocks: Blocks, options: CallOptions
) -> Backend | None:
    """Return the backend that `attend_blocks` uses, or None.

    A backend with the function `forward_blocks` is returned only if it computes every block. A
    backend without this function is the one that computes the first block. k and v are the first
    block.
    """
    nonempty: Iterator[Slices] = (x for x in slices_of_blocks.slices if x.are_computed)
    first = next(nonempty, None)
    if first is None:
        return None
    backend = choose_backend(q, k, v, first, options)
    if backend.forward_blocks is None or options.backend != DEFAULT:
        return backend  # the slices of later blocks need not be built yet
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
    """Add the gradients of one block of keys and values to `gradients`, in place.

    Args:
        output: the final output of the queries over all of their keys on all ranks, with the
            gradient of this output.
        q, k, v, slices, options: as in `attend`.
        gradients: the sum of dq, and the sums of dk and dv of this block.
    """
    if slices.are_computed and q.numel():
        chosen = choose_backend(q, k, v, slices, options)
        work = lambda: SoftmaxWork.of(q, v.shape[3], slices, backward=True)  # noqa: E731
        with hooks().computing(q.device, work) as computes:
            if computes:
                chosen.backward(output, q, k, v, slices, gradients, options)
            else:
                gradients.allocate()
