"""What up to 1,024 ranks send, as `formulas.py` states it, and what one of 8 or 64 holds.

What a rank holds is measured without the other ranks, as one of a fake process group: tensors are
on the meta device, and the backend's kernels do nothing.
"""

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from benchmarks.kernels.memory_traffic import stand_ins
from seqpar import Layout, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.backends import aten
from seqpar.softmax.call import Operands
from seqpar.softmax.compute.partial import cast_each, sinks_gradient
from seqpar.softmax.keys import key_plan
from seqpar.strategies import disaggregated
from seqpar.strategies.disaggregated import Disaggregated
from seqpar.strategies.registry import SOFTMAX
from tests.support.cases import module
from tests.support.fakes import Held, fake_group
from tests.support.formulas import FORMULAS, Setting, moved_keys
from tests.support.tiers import few_rows, quickly

PLANNED = {"disaggregated": "disaggregated+half to next"}


def operands(s):
    """q, k and v of a rank, on the meta device."""
    shapes = [(s.heads, s.dim), (s.kv_heads, s.dim), (s.kv_heads, s.value_dim)]
    return [torch.empty(1, s.local, *x, dtype=torch.bfloat16, device="meta") for x in shapes]


@pytest.fixture
def one_stage(monkeypatch):
    """All rows of disaggregated attention travel in one stage."""
    monkeypatch.setattr(disaggregated, "_ROWS_PER_STAGE", 2**40)


def sent(strategy, s):
    """The bytes and the messages that a rank sends, each as (forward, backward)."""
    attn = module(PLANNED.get(strategy, strategy), Comm("many", s.rank, s.ranks))
    options = {"causal": not s.full, "window_size": (s.window, -1)}
    rows = attn.traffic(*operands(s), Layout.contiguous(s.tokens, s.ranks), **options)
    passes = [[x for x in rows if x.direction == way] for way in ("forward", "backward")]
    return [tuple(sum(getattr(x, what) for x in of) for of in passes) for what in COUNTED]


COUNTED = "bytes", "messages"


def held(monkeypatch, strategy, s, layout=None, sinks=None, **module_options):
    """The most bytes that forward and backward hold at once beside the inputs: of forward q, k and
    v, of backward what forward kept, and dout."""
    with monkeypatch.context() as patched, fake_group(s.rank, s.ranks) as group:
        patched.setattr(aten, "forward", lambda *arguments: arguments[4].allocate())
        patched.setattr(aten, "backward", lambda *arguments: arguments[5].allocate())
        attn = module(strategy, group, **module_options)
        layout = layout or Layout.contiguous(s.tokens, s.ranks)
        comm, code = attn._bound.comm, attn._bound.strategy
        q, k, v = operands(s)
        call = attn._resolve(q, k, v, layout, causal=not s.full, sinks=sinks)
        with Held(q, k, v, *([] if sinks is None else [sinks])) as forward:
            out, lse, residuals = code.forward(comm, call, Operands(q, k, v, sinks))
        kept, dout = residuals or [q, k, v, out, lse], torch.empty_like(out)
        with Held(dout, *kept) as backward:
            gradients = cast_each(code.backward(comm, call, dout, None, sinks, kept), q.dtype)
            if sinks is not None:
                gradients.append(sinks_gradient(dout, out, lse, sinks))
    return forward.peak, backward.peak


def test_every_strategy_has_formulas():
    assert set(FORMULAS) == set(SOFTMAX)


SETTINGS = [
    *(Setting(rank, 8, 8192, 64, 8, full) for rank, full in ((0, True), (4, False), (7, False))),
    *(Setting(rank, 64, 2**16, 64, 8, full) for rank, full in ((32, True), (63, False))),
    Setting(32, 64, 2**16, 64, 64, False),
    Setting(4, 8, 8192 * 8, 32, 8, True),  # heads travel in two groups
    Setting(0, 1024, 2**20, 1024, 8, False),
]


