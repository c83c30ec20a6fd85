"""Every strategy under NCCL's rules (`tests/support/nccl.py`): no rank waits for ever, the bits are
the same as without the rules, and communication runs beside compute."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.comm.messages import channels
from seqpar.tracing.exposure import Exposure
from tests.support import cases, linear_cases
from tests.support.cases import STRATEGIES, VARIANTS, Case, backward, cu_seqlens, layouts
from tests.support.fakes import fake_group
from tests.support.linear_cases import LinearCase
from tests.support.nccl import NcclComm, nccl
from tests.support.nccl_exchanges import Speeds
from tests.support.ranks import virtual
from tests.support.tiers import examples, few_rows

RANKS = 4
TRANSPORTS = ["lasp2 all_gather", "lasp2 scan"]
LAYOUTS = {
    "zigzag": Layout.zigzag([0, 9, 40], RANKS),
    "contiguous": Layout.contiguous([0, 9, 40], RANKS),
    "striped": Layout.striped([0, 9, 40], RANKS, stripe=2),
    "one document a rank": Layout.from_spans(
        [[(i, 0, 5 + i)] for i in range(RANKS)], [0, 5, 11, 18, 26]
    ),
    "two ranks of four": Layout.from_spans([[], [(0, 5, 9)], [], [(0, 0, 5)]], [0, 9]),
    "two ranks share": Layout.from_spans(
        [[(0, 0, 5)], [(1, 0, 6)], [(0, 5, 9)], [(2, 0, 2)]], [0, 9, 15, 17]
    ),
    "crossed": Layout.from_spans(
        [[(0, 0, 3), (1, 2, 7)], [(0, 3, 9), (1, 0, 2)], [(0, 9, 11)], [(1, 7, 8)]], [0, 11, 19]
    ),
}
ROW = Layout.zigzag([0, 7, 20], 2)  # of a group of two ranks


def call(strategy, layout, causal=True, **options):
    """The call to make: of softmax attention or, for "lasp2 …", of linear attention."""
    name, _, transport = strategy.partition(" ")
    if name != "lasp2":
        options = {"heads": 4, "kv_heads": 2, "sinks": True, "dlse": True} | options
        return Case(strategy, layout, causal, **options)
    decay = 0.1 if causal else None
    # With states as large as a token's k and v, spans of one token are taken too.
    options = {"begun": True, "returned": True, "dim": 2, "value_dim": 2} | options
    return LinearCase(layout, causal, decay, transport=transport, **options)


def begin(group, case):
    """Make the call on this rank: outputs with their gradients, and leaves, by name."""
    return (linear_cases if isinstance(case, LinearCase) else cases).begin(group, case)


def results(outputs, leaves):
    """This rank's outputs and gradients, after backward."""
    return [*(x.detach() for x, _ in outputs.values()), *(x.grad for x in leaves.values())]


def once(group, case):
    """Forward and backward of one call."""
    outputs, leaves = begin(group, case)
    backward(outputs)
    return results(outputs, leaves)


class AllReduces:
    """DDP's traffic: a sum over ranks that is posted when a gradient is there, and waited for after
    the backward."""

    def __init__(self, comm):
        self.comm, self.pending = comm, []

    def post(self, gradient):
        x = torch.tensor([float(self.comm.rank)])
        others = [torch.empty_like(x) for _ in self.comm.peers]
        sends = [(peer, x) for peer in self.comm.peers]
        recvs = list(zip(self.comm.peers, others, strict=True))
        self.pending.append((self.comm.exchange(sends, recvs, label="ddp"), [x, *others]))

    def wait(self):
        """Return how many sums there were; each must be that of all ranks' numbers."""
        for pending, parts in self.pending:
            pending.wait()
            assert float(sum(parts)) == sum(range(self.comm.size))
        return len(self.pending)


def step(comm, case, of_row, shared):
    """A training step: two modules on the group and between them one on this rank's row of two, and
    an all-reduce for each gradient, on the group's communicator if it is shared, or its own."""
    everyone, first = range(comm.size), comm.rank // 2 * 2
    row = comm.beside(f"row {first}", [first, first + 1])
    reductions = AllReduces(comm if shared else comm.beside("ddp", everyone))
    begun = [begin(*x) for x in ((comm, case), (row, of_row), (comm, case))]
    for outputs, leaves in reversed(begun):
        for leaf in leaves.values():
            leaf.register_post_accumulate_grad_hook(reductions.post)
        backward(outputs)
    assert reductions.wait() == sum(len(leaves) for _, leaves in begun)
    return [results(*each) for each in begun]


