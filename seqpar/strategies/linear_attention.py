"""The module of linear attention, and the operators that its calls lower to.

As with softmax attention, each call is one operator forward and one backward, communication included.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar import linear
from seqpar.attend import accumulator_dtype, current_backend
from seqpar.comm import Group
from seqpar.layout import Layout
from seqpar.strategies.agree import shape_of
from seqpar.strategies.base import no_double_backward, operands, unit_stride
from seqpar.strategies.call import check_types
from seqpar.strategies.engine import Engine
from seqpar.strategies.lasp2 import LASP2
from seqpar.strategies.linear_call import SCHEMA, Parameters, check


class LASP2Attention(nn.Module):
    """Linear attention over a packed batch whose tokens are spread over the ranks of a group.

    out_i = scale · Σ_{j≤i} λ^{i−j} (q_i·k_j) v_j within each document, λ = exp(log_decay) one a KV head. `group` is a process
    group or a 1-D DeviceMesh. Any layout will do, so that it can share that of softmax layers; only stripes so short that their
    states outweigh their tokens are refused: more than 4 spans of a document on a rank, of less than
    D·Dv·4 / ((D + Dv)·b) tokens on average (b bytes an element of q; 8 for 4 if that is fp64).

    `transport="all_gather"`: every rank sends every other the states that its tokens need, in one exchange, posted before the
    work within spans and hidden under it. Bytes sent by rank r: S = B·Hkv·D·Dv·4 (8 for fp64) for each span of another rank
    before which r has tokens of the same document, behind that rank's span before it: forward at most S to each later rank for
    a contiguous document, and S to each rank for a zigzag one, whatever its length. Backward as much, the other way round.
    With `return_state` each rank that has tokens of a document behind another's last ones also sends that one S.

    `transport="scan"` (ZeCO's All-Scan): states pass from span to span, in `blocks` blocks. A rank sends one S for each of its
    spans that another rank's span follows, however many ranks there are, in P − 1 steps instead of one (without `causal` two
    S for each of its documents, in 2 (P − 1) steps); with `return_state` the holder of a document's last span sends S to all
    others, who send as much in backward.

    Kept for backward: q, k, v, and S for each span that does not begin its document (for all, with `initial_state`; for each
    document that the rank has tokens of, without `causal`).

    Sun et al., "LASP-2" (2025), algorithms 1 to 4; "ZeCO" (2025), section 3.
    """

    step = staticmethod(linear.step)

    def __init__(self, group: Group, transport: str = "all_gather", blocks: int = 4, check_ranks: bool = False) -> None:
        super().__init__()
        self.engine: Engine[LASP2] = Engine.make(LASP2(transport, blocks), group, 1, check_ranks)
        self.key = self.engine.key

    def extra_repr(self) -> str:
        comm, strategy = self.engine.comm, self.engine.strategy
        return f"rank={comm.rank}, ranks={comm.size}, transport={strategy.transport!r}, check_ranks={self.engine.check_ranks}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        causal: bool = True,
        log_decay: Tensor | None = None,
        scale: float = 1.0,
        initial_state: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Linear attention of this rank's queries over the keys of all ranks, each document on its own.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32, bf16 or fp16.
            k: (T_local, Hkv, D) or with the batch in front; Hq must be a multiple of Hkv.
            v: (T_local, Hkv, Dv), likewise.
            layout: which tokens of the packed batch each rank holds.
            causal: without it each query sees all keys of its document, and there is no decay.
            log_decay: (Hkv,) fp32 or fp64, at most 0, the same on all ranks: log λ. It has no gradient. On a GPU checking it
                costs a synchronisation; on the CPU it costs none.
            scale: what q·k is multiplied by.
            initial_state: (documents, Hkv, D, Dv), or with the batch in front, fp32 (fp64 for fp64): the state that each
                document goes on from, the same on all ranks. Its gradient is what this rank's outputs depend on it: sum it over
                ranks, as a parameter's.
            return_state: also return the documents' final states, like `initial_state`, on every rank.

        Returns:
            out (T_local, Hq, Dv) or with the batch in front, in q's dtype; or (out, state), differentiable both.

        The gradients are those of the sum of all ranks' losses. Under autocast q, k and v are cast as SDPA's are.

        Raises:
            ValueError: naming the argument, before anything is sent, if the call is wrong or cannot be computed exactly.
        """
        arguments = self._arguments(q, k, v, layout, causal, log_decay, scale, initial_state, return_state)
        out, state, _ = torch.ops.seqpar.linear_attention(*arguments)
        if q.dim() == 3:
            out, state = out[0], state[:, 0]
        else:
            state = state.transpose(0, 1)
        return (out, state) if return_state else out

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> str | None:
        """Why this rank would refuse the call, or None. Takes what a call takes; computes and sends nothing."""
        defaults = {"causal": True, "log_decay": None, "scale": 1.0, "initial_state": None, "return_state": False}
        try:
            q, k, v, log_decay, initial, *tail = self._arguments(q, k, v, layout, **(defaults | options))
            check(self.engine.comm, Parameters(*tail), q, k, v, log_decay, initial)
        except ValueError as refusal:
            return str(refusal)
        return None

    def _arguments(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        causal: bool,
        log_decay: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        return_state: bool,
    ) -> tuple[Any, ...]:
        """The operator's: with a batch dimension, in states the second."""
        check_types(causal, layout=layout)
        if log_decay is not None and log_decay.requires_grad and torch.is_grad_enabled():
            raise ValueError("log_decay must not require a gradient: it has none")
        batched = q.dim() == 4
        q, k, v, _ = operands(q, k, v, None)
        if initial_state is not None:
            if initial_state.dim() != 4 + batched:
                expected = "(B, documents, Hkv, D, Dv)" if batched else "(documents, Hkv, D, Dv)"
                raise ValueError(f"initial_state must be {expected}, got {tuple(initial_state.shape)}")
            initial_state = initial_state.transpose(0, 1) if batched else initial_state[:, None]
        spans, runs, continued = layout.pieces[self.engine.comm.rank % layout.ranks]
        entering = (continued if initial_state is None else spans) if causal else runs
        parameters = (
            layout.key,
            entering,
            layout.documents,
            self.key,
            current_backend(),
            causal,
            float(scale),
            bool(return_state),
        )
        return q, k, v, log_decay, initial_state, *parameters


