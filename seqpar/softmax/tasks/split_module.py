"""The module of attention whose calls can be made in two parts."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

import seqpar.softmax.tasks.split_flops  # noqa: F401  defines torch.ops.seqpar.attention_begin too
from seqpar.comm.dtensor import HeadPlacement
from seqpar.core.arguments import shown
from seqpar.layout.layout import Layout
from seqpar.softmax.call import CallArguments, CallKeywords, Operands
from seqpar.softmax.module import Attention
from seqpar.softmax.operator import as_result


class BegunCall(NamedTuple):
    """A call that has begun: its messages are under way. Give it to the module's `finish`."""

    ticket: Tensor
    operands: Operands
    arguments: CallArguments
    heads: HeadPlacement
    unbatched: bool


class SplitAttention(Attention):
    """Attention whose calls can be made in two parts, with other work between them.

    While the messages of one call travel, another batch can be computed with: two nano-batches go
    through a model in turns. `forward` is both parts, one after the other.
    """

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Unpack[CallKeywords]
    ) -> BegunCall:
        """Begin a call: post its messages, and return at once.

        The arguments are those of a call, and so are the errors. Give what this returns to
        `finish`, once. Between the two q, k and v must not be changed in place. All ranks begin and
        finish their calls in the same order. In backward `finish` posts, and `begin` computes;
        autograd runs them in the opposite order of forward, so other work lies between them again.
        """
        operands, arguments, heads = self._inputs(q, k, v, layout, **options)
        (ticket,) = torch.ops.seqpar.attention_begin(*operands, *arguments)
        return BegunCall(ticket, operands, arguments, heads, q.dim() == 3)

    def finish(self, begun: BegunCall) -> Tensor | tuple[Tensor, ...]:
        """Return what the call that has begun returns: out, or a tuple with out and more."""
        if not isinstance(begun, BegunCall):
            raise ValueError(f"begun must be what begin returned, got {shown(begun)}")
        q, k, v, sinks = begun.operands
        out, lse, _, *more = torch.ops.seqpar.attention_finish(
            begun.ticket, sinks, q, k, v, *begun.arguments
        )
        return as_result(out, lse, begun.arguments, begun.heads, begun.unbatched, *more[:1])
