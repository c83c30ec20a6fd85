"""NaN in inputs of recurrent attention reaches all later tokens of its document, on any rank."""

import math

import pytest

from seqpar import Layout, RecurrentAttention, use_backend
from seqpar.linear.kinds import KINDS, kind
from seqpar.strategies.recurrent import TRANSPORTS
from tests.support.ranks import virtual
from tests.support.recurrent_calls import NAMES, RecurrentCall
from tests.support.tiers import few_rows

LAYOUT, DOCUMENT, TOKEN = Layout.zigzag([0, 25, 60], 3), 25, 40


def attend(comm, call, place, backend):
    """out and dq of the whole pack, where one token of one input is NaN."""
    arguments = {}
    for name, x in zip(NAMES, call.case.tensors()[0], strict=True):
        if name == place:
            x[:, TOKEN] = math.nan
        if x is not None:
            constant = name == "log_decay" and kind(call.kind).decay == "constant"
            arguments[name] = x if constant else LAYOUT.shard(x, comm.rank, 1).requires_grad_()
    with use_backend(backend):
        out = RecurrentAttention(comm, call.kind, call.transport)(**arguments, layout=LAYOUT)
        out.sum().backward()
    return [LAYOUT.unshard(x, comm, 1) for x in (out.detach(), arguments["q"].grad)]


@few_rows()
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_nan_is_kept_and_stays_in_its_document(name, backend):
    call = RecurrentCall(name, LAYOUT, TRANSPORTS[list(KINDS).index(name) % 3])
    gates = {"log_decay": kind(name).decay in ("head", "key"), "beta": kind(name).uses_beta}
    for place in [x for x in NAMES if gates.get(x, True)]:
        later = slice(TOKEN, TOKEN + 1 if place == "q" else None)
        for out, dq in virtual(3, attend, call, place, backend):
            assert out[:, later].isnan().all()
            assert out[:, :DOCUMENT].isfinite().all() and dq[:, :DOCUMENT].isfinite().all()
