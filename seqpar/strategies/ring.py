"""Ring attention: queries stay, keys and values travel.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023), section 3; with the zigzag layout, work is even
under a causal mask. At step s a rank computes with the key rows of the rank s places behind it while those of step s + 1
arrive. They come straight from their owner, and only the rows that its queries see: a relay would carry rows through ranks
that have no use for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from seqpar.attend import Gradients, Upstream, attend_backward, attend_hops
from seqpar.comm import Comm
from seqpar.strategies.base import Attention, Strategy
from seqpar.strategies.blocks import Returns, post_keys
from seqpar.strategies.call import Call


class Ring(Strategy):
    name = "ring"

    def forward(self, comm: Comm, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        hops = [call.slices(comm.rank, (comm.rank - step) % comm.size) for step in range(comm.size)]
        return *attend_hops(q, _travelling(comm, call, k, v), hops, call.scoring, call.sinks), []

    def backward(
        self, comm: Comm, call: Call, dout: Tensor, dlse: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = residuals
        up = Upstream.of(dout, dlse, out, lse, call.sinks)
        total, returns = Gradients.zeros(q, k, v), None
        for step, (k_block, v_block) in enumerate(_travelling(comm, call, k, v)):
            peer = (comm.rank - step) % comm.size
            gradients = total if step == 0 else total.beside(k_block, v_block)
            attend_backward(up, q, k_block, v_block, call.slices(comm.rank, peer), gradients, call.scoring)
            if returns is not None:
                returns.add_to(total)
            if step > 0:
                returns = Returns(comm, call, gradients, to=[peer], source=[(comm.rank + step) % comm.size], step=step)
        if returns is not None:
            returns.add_to(total)
        return total.dq, total.dk, total.dv

    def areas(self, call: Call, ranks: int, rank: int, heads: int) -> list[int]:
        return [call.slices(rank, (rank - step) % ranks).area * heads for step in range(ranks)]


def _travelling(comm: Comm, call: Call, k: Tensor, v: Tensor) -> Iterator[Sequence[Tensor]]:
    """k and v step by step, this rank's own first. The next step's exchange is posted before this one's compute."""
    block: Sequence[Tensor] = (k, v)
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        arriving = post_keys(comm, call, k, v, to=[to], source=[source], step=step)
        yield block
        block = arriving.wait()
    yield block


class RingAttention(Attention):
    __doc__ = (
        (Attention.__doc__ or "")
        + """
    Ring sends keys and values, in P − 1 steps, each posted before the compute that it hides under.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D + Dv) and b bytes an
    element: forward Σ n(p, r)·S·b over the other ranks p; backward as much again, and Σ n(r, p)·S·4 (8 for fp64), since
    each rank returns its fp32 contribution to dk and dv straight to the owner, who sums them in the order of the steps.
    Memory: this rank's tensors and at most two blocks of a peer's keys and values.

    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), section 3.
    """
    )

    strategy = Ring
