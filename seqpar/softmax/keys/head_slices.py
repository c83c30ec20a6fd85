"""The groups in which heads travel and are computed on ranks with many rows.

There is one group for each 4,096 rows of the documents that two ranks share, on average. Blocks
that travel then stop growing with the rows, and the work on a group still keeps a GPU busy for
longer than the host needs to post the next group. Groups of rows would need their own tables.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from seqpar.attention.operands import OperandShape
from seqpar.layout.geometry import Geometry
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, PackedGradients
from seqpar.softmax.compute.sums import Sums

_ROWS_PER_GROUP = 4096


class HeadSlices(NamedTuple):
    """A group of heads: query heads, and the KV heads that they share."""

    queries: slice
    keys: slice

    def call(self, call: ResolvedCall) -> ResolvedCall:
        """Return the call with the slopes and max logits of these heads."""
        max_logits = None if call.max_logits is None else call.max_logits.of_heads(self.queries)
        options = call.options.of_heads(self.queries)
        return replace(call, options=options, max_logits=max_logits)

    def operands(self, operands: Operands) -> Operands:
        q, k, v, sinks = operands
        sinks = None if sinks is None else sinks[self.queries]
        return Operands(q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys], sinks)

    def output(self, output: OutputGradient) -> OutputGradient:
        dout, lse = (x[:, :, self.queries] for x in (output.dout, output.lse))
        out, dlse, delta = (
            None if x is None else x[:, :, self.queries]
            for x in (output.out, output.dlse, output.delta)
        )
        return OutputGradient(dout, out, lse, dlse, delta)

    def gradients(self, total: PackedGradients) -> PackedGradients:
        keys = (x[:, :, self.keys] for x in total.keys.tensors)
        return PackedGradients(Sums.of(total.dq[:, :, self.queries]), Sums.of(*keys))


def head_groups(shape: OperandShape, layout: Geometry) -> list[HeadSlices]:
    """Return the groups of heads, the same on all ranks, at most one per KV head.

    Where ranks share few documents, messages are short, and groups would only add to their latency.
    """
    groups = max(1, min(shape.kv_heads, layout.most_tokens * shape.batch // _ROWS_PER_GROUP))
    if groups > 1:
        groups = max(1, min(groups, layout.shared_tokens * shape.batch // _ROWS_PER_GROUP))
    edges = pairwise(i * shape.kv_heads // groups for i in range(groups + 1))
    shared = shape.heads // max(shape.kv_heads, 1)  # inside USP a rank may have no heads
    return [HeadSlices(slice(a * shared, b * shared), slice(a, b)) for a, b in edges]
