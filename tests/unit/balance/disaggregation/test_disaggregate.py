"""disaggregate: tasks are a partition of the work, even over servers, and travel for few bytes."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balance.documents import draw
from seqpar import Layout, balance
from seqpar.balance import RowBytes, Stage, disaggregate, disaggregate_stages
from seqpar.balance.disaggregation.transfers import LIMIT_TOLERANCE, ServerLoads
from seqpar.layout.masks.mask import Mask
from tests.support.cases import cu_seqlens, layouts, visible
from tests.support.tiers import few_rows

ROWS = RowBytes.of(32, 8, 128)


def mask_of(layout, causal=True, window=(-1, -1), prefix=None):
    prefix = None if prefix is None else np.array(prefix)
    return Mask.of(causal, window, prefix, layout.geometry)


def areas(tasks, seen, cu, kv_cu):
    """The visible pairs of each task, pair by pair; and in how many tasks each pair is."""
    times, found = np.zeros(seen.shape, int), []
    for document, q0, q1, k0, k1, _ in zip(*tasks[:6], strict=True):
        rows = slice(cu[document] + q0, cu[document] + q1)
        keys = slice(kv_cu[document] + k0, kv_cu[document] + k1)
        assert q0 < q1 <= cu[document + 1] - cu[document]
        assert k0 < k1 <= kv_cu[document + 1] - kv_cu[document]
        times[rows, keys] += 1
        found.append(int(seen[rows, keys].sum()))
    return np.array(found, int), times


@st.composite
def calls(draw):
    ranks, cu = draw(st.integers(1, 6)), draw(cu_seqlens(100))
    kv_cu = draw(st.sampled_from([cu, draw(cu_seqlens(100, documents=len(cu) - 1))]))
    layout = draw(layouts(cu, ranks))
    kv_layout = layout if kv_cu is cu else draw(layouts(kv_cu, ranks))
    bounds = st.sampled_from([-1, 0, 1, 7, 40])
    prefix = draw(st.none() | st.tuples(*(st.integers(0, n) for n in np.diff(kv_cu).tolist())))
    masked = draw(st.booleans()), (draw(bounds), draw(bounds)), prefix
    weights = draw(st.none() | st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    options = {
        "weights": weights if weights and sum(weights) else None,
        "tolerance": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "tile": draw(st.sampled_from([1, 2, 8, 128])),
        "price": draw(st.sampled_from([0.0, 0.1, 3.0])),
        "row_bytes": RowBytes(*draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))),
    }
    return layout, kv_layout, masked, options


@given(calls())
def test_every_visible_pair_is_in_one_task(call):
    layout, kv_layout, masked, options = call
    found = disaggregate(layout, mask_of(kv_layout, *masked), kv_layout=kv_layout, **options)
    cu, kv_cu = layout.cu_seqlens, kv_layout.cu_seqlens
    seen = visible(cu, kv_cu, *masked)
    counted, times = areas(found, seen, cu, kv_cu)
    assert (times[seen] == 1).all() and (counted > 0).all()
    assert ((found.servers >= 0) & (found.servers < layout.ranks)).all()
    # No server that counts has more than its limit, or than the fullest one has at home.
    weights = np.ones(layout.ranks) if options["weights"] is None else np.array(options["weights"])
    counts, own = weights > 0, np.zeros(layout.ranks)
    for rank in range(layout.ranks):
        own[rank] = seen[layout.token_indices(rank).numpy()].sum()
    if options["price"] == 0:
        limit = (1 + options["tolerance"]) * seen.sum() / weights.sum()
        load = np.bincount(found.servers, counted, layout.ranks)
        most = max(limit, (own[counts] / weights[counts]).max())
        assert (load[counts] <= most * weights[counts] * (1 + 1e-9)).all()


CASES = {
    "causal": (True, (-1, -1)),
    "full": (False, (-1, -1)),
    "window": (True, (4000, -1)),
    "two-sided window": (False, (3000, 2000)),
    "anticausal": (False, (0, -1)),
}


@few_rows()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_no_server_has_much_more_than_the_mean(case, kind):
    lengths = np.array([40001, 999, 0, 20000, 77, 9000, 3001, 12345])
    layout = getattr(Layout, kind)(np.r_[0, np.cumsum(lengths)], 5)
    mask = mask_of(layout, *CASES[case])
    found = disaggregate(layout, mask, row_bytes=ROWS)
    load = loads(found, layout, mask)
    assert load.max() <= 1.05 * load.mean() * (1 + 1e-9)


def loads(found, layout, mask, servers=None):
    """Each server's visible pairs, document by document."""
    shift = layout.geometry.lengths * 0
    load = np.zeros(servers or layout.ranks)
    for document, q0, q1, k0, k1, server in zip(*(x.tolist() for x in found[:6]), strict=True):
        rows = np.arange(q0, q1) + shift[document]
        first, stop = np.maximum(rows - mask.left, k0), np.minimum(rows + mask.right + 1, k1)
        load[server] += np.maximum(stop - first, 0).sum()
    return load


