"""The recurrence over spans with the kernels of fla-core, through its public functions, on CUDA.

They compute bf16 and fp16, with states in fp32. A span is a sequence of theirs. Its transition by
the delta rule is the state that leaves it if its values are 0 and the identity enters. Spans that
pass a state on and have one that enters take a second call, and in backward too: their functions
return what is of one state, not the map.

Log decays below −30 count as −30, which is 1e-13: their sums over a chunk are in fp32, and keep
digits for other rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.linear.inputs import Gradients, Inputs, fold, repeated
from seqpar.linear.kinds import Kind
from seqpar.linear.maps.attend import MapOptions
from seqpar.linear.maps.backends.places import Places
from seqpar.linear.maps.maps import Maps, empty_maps, transposed
from seqpar.linear.routes import SpanStates

MAX_HEAD_DIM = 256
LOWEST = -30.0  # log decay
_FUNCTIONS = {
    "linear": "simple_gla",
    "constant_decay": "simple_gla",
    "scalar_decay": "simple_gla",
    "vector_decay": "gla",
    "delta": "delta_rule",
    "gated_delta": "gated_delta_rule",
    "kda": "kda",
}


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Return why these operands cannot be computed, naming the argument, or None."""
    backend = 'the backend "fla"'
    if importlib.util.find_spec("fla") is None:
        return f"{backend} needs the package fla-core, which is not installed: pip install fla-core"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        found = f"{q.dtype} on {q.device}"
        return f"q must be bf16 or fp16 on a CUDA device for {backend}, got {found}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        found = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"q and v must have head dims of at most {MAX_HEAD_DIM} for {backend}, got {found}"
    return None


class _Spans(NamedTuple):
    """The spans that have rows, as sequences of fla, one batch entry after another.

    Attributes:
        filled: how many there are in one entry.
        cu_seqlens: (B · filled + 1,) on the device; and on the CPU.
        entering, leaving: where the states are that enter and leave them.
        both: where those are that leave, of spans that states enter too; and those that enter.
        empty: the same two for spans without rows.
    """

    filled: int
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    entering: Places
    leaving: Places
    both: tuple[Places, Places]
    empty: tuple[Places, Places]

    @classmethod
    def of(cls, spans: SpanStates, batch: int, device: torch.device) -> _Spans:
        """Return the sequences of spans."""
        filled = np.diff(spans.edges) > 0
        starts, rows = spans.edges[:-1][filled], spans.edges[-1]
        edges = (np.arange(batch)[:, None] * rows + starts).reshape(-1)
        cu_seqlens = torch.from_numpy(np.append(edges, batch * rows).astype(np.int64))
        enter, leave = spans.state_in, spans.state_out
        both = (enter >= 0) & (leave >= 0)

        def pair(of: NDArray[np.bool_]) -> tuple[Places, Places]:
            ends = (np.where(both, x, -1)[of] for x in (leave, enter))
            first, second = (Places.of(x, device) for x in ends)
            return first, second

        return cls(
            int(filled.sum()),
            cu_seqlens.to(device),
            cu_seqlens,
            Places.of(enter[filled], device),
            Places.of(leave[filled], device),
            pair(filled),
            pair(~filled),
        )