torch.library.define(
    "seqpar::linear_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? initial, {SCHEMA})"
    " -> (Tensor out, Tensor state, Tensor entered)",
)
torch.library.define(
    "seqpar::linear_attention_backward",
    "(Tensor? dout, Tensor? dstate, Tensor q, Tensor k, Tensor v, Tensor? log_decay, bool begun, Tensor entered, "
    f"{SCHEMA}) -> Tensor[] gradients",
)


@torch.library.impl("seqpar::linear_attention", ("cpu", "cuda"))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, *tail: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parameters = Parameters(*tail)
    engine: Engine[LASP2] = Engine.of(parameters.engine)
    checked = partial(check, engine.comm, parameters, q, k, v, log_decay, initial)
    plan, recurrence = engine.checked(checked, lambda: shape_of(q, k, v) | parameters.shared(log_decay, initial))
    engine.begins("forward")
    with torch.autocast(q.device.type, enabled=False):
        operands = unit_stride(q), unit_stride(k), unit_stride(v)
        return engine.strategy.forward(engine.comm, plan, recurrence, operands, initial)


@torch.library.register_fake("seqpar::linear_attention")  # type: ignore[untyped-decorator]
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, *tail: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parameters = Parameters(*tail)
    shape = q.shape[0], k.shape[2], q.shape[3], v.shape[3]
    counts = parameters.documents if parameters.return_state else 0, parameters.entering
    state, entered = (q.new_empty((count, *shape), dtype=accumulator_dtype(q.dtype)) for count in counts)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), state, entered


@torch.library.impl("seqpar::linear_attention_backward", ("cpu", "cuda"))
def _backward(
    dout: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, begun: bool,
    entered: Tensor, *tail: Any,
) -> list[Tensor]:  # fmt: skip
    parameters = Parameters(*tail)
    engine: Engine[LASP2] = Engine.of(parameters.engine)
    dout = q.new_zeros((*q.shape[:-1], v.shape[-1])) if dout is None else unit_stride(dout)
    if dstate is None:
        dstate = entered.new_zeros((parameters.documents * parameters.return_state, *entered.shape[1:]))
    engine.begins("backward")
    with torch.autocast(q.device.type, enabled=False):
        plan, recurrence = parameters.work(begun, log_decay, q.device)
        operands = unit_stride(q), unit_stride(k), unit_stride(v)
        dq, dk, dv, *dinitial = engine.strategy.backward(engine.comm, plan, recurrence, operands, entered, dout, dstate)
        return [*(x.to(q.dtype) for x in (dq, dk, dv)), *dinitial]


@torch.library.register_fake("seqpar::linear_attention_backward")  # type: ignore[untyped-decorator]
def _(
    dout: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, begun: bool,
    entered: Tensor, *tail: Any,
) -> list[Tensor]:  # fmt: skip
    initial = [entered.new_empty((Parameters(*tail).documents, *entered.shape[1:]))] if begun else []
    return [*(torch.empty_like(x) for x in (q, k, v)), *initial]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, log_decay, initial, *tail = inputs
    parameters = Parameters(*tail)
    ctx.set_materialize_grads(False)
    ctx.settings = parameters[1:]
    ctx.begun = initial is not None
    ctx.engine = Engine.of(parameters.engine)  # kept alive
    ctx.save_for_backward(parameters.layout, q, k, v, log_decay, output[2])


def _gradients(ctx: Any, dout: Tensor | None, dstate: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    layout, q, k, v, log_decay, entered = ctx.saved_tensors
    parameters = Parameters(layout, *ctx.settings)
    op = torch.ops.seqpar.linear_attention_backward
    dq, dk, dv, *dinitial = op(dout, dstate, q, k, v, log_decay, ctx.begun, entered, *parameters)
    return dq, dk, dv, None, *(dinitial or [None]), *[None] * len(parameters)


torch.library.register_autograd("seqpar::linear_attention", _gradients, setup_context=_setup_context)
torch.library.register_autograd("seqpar::linear_attention_backward", no_double_backward)
