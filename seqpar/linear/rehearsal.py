"""Find the tables of a call before it begins, and send them to the device in one copy.

A rehearsal makes the plans of a strategy's passes as for meta tensors. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.attention.rehearsal import Preparation, RehearsableCall, SilentComm, upload_once
from seqpar.comm.messages.exchange import Comm
from seqpar.core.hooks import hooks
from seqpar.layout.layout import Layout
from seqpar.linear.call import CallArguments, ResolvedCall
from seqpar.linear.inputs import Inputs
from seqpar.linear.strategy import LinearStrategy

_META = torch.device("meta")


def upload_tables(
    strategy: LinearStrategy[Any], comm: Comm, call: ResolvedCall, inputs: Inputs, backward: bool
) -> None:
    """Copy the tables of forward, and with `backward` of backward, to the inputs' device.

    Prepared tables of backward travel with them. Calls that differ only in their tensors share the
    tables, and only the first one copies them.
    """
    device = inputs.q.device
    if device.type == "cpu" or hooks.replace_compute is not None:
        return
    upload_once(_rehearsable(strategy, comm, call, device), device, backward)


def tables_of(
    strategy: LinearStrategy[Any],
    comm: Comm,
    call: ResolvedCall,
    device: torch.device,
    backward: bool,
) -> list[Tensor]:
    """Return the tables of forward, and with `backward` of backward, on the CPU.

    Plans and tables of the call are then kept with its layout.
    """
    return _rehearsable(strategy, comm, call, device).tables(device, backward)


def _rehearsable(
    strategy: LinearStrategy[Any], comm: Comm, call: ResolvedCall, device: torch.device
) -> RehearsableCall:
    key = call.rank, call.shape, strategy, comm.is_routed, call.options.backend, device
    run = partial(_request_on_meta, strategy, call, comm.is_routed)
    return RehearsableCall(call.routes.derived, key, run)


def _request_on_meta(
    strategy: LinearStrategy[Any], call: ResolvedCall, routed: bool, backward: bool
) -> None:
    comm = SilentComm(call.rank, call.routes.ranks, routed)
    call = replace(call, options=call.options.on_meta())
    inputs = empty_inputs(call.shape, call.layout.holdings[call.rank].tokens, _META)
    for direction in (False, True)[: 1 + backward]:
        strategy.request_tables(comm, call, inputs, direction)


def empty_inputs(shape: OperandShape, tokens: int, device: torch.device) -> Inputs:
    heads, dims = (shape.heads, shape.kv_heads, shape.kv_heads), (shape.dim, shape.dim)
    return Inputs(
        *(
            torch.empty(shape.batch, tokens, *sizes, dtype=shape.dtype, device=device)
            for sizes in zip(heads, (*dims, shape.value_dim), strict=True)
        )
    )


@dataclass(frozen=True, kw_only=True)
class LinearPreparation(Preparation):
    strategy: LinearStrategy[Any]
    causal: bool
    # initial_state, return_state: whether the calls begin with states, and return some
    initial_state: bool
    return_state: bool

    def _build(self, comm: Comm, layout: Layout) -> None:
        arguments = CallArguments(
            layout=layout._handle, states_in=0, documents=0,  # only traced graphs need these
            strategy="", backend=self.backend, causal=self.causal, scale=1.0,
            return_state=self.return_state,
        )  # fmt: skip
        inputs = empty_inputs(self.shape, 0, _META)
        call = self.strategy.to_call(comm, arguments, inputs, self.initial_state)
        tables_of(self.strategy, comm, call, self.device, self.backward)
