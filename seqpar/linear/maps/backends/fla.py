"""The backend "fla": the recurrence over spans with fla-core's kernels, on CUDA.

The backend calls fla's public functions, which compute bf16 and fp16, with states in fp32. A
*span*, which is a range of a document's tokens on one rank, is one sequence of the call. The
functions return the last state of a sequence, but not its *transition*, the factor by which the
span multiplies the state that enters it. To compute the transition of a span, the backend appends K
columns of zeros to v. The initial state of these columns is the identity matrix, so their last
state is the transition. The output of these columns, multiplied by the state that enters the span,
is added to the output of the span, which is therefore rounded twice. Backward first makes the same
call without gradients.

A log decay below −30, a factor of 1e-13, is replaced by −30. fla adds up log decays over a chunk in
fp32. In a larger sum, smaller log decays would lose digits.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from seqpar.core.arguments import Ints
from seqpar.core.compiling import constant_in_graphs
from seqpar.core.device_tables import kept_on
from seqpar.linear.inputs import Gradients, Inputs, fold, repeated
from seqpar.linear.maps.backends.chunk_grid import Places
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.maps.maps import transposed
from seqpar.linear.routes import SpanStates

MAX_HEAD_DIM = 256
LOWEST = -30.0  # the smallest log decay
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
    backend = 'the backend "fla"'
    if not _is_installed():
        return f"{backend} needs the package fla-core, which is not installed: pip install fla-core"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        found = f"{q.dtype} on {q.device}"
        return f"q must be bf16 or fp16 on a CUDA device for {backend}, got {found}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        found = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"q and v must have head dims of at most {MAX_HEAD_DIM} for {backend}, got {found}"
    return _fault_of_package()


@constant_in_graphs
def _is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


@constant_in_graphs
def _fault_of_package() -> str | None:
    return _broken()


@cache
def _broken() -> str | None:
    try:
        for name in _FUNCTIONS:
            parameters = inspect.signature(_function(name)).parameters
            if missing := {"initial_state", "cu_seqlens", "cu_seqlens_cpu"} - set(parameters):
                return f"fla-core is too old: chunk_{_FUNCTIONS[name]} has no {min(missing)}"
    # Errors of all kinds, because a broken package may raise any error when it is imported.
    except Exception as error:
        return f"fla-core cannot be imported: {type(error).__name__}: {error}"
    return None


def _function(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    name = _FUNCTIONS[kind]
    return getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")


@dataclass(frozen=True)
class _OnHost:
    cu_seqlens: Tensor


class _Group(NamedTuple):
    """Some spans, which one call of fla computes.

    A *span* is a range of a document's tokens on one rank. Each span of each batch entry is one
    sequence of the call. The sequences are ordered by batch entry, and within a batch entry by
    span.
    """

    rows: Tensor | None  # (rows,): the indices of the rows in a batch entry; None means all rows
    edges: Ints  # (spans + 1,): the edges of the spans among these rows
    cu_seqlens: Tensor  # (B · spans + 1,)
    on_host: _OnHost
    # The states that enter and that leave the spans.
    entering: Places
    leaving: Places

    @classmethod
    def of(cls, spans: SpanStates, chosen: NDArray[np.bool_], batch: int) -> _Group:
        lengths = np.diff(spans.edges)
        edges = np.append(0, np.cumsum(lengths[chosen]))
        entries = np.arange(batch)[:, None] * edges[-1] + edges[:-1]
        cu_seqlens = torch.from_numpy(np.append(entries, batch * edges[-1]))
        rows = None
        if edges[-1] < spans.edges[-1]:
            rows = torch.from_numpy(np.flatnonzero(np.repeat(chosen, lengths)))
        enter, leave = spans.state_in[chosen], spans.state_out[chosen]
        places = Places.of(enter), Places.of(leave)
        return cls(rows, edges, cu_seqlens, _OnHost(cu_seqlens), *places)

    def each(self, x: Tensor) -> Iterator[Tensor]:
        """Yield each span's rows of x (1, B · rows, h, D), as (B, h, rows of the span, D)."""
        by_entry = x.view(-1, int(self.edges[-1]), *x.shape[2:]).transpose(1, 2)
        for start, stop in zip(self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True):
            yield by_entry[:, :, start:stop]


_Groups = tuple[list[_Group], tuple[Places, Places]]


def _groups(spans: SpanStates, first: str, batch: int, device: torch.device) -> _Groups:
    """Divide the spans that have rows into groups. One call of fla computes each group.

    A *span* is a range of a document's tokens on one rank. A state may enter the span ("state_in"),
    and a state may leave the span ("state_out"). `first` is the name of one of these two states.
    The groups are spans without the state `first`, spans with both states, and spans with only the
    state `first`. Empty groups are left out.

    A span without rows is in no group. If it has both states, they are equal, and the result has
    the index of the leaving state and the index of the entering state.
    """

    def build() -> _Groups:
        filled = np.diff(spans.edges) > 0
        enters, leaves = spans.state_in >= 0, spans.state_out >= 0
        one, other = (enters, leaves) if first == "state_in" else (leaves, enters)
        chosen = [filled & ~one, filled & one & other, filled & one & ~other]
        groups = [_Group.of(spans, x, batch) for x in chosen if x.any()]
        both = ~filled & enters & leaves
        return groups, (Places.of(spans.state_out[both]), Places.of(spans.state_in[both]))

    return kept_on(device, spans.derived, ("fla sequences", first, batch), build)