def received(found, layout):
    """Bytes that travel to each server, from who has and who needs each token of the pack."""
    first, total = layout.cu_seqlens, []
    for rank in range(layout.ranks):
        needed = np.zeros((2, layout.tokens), bool)
        for document, q0, q1, k0, k1, server in zip(*(x.tolist() for x in found[:6]), strict=True):
            if server == rank:
                needed[0, first[document] + q0 : first[document] + q1] = True
                needed[1, first[document] + k0 : first[document] + k1] = True
        needed[:, layout.token_indices(rank).numpy()] = False
        queries, keys = needed.sum(1)
        total.append(queries * ROWS.query + keys * ROWS.key)
    return np.array(total)


def test_pieces_have_no_more_tiles_than_the_whole():
    layout = Layout.contiguous([0, 50001, 50077, 51000], 4)
    found = disaggregate(layout, mask_of(layout), row_bytes=ROWS)
    for server in range(4):
        for document in range(3):
            mine = (found.servers == server) & (found.documents == document)
            assert (
                (found.q_starts[mine] - spans_before(layout, document, found, mine)) % 128 == 0
            ).all()


def spans_before(layout, document, found, mine):
    """The start of the home span in which each task's first query is."""
    starts = sorted(
        s.start for r in range(layout.ranks) for s in layout.spans(r) if s.document == document
    )
    return np.array(starts)[np.searchsorted(starts, found.q_starts[mine], side="right") - 1]


def test_a_task_costs_at_most_the_best_rectangle():
    length = 2**17
    layout = Layout.from_spans([[(0, 0, length)], []], [0, length])
    mask = mask_of(layout)
    found = disaggregate(layout, mask, row_bytes=ROWS, weights=[15, 1], tolerance=0.0)
    pairs = loads(found, layout, mask)
    best = 2 * np.sqrt(pairs[1] * ROWS.query * ROWS.key)
    assert received(found, layout)[1] <= 1.01 * best  # cuts are at multiples of 128
    # Whole rows, with all of their keys, would take far more.
    rows = length * (1 - np.sqrt(15 / 16))
    assert received(found, layout)[1] < 0.7 * (rows * ROWS.query + length * ROWS.key)


def test_keys_count_once_and_not_at_home():
    # Rank 1 has the last queries of a document, so all of its keys travel to it already, and work
    # of the first ones costs only their queries.
    spans = [[(0, 0, 30000)], [(0, 30000, 32768)], []]
    layout = Layout.from_spans(spans, [0, 32768])
    found = disaggregate(layout, mask_of(layout), row_bytes=ROWS)
    assert set(found.servers.tolist()) == {0, 1, 2}
    queries = sum(
        min(q1, 30000) - q0
        for _, q0, q1, _, _, server in zip(*found[:6], strict=True)
        if server == 1 and q0 < 30000
    )
    assert queries > 0
    assert received(found, layout)[1] == queries * ROWS.query + 30000 * ROWS.key


