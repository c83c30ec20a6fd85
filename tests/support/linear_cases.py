"""Calls of linear attention to test with, and their oracle.

The oracle is the recurrence in fp64, computed by a plain loop over tokens.
"""

import dataclasses
import functools
import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from seqpar import LASP2Attention, Layout
from seqpar.attention.backend import DEFAULT, forced_backend
from seqpar.comm.messages.comm import Comm
from seqpar.linear.states.backends import aten
from tests.support.cases import backward, cu_seqlens, largest, layouts, rms


@dataclasses.dataclass(frozen=True)
class LinearCase:
    """One call on some ranks, with all that is needed to make its inputs on each rank."""

    strategy = "lasp2"
    prefix = None
    layout: Layout
    causal: bool = True
    decay: float | None = (
        0.1  # −log λ of the last KV head; other heads have evenly spaced smaller values
    )
    scale: float = 0.5
    begun: bool = False  # whether the call has initial states
    returned: bool = False
    batch: int | None = None
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 6
    dtype: torch.dtype = torch.float64
    backend: str = "aten"
    transport: str = "all_gather"
    blocks: int = 3
    chunk: int = 16  # of the aten backend
    seed: int = 0
    module_options: tuple = ()
    device: str = "cpu"

    @property
    def exact(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def log_decay(self):
        if self.decay is None:
            return None
        heads = torch.arange(1, self.kv_heads + 1, dtype=torch.float64, device=self.device)
        return -self.decay * heads / self.kv_heads

    def inputs(self):
        """Return q, k, v and dout of the whole packed batch, initial states and gradients of final
        states.

        The initial states are None if the case has none. Each rank has its own gradients of final
        states.
        """
        generator = torch.Generator().manual_seed(self.seed)
        batch = () if self.batch is None else (self.batch,)

        def draw(*shape, dtype=self.dtype):
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(self.device, dtype)

        shapes = (
            (self.heads, self.dim),
            (self.kv_heads, self.dim),
            (self.kv_heads, self.value_dim),
            (self.heads, self.value_dim),
        )
        q, k, v, dout = (draw(*batch, self.layout.tokens, *shape) for shape in shapes)
        state = (*batch, self.layout.documents, self.kv_heads, self.dim, self.value_dim)
        initial = draw(*state, dtype=self.exact) if self.begun else None
        return (
            q,
            k,
            v,
            dout,
            initial,
            [draw(*state, dtype=self.exact) for _ in range(self.layout.ranks)],
        )


def begin(group, case, **changes):
    """Make the call on this rank, with some arguments changed; return its outputs and its leaves.

    Outputs are by name, each with its gradient. Leaves are the tensors that get gradients in
    backward, also by name.
    """
    aten.CHUNK = case.chunk
    options = {"transport": case.transport, "blocks": case.blocks} | dict(case.module_options)
    lin = LASP2Attention(group, **options)
    rank, dim = lin.rank, 0 if case.batch is None else 1
    q, k, v, dout, initial, dstates = case.inputs()
    leaves = {
        name: case.layout.shard(x, rank, dim).requires_grad_()
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    if initial is not None:
        leaves["initial_state"] = initial.requires_grad_()
    arguments = {
        "layout": case.layout,
        "causal": case.causal,
        "log_decay": case.log_decay,
        "scale": case.scale,
        "return_state": case.returned,
    }
    with forced_backend(None if case.backend == DEFAULT else case.backend):
        result = lin(**leaves | arguments | changes)
    out, state = result if case.returned else (result, None)
    assert out.dtype == case.dtype and (state is None or state.dtype == case.exact)
    outputs = {"out": (out, case.layout.shard(dout, rank, dim))}
    if case.returned:
        outputs["state"] = state, dstates[rank]
    return outputs, leaves


def run(group, case):
    """Make the call and its backward on this rank; return packed out, dq, dk and dv.

    Final states follow if the case returns them. Gradients of initial states, summed over ranks,
    follow if the case has initial states.
    """
    comm, dim = Comm.of(group), 0 if case.batch is None else 1
    outputs, leaves = begin(group, case)
    backward(outputs)
    local = {"out": outputs["out"][0].detach()}
    local |= {f"d{name}": leaves[name].grad for name in ("q", "k", "v")}
    found = {name: case.layout.unshard(x, comm, dim) for name, x in local.items()}
    if case.returned:
        found["state"] = outputs["state"][0].detach()
    if case.begun:
        gathered = comm.all_gather(leaves["initial_state"].grad, label="test")
        found["dinitial"] = torch.stack(gathered).sum(0)
    return {name: x.double().cpu().numpy() for name, x in found.items()}


def oracle(case):
    """Return what `run` should return: computed in fp64 on one process, by autograd.

    The results depend on the documents and the number of ranks, and not on where documents are or
    on the transport. Cases that differ only in these two are therefore computed once.
    """
    documents = tuple(case.layout.cu_seqlens.tolist()), case.layout.ranks
    unneeded = {"backend": "", "transport": "", "blocks": 0, "chunk": 0, "module_options": ()}
    return dict(_oracle(dataclasses.replace(case, layout=documents, device="cpu", **unneeded)))


@functools.lru_cache(maxsize=32)
def _oracle(case):
    case = dataclasses.replace(case, layout=Layout.contiguous(*case.layout))
    q, k, v, dout, initial, dstates = case.inputs()
    q, k, v = inputs = [x.double().requires_grad_() for x in (q, k, v)]
    initial = None if initial is None else initial.double().requires_grad_()
    decay = 1.0 if case.log_decay is None else case.log_decay.exp()[:, None, None]
    group, outs, states = case.heads // case.kv_heads, [], []
    shape = (() if case.batch is None else (case.batch,)) + (
        case.kv_heads,
        case.dim,
        case.value_dim,
    )
    for document, (start, stop) in enumerate(itertools.pairwise(case.layout.cu_seqlens.tolist())):
        state = (
            torch.zeros(shape, dtype=torch.float64)
            if initial is None
            else initial[..., document, :, :, :]
        )
        if not case.causal:
            state = state + torch.einsum(
                "...thd,...the->...hde", k[..., start:stop, :, :], v[..., start:stop, :, :]
            )
        for i in range(start, stop):
            if case.causal:
                state = state * decay + k[..., i, :, :, None] * v[..., i, :, None, :]
            outs.append(
                case.scale * (q[..., i, :, None, :] @ state.repeat_interleave(group, -3))[..., 0, :]
            )
        states.append(state)
    dim = 0 if case.batch is None else 1
    out = torch.stack(outs, dim) if outs else dout.double() + 0 * q.sum()
    state = torch.stack(states, dim)
    loss = (out * dout.double()).sum()
    if case.returned:
        loss = loss + (state * sum(dstates).double()).sum()
    wanted = [*inputs] + ([initial] if case.begun else [])
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    found = {
        "out": out.detach(),
        **dict(zip(("dq", "dk", "dv", "dinitial"), gradients, strict=False)),
    }
    if case.returned:
        found["state"] = state.detach()
    return {name: x.numpy() for name, x in found.items()}


def errors(got, expected, dtype, roundings=16):
    """Return {name: error divided by its bound}.

    In fp64, the error is the largest difference, and its bound is 1e-10. In shorter dtypes, the
    error is the RMS, and its bound is `roundings` times the dtype's epsilon. Both bounds are
    relative to the oracle's result if that exceeds 1. The error is infinite if a result is not
    finite.
    """
    assert got.keys() == expected.keys()
    norm, bound = (
        (largest, 1e-10) if dtype == torch.float64 else (rms, roundings * torch.finfo(dtype).eps)
    )
    found = {
        name: norm(got[name] - y) / (bound * max(1.0, norm(y))) for name, y in expected.items()
    }
    return {
        name: error if np.isfinite(got[name]).all() else np.inf for name, error in found.items()
    }


def assert_right(got, expected, dtype):
    """Assert that what `run` returned is within the bounds of `errors`."""
    found = errors(got, expected, dtype)
    assert max(found.values(), default=0.0) <= 1, found


@st.composite
def linear_cases(draw, dtype, max_tokens=60):
    """Draw a number of ranks and a call on them."""
    ranks = draw(st.integers(1, 4))
    causal, kv_heads = draw(st.sampled_from([True, True, False])), draw(st.integers(1, 3))
    case = LinearCase(
        draw(layouts(draw(cu_seqlens(max_tokens)), ranks)),
        causal=causal,
        decay=draw(st.sampled_from([None, 0.0, 0.1, 3.0])) if causal else None,
        scale=draw(st.sampled_from([1.0, 0.3])),
        begun=draw(st.booleans()),
        returned=draw(st.booleans()),
        batch=draw(st.sampled_from([None, None, 2])),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 5, 8])),
        value_dim=draw(st.sampled_from([3, 8])),
        dtype=dtype,
        backend=draw(st.sampled_from(["aten", "aten", "reference"])),
        transport=draw(st.sampled_from(["all_gather", "scan"])),
        blocks=draw(st.sampled_from([1, 2, 5, 100])),
        chunk=draw(st.sampled_from([1, 4, 16, 128])),
        seed=draw(st.integers(0, 1000)),
    )
    return ranks, case
