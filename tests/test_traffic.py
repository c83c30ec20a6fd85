"""What the strategies send and when: bytes against the docstrings' formulas, skipping, order, and balance."""

import threading

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar import Layout
from seqpar.backends import aten
from tests.cases import STRATEGIES, Case, module, oracle, run, visible
from tests.ranks import virtual


@pytest.mark.parametrize("heads", [(8, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_sent_are_those_of_the_docstring(pool, strategy, dtype, heads):
    cu, ranks = [0, 30, 31, 90], 4
    for layout, window in [
        (Layout.zigzag(cu, ranks), (-1, -1)),
        (Layout.striped(cu, ranks, 4), (10, 0)),
        (Layout.contiguous(cu, ranks), (10, 0)),
    ]:
        case = Case(
            strategy,
            layout,
            causal=True,
            window=window,
            heads=heads[0],
            kv_heads=heads[1],
            dim=8,
            value_dim=16,
            dtype=dtype,
            batch=2,
        )
        for rank, sent in enumerate(pool(ranks, sent_bytes, case)):
            assert sent == BYTES[strategy](case, rank, ranks)


def sent_bytes(group, case):
    attn = module(case.strategy, group)
    comm = attn.engine.comm
    q, k, v = (case.layout.shard(x, comm.rank, 1).requires_grad_() for x in case.inputs()[:3])
    counts = [comm.sent_bytes]
    out = attn(q, k, v, case.layout, **case.options())
    counts.append(comm.sent_bytes)
    out.sum().backward()
    counts.append(comm.sent_bytes)
    return np.diff(counts).tolist()


def rows_in_reach(case, q_ranks, k_ranks, axis):
    """How many key rows (axis 0) or query rows (axis 1) of some ranks are seen by, or see, any of the others'."""
    cu = case.layout.cu_seqlens
    seen = visible(cu, cu, case.causal, case.window, None)
    q_tokens, k_tokens = (
        np.concatenate([case.layout.token_indices(rank).numpy() for rank in ranks]) for ranks in (q_ranks, k_ranks)
    )
    return int(seen[np.ix_(q_tokens, k_tokens)].any(axis).sum())


def exact(case):
    return 8 if case.dtype == torch.float64 else 4


def key_bytes(case, rank, ranks, size=1, kv_heads=None):
    """Of rank `rank` of `ranks`, each of which is `size` ranks of the layout."""

    def rows(q_rank, k_rank):
        blocks = (range(size * x, size * x + size) for x in (q_rank, k_rank))
        return rows_in_reach(case, *blocks, axis=0)

    others = [peer for peer in range(ranks) if peer != rank]
    row = 2 * (case.kv_heads if kv_heads is None else kv_heads) * (case.dim + case.value_dim)
    forward = sum(rows(peer, rank) for peer in others) * row * case.dtype.itemsize
    return [forward, forward + sum(rows(rank, peer) for peer in others) * row * exact(case)]


def query_bytes(case, rank, ranks):
    others, per_row = [peer for peer in range(ranks) if peer != rank], 2 * case.heads
    away = sum(rows_in_reach(case, [rank], [peer], axis=1) for peer in others) * per_row
    here = sum(rows_in_reach(case, [peer], [rank], axis=1) for peer in others) * per_row
    size, partial = case.dtype.itemsize, exact(case)
    forward = away * case.dim * size + here * (case.value_dim * partial + partial)
    return [forward, away * ((case.dim + case.value_dim) * size + 2 * partial) + here * case.dim * partial]


def ulysses_bytes(case, rank, ranks, first=0):
    """Of rank `rank` of a row of `ranks` whose first is `first`."""
    edges = [r * case.heads // ranks for r in range(ranks + 1)]
    group = case.heads // case.kv_heads
    q_heads = [edges[r + 1] - edges[r] for r in range(ranks)]
    kv_heads = [len({h // group for h in range(edges[r], edges[r + 1])}) for r in range(ranks)]
    tokens = [case.layout.tokens_on(first + r) for r in range(ranks)]
    size = case.dtype.itemsize
    returned = exact(case) if sum(kv_heads) > case.kv_heads else size
    forward = backward = 0
    for peer in set(range(ranks)) - {rank}:
        forward += tokens[rank] * (q_heads[peer] * case.dim + kv_heads[peer] * (case.dim + case.value_dim)) * size
        forward += tokens[peer] * q_heads[rank] * case.value_dim * size
        backward += tokens[rank] * q_heads[peer] * case.value_dim * size + tokens[peer] * q_heads[rank] * case.dim * size
        backward += tokens[peer] * kv_heads[rank] * (case.dim + case.value_dim) * returned
    return [2 * forward, 2 * backward]


def usp_bytes(case, rank, ranks):
    columns = 2
    row, column = divmod(rank, columns)
    group = case.heads // case.kv_heads
    heads = range(column * case.heads // columns, (column + 1) * case.heads // columns)
    within = ulysses_bytes(case, column, columns, first=row * columns)
    between = key_bytes(case, row, ranks // columns, size=columns, kv_heads=len({head // group for head in heads}))
    return [x + y for x, y in zip(within, between, strict=True)]


BYTES = {
    "ring": key_bytes, "all_gather": key_bytes, "token_ring": query_bytes, "ulysses": ulysses_bytes, "usp": usp_bytes,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag])
def test_a_window_needs_the_same_bytes_at_any_length(strategy, layout):
    """What sees nothing, or is not seen, does not travel: bytes of a window layer do not grow with the sequence."""
    for ranks in (4, 8):
        sent = {}
        for tokens in (512, 1024):
            case = Case(strategy, layout(tokens, ranks), causal=True, window=(16, 0), heads=1, batch=1)
            sent[tokens] = virtual(ranks, sent_bytes, case)
        assert sent[512] == sent[1024] and sum(map(sum, sent[512])) > 0


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_window_of_a_sixteenth_needs_a_fifth_of_the_bytes_or_less(strategy, layout, ranks):
    """Against full attention, forward and backward, on the rank that sends most."""
    tokens, totals = 512, []
    for options in ({"causal": True, "window": (tokens // 16, 0)}, {"causal": False}):
        case = Case(strategy, layout(tokens, ranks), heads=1, batch=1, **options)
        totals.append(max(map(sum, virtual(ranks, sent_bytes, case))))
    assert 5 * totals[0] <= totals[1]


EVENTS = {
    "ring": ["post", "compute", "post", "compute", "compute"],
    "all_gather": ["post", "compute", "compute"],
    "token_ring": ["post", "compute", "post", "compute", "post", "compute", "post"],
    "ulysses": ["post", "post", "compute", "post", "compute", "post"],
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", EVENTS)
def test_exchanges_are_posted_before_the_compute_they_hide_under(monkeypatch, strategy, backward):
    """Rank 0 of 3, all rows needed: each step's exchange is posted before the compute of the step before."""
    events = []  # (thread, what it did); a rank is a thread

    def call(comm):
        post = comm._post
        comm._post = lambda *messages: (events.append((threading.get_ident(), "post")), post(*messages))[1]
        layout, q = Layout.contiguous(12, 3), torch.zeros(4, 6, 8, requires_grad=backward)
        out = module(strategy, comm)(q, q, q, layout, causal=False)
        if backward:
            events.append((threading.get_ident(), "backward"))
            out.sum().backward()
        return threading.get_ident()

    def logged(function):
        return lambda *arguments: (events.append((threading.get_ident(), "compute")), function(*arguments))[1]

    monkeypatch.setattr(aten, "forward", logged(aten.forward))
    monkeypatch.setattr(aten, "backward", logged(aten.backward))
    first, *_ = virtual(3, call)
    mine = [what for thread, what in events if thread == first]
    expected = EVENTS[strategy]
    if backward:
        mine = mine[mine.index("backward") + 1 :]
        returns = {"ring": EVENTS["token_ring"], "all_gather": [*expected, "post"]}
        expected = returns.get(strategy, expected)
    assert mine == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mask_area_is_what_each_rank_computes(strategy):
    layout = Layout.striped([0, 30, 31, 90], 4, 4)

    def areas(comm):
        q, k = torch.zeros(layout.tokens_on(comm.rank), 6, 8), torch.zeros(layout.tokens_on(comm.rank), 3, 8)
        sent = comm.sent_bytes
        area = module(strategy, comm).mask_area(q, k, k, layout, causal=True, window_size=(20, -1))
        assert comm.sent_bytes == sent
        return area

    first, *others = virtual(4, areas)
    assert all(np.array_equal(first, other) for other in others)
    seen = visible(layout.cu_seqlens, layout.cu_seqlens, True, (20, -1), None)
    assert first.shape[0] == 4 and first.sum() == 6 * seen.sum()
    if strategy in ("ring", "all_gather", "token_ring"):
        owner = [layout.token_indices(rank).numpy() for rank in range(4)]
        axis = 1 if strategy == "token_ring" else 0
        by_rank = [seen.take(index, axis).sum() if axis else seen[index].sum() for index in owner]
        assert first.sum(1).tolist() == [6 * area for area in by_rank]


def test_zigzag_evens_out_what_contiguous_does_not():
    attn = module("ring", seqpar.comm.Comm("silent", 0, 4))
    worst = {}
    for make in (Layout.contiguous, Layout.zigzag):
        x = torch.zeros(256, 1, 8)
        area = attn.mask_area(x, x, x, make(1024, 4), causal=True)
        worst[make.__name__] = area.sum(1).max() / area.sum(1).mean()
    assert worst["zigzag"] < 1.01 and worst["contiguous"] > 1.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partials_may_travel_in_half_precision(dtype):
    """With fp64 inputs all that is lost is what the wire's dtype rounds: half a unit in the last place of each partial."""
    case = Case("token_ring", Layout.zigzag(200, 4), causal=True, module_options=(("partial_dtype", dtype),))
    expected, got = oracle(case), virtual(4, run, case)[0]
    error = np.abs(got[0] - expected[0])
    assert 0 < error.max() <= torch.finfo(dtype).eps / 2 * np.abs(case.inputs()[2].numpy()).max()
    np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=1e-12)


def on_a_mesh(group, outer):
    """USP on a real mesh of all 4 ranks: the largest difference from Ulysses on them, of out and gradients."""
    layout = Layout.zigzag([0, 30, 31, 90], 4)
    results = []
    for attn in (seqpar.USPAttention(init_device_mesh("cpu", (2, 2)), outer), seqpar.UlyssesAttention(group)):
        comm = attn.engine.comm
        generator = torch.Generator().manual_seed(comm.rank)
        shapes = [(layout.tokens_on(comm.rank), heads, 8) for heads in (6, 3, 3)]
        q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)
        out = attn(q, k, v, layout, causal=True)
        out.square().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("outer", ["ring", "all_gather", "token_ring"])
def test_usp_on_a_mesh(pool, outer):
    assert max(pool(4, on_a_mesh, outer)) <= 1e-12


def test_options_are_checked():
    comm = seqpar.comm.Comm("silent", 0, 4)
    for make, message in [
        (lambda: seqpar.TokenRingAttention(comm, partial_dtype=torch.int8), "partial_dtype must be None or one of"),
        (lambda: seqpar.UlyssesAttention(comm, head_groups=0), "head_groups must be at least 1, got 0"),
        (lambda: seqpar.USPAttention(comm), r"mesh must have 2 dimensions, got one of shape \(4,\)"),
        (lambda: seqpar.USPAttention(comm, outer="ulysses"), "outer must be one of .*'ring', 'token_ring'\\], got 'ulysses'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
