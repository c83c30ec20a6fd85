"""Linear attention across ranks: the library's LASP-2, and the baselines of the comparison.

All compute with the same primitive. Each contender is a function (comm, q, k, v, log_decay,
dout=None) -> [out, dq, dk, dv], or [out] without `dout`: causal, with one decay per head, over one
document that is divided into equal numbers of consecutive tokens. q, k, v and dout are
(1, T, H, D).

The baselines send states to ranks in different ways:

* LASP-1 (Sun et al., "Linear Attention Sequence Parallelism", 2024): states go from rank to rank,
  and each rank waits for the previous one.
* Ring: keys and values go from rank to rank, while the previous ones are computed, and a rank
  computes states from them (the right product). In backward, q and dout go the other way, and a
  rank computes gradients of states from them. dk and dv stay with their owners: sending
  contributions to them would take the same number of elements, and twice the bytes in fp32.
* data parallel: each rank's tokens are a separate document, without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar import LASP2Attention, Layout
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions


class Way:
    """A rank's place in a pass: states go up the ranks in forward and down in backward."""

    def __init__(self, comm: Comm, options: StateOptions, tokens: int, reverse: bool) -> None:
        step = -1 if reverse else 1
        self._comm, self._options, self._tokens = comm, options, tokens
        self._source, self._target = comm.rank - step, comm.rank + step
        # number of ranks whose states enter this one
        self.before = comm.size - 1 - comm.rank if reverse else comm.rank
        self.last = self.before == comm.size - 1

    def post(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], hop: int) -> Pending:
        """Send to the next rank, if there is one, and receive from the previous rank."""
        sends = () if self.last else sends
        outgoing, incoming = [(self._target, x) for x in sends], [(self._source, x) for x in recvs]
        return self._comm.exchange(outgoing, incoming, label="baseline", step=hop)

    def decayed(self, state: Tensor, ranks: int) -> Tensor:
        """Return a state decayed by the tokens of this number of ranks."""
        powers = self._options.power(torch.tensor([ranks * self._tokens]), state.shape[2])
        return state * powers.to(state.dtype)[:, None, :, None, None]


# A pass without its end: (way, a function that begins the work, tensors from which others compute
# this rank's state, the function that does so) -> (work, entering state, messages under way).
Bridge = Callable[
    [Way, Callable[[], Any], Sequence[Tensor], Callable[..., Tensor]],
    tuple[Any, Tensor | None, Pending],
]


def pass_on(
    way: Way, begin: Callable[[], Any], block: Sequence[Tensor], state_of: Callable[..., Tensor]
) -> Any:
    """Pass states on from rank to rank: LASP-1's bridge."""
    work = begin()
    entering = [work.outgoing.new_empty((1, *work.outgoing.shape[1:]))] if way.before else []
    arriving = way.post([], entering, way.before)
    work.local()
    arriving.wait()
    leaving = [work.outgoing + way.decayed(x, 1) for x in entering] or [work.outgoing]
    return work, entering[0] if entering else None, way.post(leaving, [], way.before + 1)


def gather_blocks(
    way: Way, begin: Callable[[], Any], block: Sequence[Tensor], state_of: Callable[..., Tensor]
) -> Any:
    """Compute states from other ranks' blocks as they arrive: Ring's bridge."""
    arriving = [torch.empty_like(x) for x in block] if way.before else []
    pending = way.post(block, arriving, 1)
    work = begin()
    work.local()
    total: Tensor | None = None
    for hop in range(1, way.before + 1):
        pending.wait()
        block, arriving = arriving, [torch.empty_like(x) for x in block] if hop < way.before else []
        pending = way.post(block, arriving, hop + 1)
        state = way.decayed(state_of(*block), hop - 1)
        total = state if total is None else total + state
    return work, total, pending


def baseline(
    bridge: Bridge,
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    dout: Tensor | None = None,
) -> list[Tensor]:
    """Compute with a bridge that brings states to ranks."""
    options, tokens = StateOptions(1.0, True, "aten", log_decay.double()), q.shape[1]
    way = Way(comm, options, tokens, reverse=False)
    spans, inputs = span(tokens, way.before > 0, not way.last), Inputs(q, k, v)

    def state(k: Tensor, v: Tensor) -> Tensor:
        return begin_forward(Inputs(k, k, v), span(tokens, False, True), options).outgoing

    def dstate(q: Tensor, dout: Tensor) -> Tensor:
        return begin_backward(
            Inputs(q, k, v), dout, span(tokens, True, False), options, None
        ).outgoing

    work, entered, sent = bridge(way, lambda: begin_forward(inputs, spans, options), (k, v), state)
    out = work.finish(entered)
    sent.wait()
    if dout is None:
        return [out]
    way = Way(comm, options, tokens, reverse=True)
    work, left, sent = bridge(
        way,
        lambda: begin_backward(inputs, dout, spans, options, entered),
        (q, dout),
        dstate,
    )
    gradients = work.finish(left)
    sent.wait()
    return [out, *(x.to(q.dtype) for x in gradients)]


@cache
def span(tokens: int, enters: bool, leaves: bool) -> SpanStates:
    """Return all of a rank's tokens as one span."""
    return SpanStates(np.array([0, tokens]), np.array([enters - 1]), np.array([leaves - 1]))


def alone(_: Comm, *operands: Any) -> list[Tensor]:
    """Compute only with this rank's tokens: data parallel."""
    return baseline(pass_on, Comm("alone", 0, 1), *operands)


def lasp2(
    transport: str,
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    dout: Tensor | None = None,
) -> list[Tensor]:
    """Compute with the library's module."""
    operands = [x.detach().requires_grad_(dout is not None) for x in (q, k, v)]
    out = LASP2Attention(comm, transport)(
        *operands, layout(q.shape[1] * comm.size, comm.size), log_decay=log_decay
    )
    return [out.detach(), *(() if dout is None else torch.autograd.grad(out, operands, dout))]


@cache
def layout(tokens: int, ranks: int) -> Layout:
    """Return one document's layout, made once."""
    return Layout.contiguous(tokens, ranks)


CONTENDERS: dict[str, Callable[..., list[Tensor]]] = {
    "LASP-2 all_gather": partial(lasp2, "all_gather"),
    "LASP-2 scan": partial(lasp2, "scan"),
    "LASP-1": partial(baseline, pass_on),
    "Ring": partial(baseline, gather_blocks),
    "data parallel": alone,
}