def assert_same(got, expected):
    """The same bits, and NaN nowhere."""
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def assert_right(case, shared, one_at_a_time):
    """Hold a training step under the rules to the bits of each call without them."""
    of_row = call(f"lasp2 {case.transport}" if isinstance(case, LinearCase) else case.strategy, ROW)
    on_group, on_row = virtual(RANKS, once, case), virtual(2, once, of_row)
    steps, _ = nccl(RANKS, step, case, of_row, shared, one_at_a_time=one_at_a_time)
    for rank, (first, between, last) in enumerate(steps):
        assert_same(first, on_group[rank])
        assert_same(between, on_row[rank % 2])
        assert_same(last, on_group[rank])


@few_rows()
@pytest.mark.parametrize("strategy", [*STRATEGIES, *TRANSPORTS, *VARIANTS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_a_training_step_ends_with_the_same_bits(strategy, layout, causal, shared, one_at_a_time):
    """`shared`: one communicator for all traffic. Else the device may have room for several."""
    assert_right(call(strategy, LAYOUTS[layout], causal), shared, one_at_a_time)


@examples(7, 20)
@given(st.data())
def test_any_layout_ends_with_the_same_bits(data):
    ranks = data.draw(st.integers(2, 4))
    layout = data.draw(layouts(data.draw(cu_seqlens(40)), ranks))
    strategy = data.draw(st.sampled_from([*STRATEGIES, *TRANSPORTS, TRANSPORTS[1]]))
    case = call(strategy, layout, data.draw(st.booleans()))
    got, _ = nccl(ranks, once, case, one_at_a_time=data.draw(st.booleans()))
    for found, expected in zip(got, virtual(ranks, once, case), strict=True):
        assert_same(found, expected)


def mixed(comm, cases):
    """A model whose layers are different strategies on one group, which share its channels, with an
    all-reduce for each gradient."""
    reductions = AllReduces(comm)
    begun = [begin(comm, case) for case in cases]
    for outputs, leaves in reversed(begun):
        for leaf in leaves.values():
            leaf.register_post_accumulate_grad_hook(reductions.post)
        backward(outputs)
    reductions.wait()
    return [results(*each) for each in begun]


@few_rows()
@pytest.mark.parametrize("layout", ["crossed", "two ranks of four"])
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_strategies_share_a_group_and_its_channels(layout, one_at_a_time):
    names = ["token_ring", "usp+token_ring", "lasp2 scan", "ring", "token_ring", "ulysses"]
    mixture = [call(name, LAYOUTS[layout]) for name in names]
    got, _ = nccl(RANKS, mixed, mixture, one_at_a_time=one_at_a_time)
    expected = [virtual(RANKS, once, case) for case in mixture]
    for rank, of_layers in enumerate(got):
        for found, of_ranks in zip(of_layers, expected, strict=True):
            assert_same(found, of_ranks[rank])


def linear_forward_beside_another_group(comm, case):
    """A forward whose group nobody else makes for the ranks that have nothing to do in it."""
    linear_cases.begin(comm, case)
    AllReduces(comm.beside("ddp", range(comm.size))).post(None)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_without_states_join_the_first_call(transport):
    case = call(transport, LAYOUTS["two ranks of four"], returned=False, begun=False)
    nccl(RANKS, linear_forward_beside_another_group, case)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring", *TRANSPORTS])
def test_a_first_call_without_messages_makes_the_communicator(monkeypatch, strategy):
    made = []
    monkeypatch.setattr(channels, "_use", lambda *made_for: made.append(made_for))
    monkeypatch.setattr(channels, "post", lambda *_: pytest.fail("messages"))
    options = {"returned": False} if strategy in TRANSPORTS else {}
    case = call(strategy, LAYOUTS["one document a rank"], **options)
    with fake_group(rank=0, ranks=RANKS) as group:
        for _ in range(2):
            begin(group, case)
        device = torch.device("cpu")
        assert made == [(group, device)]


def forward(comm, case):
    begin(comm, case)


def seconds(function, case, **speeds):
    """The virtual time of the slowest rank."""
    _, world = nccl(case.layout.ranks, function, case, speeds=Speeds(**speeds))
    return max(world.now)


def in_bf16(strategy, layout):
    return call(strategy, layout, sinks=False, dlse=False, dtype=torch.bfloat16)


@functools.cache
def rate_of_ring(layout):
    """At which Ring's forward takes as long to send what it sends as to compute."""
    case = in_bf16("ring", layout)
    return seconds(forward, case, rate=1.0) / seconds(forward, case, area=1.0)


def exposed(strategy, layout, transfer=0.5):
    """What share of communication is exposed in forward and in backward, as `seqpar.exposure` says,
    on links that take `transfer` of Ring's compute in forward for what that sends."""
    case, rate = in_bf16(strategy, layout), rate_of_ring(layout) / transfer
    ways = {"area": 1.0, "rate": rate}, {"area": 1.0}, {"rate": rate}
    of_forward = [seconds(forward, case, **speeds) for speeds in ways]
    of_both = [seconds(once, case, **speeds) for speeds in ways]
    of_backward = [both - first for both, first in zip(of_both, of_forward, strict=True)]
    return [Exposure((tuple(times),)).fraction for times in (of_forward, of_backward)]


# AllGather's first exchanges are small, and its last, so that its own block hides them; in forward,
# where less is computed with each key, not quite.
EXPOSED_AT_MOST = {
    "ring": (1e-9, 1e-9),
    "all_gather": (0.075, 1e-9),
    "disaggregated+at home": (1e-9, 0.09),
    "usp": (0.36, 0.16),
    "token_ring": (0.27, 0.08),
    "mesh": (0.18, 0.05),
}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(x, marks=() if x == "ring" else pytest.mark.exhaustive) for x in EXPOSED_AT_MOST],
)
def test_no_more_of_communication_is_exposed_than_this(strategy):
    for found, bound in zip(
        exposed(strategy, Layout.zigzag(2048, 8)), EXPOSED_AT_MOST[strategy], strict=True
    ):
        assert found <= bound


