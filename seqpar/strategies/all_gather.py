"""AllGather attention: the keys and values that a rank needs, all at once.

The context parallelism of "The Llama 3 Herd of Models" (2024), section 3.3.2, and the softmax half
of LASP-2H (Sun et al., "LASP-2", 2025, section 3.3). A rank receives only the rows that its queries
see, straight from their owners. They arrive while it computes with its own keys; then it computes
with all the others at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.layout.blocks import Blocks
from seqpar.softmax.attend import attend_backward, attend_blocks
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.key_exchange import (
    GradientReturn,
    keys_traffic,
    post_keys,
    return_traffic,
)
from seqpar.softmax.module import Attention
from seqpar.softmax.partial import Gradients, OutputGradient
from seqpar.softmax.strategy import ForwardResult, Strategy
from seqpar.strategies.registry import register
from seqpar.traffic import Traffic


@dataclass(frozen=True)
class AllGather(Strategy):
    """Keys and values are sent to all ranks that need them, at once."""

    name = "all_gather"

    def forward(
        self, comm: Comm, call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor
    ) -> ForwardResult:
        peers, label = comm.peers, "all_gather forward"
        arriving = post_keys(comm, call, k, v, to=peers, source=peers, label=label)
        blocks = (block() for block in (lambda: (k, v), arriving.wait))
        own, others = call.slices(comm.rank, comm.rank), call.slices_over(comm.rank, peers)
        slices = call.once("all_gather blocks", lambda: Blocks((own, others)))
        out, lse = attend_blocks(q, blocks, slices, call.options, call.sinks)
        return ForwardResult(out, lse, [])

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        residuals: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = residuals
        peers, label = comm.peers, "all_gather backward"
        output = OutputGradient.of(dout, dlse, out, lse, call.sinks)
        total = Gradients.zeros(q, k, v)
        arriving = post_keys(comm, call, k, v, to=peers, source=peers, label=label)
        own_slices = call.slices(comm.rank, comm.rank)
        attend_backward(output, q, k, v, own_slices, total, call.options)
        k_block, v_block = arriving.wait()
        gradients = total.with_new_kv(k_block, v_block)
        slices = call.slices_over(comm.rank, peers)
        attend_backward(output, q, k_block, v_block, slices, gradients, call.options)
        returning = GradientReturn(comm, call, gradients, to=peers, source=peers, label=label)
        returning.add_to(total)
        return total.dq, total.dk, total.dv

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        slices = call.slices(rank, rank), call.slices_over(rank, call.others(rank))
        return [part.area * call.shape.heads for part in slices]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        rows = []
        for peer in call.others(rank):
            rows += [keys_traffic(call, x, 0, rank, peer) for x in ("forward", "backward")]
            rows.append(return_traffic(call, 0, rank, peer))
        return rows


@register
class AllGatherAttention(Attention):
    """Softmax attention whose keys and values travel in one exchange.

    It is posted before the compute over a rank's own keys. See `Attention` for the call, which all
    strategies share.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D +
    Dv) and b the bytes of an element: forward Σ n(p, r)·S·b over the other ranks p; backward the
    same again, and Σ n(r, p)·S·4 (8 for fp64), since the fp32 contributions to dk and dv go to the
    rows' owner, which sums them in rank order. `traffic` says how many that is.

    Memory: all keys and values that this rank's queries see, where Ring holds two blocks of them;
    in return there are fewer messages and larger kernels.

    "The Llama 3 Herd of Models" (2024), section 3.3.2; Sun et al., "LASP-2" (2025), section 3.3.
    """

    strategy = AllGather
