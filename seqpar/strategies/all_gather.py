"""AllGather attention: the keys and values that a rank needs, all at once.

The context parallelism of "The Llama 3 Herd of Models" (2024), section 3.3.2, and the softmax half
of LASP-2H (Sun et al., "LASP-2", 2025, section 3.3). A rank receives only the rows that its queries
see, straight from their owners. All exchanges are posted first. A rank computes with its own keys,
and then with those of each exchange when they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.softmax.attend import attend_blocks
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.key_exchange import attend_backward_to_all, travelling_keys
from seqpar.softmax.key_plan import Distances, KeyPlan, key_areas, key_traffic
from seqpar.softmax.module import Attention
from seqpar.softmax.partial import OutputGradient
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
        plan = self.plan(call)
        keys = travelling_keys(comm, plan, k, v, "all_gather forward", ahead=call.ranks)
        out, lse = attend_blocks(q, keys, plan.blocks, call.options, call.sinks)
        return ForwardResult(out, lse, [])

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        label = "all_gather backward"
        return attend_backward_to_all(
            comm, call, self.plan(call), output, (q, k, v), label, ahead=call.ranks
        )

    def plan(self, call: ResolvedCall) -> KeyPlan:
        """Return what travels in which step, decided once for a layout and a mask."""
        return call.once("all_gather plan", lambda: KeyPlan.of(call, distances(call.ranks)))

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        return key_areas(call, rank, distances(call.ranks))

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        return key_traffic(call, rank, distances(call.ranks))


def distances(ranks: int) -> Distances:
    """Return from how far behind a rank receives keys in each exchange, so that compute hides it.

    The exchanges are of 1, 2, 4, … ranks' keys, and at the end of …, 4, 2, 1. So the first one's
    arrive, and the last one's gradients return, while a rank computes with its own; between them,
    the compute with the keys of n ranks hides an exchange with 2n.
    """
    rising: list[int] = []
    middle = ranks - 1
    while middle >= 2 << len(rising):
        rising.append(1 << len(rising))
        middle -= 2 * rising[-1]
    sizes = [*rising, middle, *reversed(rising)]
    if rising and 2 * middle <= rising[-1]:  # too few for an exchange of their own
        sizes = [*rising[:-1], rising[-1] + middle, *reversed(rising)]
    edges = accumulate(sizes, initial=1)
    return [range(first, stop) for first, stop in pairwise(edges) if stop > first]


@register
class AllGatherAttention(Attention):
    """Softmax attention whose keys and values travel at once.

    That is in about 2·log₂ P exchanges, all posted before the compute over a rank's own keys. In
    backward this compute is cut in two, of which one half hides the first keys and the other the
    last gradients. See `Attention` for the call, which all strategies share.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D +
    Dv) and b the bytes of an element: forward Σ n(p, r)·S·b over the other ranks p; backward the
    same again, and Σ n(r, p)·S·4 (8 for fp64), since the fp32 contributions to dk and dv go to the
    rows' owner, which sums them in the order of the exchanges. `traffic` says how many that is.
    Messages: one to each peer of keys with values, and in backward also one of their gradients.

    Memory: all keys and values that this rank's queries see, where Ring holds two blocks of them;
    in backward fp32 gradients of those of two exchanges, and what comes for this rank's. In return
    there are fewer waits and larger kernels.

    "The Llama 3 Herd of Models" (2024), section 3.3.2; Sun et al., "LASP-2" (2025), section 3.3.
    """

    strategy = AllGather
