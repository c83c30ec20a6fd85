"""Calls of the recurrent primitive to test with, and their oracle.

The oracle computes the formula of each token in fp64, and autograd its gradients.
"""

import dataclasses
import functools

import numpy as np
import torch
from einops import rearrange, repeat

from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import kind
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.maps.maps import apply
from seqpar.linear.routes import SpanStates


@dataclasses.dataclass(frozen=True)
class RecurrentCase:
    """One call of the primitive, with all that is needed to make the same tensors each time.

    Attributes:
        edges: the tokens at which spans begin, and the end of the last span.
        entered: whether a state enters each span; None: a state enters all spans.
        left: whether a state leaves each span; None: a state leaves all spans.
        log_decay: if a number, log decays are drawn between it and 0. If a tuple, each log decay is
            one of its values.
        beta: the lower and the upper end of the interval from which β is drawn.
        key_length: the norm of every key. None: keys keep their random norm, which is about the
            square root of the head dim.
    """

    kind: str
    edges: tuple = (0, 70, 70, 75, 203)
    entered: tuple | None = None
    left: tuple | None = None
    batch: int = 2
    q_heads: int = 2
    k_heads: int = 2
    v_heads: int = 2
    dim: int = 8
    value_dim: int = 6
    log_decay: float | tuple = -0.5
    beta: tuple = (0.0, 1.0)
    key_length: float | None = 1.0
    dtype: torch.dtype = torch.float64
    backend: str = "aten"
    scale: float = 0.7
    seed: int = 0

    @property
    def spans(self):
        def numbered(flags):
            flags = np.array(flags or [True] * (len(self.edges) - 1), dtype=bool)
            return np.where(flags, np.cumsum(flags) - 1, -1)

        return SpanStates(np.array(self.edges), numbered(self.entered), numbered(self.left))

    def tensors(self):
        """Return the inputs, dout, entering states, and the gradients of leaving states."""
        generator = torch.Generator().manual_seed(self.seed)
        this, tokens, spans = kind(self.kind), self.edges[-1], self.spans
        heads = max(self.k_heads, self.v_heads)

        def draw(*shape, dtype=self.dtype, of=torch.randn):
            return of(*shape, generator=generator, dtype=torch.float64).to(dtype)

        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        rows = self.batch, tokens
        q = draw(*rows, self.q_heads, self.dim)
        k = draw(*rows, self.k_heads, self.dim)
        if self.key_length is not None:
            k = (k.double() / k.double().norm(dim=-1, keepdim=True) * self.key_length).to(k.dtype)
        v = draw(*rows, self.v_heads, self.value_dim)
        shapes = {"constant": (heads,), "head": (*rows, heads), "key": (*rows, heads, self.dim)}
        log_decay = beta = None
        if this.decay is not None:
            log_decay = draw(*shapes[this.decay], dtype=exact, of=torch.rand)
            if isinstance(self.log_decay, tuple):
                choices = torch.tensor(self.log_decay, dtype=exact)
                log_decay = choices[(log_decay * len(choices)).long()]
            else:
                log_decay = log_decay * self.log_decay
        if this.uses_beta:
            low, high = self.beta
            beta = low + draw(*rows, heads, of=torch.rand) * (high - low)
        dout = draw(*rows, max(self.q_heads, heads), self.value_dim)
        state = self.batch, heads, self.dim, self.value_dim
        entering = draw(spans.states_in, *state, dtype=exact)
        dleaving = draw(spans.states_out, *state, dtype=exact)
        return Inputs(q, k, v, log_decay, beta), dout, entering, dleaving


def oracle(case):
    """Return the results of the case in fp64, by name: the formula of each token, and its
    gradients.

    They do not depend on the backend, so cases that differ only in the backend are computed once.
    """
    return dict(_oracle(dataclasses.replace(case, backend="")))


