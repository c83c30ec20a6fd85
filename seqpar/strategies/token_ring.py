"""TokenRing attention: keys and values stay, queries travel, and their results return.

Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via
Bidirectional Communication" (2024), section 3. At step s rank r computes for the queries of rank r
− s, while those of the next step arrive and the results of the step before leave for their owner,
the other way at the same time. The paper has no backward: here (q, dout, lse, delta) travel, dq
returns, dk and dv stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.arguments import shown
from seqpar.comm.exchange import Comm
from seqpar.dtypes import DTYPES, accumulator_dtype
from seqpar.layout.blocks import Blocks
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.key_exchange import PendingBlock
from seqpar.softmax.module import Attention
from seqpar.softmax.partial import Gradients, OutputGradient, Partial
from seqpar.softmax.rows import Rows
from seqpar.softmax.strategy import ForwardResult, Strategy
from seqpar.strategies.registry import register
from seqpar.traffic import Traffic

# Computes for queries of another rank, given tensors of them and that rank; returns their results.
Compute = Callable[[list[Tensor], int], Sequence[Tensor]]


class ResultKind(NamedTuple):
    """A tensor of results that returns to the queries' rank, (n, B, *shape), of a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class TokenRing(Strategy):
    """Queries travel one way, their results the other way."""

    name = "token_ring"
    partial_dtype: torch.dtype | None = None  # of outputs that return; None: the accumulator's

    def __post_init__(self) -> None:
        dtype = self.partial_dtype
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in DTYPES):
            expected = f"None or one of {DTYPES}"
            raise ValueError(f"partial_dtype must be {expected}, got {shown(dtype)}")

    def forward(
        self, comm: Comm, call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor
    ) -> ForwardResult:
        total, lse_dtype = Partial.nothing(q, v), accumulator_dtype(q.dtype)
        out_dtype = self.partial_dtype or lse_dtype

        def compute_own() -> None:
            attend(q, k, v, call.slices(comm.rank, comm.rank), total, call.options)

        def compute(visitors: list[Tensor], source: int) -> Sequence[Tensor]:
            blocks = call.once(
                ("token_ring block", source), lambda: Blocks((call.visitors(source, comm.rank),))
            )
            return attend_blocks(visitors[0], [(k, v)], blocks, call.options, None, out_dtype)

        kinds = [
            ResultKind((q.shape[2], v.shape[3]), out_dtype),
            ResultKind((q.shape[2],), lse_dtype),
        ]
        label = "token_ring forward"
        for rows, results in _visits(comm, call, [q], kinds, compute_own, compute, label):
            for local, part in rows.parts(q.device):
                total.merge(local, *(x[:, part] for x in results))
            del results  # before the next step is computed
        return ForwardResult(*total.finish(call.sinks, q.dtype), [])

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        residuals: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = residuals
        dlse = call.dlse_on_all_ranks(dlse, dout)
        output = OutputGradient.of(dout, dlse, out, lse, call.sinks)
        total = Gradients.zeros(q, k, v)

        def compute_own() -> None:
            slices = call.slices(comm.rank, comm.rank)
            attend_backward(output, q, k, v, slices, total, call.options)

        def compute(visitors: list[Tensor], source: int) -> Sequence[Tensor]:
            slices = call.visitors(source, comm.rank)
            q_block, dout_block, statistics = visitors
            lse_block, delta, *dlse_block = statistics.unbind(-1)
            visiting = OutputGradient(
                dout_block, None, lse_block, dlse_block[0] if dlse_block else None, delta
            )
            dq = q_block.new_zeros(q_block.shape, dtype=total.dq.dtype)
            gradients = Gradients(dq, total.dk, total.dv)
            attend_backward(visiting, q_block, k, v, slices, gradients, call.options)
            return [dq]

        columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
        travelling = [q, output.dout, torch.stack(columns, -1)]
        kinds = [ResultKind(tuple(q.shape[2:]), total.dq.dtype)]
        label = "token_ring backward"
        for rows, (dq,) in _visits(comm, call, travelling, kinds, compute_own, compute, label):
            for local, part in rows.parts(q.device):
                total.dq[:, local] += dq[:, part]
            del dq
        return total.dq, total.dk, total.dv

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        sources = [(rank - step) % call.ranks for step in range(call.ranks)]
        return [call.visitors(source, rank).area * call.shape.heads for source in sources]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        s = call.shape
        element, accumulator = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
        partial = accumulator if self.partial_dtype is None else self.partial_dtype.itemsize
        statistics = (2 + call.return_lse) * accumulator
        # For each direction: (messages, bytes for each row and head) of queries, and of results.
        sizes = {
            "forward": ((1, s.dim * element), (2, s.value_dim * partial + accumulator)),
            "backward": (
                (3, (s.dim + s.value_dim) * element + statistics),
                (1, s.dim * accumulator),
            ),
        }
        rows = []
        for direction, (query, result) in sizes.items():
            for step in range(1, call.ranks):
                to, source = (rank + step) % call.ranks, (rank - step) % call.ranks
                visits = (
                    (to, call.visitors(rank, to), query),
                    (source, call.visitors(source, rank), result),
                )
                for peer, slices, (messages, size) in visits:
                    total = slices.query_rows * s.batch * s.heads * size
                    rows.append(Traffic(direction, step, peer, messages, total))
        return rows