def saved_by(monkeypatch, method, nothing, layout):
    """Bytes that travel, and how many more do without what a method finds."""
    few = received(disaggregate(layout, mask_of(layout), row_bytes=ROWS), layout).sum()
    monkeypatch.setattr(ServerLoads, method, lambda *arguments: nothing)
    return few, received(disaggregate(layout, mask_of(layout), row_bytes=ROWS), layout).sum() - few


def test_tasks_go_to_servers_that_have_their_keys(monkeypatch):
    spans = [[(0, 0, 30000)], [(0, 30000, 32768)], [(1, 0, 24000)], []]
    layout = Layout.from_spans(spans, [0, 32768, 56768])
    few, more = saved_by(monkeypatch, "_holders", [], layout)
    assert more > 0.03 * few


def test_work_only_moves_together_with_its_keys(monkeypatch):
    # Rank 1 has a little too much: the last queries of rank 0's document, for all of its keys.
    spans = [[(0, 0, 30000)], [(0, 30000, 30640), (1, 0, 31000)], [(2, 0, 30000)]]
    layout = Layout.from_spans(spans, [0, 30640, 61640, 91640])
    few, more = saved_by(monkeypatch, "_foreign", (), layout)
    assert more > few


def test_the_price_is_that_of_the_links():
    layout = Layout.contiguous([0, 50000, 60000], 16)
    costs = balance.Costs(balance.Cluster.preset("2x8-h100"), balance.Model.preset("llama-8b"))
    arguments = {"layout": layout, "mask": mask_of(layout), "costs": costs, "row_bytes": ROWS}
    price = 2 / costs.cluster.between.rate  # there is a NIC for each device
    priced, same, free = (
        disaggregate(**arguments, **price) for price in ({}, {"price": price}, {"price": 0})
    )
    assert all(map(np.array_equal, priced, same))
    assert received(priced, layout).max() < received(free, layout).max()


def test_servers_of_unequal_speed():
    layout = Layout.contiguous(60000, 4)
    mask = mask_of(layout)
    weights = np.array([1.0, 0.5, 0.0, 2.0])
    found = disaggregate(layout, mask, row_bytes=ROWS, weights=weights)
    load = loads(found, layout, mask)
    assert load[2] == 0
    share = load / load.sum() * weights.sum()
    assert (share <= weights * 1.05 + 1e-9).all()


def test_speeds_of_any_size_are_taken():
    layout = Layout.contiguous(60000, 3)
    plans = [
        disaggregate(layout, mask_of(layout), row_bytes=ROWS, weights=weights)
        for weights in ([2, 1, 0], [1.6e308, 0.8e308, 0], [2, 1, 1e-300])
    ]
    for other in plans[1:]:
        assert all(map(np.array_equal, plans[0], other))


def test_memory_is_kept():
    layout = Layout.from_spans(
        [[(0, 0, 60000)], [(1, 0, 500)], [(2, 0, 500)]], [0, 60000, 60500, 61000]
    )
    mask, home = mask_of(layout), ROWS.query + ROWS.key
    free = disaggregate(layout, mask, row_bytes=ROWS)
    most = received(free, layout).max()
    memory = np.array([60000 * home, 500 * home + most / 2, 500 * home + most])
    found = disaggregate(layout, mask, row_bytes=ROWS, memory=memory)
    used = received(found, layout) + np.array(layout.tokens_per_rank) * home
    assert (used <= memory).all() and used[1] > 0.9 * memory[1]
    with pytest.raises(ValueError, match="memory must be at least 1236480000 bytes on server 0"):
        disaggregate(layout, mask, row_bytes=ROWS, memory=1e9)