class _Work:
    """Shared by forward and backward: the inputs as fla takes them, with max(Hq, H) heads."""

    def __init__(self, kind: Kind, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        self.kind, self.inputs, self.options = kind, inputs, options
        self.batch, device = inputs.q.shape[0], inputs.q.device
        key = "fla sequences", self.batch, device
        self.spans = spans.derived(key, lambda: _Spans.of(spans, self.batch, device))
        self.heads = inputs.out_shape[2]
        self.group = self.heads // inputs.heads
        q, k, v, log_decay, beta = inputs
        if log_decay is not None:
            if log_decay.dim() == 1:
                log_decay = log_decay.expand(*q.shape[:2], inputs.heads)
            log_decay = log_decay.float().clamp_min(LOWEST)
        named = {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}
        self.operands = {
            name: repeated(x, self.heads).flatten(0, 1)[None].contiguous()
            for name, x in named.items()
            if x is not None
        }

    def call(self, initial: Tensor | None, **operands: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and the last states of fla's function."""
        name = _FUNCTIONS[self.kind.name]
        function: Callable[..., tuple[Tensor, Tensor]] = getattr(
            import_module(f"fla.ops.{name}"), f"chunk_{name}"
        )
        return function(
            **operands,
            scale=self.options.scale,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=self.spans.cu_seqlens,
            cu_seqlens_cpu=self.spans.cu_seqlens_cpu,
        )

    def starts(self, states: Tensor | None, places: Places) -> Tensor:
        """Return each sequence's entering state (B · filled, heads, K, V), 0 if it has none."""
        zeros = self.inputs.k.new_zeros(
            (self.spans.filled, *self.inputs.state_shape), dtype=torch.float32
        )
        filled = places.fill(zeros, states).transpose(0, 1)
        return repeated(filled, self.heads).flatten(0, 1).contiguous()

    def grouped(self, states: Tensor) -> Tensor:
        """Return (filled, B, H, queries of a state, …) of states of sequences."""
        by_span = states.unflatten(0, (self.batch, self.spans.filled)).transpose(0, 1)
        return by_span.unflatten(2, (-1, self.group))

    def set_transitions(self, maps: Maps, end: int) -> None:
        """Set the transitions of spans with both states, by the index in `state_out` (end 0)."""
        if empty := self.spans.empty[end]:
            one = maps.transition.new_ones(maps.transition.shape[1:])
            if self.kind.transition == "matrix":
                one = torch.diag_embed(one[..., 0])
            maps.transition[empty.states] = one
        if self.spans.both[end]:
            found = self.transitions()
            self.spans.both[end].put(
                maps.transition, transposed(self.kind, found) if end else found
            )

    def transitions(self) -> Tensor:
        """Return the transitions of sequences, (filled, B, H[, K[, K]])."""
        k = self.operands["k"]
        if self.kind.uses_beta:
            sequences, dim = self.batch * self.spans.filled, k.shape[-1]
            eye = torch.eye(dim, dtype=torch.float32, device=k.device)
            initial = eye.expand(sequences, self.heads, dim, dim).contiguous()
            others = self.operands | {"q": k, "v": torch.zeros_like(k)}
            return self.grouped(self.call(initial, **others)[1])[:, :, :, 0]
        g = self.operands.get("g")
        if g is None:
            g = k.new_zeros(k.shape[:3], dtype=torch.float32)
        lengths = self.spans.cu_seqlens.diff()
        sums = torch.segment_reduce(g[0].contiguous(), "sum", lengths=lengths, axis=0)
        return self.grouped(sums.exp())[:, :, :, 0]


class Forward(_Work):
    """The forward in steps; see `ForwardSteps` in `seqpar.linear.maps.attend`."""

    def __init__(self, kind: Kind, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        super().__init__(kind, inputs, spans, options)
        self.maps = empty_maps(kind, inputs, spans.states_out)
        self.out: Tensor | None = None
        if self.batch and (self.spans.leaving or not self.spans.entering) and self.spans.filled:
            out, last = self.call(None, **self.operands)
            self.spans.leaving.put(self.maps.state, self.grouped(last)[:, :, :, 0])
            self.out = None if self.spans.entering else out
        if self.batch:
            self.set_transitions(self.maps, 0)

    def local(self) -> None:
        """Do nothing: fla's functions do all at once."""

    def finish(self, states_in: Tensor | None) -> Tensor:
        if not self.batch or not self.spans.filled:
            return self.inputs.q.new_empty(self.inputs.out_shape)
        out = self.out
        if out is None:
            out, _ = self.call(self.starts(states_in, self.spans.entering), **self.operands)
        return out.view(self.inputs.out_shape)


class Backward(_Work):
    """The backward in steps; see `BackwardSteps` in `seqpar.linear.maps.attend`."""

    def __init__(
        self,
        kind: Kind,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: MapOptions,
        states_in: Tensor | None,
    ) -> None:
        super().__init__(kind, inputs, spans, options)
        self.maps = empty_maps(kind, inputs, spans.states_in)
        self.found: tuple[Tensor, ...] | None = None
        if not self.batch:
            return
        self.set_transitions(self.maps, 1)
        if not self.spans.filled:
            return
        self.dout = dout.flatten(0, 1)[None].contiguous()
        with torch.enable_grad():
            self.leaves = {n: x.detach().requires_grad_() for n, x in self.operands.items()}
            initial = self.starts(states_in, self.spans.entering).requires_grad_()
            self.out, self.last = self.call(initial, **self.leaves)
        if not self.spans.leaving:
            *found, dinitial = self.gradients(None, *self.leaves.values(), initial)
            self.found = tuple(found)
        elif self.spans.entering:
            (dinitial,) = self.gradients(None, initial)
        if self.spans.entering:
            self.spans.entering.put(self.maps.state, self.grouped(dinitial).sum(3))

    def gradients(self, dlast: Tensor | None, *of: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of some tensors, given those of the last states."""
        outputs, doutputs = [self.out], [self.dout]
        if dlast is not None:
            outputs, doutputs = [*outputs, self.last], [*doutputs, dlast]
        return torch.autograd.grad(outputs, of, doutputs, retain_graph=True)

    def local(self) -> None:
        """Do nothing: fla's functions do all at once."""

    def finish(self, dstates_out: Tensor | None) -> Gradients:
        if not self.batch or not self.spans.filled:
            return Gradients.of(self.inputs, torch.zeros_like)
        found = self.found
        if found is None:
            dlast = self.starts(dstates_out, self.spans.leaving)
            # Only one of the queries that share a state passes its gradient on.
            dlast.unflatten(1, (-1, self.group))[:, :, 1:] = 0
            found = self.gradients(dlast, *self.leaves.values())
        named = dict(zip(self.leaves, found, strict=True))
        named = {n: x.view(*self.inputs.q.shape[:2], *x.shape[2:]) for n, x in named.items()}
        if "g" in named:
            kept = self.operands["g"].view(named["g"].shape) > LOWEST
            named["g"] = named["g"] * kept
        for name in ("g", "beta"):
            if name in named:
                x = named[name].unflatten(2, (-1, self.group)).sum(3)
                named[name] = x if x.dim() == 4 else x[..., None]
        gradients = (named.get(name) for name in ("q", "k", "v", "g", "beta"))
        return fold(self.inputs, Gradients(*gradients))  # type: ignore[arg-type]