def _visits(
    comm: Comm,
    call: ResolvedCall,
    travelling: Sequence[Tensor],
    kinds: Sequence[ResultKind],
    compute_own: Callable[[], None],
    compute: Compute,
    label: str,
) -> Iterator[tuple[Rows, list[Tensor]]]:
    """Send this rank's rows to all others; yield (rows, results) as results return.

    Results come in the order of the steps. `travelling`
    are (B, T, …) tensors: the rows that see any key of a peer are sent there. At step 0
    `compute_own` computes with this rank's queries, and at each later step `compute` with those of
    another rank, the *visitors*. While step s is computed, the queries of step s + 1 are under way
    and, in the other direction, the results of step s − 1.
    """
    rank, ranks, batch = comm.rank, comm.size, travelling[0].shape[0]

    def post_queries(step: int) -> PendingBlock:
        to, source = (rank + step) % ranks, (rank - step) % ranks
        rows, visitors = Rows.sent(call.visitors(rank, to)), call.visitors(source, rank).query_rows
        sends = [(to, rows.take(x)) for x in travelling]
        arriving = [x.new_empty((visitors, batch, *x.shape[2:])) for x in travelling]
        recvs = [(source, x) for x in arriving]
        return PendingBlock(arriving, comm.exchange(sends, recvs, label=label, step=step))

    def post_results(step: int, results: Sequence[Tensor]) -> tuple[Rows, PendingBlock]:
        to, source = (rank - step) % ranks, (rank + step) % ranks
        sent = call.visitors(rank, source)  # the rows of this rank that `source` computed with
        sends = [(to, x.transpose(0, 1).contiguous()) for x in results]
        arriving = [
            travelling[0].new_empty((sent.query_rows, batch, *kind.shape), dtype=kind.dtype)
            for kind in kinds
        ]
        recvs = [(source, x) for x in arriving]
        pending = comm.exchange(sends, recvs, label=label, step=step)
        return Rows.sent(sent), PendingBlock(arriving, pending)

    visitors: list[Tensor] = []
    returning: tuple[Rows, PendingBlock] | None = None
    for step in range(ranks):
        arriving = post_queries(step + 1) if step + 1 < ranks else None
        if step == 0:
            compute_own()
        else:
            source = (rank - step) % ranks
            slices = call.visitors(source, rank)
            results = compute(visitors, source) if slices.query_rows else []
            visitors = []
            returned = (returning[0], returning[1].wait()) if returning else None
            returning = post_results(step, results)
            del results  # before the next step is computed
            if returned:
                yield returned
            returned = None
        visitors = arriving.wait() if arriving else []
    if returning:
        yield returning[0], returning[1].wait()


@register
class TokenRingAttention(Attention):
    """Softmax attention whose queries travel, in P − 1 steps, while keys and values stay.

    The results (out, lse) return the other way at the same time; keys and values, and their
    gradients, stay. Each partial is merged once, on the queries' rank, in fp32, in the order of the
    steps.

    `partial_dtype` is what partial outputs travel in: by default the accumulator's, fp32 (fp64 for
    fp64), which adds no error and takes twice the bytes of bf16. With torch.bfloat16 and bf16
    inputs each partial is rounded once more, to the result's dtype: the RMS error of out becomes at
    most √2 times that of one device; measured 1.08 to 1.24 times under a causal mask and 1.23 to
    1.40 without (P = 2 to 16 ranks, N = 1,024 tokens), at most 1.02 for the gradients. With fp32
    inputs the error of out becomes some 3,000 times that of one device. lse, and dq in backward,
    always travel in the accumulator's dtype.

    Bytes sent by rank r, with m(r, p) the query rows of r that see any key of p, b the bytes of an
    element of q, w those of a partial output, and e = 4 (8 for fp64). Sums are over the other ranks
    p:

    * forward: queries Σ m(r, p)·B·Hq·D·b, results Σ m(p, r)·B·Hq·(Dv·w + e);
    * backward: queries Σ m(r, p)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), results
      Σ m(p, r)·B·Hq·D·e.

    Memory: two blocks of a peer's queries and three of results: one that is sent, one that arrives,
    and one that is computed or merged.

    It beats Ring with as many KV heads as query heads, where queries and results have separate
    links, both free at the same time, as on a full mesh: at step s queries go to rank r + s + 1 and
    results to rank r − s + 1. Where a host has one NIC, all that it sends shares the port, and
    nothing is gained. Bytes for each token in each direction, with D = Dv and 2-byte elements:
    Ring's forward sends 4·Hkv·D one way and nothing the other, TokenRing's 2·Hq·D and Hq·(w·D + 4);
    so for Hq = Hkv a link carries half of Ring's bytes with w = 2, and as much with w = 4. Ring's
    backward sends 4·Hkv·D one way and 8·Hkv·D the other, TokenRing's Hq·(4·D + 8) and 4·Hq·D. With
    GQA, Hq ≥ 2·Hkv, Ring sends less or as much; use Ring.

    Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via
    Bidirectional Communication" (2024), section 3.
    """

    strategy = TokenRing
