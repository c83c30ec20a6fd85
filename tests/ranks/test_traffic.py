"""The bytes that each strategy sends, against the docstrings' formulas, on real ranks."""

import numpy as np
import pytest
import torch

from seqpar import Layout
from tests.support.calls import sent_bytes
from tests.support.cases import STRATEGIES, Case, visible
from tests.support.mask_cases import disjoint_ranges
from tests.support.plans import AtRandom
from tests.support.tiers import few_rows

# A prefix that two branches see, and each branch sees itself; in another document blocks.
TREE = (
    *((0, 0, 10, 0, 10, None, 0), (0, 10, 30, 0, 10, None, None)),
    *((0, 10, 20, 10, 20, None, 0), (0, 20, 30, 20, 30, None, 0)),
    *((2, 0, 59, 0, 59, None, 0), (2, 20, 40, 20, 40, 1, None)),
)


@few_rows()
@pytest.mark.parametrize("heads", [(8, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_sent_are_those_of_the_docstring(pool, strategy, dtype, heads):
    cu, ranks = [0, 30, 31, 90], 4
    for layout, window, ranges in [
        (Layout.zigzag(cu, ranks), (-1, -1), None),
        (Layout.striped(cu, ranks, 4), (10, 0), None),
        (Layout.contiguous(cu, ranks), (10, 0), None),
        (Layout.striped(cu, ranks, 4), (-1, -1), disjoint_ranges(5, cu, tries=20)),
        (Layout.zigzag(cu, ranks), (-1, -1), TREE),
    ]:
        case = Case(
            PLANNED.get(strategy, strategy),
            layout,
            causal=True,
            window=window,
            ranges=ranges,
            heads=heads[0],
            kv_heads=heads[1],
            dim=8,
            value_dim=16,
            dtype=dtype,
            batch=2,
        )
        for rank, sent in enumerate(pool(ranks, sent_bytes, case)):
            assert sent == BYTES[strategy](case, rank, ranks)


def rows_in_reach(case, q_ranks, k_ranks, axis):
    """How many key rows (axis 0) or query rows (axis 1) of some ranks are seen by, or see, any of
    the others'."""
    cu = case.layout.cu_seqlens
    seen = visible(cu, cu, case.causal, case.window, None, case.ranges)
    q_tokens, k_tokens = (
        np.concatenate([case.layout.token_indices(rank).numpy() for rank in ranks])
        for ranks in (q_ranks, k_ranks)
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
    return [
        forward,
        away * ((case.dim + case.value_dim) * size + 2 * partial) + here * case.dim * partial,
    ]


def mesh_bytes(case, rank, ranks):
    """On a mesh of two columns: rows of queries that see any key of a column of ranks, and rows of
    keys that any query of a row of ranks sees."""
    columns, size, e = 2, case.dtype.itemsize, exact(case)
    row, column = (x(rank) for x in (lambda r: r // columns, lambda r: r % columns))
    of_row = [range(r * columns, (r + 1) * columns) for r in range(ranks // columns)]
    of_column = [range(c, ranks, columns) for c in range(columns)]
    beside = [(c, r) for c, r in enumerate(of_row[row]) if c != column]
    below = [(r, c) for r, c in enumerate(of_column[column]) if r != row]
    away = sum(rows_in_reach(case, [rank], of_column[c], axis=1) for c, _ in beside) * case.heads
    here = sum(rows_in_reach(case, [r], of_column[column], axis=1) for _, r in beside) * case.heads
    of_key = case.kv_heads * (case.dim + case.value_dim)
    keys = sum(rows_in_reach(case, of_row[r], [rank], axis=0) for r, _ in below) * of_key
    guests = sum(rows_in_reach(case, of_row[row], [c], axis=0) for _, c in below) * of_key
    forward = away * case.dim * size + here * (case.value_dim + 1) * e + keys * size
    backward = away * ((case.dim + case.value_dim) * size + 2 * e) + here * case.dim * e
    return [2 * forward, 2 * (backward + keys * size + guests * e)]


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
        forward += (
            tokens[rank]
            * (q_heads[peer] * case.dim + kv_heads[peer] * (case.dim + case.value_dim))
            * size
        )
        forward += tokens[peer] * q_heads[rank] * case.value_dim * size
        backward += (
            tokens[rank] * q_heads[peer] * case.value_dim * size
            + tokens[peer] * q_heads[rank] * case.dim * size
        )
        backward += tokens[peer] * kv_heads[rank] * (case.dim + case.value_dim) * returned
    return [2 * forward, 2 * backward]


def usp_bytes(case, rank, ranks):
    columns = 2
    row, column = divmod(rank, columns)
    group = case.heads // case.kv_heads
    heads = range(column * case.heads // columns, (column + 1) * case.heads // columns)
    within = ulysses_bytes(case, column, columns, first=row * columns)
    between = key_bytes(
        case, row, ranks // columns, size=columns, kv_heads=len({head // group for head in heads})
    )
    return [x + y for x, y in zip(within, between, strict=True)]


def task_bytes(case, rank, ranks):
    """Of the plan that `PLANNED` names, from its tasks and the pairs that the mask shows."""
    layout, cu = case.layout.geometry, case.layout.cu_seqlens
    masked = case.causal, case.window, None, case.ranges
    tasks, seen = AtRandom(0)(layout, layout, None), visible(cu, cu, *masked)
    owner = np.empty(case.layout.tokens, int)
    for peer in range(ranks):
        owner[case.layout.token_indices(peer).numpy()] = peer
    needed = np.zeros((2, ranks, owner.size), bool)  # queries and keys that each server needs
    for document, q0, q1, k0, k1, server in zip(*tasks[:6], strict=True):
        q, k = (cu[document] + np.arange(a, b) for a, b in ((q0, q1), (k0, k1)))
        pairs = seen[np.ix_(q, k)]
        needed[0, server, q] |= pairs.any(1)
        needed[1, server, k] |= pairs.any(0)
    away = [needed[i][np.arange(ranks) != rank][:, owner == rank].sum() for i in range(2)]
    here = [needed[i, rank, owner != rank].sum() for i in range(2)]
    size, e, of_key = case.dtype.itemsize, exact(case), case.kv_heads * (case.dim + case.value_dim)
    forward = away[0] * case.heads * case.dim * size + away[1] * of_key * size
    forward += here[0] * case.heads * (case.value_dim + 1) * e
    backward = away[0] * case.heads * ((case.dim + case.value_dim) * size + 2 * e)
    backward += away[1] * of_key * size + here[0] * case.heads * case.dim * e
    return [2 * int(forward), 2 * int(backward + here[1] * of_key * e)]


PLANNED = {"disaggregated": "disaggregated+at random"}
BYTES = {
    "disaggregated": task_bytes,
    "mesh": mesh_bytes,
    "ring": key_bytes,
    "all_gather": key_bytes,
    "token_ring": query_bytes,
    "ulysses": ulysses_bytes,
    "usp": usp_bytes,
}
