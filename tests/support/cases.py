"""Calls of softmax attention to test with, and their oracle.

A case describes one call. The oracle computes what the call should return: a softmax in fp64 over
the whole packed batch, on one process.
"""

import copy
import dataclasses
import functools
import itertools

import numpy as np
import torch
from einops import rearrange, repeat
from hypothesis import strategies as st

from seqpar import Layout, Mask, make_attention
from seqpar.attention.backend import DEFAULT, forced_backend
from seqpar.comm.messages.comm import Comm
from seqpar.layout.cuts.striped import EvenStripes
from seqpar.layout.cuts.zigzag import EvenZigzag
from seqpar.strategies.registry import SOFTMAX
from tests.support.mask_cases import times_seen
from tests.support.plans import PLANS


def visible(cu, kv_cu, causal, window, prefix, ranges=None):
    """Return (T, T_kv) bool: which query sees which key, pair by pair from the definition.

    A query sees a key of the same document if the window, causality or the prefix admits the key.
    The ends of queries and keys are aligned in each document. With `ranges`, a query sees a key if
    some range has the pair.
    """
    if ranges is not None:
        return times_seen(ranges, cu, kv_cu) > 0
    documents = range(len(cu) - 1)
    lengths, kv_lengths = np.diff(cu), np.diff(kv_cu)
    document = np.repeat(documents, lengths)[:, None]
    kv_document = np.repeat(documents, kv_lengths)[None, :]
    i, j = aligned(cu, kv_cu)
    left, right = window
    seen = (j - i <= 0) if causal else np.full((i.size, j.size), True)
    seen &= (i - j <= left) if left >= 0 else True
    seen &= (j - i <= right) if right >= 0 else True
    if prefix is not None:
        seen |= j < np.repeat(np.array(prefix), kv_lengths)[None, :]
    return seen & (document == kv_document)


def aligned(cu, kv_cu):
    """Return the positions of queries (T, 1) and of keys (1, T_kv), both counted so that the ends
    of a document's queries and keys are aligned."""
    lengths, kv_lengths = np.diff(cu), np.diff(kv_cu)
    i = [np.arange(n) + m - n for n, m in zip(lengths, kv_lengths, strict=True)]
    j = [np.arange(m) for m in kv_lengths]
    return np.concatenate(i)[:, None], np.concatenate(j)[None, :]


def distances(cu, kv_cu):
    """Return (T, T_kv): |i + Lkv − Lq − j| for query i and key j of a document.

    Pairs of different documents have values without a meaning.
    """
    i, j = aligned(cu, kv_cu)
    return np.abs(i - j).astype(float)


@st.composite
def cu_seqlens(draw, max_tokens, documents=None):
    """Draw the boundaries of 1 to 4 documents, or of `documents`. Documents may be empty."""
    count = draw(st.integers(1, 4)) if documents is None else documents
    lengths = [draw(st.integers(0, max_tokens // count)) for _ in range(count)]
    return [0, *np.cumsum(lengths).tolist()]


@st.composite
def layouts(draw, cu, ranks):
    """Draw a layout: a regular one, an even one, or one whose spans are dealt out at random.

    In a layout dealt out at random, some ranks may hold no tokens.
    """
    kinds = ["contiguous", "zigzag", "striped", "spans", "even zigzag", "even stripes"]
    kind = draw(st.sampled_from(kinds))
    if kind == "even zigzag":
        return Layout(np.array(cu), EvenZigzag(ranks, draw(st.integers(0, 9))))
    if kind == "even stripes":
        return Layout(np.array(cu), EvenStripes(ranks, draw(st.integers(1, 9))))
    if kind == "striped":
        return Layout.striped(cu, ranks, stripe=draw(st.integers(1, 5)))
    if kind != "spans":
        return getattr(Layout, kind)(cu, ranks)
    spans = [[] for _ in range(ranks)]
    for document, length in enumerate(np.diff(cu).tolist()):
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=5))})
        for start, stop in itertools.pairwise(cuts):
            spans[draw(st.integers(0, ranks - 1))].append((document, start, stop))
    return Layout.from_spans(spans, cu)