def strategies_and_settings():
    """Each strategy with each setting; `make test` has one setting in four of each strategy."""
    for i, strategy in enumerate(FORMULAS):
        for j, s in enumerate(SETTINGS):
            marks = () if (i + j) % 4 == 0 and s.ranks < 1024 else pytest.mark.exhaustive
            name = f"{strategy}-{s.rank}-of-{s.ranks}-{s.kv_heads}-{'full' if s.full else 'causal'}"
            yield pytest.param(strategy, s, marks=marks, id=name)


@pytest.mark.parametrize(("strategy", "s"), list(strategies_and_settings()))
def test_traffic_matches_the_formulas(one_stage, strategy, s):
    formulas = FORMULAS[strategy]
    assert sent(strategy, s) == [formulas.sent(s), formulas.messages(s)]


@pytest.mark.parametrize("strategy", ["ulysses", "usp"])
def test_kept_tokens_leave_two_groups_of_heads(monkeypatch, strategy):
    """Ulysses keeps q, k, v and out of all heads in head form or, with `keep="tokens"`, none."""
    s = Setting(4, 8, 8192, 64, 64)
    tokens, heads = (
        held(monkeypatch, strategy, s, head_groups=8, keep=kept) for kept in ("tokens", "heads")
    )
    assert tokens[0] < 0.6 * heads[0]


@pytest.mark.parametrize("strategy", quickly("ring", "token_ring", "ulysses", "usp"))
def test_more_ranks_for_more_tokens_hold_the_same(monkeypatch, strategy):
    """O(N/P) memory a rank; of Ulysses' up to the factor (P − 1)/P, and as long as there are KV
    heads for all ranks, of which all have the same number of groups."""

    def held_by(ranks, kv_heads):
        return held(monkeypatch, strategy, Setting(0, ranks, 1024 * ranks, 128, kv_heads))

    for few, many in zip(held_by(8, 128), held_by(64, 128), strict=True):
        assert few <= many <= few * (8 / 7 if strategy == "ulysses" else 1)
    assert (held_by(64, 8) > held_by(8, 8)) == (strategy == "ulysses")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
