"""What up to 1,024 ranks send and hold, without them: the strategies' own code as one rank of a
fake process group.

Tensors are on the meta device and the backend's kernels do nothing, so only what is sent, received
and allocated remains. `formulas.py` states what that should be.
"""

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import Layout, use_backend
from seqpar.comm.messages.exchange import Comm
from seqpar.softmax.backends import aten
from seqpar.softmax.call import Operands
from seqpar.softmax.compute.partial import cast_each, sinks_gradient
from seqpar.strategies import disaggregated
from seqpar.strategies.registry import SOFTMAX
from tests.support.cases import module
from tests.support.fakes import Held, fake_group
from tests.support.formulas import FORMULAS
from tests.support.head_formulas import held_keeping_tokens
from tests.support.key_formulas import Setting, moved_keys
from tests.support.tiers import few_rows


def measured(monkeypatch, strategy, s, layout=None, sinks=None, **module_options):
    """What Formulas has, as the strategy's forward and backward do it."""
    received = 0

    def post(comm, sends, recvs, exchange, post=Comm.start):
        nonlocal received
        received += sum(tensor.nbytes for _, tensor in recvs)
        return post(comm, sends, recvs, exchange)

    with monkeypatch.context() as patched, fake_group(s.rank, s.ranks) as group:
        patched.setattr(Comm, "start", post)
        # All rows then travel in one stage.
        patched.setattr(disaggregated, "_ROWS_PER_STAGE", 2**40)
        patched.setattr(aten, "forward", lambda *arguments: arguments[4].sums.allocate())
        patched.setattr(aten, "backward", lambda *arguments: arguments[5].allocate())
        attn = module(PLANNED.get(strategy, strategy), group, **module_options)
        layout = layout or Layout.contiguous(s.tokens, s.ranks)
        comm, code = attn._bound.comm, attn._bound.strategy
        shapes = [(s.heads, s.dim), (s.kv_heads, s.dim), (s.kv_heads, s.value_dim)]
        q, k, v = (
            torch.empty(1, s.local, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes
        )
        options = {"causal": not s.full, "window_size": (s.window, -1), "sinks": sinks}
        call = attn._resolve(q, k, v, layout, **options)
        rows = attn.traffic(q, k, v, layout, **options)
        counts = [(comm.sent_bytes, received, comm.sent_messages)]
        with Held(q, k, v, *([] if sinks is None else [sinks])) as forward:
            out, lse, residuals = code.forward(comm, call, Operands(q, k, v, sinks))
        counts.append((comm.sent_bytes, received, comm.sent_messages))
        kept, dout = residuals or [q, k, v, out, lse], torch.empty_like(out)
        with Held(dout, *kept) as backward:
            gradients = cast_each(code.backward(comm, call, dout, None, sinks, kept), q.dtype)
            if sinks is not None:
                gradients.append(sinks_gradient(dout, out, lse, sinks))
        counts.append((comm.sent_bytes, received, comm.sent_messages))
    sent, got, messages = zip(*counts, strict=True)
    steps = [(x[1] - x[0], x[2] - x[1]) for x in (sent, got, messages)]
    return dict(
        zip(("sent", "received", "messages"), steps, strict=True),
        held=(forward.peak, backward.peak),
        traffic=[sums(rows, direction) for direction in ("forward", "backward")],
    )


PLANNED = {"disaggregated": "disaggregated+half to next"}


def sums(rows, direction):
    """The bytes and messages of a pass, of rows of traffic."""
    chosen = [row for row in rows if row.direction == direction]
    return sum(row.bytes for row in chosen), sum(row.messages for row in chosen)


def test_every_strategy_has_formulas():
    assert set(FORMULAS) == set(SOFTMAX)


SETTINGS = [
    Setting(rank, ranks, 1024 * ranks, 64, kv_heads, full)
    for ranks, kv_heads, seen in (
        (8, 8, (0, 4, 7)),
        (8, 64, (4,)),
        (64, 8, (0, 32, 63)),
        (64, 64, (32,)),
    )
    for rank in seen
    for full in (True, False)
] + [Setting(rank, 8, 8192 * 8, 32, 8, full) for rank, full in ((4, True), (3, False))]


LARGE = [
    Setting(rank, 1024, 2**20, 1024, 8, full)
    for rank, full in ((0, False), (512, True), (1023, False))
]
SLOW = {"mesh": 2, "token_ring": 1, "usp": 2}  # how many of these, where each takes several seconds


def strategies_and_settings():
    """Each strategy with each setting; `make test` has one setting in four of each strategy.

    CI has each rank, causal or full in turn, and of 1,024 ranks the first and one other.
    """
    for i, strategy in enumerate(FORMULAS):
        for j, s in enumerate(SETTINGS + LARGE[: SLOW.get(strategy, 3)]):
            chosen = (i + j) % 4 == 0 and s.ranks < 1024
            cheap = chosen or (strategy, s.rank, s.ranks) == ("all_gather", 0, 1024)
            name = f"{strategy}-{s.rank}-of-{s.ranks}-{s.kv_heads}-{'full' if s.full else 'causal'}"
            marks = [] if cheap else [pytest.mark.exhaustive]
            left_out = (i + j + j // 2) % 2 if s.ranks < 1024 else s.rank and (i + j) % 2
            if left_out and not cheap:
                marks.append(pytest.mark.every_row)
            yield pytest.param(strategy, s, marks=marks, id=name)


@pytest.mark.parametrize(("strategy", "s"), list(strategies_and_settings()))
def test_traffic_and_memory_match_the_formulas(monkeypatch, strategy, s):
    found, formulas = measured(monkeypatch, strategy, s), FORMULAS[strategy]
    for name in ("sent", "received", "messages"):
        assert found[name] == getattr(formulas, name)(s), name
    assert found["traffic"] == list(zip(formulas.sent(s), formulas.messages(s), strict=True))
    for peak, bound in zip(found["held"], formulas.held(s), strict=True):
        assert 0.9 * bound <= peak <= bound


@few_rows()
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(("strategy", "row"), [("ulysses", 8), ("usp", 2)])
def test_kept_tokens_leave_two_groups_of_heads(monkeypatch, strategy, row, groups):
    """Ulysses keeps q, k, v and out of all heads in head form or, with `keep="tokens"`, none."""
    s = Setting(4, 8, 8192, 64, 64)
    options = {"head_groups": groups}
    found = measured(monkeypatch, strategy, s, **options, keep="tokens")
    for peak, bound in zip(found["held"], held_keeping_tokens(s, row, groups), strict=True):
        assert 0.9 * bound <= peak <= bound
    if groups > 2:
        others = measured(monkeypatch, strategy, s, **options, keep="heads")["held"]
        assert found["held"][0] < 0.6 * others[0]


@pytest.mark.parametrize("strategy", ["ring", "token_ring", "ulysses", "usp"])
def test_more_ranks_for_more_tokens_hold_the_same(monkeypatch, strategy):
    """O(N/P) memory a rank; of Ulysses' up to the factor (P − 1)/P, and as long as there are KV
    heads for all ranks, of which all have the same number of groups."""

    def held(ranks, kv_heads):
        return measured(monkeypatch, strategy, Setting(0, ranks, 1024 * ranks, 128, kv_heads))[
            "held"
        ]

    for few, many in zip(held(8, 128), held(64, 128), strict=True):
        assert few <= many <= few * (8 / 7 if strategy == "ulysses" else 1)
    assert (held(64, 8) > held(8, 8)) == (strategy == "ulysses")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
def test_a_window_sends_the_same_at_any_length(monkeypatch, strategy):
    """500 keys of the rank before; of TokenRing the first 500 queries, which see them, and their
    results."""
    for ranks, local in ((8, 1024), (8, 2**17), (128, 1024)):
        s = Setting(ranks // 2, ranks, local * ranks, 8, 2, full=False, window=500)
        found = measured(monkeypatch, strategy, s)
        reached = 500 * s.kv_heads * (s.dim + s.value_dim)
        bytes_sent, messages = moved_keys(reached, reached), (1, 2)
        if strategy == "token_ring":
            forward = 2 * s.dim + 4 * s.value_dim + 4
            backward = 2 * (s.dim + s.value_dim) + 8 + 4 * s.dim
            bytes_sent, messages = (500 * s.heads * forward, 500 * s.heads * backward), (2, 4)
        if local > 4096:  # heads travel in two groups; TokenRing then packs what it sends
            messages = (4, 4) if strategy == "token_ring" else (2, 4)
        assert found["sent"] == found["received"] == bytes_sent and found["messages"] == messages


# KiB a token at most, forward and backward, of the rank in the middle of 8, in two groups of heads.
# A token's keys and values take 4, their fp32 gradients 8, the partial 16¼, the result 8⅛, and the
# rank's own gradients 24⅛. Of a group, half of these: Ring holds two blocks of keys and those it
# sends, in backward also three blocks of gradients. AllGather holds all keys that its queries see;
# in backward gradients of those of two exchanges, and its own that come. Messages count until they
# have been waited for.
PEAKS = {"ring": (22.25, 42.25), "all_gather": (30.25, 54.25)}


@few_rows()
@pytest.mark.parametrize("documents", [1, 32])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("strategy", PEAKS)
def test_peak_memory_on_zigzag_and_with_sinks(monkeypatch, strategy, sinks, documents):
    s = Setting(4, 8, 8 * 8192, 32, 8, full=False, value_dim=128)
    layout = Layout.zigzag([i * s.tokens // documents for i in range(documents + 1)], s.ranks)
    logits = torch.empty(s.heads, device="meta") if sinks else None
    found = measured(monkeypatch, strategy, s, layout, logits)["held"]
    for peak, bound, of_sinks in zip(found, PEAKS[strategy], (0, 8), strict=True):  # scaled dout
        assert peak <= (bound + sinks * of_sinks) * 1024 * s.local + 2**16  # and indices of rows


@pytest.mark.parametrize(("strategy", "peaks"), [("ring", (30, 46)), ("all_gather", (46, 70))])
def test_our_kernels_keep_to_the_promised_peaks(monkeypatch, strategy, peaks):
    """They also hold a group's result from its first block of keys on."""
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)
    s = Setting(3, 8, 8 * 8192, 32, 8, full=False, value_dim=128)
    layout = Layout.zigzag([i * s.tokens // 32 for i in range(33)], s.ranks)
    with use_backend("triton"):
        measured(monkeypatch, strategy, s, layout)  # uploads tables
        found = measured(monkeypatch, strategy, s, layout)["held"]
    for peak, bound in zip(found, peaks, strict=True):
        assert 0.6 * bound * 1024 * s.local < peak <= bound * 1024 * s.local


@pytest.mark.parametrize(("strategy", "peak"), [("ring", 38.25), ("all_gather", 48.25)])
def test_gradients_in_bf16_take_half_while_they_travel(monkeypatch, strategy, peak):
    s = Setting(4, 8, 8 * 8192, 32, 8, full=False, value_dim=128)
    options = {"gradient_dtype": torch.bfloat16}
    _, found = measured(monkeypatch, strategy, s, Layout.zigzag(s.tokens, 8), **options)["held"]
    assert found <= peak * 1024 * s.local


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