def request_tables(inputs: Inputs, spans: SpanStates, backward: bool) -> None:
    first = (Backward if backward else Forward).first
    _groups(spans, first, inputs.q.shape[0], inputs.q.device)


class _Mapped(NamedTuple):
    """The results of a group for entering states of 0, and the factors with which an entering state
    changes each result.
    """

    out: Tensor
    # (1, B · rows, heads, K): multiplied with an entering state, it is added to `out`
    readers: Tensor
    last: Tensor
    # (B · spans, heads, K, K): multiplied with an entering state, it is added to `last`
    transition: Tensor


class _Work:
    """The base class of forward and backward. It has the inputs in the form that fla reads, with
    max(Hq, H) heads.
    """

    first: str  # "state_in" or "state_out": groups without this state need not wait for an exchange
    # 0 if maps are those of the states that leave spans, 1 if they are those of the states that
    # enter spans.
    end: int

    def __init__(self, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        self.kind, self.inputs, self.options = options.kind, inputs, options
        self.batch, device = inputs.q.shape[0], inputs.q.device
        groups, empty = _groups(spans, self.first, self.batch, device)
        self.groups = groups if self.batch else []
        self.outgoing = options.empty(inputs, (spans.states_out, spans.states_in)[self.end])
        if self.batch and empty[self.end]:
            one = self.outgoing.transition.new_ones(self.outgoing.transition.shape[1:])
            if self.kind.transition == "matrix":
                one = torch.diag_embed(one[..., 0])
            self.outgoing.transition[empty[self.end].states] = one
        self.heads = inputs.out_shape[2]
        self.group = self.heads // inputs.heads
        q, k, v, log_decay, beta = inputs
        if log_decay is not None:
            if log_decay.dim() == 1:
                log_decay = log_decay.expand(*q.shape[:2], inputs.heads)
            log_decay = log_decay.float().clamp_min(LOWEST)
        named = {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}
        self.operands = {n: repeated(x, self.heads) for n, x in named.items() if x is not None}

    def local(self) -> None:
        """Do nothing: fla's functions do all work in one call."""

    def rows(self, group: _Group, x: Tensor) -> Tensor:
        """Return the rows of a group from x (B, T, h, …), in the form (1, B · rows, h, …) that fla
        reads.
        """
        x = x if group.rows is None else x.index_select(1, group.rows)
        return x.flatten(0, 1)[None].contiguous()

    def of(self, group: _Group) -> dict[str, Tensor]:
        return {name: self.rows(group, x) for name, x in self.operands.items()}

    def set_rows(self, target: Tensor, group: _Group, x: Tensor) -> Tensor:
        """Write x, the rows of a group, to `target` (B, T, h, …). Return `target`.

        If the group has all rows, x itself is returned in the shape of `target`.
        """
        x = x.view(self.batch, -1, *x.shape[2:])
        return x if group.rows is None else target.index_copy_(1, group.rows, x)

    def call(
        self, group: _Group, initial: Tensor | None, operands: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return _function(self.kind.name)(
            **operands,
            scale=self.options.scale,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=group.cu_seqlens,
            cu_seqlens_cpu=group.on_host.cu_seqlens,
        )

    def call_with_map(self, group: _Group, operands: dict[str, Tensor], dims: int) -> _Mapped:
        """Call fla with K additional columns of v, which give the transitions of the spans, and
        return all results.

        The results `out` and `last` are those of the first `dims` columns of v.
        """
        dim, values = self.inputs.k.shape[3], operands["v"][..., :dims]
        eye = torch.eye(dim, dtype=torch.float32, device=values.device)
        sequences = len(group.cu_seqlens) - 1
        initial = pad(eye, (dims, 0)).expand(sequences, self.heads, dim, dims + dim).contiguous()
        out, last = self.call(group, initial, operands | {"v": pad(values, (0, dim))})
        return _Mapped(*out.split([dims, dim], -1), *last.split([dims, dim], -1))

    def starts(self, group: _Group, states: Tensor | None, places: Places) -> Tensor:
        """Return the state at the start of each sequence, (B · spans, heads, K, V). A sequence
        without a state in `places` starts with 0.
        """
        shape = group.edges.size - 1, *self.inputs.state_shape
        zeros = self.inputs.k.new_zeros(shape, dtype=torch.float32)
        filled = places.fill(zeros, states).transpose(0, 1)
        return repeated(filled, self.heads).flatten(0, 1).contiguous()

    def by_span(self, group: _Group, states: Tensor) -> Tensor:
        """Return states of sequences, ordered by span, as (spans, B, H, G, …). G heads in the call
        of fla share one head of states.
        """
        entries = states.unflatten(0, (self.batch, group.edges.size - 1)).transpose(0, 1)
        return entries.unflatten(2, (-1, self.group))

    def set_map(self, group: _Group, state: Tensor, transition: Tensor | None) -> None:
        """Write the maps of a group's spans to `outgoing`.

        `state` is (spans, B, H, K, V). `transition` has one entry for each sequence.
        """
        places = (group.leaving, group.entering)[self.end]
        places.put(self.outgoing.state, state)
        if transition is not None:
            found = self.by_span(group, transition)[:, :, :, 0]
            if self.kind.transition != "matrix":
                found = found.diagonal(0, -2, -1)
                found = found if self.kind.transition == "key" else found[..., 0]
            found = transposed(self.kind, found) if self.end else found
            places.put(self.outgoing.transition, found)


class Forward(_Work):
    first, end = "state_in", 0

    def __init__(self, inputs: Inputs, spans: SpanStates, options: MapOptions) -> None:
        super().__init__(inputs, spans, options)
        self.outs: list[Callable[[Tensor | None], Tensor]] = [self._begin(x) for x in self.groups]

    def _begin(self, group: _Group) -> Callable[[Tensor | None], Tensor]:
        """Compute what does not depend on entering states, and return a function that computes out
        from the entering states.
        """
        operands = self.of(group)
        if not group.leaving and group.entering:
            return lambda states: self.call(
                group, self.starts(group, states, group.entering), operands
            )[0]
        if not group.entering:
            out, last = self.call(group, None, operands)
            if group.leaving:
                self.set_map(group, self.by_span(group, last)[:, :, :, 0], None)
            return lambda _: out
        mapped = self.call_with_map(group, operands, self.inputs.v.shape[3])
        self.set_map(group, self.by_span(group, mapped.last)[:, :, :, 0], mapped.transition)
        return lambda states: self._entered(group, mapped, states)

    def _entered(self, group: _Group, mapped: _Mapped, states: Tensor | None) -> Tensor:
        out = mapped.out.float()
        starts = self.starts(group, states, group.entering).unflatten(0, (self.batch, -1))
        parts = zip(group.each(out), group.each(mapped.readers), starts.unbind(1), strict=True)
        for rows, readers, state in parts:
            rows += readers.float() @ state
        return out.to(mapped.out.dtype)

    def finish(self, states_in: Tensor | None) -> Tensor:
        out = self.inputs.q.new_empty(self.inputs.out_shape)
        for group, finish in zip(self.groups, self.outs, strict=True):
            out = self.set_rows(out, group, finish(states_in))
        return out


class Backward(_Work):
    first, end = "state_out", 1

    def __init__(
        self,
        inputs: Inputs,
        dout: Tensor,
        spans: SpanStates,
        options: MapOptions,
        states_in: Tensor | None,
    ) -> None:
        super().__init__(inputs, spans, options)
        self.dout, self.states_in = dout, states_in
        self.found = {name: torch.empty_like(x) for name, x in self.operands.items()}
        for group in self.groups:
            if not group.leaving:
                self._differentiate(group, None)
            elif group.entering:
                self._set_map(group)

    def _set_map(self, group: _Group) -> None:
        """Compute the maps of a group's spans for backward, from the gradient of the leaving state
        to the gradient of the entering state.
        """
        mapped = self.call_with_map(group, self.of(group), 0)
        rows = zip(group.each(mapped.readers), group.each(self.rows(group, self.dout)), strict=True)
        states = torch.stack([readers.float().mT @ dout.float() for readers, dout in rows], 1)
        states = self.by_span(group, states.flatten(0, 1)).sum(3)
        self.set_map(group, states, mapped.transition)

    def _differentiate(self, group: _Group, dstates_out: Tensor | None) -> None:
        with torch.enable_grad():
            leaves = {n: x.detach().requires_grad_() for n, x in self.of(group).items()}
            initial = self.starts(group, self.states_in, group.entering).requires_grad_()
            outputs = self.call(group, initial, leaves)
        dlast = self.starts(group, dstates_out, group.leaving)
        # Each query head that shares a state has a copy of the state. The gradient of the state
        # enters only one of the copies.
        dlast.unflatten(1, (-1, self.group))[:, :, 1:] = 0
        doutputs = self.rows(group, self.dout), dlast
        *found, dinitial = torch.autograd.grad(outputs, [*leaves.values(), initial], doutputs)
        if group.entering and not group.leaving:
            self.set_map(group, self.by_span(group, dinitial).sum(3), None)
        for name, gradient in zip(leaves, found, strict=True):
            self.found[name] = self.set_rows(self.found[name], group, gradient)

    def finish(self, dstates_out: Tensor | None) -> Gradients:
        for group in self.groups:
            if group.leaving:
                self._differentiate(group, dstates_out)
        found = self.found
        if "g" in found:
            found["g"] = found["g"] * (self.operands["g"] > LOWEST)
        for name in {"g", "beta"} & found.keys():
            x = found[name].unflatten(2, (-1, self.group)).sum(3)
            found[name] = x if x.dim() == 4 else x[..., None]
        gradients = (found.get(name) for name in ("q", "k", "v", "g", "beta"))
        return fold(self.inputs, Gradients(*gradients))  # type: ignore[arg-type]
