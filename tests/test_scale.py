"""What up to 1,024 ranks send and hold, without them: the strategies' own code as one rank of a fake process group.

Tensors are on the meta device and the backend's kernels do nothing, so only what is sent, received and allocated remains.
`formulas.py` states what that should be.
"""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpar import LASP2Attention, Layout, linear
from seqpar.backends import aten
from seqpar.comm import Comm
from seqpar.strategies.call import check
from seqpar.strategies.states import Plan
from tests.cases import STRATEGIES, module
from tests.formulas import FORMULAS, Setting, moved_keys


class Held(TorchDispatchMode):
    """The bytes of all storages that operators have made and that are alive, and their peak."""

    def __init__(self, *inputs):
        super().__init__()
        self.now, self.peak, self._known = 0, 0, {}
        for x in inputs:
            self._note(x.untyped_storage(), 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                self._note(x.untyped_storage(), x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage, size):
        def freed(_, key=storage._cdata):
            del self._known[key]
            self.now -= size

        self._known[storage._cdata] = weakref.ref(storage, freed)
        self.now += size


@contextmanager
def fake_group(rank, ranks):
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def measured(monkeypatch, strategy, s):
    """What Formulas has, as the strategy's forward and backward do it."""
    received = 0

    def post(comm, sends, recvs, step, post=Comm._post):
        nonlocal received
        received += sum(tensor.nbytes for _, tensor in recvs)
        return post(comm, sends, recvs, step)

    with monkeypatch.context() as patched, fake_group(s.rank, s.ranks) as group:
        patched.setattr(Comm, "_post", post)
        patched.setattr(aten, "forward", lambda *arguments: None)
        patched.setattr(aten, "backward", lambda *arguments: None)
        attn, layout = module(strategy, group), Layout.contiguous(s.tokens, s.ranks)
        comm, code = attn.engine.comm, attn.engine.strategy
        shapes = [(s.heads, s.dim), (s.kv_heads, s.dim), (s.kv_heads, s.value_dim)]
        q, k, v = (torch.empty(1, s.local, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
        parameters = attn._arguments(q, layout, causal=not s.full, window_size=(s.window, -1))
        call = check(comm, parameters, q, k, v, None)
        counts = [(comm.sent_bytes, received, comm.sent_messages)]
        with Held(q, k, v) as forward:
            out, lse, residuals = code.forward(comm, call, q, k, v)
        counts.append((comm.sent_bytes, received, comm.sent_messages))
        kept, dout = residuals or [q, k, v, out, lse], torch.empty_like(out)
        with Held(dout, *kept) as backward:
            [gradient.to(q.dtype) for gradient in code.backward(comm, call, dout, None, kept)]
        counts.append((comm.sent_bytes, received, comm.sent_messages))
    sent, got, messages = zip(*counts, strict=True)
    steps = [(x[1] - x[0], x[2] - x[1]) for x in (sent, got, messages)]
    return dict(zip(("sent", "received", "messages"), steps, strict=True), held=(forward.peak, backward.peak))


def test_every_strategy_has_formulas():
    assert set(FORMULAS) == set(STRATEGIES)


SETTINGS = [
    Setting(rank, ranks, 1024 * ranks, 64, kv_heads, full)
    for ranks, kv_heads, seen in ((8, 8, (0, 4, 7)), (8, 64, (4,)), (64, 8, (0, 32, 63)), (64, 64, (32,)))
    for rank in seen
    for full in (True, False)
]
LARGE = [Setting(rank, 1024, 2**20, 1024, 8, full) for rank, full in ((0, False), (512, True), (1023, False))]
SLOW = {"token_ring": 1, "usp": 2}  # how many of these, where each takes several seconds
CASES = [(strategy, s) for strategy in FORMULAS for s in SETTINGS + LARGE[: SLOW.get(strategy, 3)]]


def named(x):
    return f"{x.rank}-of-{x.ranks}-{x.kv_heads}-{'full' if x.full else 'causal'}" if isinstance(x, Setting) else x


@pytest.mark.parametrize(("strategy", "s"), CASES, ids=named)
def test_a_rank_sends_receives_and_holds_what_the_formulas_say(monkeypatch, strategy, s):
    found, formulas = measured(monkeypatch, strategy, s), FORMULAS[strategy]
    for name in ("sent", "received", "messages"):
        assert found[name] == getattr(formulas, name)(s), name
    for peak, bound in zip(found["held"], formulas.held(s), strict=True):
        assert 0.9 * bound <= peak <= bound


@pytest.mark.parametrize("strategy", ["ring", "token_ring", "ulysses", "usp"])
def test_more_ranks_for_more_tokens_hold_the_same(monkeypatch, strategy):
    """O(N/P) memory a rank; of Ulysses' up to the factor (P − 1)/P, and as long as there are KV heads for all ranks, of which
    all have the same number of groups."""

    def held(ranks, kv_heads):
        return measured(monkeypatch, strategy, Setting(0, ranks, 1024 * ranks, 128, kv_heads))["held"]

    for few, many in zip(held(8, 128), held(64, 128), strict=True):
        assert few <= many <= few * (8 / 7 if strategy == "ulysses" else 1)
    assert (held(64, 8) > held(8, 8)) == (strategy == "ulysses")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
def test_a_window_sends_the_same_at_any_length(monkeypatch, strategy):
    """500 keys of the rank before; of TokenRing the first 500 queries, which see them, and their results."""
    for ranks, local in ((8, 1024), (8, 2**17), (128, 1024)):
        s = Setting(ranks // 2, ranks, local * ranks, 8, 2, full=False, window=500)
        found, reached = measured(monkeypatch, strategy, s), 500 * s.kv_heads * (s.dim + s.value_dim)
        bytes_sent, messages = moved_keys(reached, reached), (2, 4)
        if strategy == "token_ring":
            forward, backward = 2 * s.dim + 4 * s.value_dim + 4, 2 * (s.dim + s.value_dim) + 8 + 4 * s.dim
            bytes_sent, messages = (500 * s.heads * forward, 500 * s.heads * backward), (3, 4)
        assert found["sent"] == found["received"] == bytes_sent and found["messages"] == messages


def test_held_counts_each_storage_once_while_it_lives():
    x = torch.empty(10, device="meta")
    with Held(x) as held:
        y = x.view(5, 2) + 1
        z = y.t()
        assert held.now == 40
        del y
        assert held.now == 40
        del z
    assert held.now == 0 and held.peak == 40


class NoWork:
    """A linear backend's forward or backward that computes nothing."""

    def __init__(self, q, k, v, *rest):
        spans = rest[1] if isinstance(rest[0], torch.Tensor) else rest[0]
        count = spans.entering if isinstance(rest[0], torch.Tensor) else spans.leaving
        self.states = q.new_empty((count, q.shape[0], k.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
        self.results = (q, k, v) if isinstance(rest[0], torch.Tensor) else torch.empty_like(q)

    def local(self):
        pass

    def finish(self, states):
        return self.results


@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize(
    ("rank", "ranks", "tokens"), [(0, 64, 2**16), (31, 64, 2**22), (512, 1024, 2**20), (1023, 1024, 2**20)]
)
def test_lasp2_sends_states_only(monkeypatch, transport, rank, ranks, tokens):
    """One document in zigzag: a state to each rank, or one for each of two spans, and so in backward, at any length."""
    monkeypatch.setattr(linear, "backend", lambda name: SimpleNamespace(Forward=NoWork, Backward=NoWork))
    with fake_group(rank, ranks) as group:
        lin, layout = LASP2Attention(group, transport=transport), Layout.zigzag(tokens, ranks)
        comm, code = lin.engine.comm, lin.engine.strategy
        q = torch.empty(1, tokens // ranks, 8, 64, dtype=torch.bfloat16, device="meta")
        plan, recurrence = Plan.of(layout.geometry, True, False, False), linear.Recurrence(1.0, True, "aten", None)
        sent = [(comm.sent_bytes, comm.sent_messages)]
        _, _, entered = code.forward(comm, plan, recurrence, (q, q, q), None)
        sent.append((comm.sent_bytes, comm.sent_messages))
        code.backward(comm, plan, recurrence, (q, q, q), entered, q, entered[:0])
        sent.append((comm.sent_bytes, comm.sent_messages))
    spans = 1 if rank in (0, ranks - 1) else 2  # the last rank's two spans are one; nothing follows the first one's last
    states, messages = (ranks - 1, ranks - 1) if transport == "all_gather" else (spans, 4 * spans)
    assert np.diff(sent, axis=0).tolist() == [[states * 8 * 64 * 64 * 4, messages]] * 2
