"""What up to 1,024 ranks send and hold, without them: the strategies' own code as one rank of a fake process group.

Tensors are on the meta device and the backend's kernels do nothing, so only what is sent, received and allocated remains.
FORMULAS states what that should be, from the numbers of tokens, ranks, heads and dims; a new strategy adds an entry.
"""

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpar import Layout
from seqpar.backends import aten
from seqpar.comm import Comm
from seqpar.strategies.call import check
from tests.cases import STRATEGIES, module


@dataclasses.dataclass(frozen=True)
class Setting:
    """N tokens laid out contiguously on P ranks, in bf16; `full` or causal, as rank r sees it."""

    rank: int
    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    full: bool = True
    window: int = -1
    dim: int = 128
    value_dim: int = 64

    @property
    def local(self):
        return self.tokens // self.ranks

    @property
    def keys(self):
        """Elements in a rank's own keys and values."""
        return self.local * self.kv_heads * (self.dim + self.value_dim)

    @property
    def sources(self):
        """How many other ranks' keys this rank's queries see."""
        return self.ranks - 1 if self.full else self.rank

    @property
    def targets(self):
        """How many other ranks' queries see this rank's keys."""
        return self.ranks - 1 if self.full else self.ranks - 1 - self.rank

    @property
    def heads_here(self):
        """Ulysses' query heads and KV heads of a rank (the former a multiple of the ranks), and the bytes of an element of a
        rank's contribution to dk and dv: fp32 where several have the same KV head."""
        q = self.heads // self.ranks
        kv = max(1, q * self.kv_heads // self.heads)
        return q, kv, 4 if kv * self.ranks > self.kv_heads else 2


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Of a setting, each as (forward, backward): bytes sent and received, messages sent, and a bound on bytes held at once
    beside the inputs (of forward q, k, v; of backward what forward kept, and dout)."""

    sent: Callable[[Setting], tuple[int, int]]
    received: Callable[[Setting], tuple[int, int]]
    messages: Callable[[Setting], tuple[int, int]]
    held: Callable[[Setting], tuple[int, int]]


def moved_keys(sent, received):
    """Bytes: bf16 keys and values go one way in both passes, and in backward their fp32 gradients the other way."""
    return 2 * sent, 2 * sent + 4 * received


def running(tokens, heads, s):
    """Bytes of forward's partial (fp32 out, fp64 lse) and of what it becomes (bf16 out, fp32 lse)."""
    return tokens * heads * (4 * s.value_dim + 8), tokens * heads * (2 * s.value_dim + 4)


def own_gradients(s):
    """Bytes of fp32 dq, dk and dv of a rank's tokens, and of lse with its rows that see nothing replaced."""
    return 4 * (s.local * s.heads * s.dim + s.keys) + 4 * s.local * s.heads


def ring_held(s):
    """Two blocks of keys; in backward also the gradients of one, and those sent and received for the one before."""
    partial, finished = running(s.local, s.heads, s)
    blocks = min(2, s.sources)
    forward = partial + max(2 * s.keys * blocks, finished)
    contributions = max(blocks + min(1, s.targets), min(1, blocks) + min(2, s.targets))
    own = own_gradients(s)
    return forward, max(own + 2 * s.keys * blocks + 4 * s.keys * contributions, own + own // 2)


def all_gather_held(s):
    """All keys that are seen; in backward also their gradients, and the contributions to this rank's."""
    partial, finished = running(s.local, s.heads, s)
    arrived = 2 * s.keys * s.sources
    return arrived + partial + finished, own_gradients(s) + 3 * arrived + 4 * s.keys * s.targets


def ulysses_sent(s):
    """Of each head its owner needs all tokens: (P − 1)/P of q, out, dout and dq travel, keys to each rank that needs them."""
    q, kv, contribution = s.heads_here
    others = s.local * (s.ranks - 1)
    queries, keys = others * q * (s.dim + s.value_dim), others * kv * (s.dim + s.value_dim)
    return 2 * queries + 2 * keys, 2 * queries + contribution * keys


def ulysses_messages(s):
    """q, k, v and out; dout, dq, dk and dv: one to each peer."""
    return 4 * (s.ranks - 1), 4 * (s.ranks - 1)


def ulysses_held(s):
    """q, k and v over all tokens of the rank's heads, beside the copies that others are sent, or beside the partial and out;
    in backward dout, lse, fp32 gradients and what is cast of them, what arrives of the rank's own, and their sum."""
    q, kv, contribution = s.heads_here
    queries, keys = q * s.dim, kv * (s.dim + s.value_dim)
    copies = 2 * s.local * (s.ranks - 1) * (queries + keys)
    forward = 2 * s.tokens * (queries + keys) + max(copies, sum(running(s.tokens, q, s)))
    summed = s.tokens * (q * (2 * s.value_dim + 4) + 4 * (queries + keys))
    cast = s.tokens * 2 * (queries + keys * (contribution == 2))
    arriving = s.local * (s.ranks - 1) * (2 * queries + contribution * keys)
    return forward, summed + cast + arriving + 2 * s.local * s.heads * s.dim + contribution * s.keys


def two_a_peer(s):
    """Keys and values to each rank that sees them, and in backward their gradients to each owner."""
    return 2 * s.targets, 2 * s.targets + 2 * s.sources


def key_formulas(held):
    return Formulas(
        sent=lambda s: moved_keys(s.keys * s.targets, s.keys * s.sources),
        received=lambda s: moved_keys(s.keys * s.sources, s.keys * s.targets),
        messages=two_a_peer,
        held=held,
    )


FORMULAS = {
    "ring": key_formulas(ring_held),
    "all_gather": key_formulas(all_gather_held),
    "ulysses": Formulas(ulysses_sent, ulysses_sent, ulysses_messages, ulysses_held),
}


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
        parameters = attn._arguments(q, layout, causal=not s.full, window_size=(s.window, -1), wants_lse=False)
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
    for ranks, kv_heads in ((8, 8), (64, 8), (64, 64))
    for rank in (0, ranks // 2, ranks - 1)
    for full in (True, False)
] + [Setting(rank, 1024, 2**20, 1024, 8, full) for rank, full in ((512, True), (0, False), (1023, False))]


@pytest.mark.parametrize("s", SETTINGS, ids=lambda s: f"{s.rank}-of-{s.ranks}-{s.kv_heads}-{'full' if s.full else 'causal'}")
@pytest.mark.parametrize("strategy", FORMULAS)
def test_a_rank_sends_receives_and_holds_what_the_formulas_say(monkeypatch, strategy, s):
    found, formulas = measured(monkeypatch, strategy, s), FORMULAS[strategy]
    for name in ("sent", "received", "messages"):
        assert found[name] == getattr(formulas, name)(s), name
    for peak, bound in zip(found["held"], formulas.held(s), strict=True):
        assert 0.9 * bound <= peak <= bound


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_more_ranks_for_more_tokens_hold_the_same(monkeypatch, strategy):
    """O(N/P) memory a rank; of Ulysses' up to the factor (P − 1)/P, and as long as there are KV heads for all ranks."""

    def held(ranks, kv_heads):
        return measured(monkeypatch, strategy, Setting(0, ranks, 1024 * ranks, 64, kv_heads))["held"]

    for few, many in zip(held(8, 64), held(64, 64), strict=True):
        assert few <= many <= few * 8 / 7
    assert (held(64, 8) > held(8, 8)) == (strategy == "ulysses")


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_a_window_sends_the_same_at_any_length(monkeypatch, strategy):
    for ranks, local in ((8, 1024), (8, 2**17), (128, 1024)):
        s = Setting(ranks // 2, ranks, local * ranks, 8, 2, full=False, window=500)
        found, reached = measured(monkeypatch, strategy, s), 500 * s.kv_heads * (s.dim + s.value_dim)
        assert found["sent"] == found["received"] == moved_keys(reached, reached) and found["messages"] == (2, 4)


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