def test_its_own_plan_is_faster_than_local_work():
    """Where one rank alone would take 1.6 times as long as all do together."""
    packed = Layout.contiguous([0, *itertools.accumulate([3000, 200, 700, 90, 400, 1000])], 4)
    plans = (call(f"disaggregated{x}", packed, dtype=torch.bfloat16) for x in ("", "+at home"))
    balanced, at_home = (seconds(forward, case, area=1.0) for case in plans)
    assert balanced < 0.65 * at_home


def test_mesh_levels_do_not_wait_for_each_other(monkeypatch):
    """Gradients of one group's heads return within rows while another group's keys, and their
    gradients, are under way between rows, on links that take as long as Ring's compute."""
    heads = {"heads": 8, "kv_heads": 8, "sinks": False, "dlse": False, "dtype": torch.bfloat16}
    ring, usp = (call(name, Layout.zigzag(256, 8), **heads) for name in ("ring", "usp"))
    rate = seconds(forward, ring, rate=1.0) / seconds(forward, ring, area=1.0)
    apart = seconds(once, usp, area=1.0, rate=rate)
    monkeypatch.setattr(NcclComm, "channel", lambda comm, name: comm)
    assert apart < 0.99 * seconds(once, usp, area=1.0, rate=rate)


def test_token_ring_results_do_not_queue_behind_queries(monkeypatch):
    """Where all transfers take as long as all compute."""
    case = call("token_ring", Layout.zigzag(256, 8), sinks=False, dlse=False, dtype=torch.bfloat16)
    compute, transfer = seconds(forward, case, area=1.0), seconds(forward, case, rate=1.0)
    times = []
    for channel in (NcclComm.channel, lambda comm, name: comm):
        monkeypatch.setattr(NcclComm, "channel", channel)
        times.append(seconds(forward, case, area=1.0, rate=transfer / compute) / compute)
    assert times[0] < 1.2 < 1.4 < times[1]


def test_all_gather_computes_with_keys_as_they_arrive():
    """Those of 1, 3, 2 and 1 ranks. Where one rank's take as long as the compute with them, they
    are there at 1, 4, 6 and 7 times that, and the compute with the 3 waits for 2 of these."""
    layout = Layout.zigzag(256, 8)
    case = call("all_gather", layout, causal=False, sinks=False)
    own, total = 32 * 32 * case.heads, 32 * 256 * case.heads
    sent = 32 * case.kv_heads * (case.dim + case.value_dim) * 8  # bytes to each rank, fp64
    assert seconds(forward, case, area=1.0, rate=sent / own) == total + 2 * own
    assert seconds(forward, case, area=1.0, rate=2 * sent / own) == total
