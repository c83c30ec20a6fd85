"""Calls of `RecurrentAttention` to test with, and their oracle.

The oracle computes the formula of each token in fp64, over the whole packed batch in one process.
"""

import dataclasses

import torch
from hypothesis import strategies as st

from seqpar import Layout, RecurrentAttention, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.linear.kinds import KINDS, kind
from tests.support.cases import backward, cu_seqlens, layouts
from tests.support.recurrent_cases import RecurrentCase
from tests.support.recurrent_cases import oracle as formula

NAMES = "q", "k", "v", "log_decay", "beta"


@dataclasses.dataclass(frozen=True)
class RecurrentCall:
    """One call on some ranks, with all that is needed to make its inputs on each rank.

    `options` are fields of `RecurrentCase`, which makes the inputs.
    """

    kind: str
    layout: Layout
    transport: str = "all_gather"
    begun: bool = False  # whether the call has initial states
    returned: bool = False
    batched: bool = True
    blocks: int = 3
    module_options: tuple = ()
    options: tuple = ()

    @property
    def case(self):
        """Return the same call of the primitive on one process, whose spans are the documents."""
        batch = {} if self.batched else {"batch": 1}
        documents = self.layout.documents
        return RecurrentCase(
            self.kind,
            edges=tuple(self.layout.cu_seqlens.tolist()),
            entered=(self.begun,) * documents,
            left=(self.returned,) * documents,
            **dict(self.options) | batch,
        )

    @property
    def dtype(self):
        return self.case.dtype


def begin(group, call, **changes):
    """Make the call on this rank, with some arguments changed; return its outputs and its leaves.

    Outputs are by name, each with its gradient. Leaves are the tensors that get gradients in
    backward, also by name.
    """
    rec = RecurrentAttention(
        group, call.kind, call.transport, blocks=call.blocks, **dict(call.module_options)
    )
    inputs, dout, entering, dleaving = call.case.tensors()
    constant, rank, dim = kind(call.kind).decay == "constant", rec.rank, int(call.batched)
    ours = (lambda x: x) if call.batched else (lambda x: x[0])
    leaves, fixed = {}, {}
    for name, x in zip(NAMES, inputs, strict=True):
        if name == "log_decay" and constant:
            fixed[name] = x
        elif x is not None:
            leaves[name] = call.layout.shard(ours(x), rank, dim).clone().requires_grad_()
    entering, dleaving = (ours(x.transpose(0, 1)) for x in (entering, dleaving))
    if call.begun:
        leaves["initial_state"] = entering.clone().requires_grad_()
    arguments = {"layout": call.layout, "scale": call.case.scale, "return_state": call.returned}
    with use_backend(call.case.backend):
        result = rec(**leaves | fixed | arguments | changes)
    out, state = result if call.returned else (result, None)
    assert out.dtype == call.dtype
    outputs = {"out": (out, call.layout.shard(ours(dout), rank, dim))}
    if call.returned:  # ranks have different parts of the gradient
        share = (rank + 1) / sum(range(1, rec.ranks + 1))
        outputs["state"] = state, dleaving * share
    return outputs, leaves


def run(group, call):
    """Make the call and its backward on this rank; return the results that `oracle` returns.

    Gradients of initial states are summed over ranks.
    """
    comm, dim = Comm.of(group), int(call.batched)
    outputs, leaves = begin(group, call)
    backward(outputs)
    initial = leaves.pop("initial_state", None)
    local = {"out": outputs["out"][0].detach()} | {f"d{n}": x.grad for n, x in leaves.items()}
    found = {name: call.layout.unshard(x, comm, dim) for name, x in local.items()}
    found = {name: x if call.batched else x[None] for name, x in found.items()}
    states = {"state_out": outputs["state"][0].detach()} if call.returned else {}
    if initial is not None:
        states["dstate_in"] = torch.stack(comm.all_gather(initial.grad, label="test")).sum(0)
    for name, x in states.items():
        found[name] = (x if call.batched else x[None]).transpose(0, 1)
    return {name: x.double().numpy() for name, x in found.items()}


def oracle(call):
    """Return what `run` should return."""
    found = formula(call.case)
    if kind(call.kind).decay == "constant":
        del found["dlog_decay"]
    for name, some in (("state_out", call.returned), ("dstate_in", call.begun)):
        if not some:
            found.pop(name, None)
    return {name: x.numpy() for name, x in found.items()}


def gated_delta(group, transport="all_gather", **options):
    """Return recurrent attention with random gates that is called like softmax attention."""
    rec = RecurrentAttention(group, "gated_delta", transport, **options)

    def attend(q, k, v, layout, causal):
        gate = torch.rand(q.shape[:-1], requires_grad=True)
        return rec(q, k, v, layout, log_decay=-gate, beta=gate)

    return attend


@st.composite
def recurrent_calls(draw, dtype, max_tokens=60):
    """Draw a number of ranks and a call on them."""
    ranks = draw(st.integers(1, 4))
    few, more = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = draw(st.sampled_from([(few * more, few, few), (few, few, few * more), (1, 2, 1)]))
    log_decay = draw(st.sampled_from([0.0, -1e-4, -0.5, -8.0]))
    options = {
        "batch": draw(st.integers(1, 2)),
        **dict(zip(("q_heads", "k_heads", "v_heads"), heads, strict=True)),
        "dim": draw(st.sampled_from([1, 5, 8])),
        "value_dim": draw(st.sampled_from([3, 8])),
        "log_decay": log_decay,
        "beta": draw(st.sampled_from([(0.0, 1.0), (0.0, 0.0), (1.0, 1.0)])),
        "dtype": dtype,
        "backend": draw(st.sampled_from(["aten", "reference"])),
        "seed": draw(st.integers(0, 1000)),
    }
    call = RecurrentCall(
        draw(st.sampled_from(sorted(KINDS))),
        draw(layouts(draw(cu_seqlens(max_tokens).filter(lambda cu: cu[-1])), ranks)),
        draw(st.sampled_from(["all_gather", "scan", "tree"])),
        begun=draw(st.booleans()),
        returned=draw(st.booleans()),
        batched=draw(st.booleans()),
        blocks=draw(st.sampled_from([1, 2, 5, 100])),
        options=tuple(options.items()),
    )
    return ranks, call
