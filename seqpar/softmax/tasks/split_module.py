"""The base class of attention modules whose calls can begin and finish separately."""

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
    """A call whose messages are under way. Pass it to the module's `finish`."""

    ticket: Tensor
    operands: Operands
    arguments: CallArguments
    heads: HeadPlacement
    unbatched: bool


class SplitAttention(Attention):
    """Attention whose calls can be made in two parts, with other work between them.

    While the messages of one call travel, the model can compute another batch: two nano-batches
    alternate. `forward` makes both parts, one after the other.
    """

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Unpack[CallKeywords]
    ) -> BegunCall:
        """Post the messages of a call and return immediately.

        Arguments and errors are the same as in a call. Pass the result to `finish`, once. Until
        then, do not change q, k and v in place. All ranks begin and finish their calls in the same
        order. Autograd runs the two parts in the opposite order: the backward of `finish` posts,
        and the backward of `begin` computes, so other work lies between them again.
        """
        operands, arguments, heads = self._inputs(q, k, v, layout, **options)
        (ticket,) = torch.ops.seqpar.attention_begin(*operands, *arguments)
        return BegunCall(ticket, operands, arguments, heads, q.dim() == 3)

    def finish(self, begun: BegunCall) -> Tensor | tuple[Tensor, ...]:
        """Return the result of a call that has begun: out, or a tuple that begins with out."""
        if not isinstance(begun, BegunCall):
            raise ValueError(f"begun must be what begin returned, got {shown(begun)}")
        q, k, v, sinks = begun.operands
        out, lse, _, *more = torch.ops.seqpar.attention_finish(
            begun.ticket, sinks, q, k, v, *begun.arguments
        )
        return as_result(out, lse, begun.arguments, begun.heads, begun.unbatched, *more[:1])
