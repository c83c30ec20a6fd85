"""The base class of strategies whose passes have two parts: posting, and computing.

Between the two parts, while messages travel, a model can compute another batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy

P = TypeVar("P")  # the messages of a pass that has begun


@dataclass(frozen=True)
class SplitStrategy(Strategy, Generic[P]):
    """A strategy that first posts all messages that need no other message, without waiting."""

    keeps_operands: ClassVar[bool] = True

    def post(self, comm: Comm, call: ResolvedCall, operands: Operands) -> P:
        """Post the messages of a forward."""
        raise NotImplementedError

    def complete(self, posted: P, call: ResolvedCall, operands: Operands) -> ForwardResult:
        """Return the result of a forward whose messages are posted."""
        raise NotImplementedError

    def post_gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> P:
        """Post the messages of a backward; `residuals` come from forward's result."""
        raise NotImplementedError

    def complete_gradients(
        self,
        posted: P,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> Gradients:
        """Return dq, dk and dv of a backward whose messages are posted."""
        raise NotImplementedError

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        return self.complete(self.post(comm, call, operands), call, operands)

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        sinks: Tensor | None,
        residuals: list[Tensor],
    ) -> Gradients:
        q, k, v, out, lse, *kept = residuals
        output = OutputGradient.of(dout, dlse, out, lse, sinks)
        return self._both(comm, call, output, Operands(q, k, v, sinks), kept)

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
    ) -> Gradients:
        return self._both(comm, call, output, operands, [])

    def _both(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> Gradients:
        posted = self.post_gradients(comm, call, output, operands, residuals)
        return self.complete_gradients(posted, call, output, operands, residuals)
