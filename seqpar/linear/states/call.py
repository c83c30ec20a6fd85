"""What a linear attention call says besides its tensors, for the operator and for strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.backend import current_backend, refusal
from seqpar.attention.operands import (
    OperandShape,
    check_layouts,
    check_operands,
    check_ranks_of,
    naming_rank,
)
from seqpar.attention.operators import Count, schema_of
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import as_bool, as_float
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.layout.geometry import Geometry
from seqpar.layout.handle import from_handle, name_of, sizes_of
from seqpar.layout.layout import Layout
from seqpar.linear.call import StateCall, check_initial_state, check_scale, check_spans
from seqpar.linear.routes import StateRoutes, StateSums
from seqpar.linear.states.attend import LinearOptions
from seqpar.linear.states.decay import check_decay, check_values, on_device
from seqpar.linear.states.sums import Sum, SumsOnDevice

STATE_DIMS = "Hkv, D, Dv"  # of a state, for errors


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
    causal: bool
    scale: float
    return_state: bool

    @classmethod
    def of(
        cls,
        strategy: str,
        rank: int,
        layout: Layout,
        *,
        causal: bool,
        scale: float | Tensor,
        has_initial_state: bool,
        return_state: bool,
    ) -> CallArguments:
        """Make them from a user's arguments.

        This checks types, since the operator takes no others; `resolve` checks values.
        """
        check_layouts(layout=layout)
        causal = as_bool("causal", causal)
        sizes = sizes_of(layout._sizes[rank % layout.ranks])
        states_in = sizes.spans if has_initial_state else sizes.continued
        return cls(
            layout=layout._handle,
            states_in=states_in if causal else sizes.runs,
            documents=sizes.documents,
            strategy=strategy,
            backend=current_backend("linear"),
            causal=causal,
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
        self,
        comm: Comm,
        shape: OperandShape,
        has_initial_state: bool,
        log_decay: Tensor | None,
        device: torch.device,
    ) -> ResolvedCall:
        """Return the resolved call; raise a ValueError if the layout or a number is wrong.

        What is the same in all calls of these settings is checked and made once, and kept with the
        layout. `log_decay` is (Hkv,), and `device` the operands'.
        """
        layout = from_handle(self.layout)
        # Values on a GPU are not known to the host, and may be others in the next call.
        known = log_decay is None or log_decay.device.type == "cpu"
        values = None if log_decay is None else tuple(log_decay.tolist()) if known else "unknown"

        def options_of_call() -> LinearOptions:
            decay = None if log_decay is None else on_device(log_decay, device)
            return LinearOptions(self.scale, self.causal, self.backend, decay)

        def settle() -> tuple[StateRoutes, LinearOptions | None]:
            check_ranks_of(comm, layout=layout)
            self._check_numbers(layout, shape, log_decay)
            routes = StateRoutes.of(layout, self.causal, self.return_state, has_initial_state)
            return routes, options_of_call() if known else None

        settled = layout.derived(("settled",), lambda: Memo(MAX_KEPT_SETTINGS))
        key = comm.rank, comm.size, shape, has_initial_state, values, device, *self.settings()
        routes, options = settled(key, settle)
        if options is None:
            assert log_decay is not None
            check_values(log_decay)
            options = options_of_call()
        return ResolvedCall(comm.rank, layout, routes, shape, options)

    def _check_numbers(
        self, layout: Geometry, shape: OperandShape, log_decay: Tensor | None
    ) -> None:
        check_scale(self.scale, shape.dtype)
        if log_decay is not None:
            if not self.causal:
                where = "where no token is before another"
                raise ValueError(f"log_decay must be None with causal=False, {where}")
            check_values(log_decay)
        if self.causal:
            check_spans(layout, shape, shape.dim * shape.value_dim, "states")

    def shared(
        self, log_decay: Tensor | None, initial: Tensor | None, canonical: bool
    ) -> dict[str, Any]:
        """Return what all ranks must agree on, as the `CallArguments` of softmax attention do."""
        return {
            "layout": name_of(self.layout, canonical),
            "causal": self.causal,
            "scale": self.scale,
            "log_decay": None if log_decay is None else log_decay.tolist(),
            "initial_state": initial is not None,
            "return_state": self.return_state,
            "backend": self.backend,
        }


SCHEMA = schema_of(CallArguments)


@dataclass(frozen=True)
class ResolvedCall(StateCall):
    """What a strategy knows of a call besides q, k, v and the states."""

    options: LinearOptions

    def weigh(self, name: str, sums: Callable[[int], StateSums], device: torch.device) -> Sum:
        """Return `sums(rank)`, whose name tells them from others, as a function of states."""
        tables = self.once(
            (name, device), lambda: SumsOnDevice([sums(self.rank)], self.shape, device)
        )
        return self.options.derived(tables, lambda: tables.weigh(self.options))[0]


def resolve(
    comm: Comm,
    arguments: CallArguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
) -> ResolvedCall:
    """Return the resolved call, if it is right and can be computed exactly.

    Otherwise raise a ValueError naming the argument, its value, what was expected and the rank.
    """
    with naming_rank(comm):
        comm.check_device("q", q.device)
        shape = OperandShape.of(q, k, v)
        check_decay(log_decay, shape.kv_heads, q.device)
        call = arguments.to_call(comm, shape, initial is not None, log_decay, q.device)
        tokens = call.layout.holdings[comm.rank].tokens
        check_operands(q, k, v, tokens, tokens)
        check_initial_state(call.layout, shape, initial, STATE_DIMS)
        if reason := refusal("linear", arguments.backend, q, v):
            raise ValueError(reason)
    return call
