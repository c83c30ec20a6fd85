"""`Strategy`, the base class of all strategies of softmax attention.

To write a new strategy, see "Adding a strategy" in the documentation.

Letters of shapes: B is the batch, T_local and Tkv_local the numbers of this rank's query and key
tokens, Hq and Hkv the numbers of query heads and KV heads, D the head dim of q and k, and Dv the
head dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from seqpar.attention.module import NO_OPTION
from seqpar.comm.messages.comm import Comm
from seqpar.core.traffic import Traffic
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.compute.partial import OutputGradient

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv, like q, k and v


class ForwardResult(NamedTuple):
    out: Tensor  # (B, T_local, Hq, Dv), in q's dtype
    lse: Tensor  # (B, T_local, Hq), fp32 (fp64 for fp64)
    # Tensors that backward needs. If the list is empty, backward gets q, k, v, out and lse. If the
    # strategy `keeps_operands`, backward gets these five tensors and then this list.
    residuals: list[Tensor]


@dataclass(frozen=True)
class Strategy:
    """The base class of strategies: forward, backward, and predictions of work and messages.

    The fields of a strategy are its options. `str()` of a strategy must show all fields, because
    strategies on one group with the same string are treated as one strategy. Tensors are q (B,
    T_local, Hq, D), k (B, Tkv_local, Hkv, D) and v (B, Tkv_local, Hkv, Dv).
    """

    name: ClassVar[str]
    routable: ClassVar[bool] = True
    keeps_operands: ClassVar[bool] = False  # see `ForwardResult`
    finds_max_logits: ClassVar[bool] = True  # False if another process computes the scores
    # whether a call can run on meta tensors without sending messages
    rehearses: ClassVar[bool] = True
    # Whether queries are computed in tiles that begin at fixed positions of a document, so that
    # results have the same bits on any number of ranks.
    rank_invariant: bool = field(default=False, kw_only=True, metadata=NO_OPTION)

    @property
    def takes_most_documents(self) -> bool:
        """Whether the strategy can compute layouts with `most_documents`.

        If it can, its messages and launches do not depend on the documents of the layout. They are
        the messages and launches for `Geometry.worst_case`.
        """
        return False

    def to_rank_invariant(self) -> Self:
        """Return this strategy with `rank_invariant` set.

        Raise a ValueError if the strategy does not support it.
        """
        expected = f"deterministic must be True or False with {self.name!r}"
        raise ValueError(f'{expected}, got "ranks", which ring, all_gather, ulysses and usp take')

    def check(self, call: ResolvedCall) -> None:
        """Raise a ValueError that names an option if the strategy cannot compute the call."""

    def agreed(self, call: ResolvedCall) -> dict[str, object]:
        """Return the values, by name, that ranks compare for this strategy.

        Ranks raise an error if these values differ between ranks.
        """
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
        """Return dq, dk and dv of this rank's tokens.

        The gradients may be in the accumulator's dtype. The caller casts them to the dtypes of q, k
        and v. dout is (B, T_local, Hq, Dv). dlse is (B, T_local, Hq), or None if lse has no
        gradient.
        """
        q, k, v, out, lse = residuals
        output = OutputGradient.of(dout, dlse, out, lse, sinks, self.rank_invariant)
        return self.gradients(comm, call, output, Operands(q, k, v, sinks))

    def gradients(
        self, comm: Comm, call: ResolvedCall, output: OutputGradient, operands: Operands
    ) -> Gradients:
        """Return dq, dk and dv for the final output of this rank's queries and its gradient."""
        raise NotImplementedError

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        """Return the area that a rank computes in each step of forward.

        An area is the number of (query, key) pairs that the mask allows, times the number of query
        heads.
        """
        raise NotImplementedError

    def backward_areas(self, call: ResolvedCall, rank: int) -> list[int]:
        """Return the area that a rank computes in each step of backward, as `areas` does for
        forward.
        """
        return self.areas(call, rank)

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        """Return the messages that a rank sends, by direction, step and peer. Nothing is sent.

        The result must be equal to the messages that `forward` and `backward` send. Entries of 0
        bytes are ignored.
        """
        raise NotImplementedError

    def merged_size(self, ranks: int) -> int:
        """Return how many consecutive ranks exchange heads with each other, or 1 for strategies
        that do not exchange heads.

        After the exchange, a rank has some heads of the tokens of all these ranks.
        """
        return 1

    def empty_residuals(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int
    ) -> list[Tensor]:
        """Return empty tensors with the shapes of forward's residuals, for torch.compile.

        `tokens` and `kv_tokens` are those of `CallArguments`.
        """
        return []

    def rehearse(self, comm: Comm, call: ResolvedCall, backward: bool) -> None:
        """Run forward on meta tensors. With `backward`, also run backward. Nothing is computed or
        sent.
        """
        shape, rank, meta = call.shape, call.rank, torch.device("meta")
        tokens, kv_tokens = (x.holdings[rank].tokens for x in (call.layout, call.kv_layout))
        q, k, v = (
            torch.empty(shape.batch, *sizes, dtype=shape.dtype, device=meta)
            for sizes in (
                (tokens, shape.heads, shape.dim),
                (kv_tokens, shape.kv_heads, shape.dim),
                (kv_tokens, shape.kv_heads, shape.value_dim),
            )
        )
        sinks = torch.empty(shape.heads, device=meta) if call.has_sinks else None
        if (slopes := call.options.slopes) is not None:
            call = replace(call, options=call.options.with_slopes(slopes.to(meta)))
        if call.max_logits is not None:
            call = replace(call, max_logits=MaxLogits.nothing(q))
        out, lse, residuals = self.forward(comm, call, Operands(q, k, v, sinks))
        if not backward:
            return
        if not residuals or self.keeps_operands:
            residuals = [q, k, v, out, lse, *residuals]
        dlse = torch.empty_like(lse) if call.return_lse else None
        self.backward(comm, call, torch.empty_like(out), dlse, sinks, residuals)