def test_messages_hide_under_a_servers_own_work():
    spans = [[(0, 0, 60000)], [(1, 0, 9000)], []]
    layout = Layout.from_spans(spans, [0, 60000, 69000])
    mask = mask_of(layout)

    def ends(found, price):
        """When each server is done, if what is not its own begins once it is there."""
        own = loads(found.take(at_home(found)), layout, mask)
        return np.maximum(own, price * received(found, layout)) + loads(found, layout, mask) - own

    def at_home(found):
        return found.servers == found.documents

    price = 0.5  # so many pairs take as long as a byte
    blind = disaggregate(layout, mask, row_bytes=ROWS, tolerance=0.0)
    aware = disaggregate(layout, mask, row_bytes=ROWS, tolerance=0.0, price=price)
    assert ends(aware, price).max() < 0.97 * ends(blind, price).max()
    # The one that has nothing to do meanwhile gets less.
    load = loads(aware, layout, mask)
    assert load[2] < load[1] < load[0]
    assert np.ptp(ends(aware, price)) < 0.01 * ends(aware, price).max()


def test_the_rest_is_even_where_little_can_move():
    # Ranks 2 and 3 have no memory for more than a little, so the others share what is left.
    spans = [[(0, 0, 40000)], [(1, 0, 20000)], [(2, 0, 100)], [(3, 0, 100)]]
    layout = Layout.from_spans(spans, [0, 40000, 60000, 60100, 60200])
    mask, home = mask_of(layout), ROWS.query + ROWS.key
    memory = np.array(layout.tokens_per_rank) * home + np.array([1e12, 1e12, 4e7, 4e7])
    found = disaggregate(layout, mask, row_bytes=ROWS, memory=memory)
    load = loads(found, layout, mask)
    assert load[2:].max() < 0.2 * load.mean()
    assert load[:2].max() < 1.06 * load[:2].mean()


def test_servers_that_can_shed_nothing_bound_the_time():
    # With such tiles documents move whole, and the long one would be as long anywhere.
    layout = Layout.from_spans(
        [[(0, 0, 60000)], [(1, 0, 30000), (2, 0, 30000)], [], []], [0, 60000, 90000, 120000]
    )
    found = disaggregate(layout, mask_of(layout), row_bytes=ROWS, tile=2**16)
    assert found.servers.tolist() == [0, 1, 1]


def test_one_document_on_many_servers_plans_quickly():
    layout, cluster = Layout.contiguous(2**20, 1024), balance.Cluster.preset("128x8-h100")
    costs = balance.Costs(cluster, balance.Model.preset("llama-8b"))
    before = time.process_time()
    found = disaggregate(layout, mask_of(layout), costs, row_bytes=ROWS)
    assert time.process_time() - before < 1
    assert found.documents.size < 2 * 1024


@pytest.mark.parametrize("kind", ["llama-8b"])
def test_predicted_time_is_even(kind):
    cluster = balance.Cluster.preset("1x8-h200")
    costs = balance.Costs(cluster, balance.Model.preset(kind))
    lengths = draw("pretrain", 8 * 2**17, 2**17)
    layout = Layout.contiguous(np.r_[0, np.cumsum(lengths)], 8)
    found = disaggregate(layout, mask_of(layout), costs, row_bytes=ROWS)
    seconds = np.zeros(8)
    for way in (False, True):
        q0, q1, k0, k1 = found[1:5]
        stop = np.clip(np.arange(0, 1)[:, None] + q1, k0, k1)[0]
        pairs = loads_of_each(found)
        tasks = balance.Tasks.of(q1 - q0, np.maximum(stop - k0, 1), pairs)
        seconds += costs.attention_call(tasks, found.servers, 8, way)
    assert seconds.max() <= 1.05 * (1 + LIMIT_TOLERANCE) * seconds.mean()


def loads_of_each(found):
    """The causal pairs of each task."""
    rows = [np.arange(q0, q1) for q0, q1 in zip(found.q_starts, found.q_stops, strict=True)]
    return np.array(
        [
            np.clip(np.minimum(r + 1, k1) - k0, 0, None).sum()
            for r, k0, k1 in zip(rows, found.k_starts, found.k_stops, strict=True)
        ]
    )


