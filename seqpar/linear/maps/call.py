"""What a recurrent call says besides its tensors, for the operator and for transports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from seqpar.attention.backend import current_backend, refusal
from seqpar.attention.operands import (
    OperandShape,
    check_layouts,
    check_ranks_of,
    check_rows,
    naming_rank,
)
from seqpar.attention.operators import Count, schema_of
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import as_bool, as_float
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.layout.handle import from_handle, name_of, sizes_of
from seqpar.layout.layout import Layout
from seqpar.linear.call import StateCall, check_initial_state, check_scale, check_spans
from seqpar.linear.inputs import Inputs, check_gates, check_heads
from seqpar.linear.kinds import Kind
from seqpar.linear.maps.attend import RecurrentOptions
from seqpar.linear.maps.maps import elements
from seqpar.linear.routes import StateRoutes

STATE_DIMS = "H, K, V"  # of a state, for errors


class CallArguments(NamedTuple):
    """A call's arguments besides its tensors of numbers, as the operator carries them.

    `layout` is the handle of a geometry, and `strategy` the key of a BoundStrategy. `states_in` is
    how many states enter this rank's spans.
    """

    layout: Tensor
    states_in: Count
    documents: Count
    strategy: str
    backend: str
    scale: float
    return_state: bool

    @classmethod
    def of(
        cls,
        strategy: str,
        rank: int,
        layout: Layout,
        *,
        scale: float | Tensor,
        has_initial_state: bool,
        return_state: bool,
    ) -> CallArguments:
        """Make them from a user's arguments.

        This checks types, since the operator takes no others; `resolve` checks values.
        """
        check_layouts(layout=layout)
        sizes = sizes_of(layout._sizes[rank % layout.ranks])
        return cls(
            layout=layout._handle,
            states_in=sizes.spans if has_initial_state else sizes.continued,
            documents=sizes.documents,
            strategy=strategy,
            backend=current_backend("recurrent"),
            scale=as_float("scale", scale),
            return_state=as_bool("return_state", return_state),
        )

    def tensors(self) -> tuple[Tensor]:
        """Return the fields that autograd must save as tensors: the first one."""
        return (self.layout,)

    def settings(self) -> tuple[Any, ...]:
        """Return all other fields."""
        return self[1:]

    def to_call(
        self, comm: Comm, kind: Kind, shape: OperandShape, has_initial_state: bool
    ) -> ResolvedCall:
        """Return the resolved call; raise a ValueError if the layout or a number is wrong.

        What is the same in all calls of these settings is checked and made once, and kept with the
        layout.
        """
        layout = from_handle(self.layout)

        def settle() -> StateRoutes:
            check_ranks_of(comm, layout=layout)
            check_scale(self.scale, shape.dtype)
            check_spans(layout, shape, elements(kind, shape.dim, shape.value_dim), "maps")
            return StateRoutes.of(layout, True, self.return_state, has_initial_state)

        settled = layout.derived(("settled recurrent",), lambda: Memo(MAX_KEPT_SETTINGS))
        key = comm.rank, comm.size, kind, shape, has_initial_state, *self.settings()
        routes = settled(key, settle)
        options = RecurrentOptions(self.scale, self.backend)
        return ResolvedCall(comm.rank, layout, routes, shape, kind, options)

    def shared(self, initial: bool, canonical: bool) -> dict[str, Any]:
        """Return what all ranks must agree on, as the `CallArguments` of linear attention do."""
        return {
            "layout": name_of(self.layout, canonical),
            "scale": self.scale,
            "initial_state": initial,
            "return_state": self.return_state,
            "backend": self.backend,
        }


SCHEMA = schema_of(CallArguments)


@dataclass(frozen=True)
class ResolvedCall(StateCall):
    """What a transport knows of a call besides its inputs and maps.

    In `shape`, kv_heads is H, dim K and value_dim V.
    """

    kind: Kind
    options: RecurrentOptions

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        """The shape of a packed map: (B, H, e)."""
        s = self.shape
        return s.batch, s.kv_heads, elements(self.kind, s.dim, s.value_dim)

    @property
    def map_bytes(self) -> int:
        """The bytes of a span's map: of its transition and its state."""
        return math.prod(self.packed_shape) * accumulator_dtype(self.shape.dtype).itemsize


def shape_of(inputs: Inputs) -> OperandShape:
    """Return the shape of the operands, whose kv_heads is the number of states."""
    return OperandShape.of(inputs.q, inputs.k, inputs.v)._replace(kv_heads=inputs.heads)


def described(inputs: Inputs) -> dict[str, Any]:
    """Return what ranks share of the inputs, by the names that users know, for the rank check."""
    others: dict[str, Any] = {"heads of v": inputs.v.shape[2]}
    if inputs.log_decay is not None and inputs.log_decay.dim() == 1:
        others["log_decay"] = inputs.log_decay.tolist()  # constant: the same on all ranks
    return OperandShape.of(inputs.q, inputs.k, inputs.v).described() | others


def resolve(
    comm: Comm, kind: Kind, arguments: CallArguments, inputs: Inputs, initial: Tensor | None
) -> ResolvedCall:
    """Return the resolved call, if it is right and can be computed exactly.

    Otherwise raise a ValueError naming the argument, its value, what was expected and the rank.
    """
    with naming_rank(comm):
        comm.check_device("q", inputs.q.device)
        check_heads(inputs)
        shape = shape_of(inputs)
        call = arguments.to_call(comm, kind, shape, initial is not None)
        tokens = call.layout.holdings[comm.rank].tokens
        check_rows(inputs.q, inputs.k, inputs.v, tokens, tokens)
        check_gates(kind, inputs, "B, T_local")
        check_initial_state(call.layout, shape, initial, STATE_DIMS)
        if reason := refusal("recurrent", arguments.backend, inputs.q, inputs.v):
            raise ValueError(reason)
    return call