@functools.lru_cache(maxsize=32)
def _oracle(case):
    inputs, dout, entering, dleaving = case.tensors()
    leaves = [None if x is None else x.double().requires_grad_() for x in inputs]
    q, k, v, log_decay, beta = leaves
    state_in = entering.double().requires_grad_()
    heads, spans = inputs.heads, case.spans
    if log_decay is None:
        log_decay = torch.zeros(heads, dtype=torch.float64)
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(*q.shape[:2], heads)
    decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).exp()
    q, k, v = (
        repeat(x, "b t h d -> b t (h copies) d", copies=max(1, heads // x.shape[2]))
        for x in (q, k, v)
    )
    q = rearrange(q, "b t (h group) d -> b t h group d", h=heads)
    outs, leaving = [], []
    for span in range(len(case.edges) - 1):
        enters, leaves_to = int(spans.state_in[span]), int(spans.state_out[span])
        state = torch.zeros(inputs.state_shape, dtype=torch.float64)
        if enters >= 0:
            state = state_in[enters]
        for t in range(case.edges[span], case.edges[span + 1]):
            state = decay[:, t, :, :, None] * state
            write = v[:, t]
            if beta is not None:
                error = write - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
                write = beta[:, t, :, None] * error
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
            outs.append(case.scale * torch.einsum("bhgk,bhkv->bhgv", q[:, t], state).flatten(1, 2))
        if leaves_to >= 0:
            leaving.append(state)
    out = torch.stack(outs, 1) if outs else torch.zeros_like(dout).double()
    left = torch.stack(leaving) if leaving else torch.zeros_like(dleaving).double()
    objective = (out * dout.double()).sum() + (left * dleaving.double()).sum()
    wanted = {"q": leaves[0], "k": leaves[1], "v": leaves[2], "log_decay": leaves[3]}
    wanted |= {"beta": leaves[4], "state_in": state_in}
    wanted = {name: x for name, x in wanted.items() if x is not None and x.numel()}
    gradients = [None] * len(wanted)
    if objective.requires_grad:
        gradients = torch.autograd.grad(objective, list(wanted.values()), allow_unused=True)
    found = {"out": out.detach(), "state_out": left.detach()}
    for (name, x), gradient in zip(wanted.items(), gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(x) if gradient is None else gradient
    return found


def errors(found, expected):
    """Return the RMS error of each result, divided by the RMS of the oracle's result.

    Results that are empty, or zero in the oracle, are left out.
    """
    return {
        name: float((found[name].double() - y).square().mean().sqrt() / y.square().mean().sqrt())
        for name, y in expected.items()
        if y.numel() and y.any()
    }


def run(case, local=False):
    """Return the results of the primitive by name.

    Its maps are applied to the states that enter, and to the gradients of the states that leave.
    """
    this, spans = kind(case.kind), case.spans
    inputs, dout, entering, dleaving = case.tensors()
    options = MapOptions(this, case.scale, case.backend)
    forward = begin_forward(inputs, spans, options)
    backward = begin_backward(inputs, dout, spans, options, entering)
    found = {}
    for work in (forward, backward):
        if local:
            work.local()
    found["out"] = forward.finish(entering)
    gradients = backward.finish(dleaving)
    found |= {f"d{n}": x for n, x in gradients._asdict().items() if x is not None}
    ends = spans.state_out, spans.state_in
    found["state_out"] = _through(this, forward.outgoing, *ends, entering)
    found["dstate_in"] = _through(this, backward.outgoing, *reversed(ends), dleaving)
    return {name: x for name, x in found.items() if x.numel()}


def _through(this, maps, to, source, states):
    """Return the states that maps produce from the states at the other ends of spans."""
    result = maps.state.clone()
    for target, origin in zip(to.tolist(), source.tolist(), strict=True):
        if target >= 0 and origin >= 0:
            one = slice(target, target + 1)
            result[one] += apply(this, maps.transition[one], states[origin : origin + 1])
    return result
