"""When states are posted: nothing that must be sent waits for weights, or for other traffic."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar import LASP2Attention, Layout
from seqpar.linear import attend
from seqpar.linear.inputs import Inputs
from seqpar.strategies.lasp2 import TRANSPORTS
from tests.support.linear_cases import LinearCase, begin
from tests.support.nccl import Deadlock, nccl
from tests.support.steady import SilentComm


class Names(TorchDispatchMode):
    """The names of all operators."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_computed_before_there_are_states(monkeypatch, transport):
    """On a GPU the scan's stream waits for the states, so that what is behind them is late."""
    case = LinearCase(Layout.zigzag([0, 40, 90], 4), begun=True)
    lin = LASP2Attention(SilentComm(1, 4), transport)
    q, k, v, dout = (case.layout.shard(x, 1)[None] for x in case.inputs()[:4])
    initial = case.inputs()[4]
    given = {"log_decay": case.log_decay, "initial_state": initial}
    call = lin._resolve(q[0], k[0], v[0], case.layout, **given)
    before, make = [], attend.load_backend("linear", call.options.backend)

    class Backend:
        def __getattr__(self, name):
            before.append([x for x in names.found if x == "aten.exp.default"])
            return getattr(make, name)

    monkeypatch.setattr(attend, "load_backend", lambda family, name: Backend())
    with Names() as names:
        result = lin._bound.strategy.forward(
            lin._bound.comm, call, Inputs(q, k, v), initial[:, None]
        )
    assert len(before[0]) == 2  # of the exchange, and of the initial states
    with Names() as names:
        lin._bound.strategy.backward(
            lin._bound.comm, call, Inputs(q, k, v), result.states_in, dout, result.final_states
        )
    assert len(before[1]) == 1


def beside_other_traffic(comm, case):
    """Rank 0 posts other traffic before the call, and rank 1 only behind it."""
    peer, x = 1 - comm.rank, torch.zeros(1)
    comm.join()
    if comm.rank == 0:
        pending = comm.exchange([], [(peer, x)], label="other")
    begin(comm, case)
    if comm.rank == 1:
        pending = comm.exchange([(peer, x)], [], label="other")
    pending.wait()


def test_a_scan_has_a_communicator_of_its_own():
    case = LinearCase(Layout.contiguous([0, 40, 90], 2), transport="scan")
    nccl(2, beside_other_traffic, case)
    with pytest.raises(Deadlock):
        nccl(2, beside_other_traffic, LinearCase(case.layout))