def test_stages_of_a_pipeline_share_servers():
    # Two ranks a stage. The first stage's batch has the long documents, so its ranks are behind,
    # and the second stage's help. Alone neither stage could be as even.
    first = Layout.contiguous([0, 60000, 80000], 2)
    second = Layout.zigzag([0, 6000, 8000, 20001], 2)
    stages = [
        Stage(first, mask_of(first), servers=[0, 1]),
        Stage(second, mask_of(second, window=(512, 0)), servers=[2, 3]),
    ]
    found = disaggregate_stages(stages, 4, row_bytes=ROWS)
    load = sum(
        loads(tasks, stage.layout, stage.mask, 4)
        for tasks, stage in zip(found, stages, strict=True)
    )
    assert load.max() <= 1.05 * load.mean()
    for tasks, stage in zip(found, stages, strict=True):
        total = loads(tasks, stage.layout, stage.mask, 4).sum()
        whole = disaggregate(stage.layout, stage.mask, row_bytes=ROWS)
        assert total == loads(whole, stage.layout, stage.mask).sum()
    assert set(found[0].servers.tolist()) == {0, 1, 2, 3}


def test_equal_arguments_give_equal_tasks():
    spans = [[(0, 0, 700), (1, 5, 9)], [(1, 0, 5), (1, 9, 300)]]
    one = Layout.from_spans(spans, [0, 700, 1000])
    two = Layout.from_spans([list(reversed(s)) for s in spans], np.array([0, 700, 1000], np.int32))
    found = [disaggregate(x, mask_of(x), row_bytes=ROWS, tile=8) for x in (one, two)]
    for a, b in zip(*(tasks[:6] for tasks in found), strict=True):
        assert a.dtype == np.int64 and np.array_equal(a, b)


WRONG = {
    "layout must be a seqpar.Layout, got int": {"layout": 3},
    "kv_layout must have layout's 1 documents and 2 ranks, got 2 and 2": {
        "kv_layout": Layout.contiguous([0, 3, 5], 2)
    },
    "tolerance must be at least 0, .* got -1.0": {"tolerance": -1},
    "weights must be one number, or one for each of 2 servers, got": {"weights": [1, 2, 3]},
    "weights must be finite, and not 0 for all servers": {"weights": 0},
    "weights must be finite": {"weights": [1, np.inf]},
    "weights must not be negative or NaN": {"weights": [1, np.nan]},
    "memory must be one number, or one for each of 2 servers": {"memory": "much"},
    "price must be at least 0, .* got -1.0": {"price": -1},
    "price must be at least 0, .* got inf": {"price": np.inf},
    "row_bytes must be RowBytes, got": {"row_bytes": (4, 1)},
    "row_bytes must be positive, .* got": {"row_bytes": RowBytes(4, 0)},
    "row_bytes must be positive, from 1e-09": {"row_bytes": RowBytes(1e300, 1)},
    "costs must be a Costs or None, got str": {"costs": "h100"},
    "mask must be a Mask, got 'causal'": {"mask": "causal"},
    "mask must have a prefix of 1 documents, got 2": {"mask": Mask(9, 0, (1, 1))},
    "tile must be at least 1, got 0": {"tile": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    layout = Layout.contiguous(9, 2)
    arguments = {"layout": layout, "mask": mask_of(layout), "row_bytes": ROWS} | WRONG[message]
    with pytest.raises(ValueError, match=message):
        disaggregate(**arguments)


def test_no_stages_have_no_tasks():
    assert disaggregate_stages([], 4, row_bytes=ROWS) == []


def test_wrong_servers_of_a_stage_are_named():
    layout = Layout.contiguous(9, 2)
    for servers in ([0], [0, 0], [1, 4], [-1, 0]):
        with pytest.raises(
            ValueError, match="servers of a stage must be 2 different numbers below 4"
        ):
            disaggregate_stages(
                [Stage(layout, mask_of(layout), servers=servers)], 4, row_bytes=ROWS
            )
