"""AllGather attention: the keys and values that a rank needs, all at once.

The context parallelism of "The Llama 3 Herd of Models" (2024), section 3.3.2, and the softmax half of LASP-2H (2025),
section 3.3. A rank receives only the rows that its queries see, straight from their owners. They arrive under the
compute over its own keys; then one attend covers all the others.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.attend import Gradients, Upstream, attend_backward, attend_hops
from seqpar.comm import Comm
from seqpar.strategies.base import Attention, Strategy
from seqpar.strategies.blocks import Returns, post_keys
from seqpar.strategies.call import Call


class AllGather(Strategy):
    name = "all_gather"

    def forward(self, comm: Comm, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        others = comm.others
        arriving = post_keys(comm, call, k, v, to=others, source=others)
        blocks = (block() for block in (lambda: (k, v), arriving.wait))
        hops = [call.slices(comm.rank, comm.rank), call.slices_over(comm.rank, others)]
        return *attend_hops(q, blocks, hops, call.scoring, call.sinks), []

    def backward(
        self, comm: Comm, call: Call, dout: Tensor, dlse: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = residuals
        up, total = Upstream.of(dout, dlse, out, lse, call.sinks), Gradients.zeros(q, k, v)
        others = comm.others
        arriving = post_keys(comm, call, k, v, to=others, source=others)
        attend_backward(up, q, k, v, call.slices(comm.rank, comm.rank), total, call.scoring)
        k_block, v_block = arriving.wait()
        gradients = total.beside(k_block, v_block)
        attend_backward(up, q, k_block, v_block, call.slices_over(comm.rank, others), gradients, call.scoring)
        Returns(comm, call, gradients, to=others, source=others).add_to(total)
        return total.dq, total.dk, total.dv

    def areas(self, call: Call, ranks: int, rank: int, heads: int) -> list[int]:
        others = [peer for peer in range(ranks) if peer != rank]
        slices = call.slices(rank, rank), call.slices_over(rank, others)
        return [part.area * heads for part in slices]


class AllGatherAttention(Attention):
    __doc__ = (
        (Attention.__doc__ or "")
        + """
    AllGather sends keys and values, in one exchange posted before the compute over a rank's own keys.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D + Dv) and b bytes an
    element: forward Σ n(p, r)·S·b over the other ranks p; backward as much again, and Σ n(r, p)·S·4 (8 for fp64), since
    the fp32 contributions to dk and dv go to their owner, who sums them in rank order. Memory: all keys and values that
    this rank's queries see, where Ring holds two blocks of them; in return it has fewer messages and larger kernels.

    "The Llama 3 Herd of Models" (2024), section 3.3.2; Sun et al., "LASP-2" (2025), section 3.3.
    """
    )

    strategy = AllGather
