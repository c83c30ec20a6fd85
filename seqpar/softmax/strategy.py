"""The base class of strategies of softmax attention: what moves between ranks, and what it costs.

Legend: B batch, T_local and Tkv_local this rank's query and key tokens, Hq query heads, Hkv KV
heads, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from seqpar.attention.module import NO_OPTION
from seqpar.attention.operands import digest_of_call
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm
from seqpar.core.traffic import Traffic
from seqpar.layout.handle import key_of
from seqpar.softmax.call import CallArguments, Operands, ResolvedCall
from seqpar.softmax.compute.alibi import described_slopes
from seqpar.softmax.compute.partial import OutputGradient

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv, like q, k and v


class ForwardResult(NamedTuple):
    """What a strategy's forward returns.

    Attributes:
        out: (B, T_local, Hq, Dv), in q's dtype.
        lse: (B, T_local, Hq), fp32 (fp64 for fp64).
        residuals: the tensors that backward is given; if there are none, q, k, v, out and lse. Of
            a strategy that `keeps_beside` it is given these five first, and then the residuals.
    """

    out: Tensor
    lse: Tensor
    residuals: list[Tensor]


@dataclass(frozen=True)
class Strategy:
    """What moves between ranks, forward and backward.

    Its fields are its options, and `str()` must show all of them: modules of the same string on one
    group share a BoundStrategy. q is (B, T_local, Hq, D), k (B, Tkv_local, Hkv, D), v (B,
    Tkv_local, Hkv, Dv).
    """

    name: ClassVar[str]
    routable: ClassVar[bool] = True
    keeps_beside: ClassVar[bool] = False  # see `ForwardResult`
    finds_max_logits: ClassVar[bool] = True  # whether scores are computed in this process
    # Whether tiles are anchored at document positions, and bits the same on any number of ranks.
    anchored: bool = field(default=False, kw_only=True, metadata=NO_OPTION)

    def anchor(self) -> Self:
        """Return the same strategy, anchored; raise a ValueError if it cannot be."""
        expected = f"deterministic must be True or False with {self.name!r}"
        raise ValueError(f'{expected}, got "ranks", which ring, all_gather and ulysses take')

    def check(self, call: ResolvedCall) -> None:
        """Raise a ValueError that names an option with which the call cannot be computed."""

    def agreed(self, call: ResolvedCall) -> dict[str, Any]:
        """Return what, besides the call and the options, must be the same on all ranks."""
        return {}

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        """Return the attention of this rank's queries over the keys of all ranks."""
        raise NotImplementedError

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        sinks: Tensor | None,
        residuals: list[Tensor],
    ) -> Gradients:
        """Return dq, dk and dv of this rank's tokens, in the accumulator's dtype or in theirs.

        dout is (B, T_local, Hq, Dv), and dlse (B, T_local, Hq), or None if lse has no gradient.
        """
        q, k, v, out, lse = residuals
        output = OutputGradient.of(dout, dlse, out, lse, sinks, self.anchored)
        return self.gradients(comm, call, output, Operands(q, k, v, sinks))

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
    ) -> Gradients:
        """Return dq, dk and dv as `backward` does, from what flows into this rank's output."""
        raise NotImplementedError

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        """Return the area that a rank computes in each step of forward.

        An area is the number of (query, key) pairs that see each other, times query heads.
        """
        raise NotImplementedError

    def backward_areas(self, call: ResolvedCall, rank: int) -> list[int]:
        """Return the area that a rank computes in each step of backward."""
        return self.areas(call, rank)

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        """Return what a rank sends, by pass, step and peer, from geometry alone.

        It must equal what `forward` and `backward` send. Entries of 0 bytes do not count.
        """
        raise NotImplementedError

    def merged_size(self, ranks: int) -> int:
        """Return how many consecutive ranks are merged, each computing with the tokens of all.

        `ranks` is how many there are in the group.
        """
        return 1

    def empty_residuals(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int
    ) -> list[Tensor]:
        """Return empty tensors like forward's residuals, with which torch.compile traces.

        `tokens` and `kv_tokens` are how many this rank computes with, as in `CallArguments`.
        """
        return []


def describe(
    comm: Comm,
    bound: BoundStrategy[Any],
    arguments: CallArguments,
    call: ResolvedCall,
    device: torch.device,
    sinks: Tensor | None,
    decodes: bool = False,
) -> None:
    """Have the headers of a call's messages carry a digest of its arguments.

    With `decodes` the layout of queries differs between ranks, and their documents are compared.
    """
    if not comm.has_headers(device):
        return
    slopes = arguments.alibi_slopes

    def described(canonical: bool) -> dict[str, Any]:
        names = call.shape.described() | arguments.shared(call.has_sinks, canonical)
        if decodes:
            del names["layout"]  # which has all queries on this rank
            names["cu_seqlens"] = call.layout.cu_seqlens.tolist()
        names |= {"strategy": str(bound.strategy), "routing": str(bound.routing)}
        try:
            return names | bound.strategy.agreed(call)
        except (ValueError, TypeError):  # a wrong backward plan, which backward raises
            return names

    kv_key = None if call.kv_layout is call.layout else key_of(arguments.kv_layout.numpy())
    key = (
        decodes,
        comm.rank,
        kv_key,
        call.shape,
        arguments.masking.contents(),
        sinks is not None,
        slopes is not None,
        arguments.settings(),
    )
    digest = digest_of_call(call.layout, key, described)
    comm.digest = digest.extended(sinks=sinks, alibi_slopes=slopes)


def agreed(
    bound: BoundStrategy[Any],
    arguments: CallArguments,
    operands: Operands,
    canonical: bool,
) -> dict[str, Any]:
    """Return what all ranks must agree on, by the names that users know.

    Unless it is to be `canonical`, equal layouts that were made in different ways differ.
    """
    shape, has_sinks = operands.shape, operands.sinks is not None
    described = shape.described() | arguments.shared(has_sinks, canonical)
    described |= described_slopes(arguments.alibi_slopes)
    try:
        call = arguments.to_call(bound.comm, shape, has_sinks)
        return described | bound.strategy.agreed(call)
    except (ValueError, TypeError):  # which `resolve` has raised
        return described
