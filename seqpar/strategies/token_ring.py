"""TokenRing attention: keys and values stay, queries travel, and their results return.

Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via
Bidirectional Communication" (2024), section 3. At step s rank r computes for the queries of rank r
− s, while those of the next step arrive and the results of the step before leave for their owner,
the other way at the same time. The paper has no backward: here (q, dout, lse, delta) travel, dq
returns, dk and dv stay. Half of a rank's own queries are computed last, while the last results
return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.arguments import shown
from seqpar.comm.exchange import Comm
from seqpar.dtypes import DTYPES, accumulator_dtype
from seqpar.layout.mask import Slices
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.eight_bits import decode, encode, encoded_width
from seqpar.softmax.module import Attention
from seqpar.softmax.packing import Kind
from seqpar.softmax.partial import Gradients, OutputGradient, Partial
from seqpar.softmax.strategy import ForwardResult, Strategy
from seqpar.softmax.visits import Pass, Plan, Visit, are_packed, head_groups
from seqpar.strategies.registry import register
from seqpar.traffic import Traffic


@dataclass(frozen=True)
class TokenRing(Strategy):
    """Queries travel one way, their results the other way."""

    name = "token_ring"
    partial_dtype: torch.dtype | None = None  # of outputs that return; None: the accumulator's

    def __post_init__(self) -> None:
        dtype, allowed = self.partial_dtype, (*DTYPES, torch.int8)
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in allowed):
            expected = f"None or one of {allowed}"
            raise ValueError(f"partial_dtype must be {expected}, got {shown(dtype)}")

    def check(self, call: ResolvedCall) -> None:
        if self.partial_dtype == torch.int8 and call.shape.dtype == torch.float64:
            raise ValueError("partial_dtype must not be int8 with fp64, whose digits it would lose")

    def forward(
        self, comm: Comm, call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor
    ) -> ForwardResult:
        total, accumulator = Partial.nothing(q, v), accumulator_dtype(q.dtype)
        dims, coded = [v.shape[-1]], self.partial_dtype == torch.int8
        width = encoded_width(dims) if coded else dims[0]
        kinds = [Kind((width,), self.partial_dtype or accumulator), Kind((), accumulator)]
        plan = Plan.of(call, [Kind((q.shape[-1],), q.dtype)], kinds)
        keys = [(k[:, :, x.keys], v[:, :, x.keys]) for x in plan.groups]
        totals = [total.of_heads(x.queries) for x in plan.groups]

        def compute_own(slices: Slices) -> None:
            attend(q, k, v, slices, total, call.options, call.max_logits)

        def compute(visit: Visit, guests: list[Tensor]) -> Tensor:
            assert visit.blocks is not None
            message, (out, lse) = visit.leaving.empty(q.device)
            block, heads = [keys[visit.group]], plan.groups[visit.group].queries
            largest = None if call.max_logits is None else call.max_logits.of_heads(heads)
            into = (lse.new_empty((*out.shape[:-1], *dims)) if coded else out), lse
            attend_blocks(guests[0], block, visit.blocks, call.options, None, into, largest)
            if coded:
                out.copy_(encode(into[0], dims))
            return message

        travel = Pass(comm, plan, [q], "token_ring forward")
        for group, rows, (out, lse) in travel.results(compute_own, compute):
            if coded:
                (out,) = decode(out, dims, accumulator)
            totals[group].merge(rows, out, lse)
            total.empty = False  # for the second half of this rank's own slices
            del out, lse  # before the next visit is computed
        return ForwardResult(*total.finish(call.sinks, q.dtype), [])

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dlse = call.dlse_on_all_ranks(output.dlse, output.dout)
        total = Gradients.zeros(q, k, v)
        columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
        travelling = [q, output.dout, torch.stack(columns, -1)]
        kinds = [Kind(tuple(x.shape[3:]), x.dtype, x is travelling[2]) for x in travelling]
        plan = Plan.of(call, kinds, [Kind((q.shape[-1],), total.dq.dtype)])
        keys = [[x[:, :, heads.keys] for x in (k, v, total.dk, total.dv)] for heads in plan.groups]
        totals = [total.dq[:, :, heads.queries] for heads in plan.groups]

        def compute_own(slices: Slices) -> None:
            attend_backward(output, q, k, v, slices, total, call.options)

        def compute(visit: Visit, guests: list[Tensor]) -> Tensor:
            assert visit.blocks is not None
            q_block, dout_block, statistics = guests
            lse_block, delta, *dlse_block = statistics.unbind(-1)
            visiting = OutputGradient(
                dout_block, None, lse_block, dlse_block[0] if dlse_block else None, delta
            )
            message, (dq,) = visit.leaving.empty(q.device)
            (k_part, v_part, dk, dv), (slices,) = keys[visit.group], visit.blocks.slices
            gradients = Gradients(dq.zero_(), dk, dv)
            attend_backward(visiting, q_block, k_part, v_part, slices, gradients, call.options)
            return message

        travel = Pass(comm, plan, travelling, "token_ring backward")
        for group, rows, (dq,) in travel.results(compute_own, compute):
            if isinstance(rows, slice):
                totals[group][:, rows].add_(dq)
            else:
                totals[group].index_add_(1, rows, dq)
            del dq
        return total.dq, total.dk, total.dv

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        sources = [(rank - step) % call.ranks for step in range(call.ranks)]
        return [call.visitors(source, rank).area * call.shape.heads for source in sources]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        s = call.shape
        element, accumulator = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
        partial = s.value_dim * (self.partial_dtype or accumulator_dtype(s.dtype)).itemsize
        if self.partial_dtype == torch.int8:
            partial = encoded_width([s.value_dim])
        statistics = (2 + call.return_lse) * accumulator
        # For each direction: (messages, bytes for each row and head) of queries, and of results.
        sizes = {
            "forward": (1, s.dim * element, partial + accumulator),
            "backward": (3, (s.dim + s.value_dim) * element + statistics, s.dim * accumulator),
        }
        rows, groups = [], len(head_groups(call))
        for direction, (tensors, query, result) in sizes.items():
            for step in range(1, call.ranks):
                host, guest = (rank + step) % call.ranks, (rank - step) % call.ranks
                away, here = call.visitors(rank, host), call.visitors(guest, rank)
                messages = groups if are_packed(call, away) else tensors
                sent = (host, away, messages, query), (guest, here, groups, result)
                for peer, slices, count, size in sent:
                    total = slices.query_rows * s.batch * s.heads * size
                    rows.append(Traffic(direction, step, peer, count, total))
        return rows


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

    Messages: what travels to a peer is one, and so are its results. Only of rows that are one range
    are q, dout and the statistics of backward sent apart, without a copy. Ranks with many rows send
    their heads in groups, each of which hides under the one before: g of them, one for each 4,096
    of the B·T rows of the longest rank, and at most Hkv.

    Memory beside inputs and results, in bytes, for T local rows of which all see keys of every
    rank: two blocks of a peer's queries, with one more of those that leave if they are copied (c =
    1, else 0), and three of results: one that leaves, one that returns, and one that is computed
    or merged. Only what stays grows with the rows.

    * forward: B·T·Hq·(4·Dv + 8 + ((2 + c)·D·b + 3·(Dv·w + 4) + 8)/g);
    * backward: B·T·Hq·(4·D + 16 + ((2 + c)·((D + Dv)·b + 8) + 12·D)/g), and dk and dv in fp32.

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