def test_a_window_sends_the_same_at_any_length(strategy):
    """500 keys of the rank before; of TokenRing the first 500 queries, which see them, and their
    results."""
    for ranks, local in ((8, 1024), (8, 2**17), (128, 1024)):
        s = Setting(ranks // 2, ranks, local * ranks, 8, 2, full=False, window=500)
        reached = 500 * s.kv_heads * (s.dim + s.value_dim)
        bytes_sent, messages = moved_keys(reached, reached, reached), (1, 2)
        if strategy == "token_ring":
            forward = 2 * s.dim + 2 * s.value_dim + 4
            backward = 2 * (s.dim + s.value_dim) + 8 + 2 * s.dim
            bytes_sent, messages = (500 * s.heads * forward, 500 * s.heads * backward), (2, 4)
        if local > 4096:  # heads travel in two groups; TokenRing then packs what it sends
            messages = (4, 4) if strategy == "token_ring" else (2, 4)
        assert sent(strategy, s) == [bytes_sent, messages]


def of_groups(forward, backward):
    """KiB a token at most, forward and backward, by the number of groups of heads; `forward` and
    `backward` are what a group holds if it has all heads.

    A token's keys and values take 4, their fp32 gradients 8, the partial 16¼, the rank's own fp32
    gradients 24, and the results 8⅛ in forward and 12⅛ in backward: dq, dk and dv in bf16, and lse.
    With several groups, the results are held beside what a group holds.
    """
    return {1: (forward, 0.125 + backward), 2: (8.125 + forward / 2, 12.125 + backward / 2)}


# KiB a token at most, by groups of heads, of the rank in the middle of 8. Ring holds the partial,
# two blocks of keys and those it sends; in backward the own gradients, and three blocks of
# gradients. AllGather holds all keys that its queries see; in backward the own gradients, gradients
# of the keys of two exchanges, and those of its own keys that come. Messages count until they have
# been waited for. Other strategies hold what was measured, which may not grow.
PEAKS = {
    "ring": of_groups(16.25 + 3 * 4, 24 + 3 * 4 + 3 * 8),
    "all_gather": of_groups(16.25 + 7 * 4, 24 + 7 * 4 + 4 * 8),
    "token_ring": {1: (81.125, 105.25), 2: (52.75, 73)},
    "mesh": {1: (83, 111.25), 2: (54.75, 79)},
    "ulysses": {1: (40.75, 40.125), 2: (40.75, 40.125)},
    "usp": {1: (40.5, 40.25), 2: (40.5, 36.125)},
    "disaggregated": dict.fromkeys((1, 2), (58.5, 93.5)),  # two groups with short documents too
}


@few_rows()
@pytest.mark.parametrize(("documents", "groups"), [(1, 2), (32, 1)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("strategy", PEAKS)
def test_peak_memory_on_zigzag_and_with_sinks(
    monkeypatch, one_stage, strategy, sinks, documents, groups
):
    s = Setting(4, 8, 8 * 8192, 32, 8, full=False, value_dim=128)
    layout = Layout.zigzag([i * s.tokens // documents for i in range(documents + 1)], s.ranks)
    logits = torch.empty(s.heads, device="meta") if sinks else None
    planned, peaks = PLANNED.get(strategy, strategy), PEAKS[strategy][groups]
    found = held(monkeypatch, planned, s, layout, logits)
    for peak, bound, of_sinks in zip(found, peaks, (0, 8), strict=True):  # scaled dout
        assert peak <= (bound + sinks * of_sinks) * 1024 * s.local + 2**16  # and indices of rows


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_short_documents_hold_as_much_as_long_ones_on_many_rows(monkeypatch, strategy):
    """1M tokens on 8 ranks have 8 groups of heads, as one document or as 256."""
    s = Setting(4, 8, 2**20, 32, 8, full=False, value_dim=128)
    one, many = (
        held(monkeypatch, strategy, s, Layout.zigzag(range(0, s.tokens + 1, length), s.ranks))
        for length in (s.tokens, 4096)
    )
    for of_many, of_one in zip(many, one, strict=True):
        assert of_many <= of_one + 2**20  # indices of rows


# KiB a token in backward that belong to groups of heads, of all groups together: the rank's own
# gradients and the messages. AllGather keeps buffers of two blocks for the keys of the next group.
OF_GROUPS = {"ring": 24 + 3 * 4 + 3 * 8, "all_gather": 84 + 8}


@pytest.mark.parametrize("strategy", OF_GROUPS)
def test_a_million_tokens_hold_sums_of_one_group(monkeypatch, strategy):
    """Eight groups: the rounded results of all of them, and the fp32 sums and messages of one."""
    s = Setting(4, 8, 2**20, 32, 8, full=False, value_dim=128)
    _, found = held(monkeypatch, strategy, s, Layout.zigzag(s.tokens, s.ranks))
    assert found <= (12.125 + OF_GROUPS[strategy] / 8) * 1024 * s.local + 2**16


@few_rows()
@pytest.mark.parametrize("documents", [1, 32])
@pytest.mark.parametrize("two_parts", [False, True])
@pytest.mark.parametrize("rank", [0, 2, 7])
@pytest.mark.parametrize(("plan", "peak"), [("+half to next", 58), ("", 48)])
def test_gradients_of_tasks_hold_few_groups(monkeypatch, plan, peak, rank, two_parts, documents):
    """Four groups at 16,384 rows, whatever the documents are. The foreign rows of at most two
    groups exist at once, also in two alternating batches, where a call is made in two parts."""
    post = Disaggregated.post_gradients
    if two_parts:
        posts_early = lambda *arguments, at_once: post(*arguments, at_once=True)  # noqa: E731
        monkeypatch.setattr(Disaggregated, "post_gradients", posts_early)
    s = Setting(rank, 8, 8 * 16384, 32, 8, full=False, value_dim=128)
    layout = Layout.zigzag([i * s.tokens // documents for i in range(documents + 1)], s.ranks)
    strategy = f"disaggregated{plan}"
    _, found = held(monkeypatch, strategy, s, layout)
    assert found <= peak * 1024 * s.local
    if not plan:  # on a GPU, results of kernels also wait, and rows of keys are copied for kernels
        with stand_ins():
            held(monkeypatch, strategy, s, layout)  # uploads tables
            assert held(monkeypatch, strategy, s, layout)[1] <= 53 * 1024 * s.local


@few_rows()
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("rows", [8192, 2**17])
def test_results_that_wait_hold_the_promised_peaks(monkeypatch, ranks, rows):
    """On a GPU, and on any number of ranks: 16 bytes per element of a group's out at most, with the
    sums into which results are merged. The last rank has the most results."""
    s = Setting(ranks - 1, ranks, ranks * rows, 32, 8, full=False, value_dim=128)
    groups = min(8, rows // 4096)
    with stand_ins():
        layout = Layout.zigzag(s.tokens, s.ranks)
        held(monkeypatch, "ring", s, layout)  # uploads tables
        found = held(monkeypatch, "ring", s, layout)
    # In backward, 8 bytes of dq wait, and their fp32 sums take 4.
    bounds = 8.125 + (3 * 4 + 16 * 4 + 0.5) / groups, 12.125 + (12 * 4 + 20) / groups
    for peak, bound in zip(found, bounds, strict=True):
        assert 0.9 * bound * 1024 * s.local < peak <= bound * 1024 * s.local


@few_rows()
@pytest.mark.parametrize(("rows", "peaks"), [(8192, (59, 85)), (32768, (31, 43))])
def test_token_ring_holds_the_promised_peaks_with_results_that_wait(monkeypatch, rows, peaks):
    """On any rank; those between the first and the last have the most results."""
    for rank in (0, 1, 4, 7):
        s = Setting(rank, 8, 8 * rows, 32, 8, full=False, value_dim=128)
        with stand_ins():
            layout = Layout.zigzag(s.tokens, s.ranks)
            held(monkeypatch, "token_ring", s, layout)  # uploads tables
            found = held(monkeypatch, "token_ring", s, layout)
        for peak, bound in zip(found, peaks, strict=True):
            assert 0.8 * bound * 1024 * s.local < peak <= bound * 1024 * s.local


@pytest.mark.parametrize(("strategy", "peaks"), [("ring", (30, 46)), ("all_gather", (46, 70))])
def test_our_kernels_keep_to_the_promised_peaks(monkeypatch, strategy, peaks):
    """They also hold a group's result from its first block of keys on."""
    monkeypatch.setattr(launching, "_run", lambda *arguments: None)
    monkeypatch.setattr(key_plan, "_ROWS_PER_SHORT_GROUP", 4096)  # two groups of heads
    s = Setting(3, 8, 8 * 8192, 32, 8, full=False, value_dim=128)
    layout = Layout.zigzag([i * s.tokens // 32 for i in range(33)], s.ranks)
    with use_backend("triton"):
        held(monkeypatch, strategy, s, layout)  # uploads tables
        found = held(monkeypatch, strategy, s, layout)
    for peak, bound in zip(found, peaks, strict=True):
        assert 0.6 * bound * 1024 * s.local < peak <= bound * 1024 * s.local


@pytest.mark.parametrize(("strategy", "peak"), [("ring", 38.25), ("all_gather", 48.25)])
def test_gradients_in_bf16_take_half_while_they_travel(monkeypatch, strategy, peak):
    s = Setting(4, 8, 8 * 8192, 32, 8, full=False, value_dim=128)
    options = {"gradient_dtype": torch.bfloat16}
    _, found = held(monkeypatch, strategy, s, Layout.zigzag(s.tokens, 8), **options)
    assert found <= peak * 1024 * s.local