STRATEGIES = sorted(SOFTMAX, key=lambda name: (name != "ring", name))  # ring first
# Names with options that change which tensors are sent; see `module`.
VARIANTS = [
    *("usp+all_gather", "usp+token_ring", "usp+mesh"),
    *("disaggregated+at random", "disaggregated+at random+server"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call on some ranks, with all that is needed to make its inputs on each rank."""

    strategy: str
    layout: Layout
    causal: bool
    kv_layout: Layout | None = None
    window: tuple = (-1, -1)
    prefix: tuple | None = None
    ranges: tuple | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "heads": a slope a head; "batch": also for each batch entry
    sinks: bool = False
    dlse: float = 0.0  # the size of the gradient of lse; 0: lse has no gradient
    batch: int | None = None
    heads: int = 2
    kv_heads: int = 1
    dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float64
    backend: str = "aten"  # or DEFAULT: the backend that is chosen when no backend is forced
    seed: int = 0
    common: float = 0.0  # added to a tenth of q and k, so that scores are large and similar
    module_options: tuple = ()
    device: str = "cpu"

    def inputs(self):
        """Return q, k, v, sinks and the gradients dout and dlse, of the whole packed batch."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = () if self.batch is None else (self.batch,)
        tokens, keys = self.layout.tokens, (self.kv_layout or self.layout).tokens

        def draw(*shape, dtype=self.dtype, common=0.0):
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn = drawn / 10 + common if common else drawn
            return drawn.to(self.device, dtype)

        q = draw(*batch, tokens, self.heads, self.dim, common=self.common)
        k = draw(*batch, keys, self.kv_heads, self.dim, common=self.common)
        v = draw(*batch, keys, self.kv_heads, self.value_dim)
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = draw(self.heads) if self.sinks else None
        dlse = draw(*batch, tokens, self.heads, dtype=exact) * self.dlse if self.dlse else None
        return q, k, v, sinks, draw(*batch, tokens, self.heads, self.value_dim), dlse

    def options(self):
        if self.ranges is None:
            masked = {
                "causal": self.causal,
                "prefix_lens": self.prefix,
                "window_size": self.window,
            }
        else:
            masked = {"mask": Mask.of_ranges(self.ranges)}
        return {
            **masked,
            "kv_layout": self.kv_layout,
            "softmax_scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes(),
        }

    def slopes(self):
        """Return ALiBi slopes in the form that a call accepts, or None.

        The slopes differ, and one in four is negative.
        """
        if not self.alibi:
            return None
        count = self.heads * (self.batch if self.alibi == "batch" else 1)
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(self.seed)) - 0.25
        return drawn.view(*([self.batch] if self.alibi == "batch" else []), -1).to(self.device)


def module(strategy, group, **options):
    """Make an attention module for a strategy, whose name may have options after "+".

    "usp+ring" is USP with Ring as its outer strategy, on a mesh of 2 columns (or 1). "mesh" is on a
    mesh that is about square. "disaggregated+at keys+server" has the plan "at keys", and keeps
    tensors at servers.
    """
    name, *variant = strategy.split("+")
    if name == "mesh":
        group = square(group)
    elif name == "usp":
        group, options = grid(group), dict(zip(["outer"], variant, strict=False)) | options
    elif variant:
        options = (
            dict(zip(["plan", "keep"], [PLANS[variant[0]], *variant[1:]], strict=False)) | options
        )
    return make_attention(name, group, **options)


def grid(group, columns=2):
    """Return a Comm of these ranks as a mesh of `columns` columns, or of one column if `columns`
    does not divide the number of ranks."""
    comm = Comm.of(group)
    columns = 1 if comm.size % columns else columns
    if not hasattr(comm, f"mesh{columns}"):
        mesh = copy.copy(comm)
        setattr(comm, f"mesh{columns}", mesh)
        mesh.name, mesh.shape = f"{comm.name}x{columns}", (comm.size // columns, columns)
    return getattr(comm, f"mesh{columns}")


def square(group):
    """Return a Comm of these ranks as a mesh with at least as many columns as rows.

    Of all such meshes it is the one with the fewest columns.
    """
    size = Comm.of(group).size
    return grid(group, next(x for x in range(1, size + 1) if x * x >= size and not size % x))


def begin(group, case, **changes):
    """Make the call on this rank, with some arguments changed; return its outputs and its leaves.

    Outputs are by name, each with its gradient. Leaves are the tensors that get gradients in
    backward, also by name. All have this rank's tokens.
    """
    attn = module(case.strategy, group, **dict(case.module_options))
    rank, dim = attn.rank, 0 if case.batch is None else 1
    kv_layout = case.kv_layout or case.layout
    q, k, v, sinks, dout, dlse = case.inputs()
    layouts_of = (("q", q, case.layout), ("k", k, kv_layout), ("v", v, kv_layout))
    leaves = {name: layout.shard(x, rank, dim).requires_grad_() for name, x, layout in layouts_of}
    if sinks is not None:
        leaves["sinks"] = sinks.requires_grad_()
    arguments = leaves | {"layout": case.layout, "return_lse": True} | case.options() | changes
    with forced_backend(None if case.backend == DEFAULT else case.backend):
        out, lse = attn(**arguments)
    assert out.dtype == case.dtype and lse.dtype == (
        torch.float64 if case.dtype == torch.float64 else torch.float32
    )
    outputs = {"out": (out, case.layout.shard(dout, rank, dim))}
    outputs["lse"] = (lse, None if dlse is None else case.layout.shard(dlse, rank, dim))
    return outputs, leaves


def run(group, case):
    """Make the call and its backward on this rank; return packed out, lse, dq, dk and dv.

    Every rank gets the whole pack. If the case has sinks, dsinks follows, summed over ranks.
    """
    comm, dim = Comm.of(group), 0 if case.batch is None else 1
    kv_layout, before = case.kv_layout or case.layout, comm.sent_bytes
    outputs, leaves = begin(group, case)
    backward(outputs)
    assert comm.size == 1 or comm.sent_bytes >= before
    q, k, v = (leaves[name] for name in ("q", "k", "v"))
    packed = [case.layout.unshard(x.detach(), comm, dim) for x, _ in outputs.values()]
    packed.append(case.layout.unshard(q.grad, comm, dim))
    packed += [kv_layout.unshard(x, comm, dim) for x in (k.grad, v.grad)]
    if case.sinks:
        gathered = comm.all_gather(leaves["sinks"].grad.double(), label="test")
        packed.append(torch.stack(gathered).sum(0))
    return [x.double().cpu().numpy() for x in packed]


def backward(outputs, retain_graph=False):
    """Run backward from the outputs of `begin` that have a gradient."""
    begun = [(x, dx) for x, dx in outputs.values() if dx is not None]
    torch.autograd.backward(*zip(*begun, strict=True), retain_graph=retain_graph)


def oracle(case):
    """Return what `run` should return: computed in fp64 on one process, by autograd.

    The results depend on the documents, and not on where they are or on the strategy. Cases that
    differ only in these two are therefore computed once.
    """
    unneeded = {"strategy": "", "backend": "", "module_options": (), "device": "cpu"}
    return _oracle(by_documents(case, **unneeded))


def by_documents(case, **changes):
    """Return the case with cu_seqlens in place of its layouts.

    Such a case is hashable, and equal for all layouts of the same documents.
    """
    cu, kv_cu = (
        None if x is None else tuple(x.cu_seqlens.tolist()) for x in (case.layout, case.kv_layout)
    )
    return dataclasses.replace(case, layout=cu, kv_layout=kv_cu, **changes)


def on_one_rank(case):
    """Return a case of `by_documents` with layouts of one rank."""
    kv_layout = None if case.kv_layout is None else Layout.contiguous(case.kv_layout, 1)
    return dataclasses.replace(case, layout=Layout.contiguous(case.layout, 1), kv_layout=kv_layout)


@functools.lru_cache(maxsize=32)
def _oracle(case):
    case = on_one_rank(case)
    kv_layout = case.kv_layout or case.layout
    q, k, v, sinks, dout, dlse = (
        None if x is None else x.double().requires_grad_() for x in case.inputs()
    )
    cu, kv_cu = case.layout.cu_seqlens, kv_layout.cu_seqlens
    masked = case.causal, case.window, case.prefix, case.ranges
    seen = torch.from_numpy(visible(cu, kv_cu, *masked))
    group = case.heads // case.kv_heads
    keys, values = (repeat(x, "... m h d -> ... m (h group) d", group=group) for x in (k, v))
    scores = torch.einsum("...nhd,...mhd->...hnm", q, keys)
    scores = scores * (case.dim**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi:
        bias = case.slopes().double()[..., None, None] * torch.from_numpy(distances(cu, kv_cu))
        scores = scores - bias
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = rearrange(torch.logsumexp(scores, -1), "... h n -> ... n h")
    total = lse if sinks is None else torch.logaddexp(lse, sinks)
    finite = total.masked_fill(total.isneginf(), 0)
    weights = torch.exp(scores - rearrange(finite, "... n h -> ... h n 1"))
    out = torch.einsum("...hnm,...mhd->...nhd", weights, values)
    loss = (out * dout.detach()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0) * dlse.detach()).sum()
    wanted = [q, k, v] + ([] if sinks is None else [sinks])
    gradients = torch.autograd.grad(loss, wanted)
    return [x.detach().numpy() for x in (out, lse, *gradients)]


NAMES = ["out", "lse", "dq", "dk", "dv", "dsinks"]


def errors(got, expected, dtype, roundings=16):
    """Return {name: error divided by its bound} for what `run` returns.

    In fp64, the error is the largest difference, and its bound is 1e-10. In shorter dtypes, the
    error is the RMS of the difference over the whole tensor, and its bound is `roundings` times the
    dtype's epsilon. Both bounds are relative to the oracle's result if that exceeds 1. `dsinks` in
    shorter dtypes has a larger bound, since it is a long sum. The error is infinite if an infinity
    or NaN is not where the oracle has it.
    """
    found = {}
    for name, x, y in zip(NAMES, got, expected, strict=False):
        finite = np.isfinite(y)
        norm, bound = (
            (largest, 1e-10)
            if dtype == torch.float64
            else (rms, roundings * torch.finfo(dtype).eps)
        )
        allowed = bound * max(1.0, norm(y[finite]))
        if name == "dsinks" and dtype != torch.float64:
            # The result sums this many products of out and dout. Their roundings are independent.
            products = expected[0].size // max(1, y.size)
            walk = torch.finfo(dtype).eps * products**0.5 * rms(expected[0])
            allowed = max(allowed, 2 * walk)
        error = norm(x[finite] - y[finite]) / allowed
        found[name] = (
            error
            if np.array_equal(np.isfinite(x), finite) and np.array_equal(x[~finite], y[~finite])
            else np.inf
        )
    return found


def assert_right(got, expected, dtype, roundings=16):
    """Assert that what `run` returned is within the bounds of `errors`."""
    found = errors(got, expected, dtype, roundings)
    assert max(found.values()) <= 1, found


def largest(x):
    return float(np.abs(x).max(initial=0))


def rms(x):
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
