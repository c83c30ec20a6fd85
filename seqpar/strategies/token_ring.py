"""TokenRing attention: keys and values stay, queries travel, and what they see comes home the other way at the same time.

Liu et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional Communication" (2024),
section 3. At step s rank r computes for the queries of rank r − s, while those of the next step arrive and the results of the
step before leave for their owner. The paper has no backward: here (q, dout, lse, delta) travel, dq returns, dk and dv stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.attend import Gradients, Partial, Upstream, accumulator_dtype, attend, attend_backward, attend_hops
from seqpar.comm import Comm
from seqpar.geometry import Ints
from seqpar.mask import Slices
from seqpar.strategies.base import Attention, Strategy
from seqpar.strategies.blocks import Block, parts_of_rows, take_rows
from seqpar.strategies.call import DTYPES, Call

Visit = Callable[[list[Tensor], Slices], Sequence[Tensor]]
Kind = tuple[tuple[int, ...], torch.dtype]  # of a result: its shape after (n, B), and its dtype


@dataclass(frozen=True)
class TokenRing(Strategy):
    name = "token_ring"
    partial_dtype: torch.dtype | None = None  # of the outputs that return; None: the accumulator's

    def __post_init__(self) -> None:
        if self.partial_dtype not in (None, *DTYPES):
            raise ValueError(f"partial_dtype must be None or one of {DTYPES}, got {self.partial_dtype!r}")

    def forward(self, comm: Comm, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        home, exact = Partial.nothing(q, v), accumulator_dtype(q.dtype)
        on_wire = self.partial_dtype or exact

        def own() -> None:
            attend(q, k, v, call.slices(comm.rank, comm.rank), home, call.scoring)

        def visit(visitors: list[Tensor], slices: Slices) -> Sequence[Tensor]:
            return attend_hops(visitors[0], [(k, v)], [slices], call.scoring, None, on_wire)

        kinds = [((q.shape[2], v.shape[3]), on_wire), ((q.shape[2],), exact)]
        for rows, results in _visits(comm, call, [q], kinds, own, visit):
            for at_home, part in parts_of_rows(rows, q.device):
                home.merge(at_home, *(x[:, part] for x in results))
            del results  # before the next step is computed
        return *home.finish(call.sinks, q.dtype), []

    def backward(
        self, comm: Comm, call: Call, dout: Tensor, dlse: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = residuals
        dlse = call.shared_dlse(dlse, dout)
        up, total = Upstream.of(dout, dlse, out, lse, call.sinks), Gradients.zeros(q, k, v)

        def own() -> None:
            attend_backward(up, q, k, v, call.slices(comm.rank, comm.rank), total, call.scoring)

        def visit(visitors: list[Tensor], slices: Slices) -> Sequence[Tensor]:
            q_block, dout_block, rest = visitors
            lse_block, delta, *dlse_block = rest.unbind(-1)
            theirs = Upstream(dout_block, None, lse_block, dlse_block[0] if dlse_block else None, delta)
            gradients = Gradients(q_block.new_zeros(q_block.shape, dtype=total.dq.dtype), total.dk, total.dv)
            attend_backward(theirs, q_block, k, v, slices, gradients, call.scoring)
            return [gradients.dq]

        statistics = torch.stack([up.lse, up.with_delta(), *([] if dlse is None else [dlse])], -1)
        kinds = [(tuple(q.shape[2:]), total.dq.dtype)]
        for rows, (dq,) in _visits(comm, call, [q, up.dout, statistics], kinds, own, visit):
            for at_home, part in parts_of_rows(rows, q.device):
                total.dq[:, at_home] += dq[:, part]
            del dq
        return total.dq, total.dk, total.dv

    def areas(self, call: Call, ranks: int, rank: int, heads: int) -> list[int]:
        return [call.visitors((rank - step) % ranks, rank).area * heads for step in range(ranks)]


def _visits(
    comm: Comm, call: Call, travelling: Sequence[Tensor], kinds: Sequence[Kind], own: Callable[[], None], visit: Visit
) -> Iterator[tuple[Ints, list[Tensor]]]:
    """Let this rank's rows visit all others: (rows, results), in the order of the steps, as results come home.

    `travelling` are (B, T, …) tensors, of which the rows that see any key of a peer go there. `own` computes for those that
    stay, at step 0, and `visit` for those that are here. While step s is computed, the queries of step s + 1 are under way
    and, in the other direction, the results of step s − 1.
    """
    rank, ranks, batch = comm.rank, comm.size, travelling[0].shape[0]

    def post_queries(step: int) -> Block:
        away, here = call.visitors(rank, (rank + step) % ranks), call.visitors((rank - step) % ranks, rank)
        sends = [((rank + step) % ranks, take_rows(x, away.sent_rows)) for x in travelling]
        arriving = [x.new_empty((here.queries, batch, *x.shape[2:])) for x in travelling]
        return Block(arriving, comm.exchange(sends, [((rank - step) % ranks, x) for x in arriving], step))

    def post_results(step: int, results: Sequence[Tensor]) -> tuple[Ints, Block]:
        away = call.visitors(rank, (rank + step) % ranks)
        sends = [((rank - step) % ranks, x.transpose(0, 1).contiguous()) for x in results]
        shape = away.queries, batch
        arriving = [travelling[0].new_empty((*shape, *tail), dtype=dtype) for tail, dtype in kinds]
        return away.sent_rows, Block(arriving, comm.exchange(sends, [((rank + step) % ranks, x) for x in arriving], step))

    here: list[Tensor] = []
    returning: tuple[Ints, Block] | None = None
    for step in range(ranks):
        arriving = post_queries(step + 1) if step + 1 < ranks else None
        if step == 0:
            own()
        else:
            slices = call.visitors((rank - step) % ranks, rank)
            results = visit(here, slices) if slices.queries else []
            here = []
            home = (returning[0], returning[1].wait()) if returning else None
            returning = post_results(step, results)
            del results  # before the next step is computed
            if home:
                yield home
            home = None
        here = arriving.wait() if arriving else []
    if returning:
        yield returning[0], returning[1].wait()


class TokenRingAttention(Attention):
    __doc__ = (
        (Attention.__doc__ or "")
        + """
    TokenRing sends queries one way and their partial results (out, lse) the other way at the same time; keys and values,
    and their gradients, stay. Partials are merged once each, at home, in fp32, in the order of the steps.

    `partial_dtype` is what partial outputs travel in: by default the accumulator's, fp32 (fp64 for fp64), which adds no error
    and takes twice the bytes of bf16. With torch.bfloat16 and bf16 inputs each partial is rounded once more, as finely as the
    result: the RMS error of out becomes at most √2 times that of one device; measured 1.08 to 1.24 times under a causal mask
    and 1.23 to 1.40 without (P = 2 to 16, N = 1,024), at most 1.02 for the gradients. With fp32 inputs out's becomes some
    3,000 times that of one device. lse, and dq in backward, always travel in the accumulator's dtype.

    Bytes sent by rank r, with m(r, p) the query rows of r that see any key of p, b bytes an element of q, w of a partial
    output, e = 4 (8 for fp64), over the other ranks p: forward one way Σ m(r, p)·B·Hq·D·b, the other Σ m(p, r)·B·Hq·(Dv·w + e);
    backward one way Σ m(r, p)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), the other Σ m(p, r)·B·Hq·D·e. Memory: two
    blocks of a peer's queries and three of results: what leaves, what comes, and what is computed or merged.

    When it beats Ring: with as many KV heads as query heads, where both directions are free at the same time on links of
    their own, as on a full mesh (to rank r + s + 1 go queries, to rank r − s + 1 results). Behind one NIC a host all that
    leaves shares the port, and nothing is gained. Bytes a token in each direction, with D = Dv and 2-byte
    elements: Ring's forward sends 4·Hkv·D one way and nothing the other, TokenRing's 2·Hq·D and Hq·(w·D + 4); so for Hq = Hkv a
    link carries half of Ring's bytes with w = 2, and as much with w = 4. Ring's backward sends 4·Hkv·D one way and 8·Hkv·D
    the other, TokenRing's Hq·(4·D + 8) and 4·Hq·D. With GQA, Hq ≥ 2·Hkv, Ring sends less or as much; use Ring.

    Liu et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional Communication"
    (2024), section 3.
    """
    )

    strategy = TokenRing
