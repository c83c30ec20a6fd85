"""The base class of `LASP2Attention` and `RecurrentAttention`, which calls torch's operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, current_backend
from seqpar.attention.module import BoundModule
from seqpar.attention.operands import check_layouts, fold_scale, prepare_operands
from seqpar.attention.operators import refuse_tangents
from seqpar.attention.rehearsal import Preparation
from seqpar.attention.unknown_arguments import unknown_argument
from seqpar.comm.dtensor import HeadPlacement, local_heads
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_bool, check_tensor
from seqpar.layout.handle import sizes_of
from seqpar.layout.layout import Layout
from seqpar.linear.inputs import CallTensors, empty_inputs
from seqpar.linear.linear_call import (
    CARRIED,
    LinearArguments,
    LinearCall,
    batch_second,
    returned,
)
from seqpar.linear.linear_operator import LINEAR_ATTENTION
from seqpar.linear.linear_strategy import LinearStrategy


@dataclass(frozen=True, kw_only=True)
class LinearPreparation(Preparation):
    strategy: LinearStrategy[Any]
    initial_state: bool  # whether the calls have initial states
    options: dict[str, Any]  # the arguments of the calls that are not tensors

    def _call(self, comm: Comm, layout: Layout) -> LinearCall:
        arguments = CARRIED.of(
            self.options, layout=layout._handle, states_in=0, documents=0,  # for traced graphs only
            strategy="", backend=self.backend,
        )  # fmt: skip
        inputs = empty_inputs(self.shape, 0, torch.device("meta"))
        return self.strategy.to_call(comm, arguments, inputs, self.initial_state)


class LinearModule(BoundModule[LinearStrategy[Any]]):
    """Linear attention over a packed batch whose tokens are distributed over the ranks of a
    group.
    """

    strategy: ClassVar[type[LinearStrategy[Any]]]
    _decay: Literal["constant", "head", "key"] | None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        tensors, arguments, heads = self._agreed_inputs(q, k, v, layout, **options)
        out, states, *_ = LINEAR_ATTENTION(tensors, arguments)
        return returned(out, states if arguments.return_state else None, q.dim() == 4, heads)

    def _preparation(self, described: dict[str, Any], options: dict[str, Any]) -> Preparation:
        strategy, shape = self._bound.strategy, described["shape"]
        recurrent = strategy.family == "recurrent"
        if shape.heads % shape.kv_heads and not (recurrent and shape.kv_heads % shape.heads == 0):
            expected = f"a multiple {'or a divisor ' * recurrent}of kv_heads, {shape.kv_heads}"
            raise ValueError(f"heads must be {expected}, got {shape.heads}")
        initial_state = as_bool("initial_state", options.pop("initial_state", False))
        known = [x for x in CARRIED.options if x != "scale"]  # no table depends on scale
        others = {name: x for name, x in options.items() if name not in known}
        if others:
            raise unknown_argument(others, ["value_dim", "batch", "initial_state", *known])
        if recurrent and not as_bool("causal", options.get("causal", True)):
            raise ValueError("causal must be True for recurrent layers, got False")
        forced = current_backend(strategy.family)
        inputs = empty_inputs(shape, 0, described["device"])
        return LinearPreparation(
            **described,
            initial_state=initial_state,
            options=options,
            backend=strategy.default_backend(inputs) if forced == DEFAULT else forced,
        )

    def _to_call(self, tensors: CallTensors, arguments: LinearArguments) -> LinearCall:
        return LINEAR_ATTENTION.resolve(self._bound, tensors, arguments)

    def _operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> tuple[CallTensors, LinearArguments, HeadPlacement]:
        strategy, decay_heads = self._bound.strategy, {"head": -1, "key": -2}
        of_states = strategy.family == "linear"
        head_dims = {
            "q": (q, -2),
            "k": (k, -2),
            "v": (v, -2),
            "log_decay": (options.get("log_decay"), decay_heads.get(self._decay or "", 0)),
            "beta": (options.get("beta"), -1),
            "initial_state": (options.get("initial_state"), -3),
            "scale": (options.get("scale", 1.0), 0),
        }
        (q, k, v, log_decay, beta, initial, scale), heads = local_heads(head_dims)
        check_tensor("q", q)
        q, scale = fold_scale("scale", q, scale)
        batched = q.dim() == 4
        others = {} if of_states else {"log_decay": log_decay}  # may be on the CPU
        q, k, v = prepare_operands(q, k, v, **others, beta=beta, initial_state=initial)
        check_layouts(layout=layout)
        causal = as_bool("causal", options.get("causal", True))
        sizes = sizes_of(layout._sizes[self.rank % layout.ranks])
        states_in = sizes.continued if initial is None else sizes.spans
        arguments = CARRIED.of(
            {**options, "scale": scale},
            layout=layout._handle,
            states_in=states_in if causal else sizes.runs,
            documents=sizes.documents,
            strategy=self._key,
            backend=current_backend(strategy.family),
        )
        if log_decay is not None and self._decay == "constant":
            if of_states:  # torch chooses the operator's implementation by the devices of inputs
                check_tensor("log_decay", log_decay, q.device, or_cpu=True)
            if log_decay.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    "log_decay must not require a gradient, since a constant decay has none: pass "
                    "log_decay.detach()"
                )
            refuse_tangents(log_decay=log_decay)
        elif log_decay is not None and not batched:
            log_decay = log_decay[None]
        if beta is not None and not batched:
            beta = beta[None]
        if initial is not None:
            initial = batch_second(initial, batched, strategy.state_dims)
        return CallTensors(q, k, v, log_decay, beta, initial), arguments, heads
