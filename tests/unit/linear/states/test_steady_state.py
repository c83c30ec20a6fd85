"""From a layout's second call on, linear attention makes the host wait for no device: it uploads no
table, indexes with no table of the host's, and reads no number back."""

import gc
import itertools

import pytest
import torch
from seqpar.kernels.flash_attention import launching
from torch._subclasses import FakeTensorMode

from seqpar import LASP2Attention, Layout, use_backend
from seqpar.core import background
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.hooks import hooks
from seqpar.linear.inputs import Inputs
from seqpar.linear.states import options as state_options
from seqpar.linear.states.sums import Gathering
from seqpar.strategies.lasp2 import TRANSPORTS
from seqpar.strategies.zeco import _Decays
from tests.support.fakes import AtOnce
from tests.support.steady import DOCUMENTS, RANKS, HostWaits, SilentComm, layouts
from tests.support.tiers import few_rows

LAYOUTS = layouts(stripe=16)


def call(lin, layout, causal, log_decay, begun, returned):
    """Forward and backward."""

    def empty(heads):
        shape = 1, layout.tokens_on(lin.rank), heads, 8
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    q, k, v, dout = map(empty, (4, 2, 2, 4))
    initial = None
    if begun:
        state = layout.documents, 1, 2, 8, 8
        initial = torch.empty(state, dtype=accumulator_dtype(q.dtype), device="meta")
    given = None if initial is None else initial[:, 0]
    options = {"causal": causal, "log_decay": log_decay}
    call = lin._resolve(
        q[0], k[0], v[0], layout, **options, initial_state=given, return_state=returned
    )
    code, comm = lin._bound.strategy, lin._bound.comm
    _, final, states_in = code.forward(comm.call(), call, Inputs(q, k, v), initial)
    code.backward(comm.call(), call, Inputs(q, k, v), states_in, dout, final)


DECAYS = {
    "none": lambda: None,
    "on the device": lambda: torch.empty(2, device="meta"),
    "on the host": lambda: torch.full((2,), -0.1),
}
CALLS = [
    (causal, decays, begun, returned)
    for causal in (True, False)
    for decays in (DECAYS if causal else ["none"])
    for begun, returned in itertools.product([False, True], repeat=2)
]


def waits(transport, layout, ranks, calls=CALLS):
    """For what the host waits in second calls, by rank and options."""
    found = {}
    for rank, options in itertools.product(ranks, calls):
        causal, decays, begun, returned = options
        if layout == "striped" and causal:
            continue  # stripes so short are refused
        lin, second = LASP2Attention(SilentComm(rank, RANKS), transport), HostWaits()
        call(lin, LAYOUTS[layout], causal, DECAYS[decays](), begun, returned)
        with second:
            call(lin, LAYOUTS[layout], causal, DECAYS[decays](), begun, returned)
        if second.found:
            found[rank, options] = dict(second.found)
    return found


@few_rows()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_host_waits_for_nothing(monkeypatch, transport, layout):
    monkeypatch.setattr(background, "threads", AtOnce)
    with hooks.set(replace_compute=lambda area: None):
        assert not waits(transport, layout, (0, 2, RANKS - 1))


@pytest.mark.parametrize("backend", ["aten", "reference", "triton"])
def test_nor_for_what_a_backend_computes(monkeypatch, backend):
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)
    calls = [x for x in CALLS if x[1] != "on the host" and x[2] and x[3]]
    with use_backend(backend):
        assert not waits("all_gather", "uneven", (0, 2), calls)


def test_a_decay_is_reread_after_writes(monkeypatch):
    read = []
    monkeypatch.setattr(state_options, "_read", lambda x: read.append(x) or [0.0])
    first, second = torch.zeros(2, 2, device="meta")
    for x in (first, first, second):
        state_options.check_values(x)
    state_options.check_values(first.zero_())
    assert [id(x) for x in read] == [id(x) for x in (first, second, first)]
    with torch.inference_mode():
        state_options.check_values(torch.zeros(2, device="meta"))  # it has no version


def test_rewritten_decays_are_remembered_once():
    gc.collect()
    before = len(state_options._right)
    decays = torch.zeros(2, device="meta")
    for _ in range(5):
        state_options.check_values(decays.zero_())
    assert len(state_options._right) == before + 1
    del decays
    assert len(state_options._right) == before


@few_rows()
@pytest.mark.parametrize(("decays", "times"), [("on the host", 2), ("on the device", 4)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_of_constant_decays_are_computed_once(monkeypatch, transport, decays, times):
    monkeypatch.setattr(background, "threads", AtOnce)
    owner, name = {"all_gather": (Gathering, "weigh"), "scan": (_Decays, "weights")}[transport]
    weigh, made = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *given: made.append(given) or weigh(*given))
    layout = Layout.zigzag(DOCUMENTS, RANKS, min_chunk=8)  # which no other test has called
    lin = LASP2Attention(SilentComm(1, RANKS), transport)
    for _ in range(2):  # in forward and in backward
        call(lin, layout, True, DECAYS[decays](), False, False)
    assert len(made) == times
    if decays == "on the host":
        call(lin, layout, True, torch.full((2,), -0.2), False, False)
        assert len(made) == 2 * times


def test_layers_copy_decays_of_their_own_once(monkeypatch):
    monkeypatch.setattr(background, "threads", AtOnce)
    layout, layers = Layout.zigzag(DOCUMENTS, RANKS, min_chunk=8), 70
    lin, second = LASP2Attention(SilentComm(1, RANKS)), HostWaits()

    def model():
        for layer in range(layers):
            call(lin, layout, True, torch.full((2,), -1.0 / (layer + 1)), False, False)

    with hooks.set(replace_compute=lambda area: None):
        model()
        with second:
            model()
    assert not second.found


def test_kernels_are_given_contiguous_decays():
    """A kernel reads them one after another."""
    strided = torch.full((2, 2), -0.5, dtype=torch.float64, device="meta")[:, 0]
    assert state_options.constant_on(strided, strided.device).is_contiguous()


def test_no_fake_decay_is_kept():
    decay = torch.tensor([-0.625])
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="log_decay"):
        state_options.constant_on(decay, decay.device)
    assert state_options.constant_on(decay, decay.device).tolist() == [-0.625]
