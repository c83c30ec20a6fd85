"""Ring attention: queries stay, keys and values travel.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023),
section 3; with the zigzag layout, work is even under a causal mask. At step s a rank computes with
the key rows of the rank s places before it, while those of step s + 1 arrive. Unlike in the paper
they come straight from their owner, and only the rows that its queries see: passed from rank to
rank, rows would go through ranks that have no use for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
class Ring(Strategy):
    """Keys and values are sent, those of one rank in each step."""

    name = "ring"

    def forward(
        self, comm: Comm, call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor
    ) -> ForwardResult:
        sources = [(comm.rank - step) % comm.size for step in range(comm.size)]
        slices = call.once(
            "ring blocks", lambda: Blocks(tuple(call.slices(comm.rank, x) for x in sources))
        )
        blocks = _travelling_keys(comm, call, k, v, "ring forward")
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
        label = "ring backward"
        output = OutputGradient.of(dout, dlse, out, lse, call.sinks)
        total, returning = Gradients.zeros(q, k, v), None
        blocks = _travelling_keys(comm, call, k, v, label)
        for step, (k_block, v_block) in enumerate(blocks):
            peer = (comm.rank - step) % comm.size
            slices = call.slices(comm.rank, peer)
            gradients = total if step == 0 else total.with_new_kv(k_block, v_block)
            attend_backward(output, q, k_block, v_block, slices, gradients, call.options)
            if returning is not None:
                returning.add_to(total)
            if step > 0:
                source = [(comm.rank + step) % comm.size]
                returning = GradientReturn(
                    comm, call, gradients, to=[peer], source=source, label=label, step=step
                )
        if returning is not None:
            returning.add_to(total)
        return total.dq, total.dk, total.dv

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        sources = [(rank - step) % call.ranks for step in range(call.ranks)]
        return [call.slices(rank, source).area * call.shape.heads for source in sources]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        rows = []
        for step in range(1, call.ranks):
            to, source = (rank + step) % call.ranks, (rank - step) % call.ranks
            rows += [keys_traffic(call, x, step, rank, to) for x in ("forward", "backward")]
            rows.append(return_traffic(call, step, rank, source))
        return rows


def _travelling_keys(
    comm: Comm, call: ResolvedCall, k: Tensor, v: Tensor, label: str
) -> Iterator[Sequence[Tensor]]:
    """Yield k and v step by step, this rank's own first.

    The next step's exchange is posted before this one's compute.
    """
    block: Sequence[Tensor] = (k, v)
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        arriving = post_keys(comm, call, k, v, to=[to], source=[source], label=label, step=step)
        yield block
        block = arriving.wait()
    yield block


@register
class RingAttention(Attention):
    """Softmax attention whose keys and values travel, in P − 1 steps.

    Each step's messages are posted before the compute that they hide under. See `Attention` for the
    call, which all strategies share.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D +
    Dv) and b the bytes of an element: forward Σ n(p, r)·S·b over the other ranks p; backward the
    same again, and Σ n(r, p)·S·4 (8 for fp64), since each rank returns its fp32 contribution to dk
    and dv straight to the rows' owner, which sums them in the order of the steps. `traffic` says
    how many that is.

    Memory: this rank's tensors and at most two blocks of a peer's keys and values.

    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (2023), section 3.
    """

    strategy = Ring
