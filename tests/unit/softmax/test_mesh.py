"""Meshes of any shape, the one that sends least, and what is special about edges."""

import itertools
from collections import Counter

import pytest
import torch

import seqpar
from seqpar import Layout, best_mesh
from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm, as_mesh
from seqpar.softmax.keys import key_plan
from seqpar.strategies.mesh import row_bytes, sent_bytes
from tests.support import cases
from tests.support.cases import Case, assert_right, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

CU = [0, 41, 42, 42, 50, 121]
SHAPES = [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (3, 3)]
CALLS = {
    "batch, sinks, lse": {"batch": 2, "sinks": True, "dlse": True},
    "window": {"window": (9, 2), "dtype": torch.float32, "value_dim": 5},
    "narrow window, softcap, slopes": {"window": (2, 0), "softcap": 3.0, "alibi": "heads"},
    "prefix": {"prefix": (30, 0, 0, 1, 5), "causal": False},
    "other keys": {"kv_layout": True, "dlse": True},
}


@pytest.fixture
def small(monkeypatch):
    """Rows for a group of heads, and for a tile, that small cases have."""
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", 4)
    monkeypatch.setattr(key_plan, "_ROWS_PER_SHORT_GROUP", 8)
    monkeypatch.setattr("seqpar.layout.masks.mask._TILE_ROWS", 2)


@few_rows()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_a_mesh_of_any_shape_is_right(monkeypatch, small, shape, kind, options):
    monkeypatch.setattr(cases, "square", lambda group: as_mesh(Comm.of(group), *shape))
    ranks, options = (
        shape[0] * shape[1],
        {"causal": True, "heads": 6, "kv_heads": 3} | CALLS[options],
    )
    if "kv_layout" in options:
        options["kv_layout"] = Layout.striped([0, 30, 35, 36, 60, 200], ranks, stripe=3)
    case = Case("mesh", getattr(Layout, kind)(CU, ranks), **options)
    for got in virtual(ranks, run, case):
        assert_right(got, oracle(case), case.dtype)


def sent(shape, rank, layout, causal, heads, **options):
    """The bytes that a rank of a mesh sends in a pass, by direction."""
    mesh = as_mesh(Comm("silent", rank, shape[0] * shape[1]), *shape)
    attn = seqpar.MeshAttention(mesh, **options)
    q, k = (
        torch.empty(layout.tokens_on(rank), x, 8, dtype=torch.bfloat16)  # results in fp32
        for x in heads
    )
    found = Counter()
    for row in attn.traffic(q, k, k, layout, causal=causal):
        found[row.direction] += row.bytes
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, {}) for shape in ((1, 4), (4, 1), (3, 2), (3, 3))),
        ((3, 2), {"message_dtype": torch.int8}),
        ((3, 2), {"gradient_dtype": torch.bfloat16}),
    ],
)
def test_the_best_shape_sends_the_fewest_bytes(shape, options, causal):
    """On a zigzag layout, of chunks of 8 tokens."""
    ranks = shape[0] * shape[1]
    layout = Layout.zigzag(16 * ranks, ranks)
    for passes in (1, 2):
        operands = OperandShape(torch.bfloat16, 1, 4, 2, 8, 8)
        sizes = row_bytes(operands, **options, backward=passes == 2)
        expected = 8 * sent_bytes(shape, sizes, causal)
        for rank in range(ranks):
            found = sent(shape, rank, layout, causal, (4, 2), **options)
            assert sum([found["forward"], found["backward"]][:passes]) == expected[rank]


@few_rows()
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (8, 4), (8, 1)])
@pytest.mark.parametrize("messages", [None, torch.int8])
@pytest.mark.parametrize("ranks", [1, 7, 12, 64])
def test_no_other_shape_sends_less(ranks, messages, q_heads, kv_heads, backward):
    options = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 8}
    found = best_mesh(ranks, **options, message_dtype=messages, backward=backward)
    operands = OperandShape(torch.bfloat16, 1, q_heads, kv_heads, 8, 8)
    sizes = row_bytes(operands, None, messages, backward=backward)
    most = {
        (rows, columns): sent_bytes((rows, columns), sizes, True).max()
        for rows, columns in itertools.product(range(1, ranks + 1), repeat=2)
        if rows * columns == ranks
    }
    assert most[found] == min(most.values())


def test_the_published_shape_and_traffic():
    """Without a mask a rank of 256 sends 60 units forward, of a block of queries in 16 bits, where
    Ring sends 510: with partials in 16 bits, and beside lse, which takes 1/64 of 15 of these."""
    options = {"q_heads": 32, "kv_heads": 32, "causal": False, "backward": False}
    assert best_mesh(256, **options, partial_dtype=torch.bfloat16) == (16, 16)
    operands = OperandShape(torch.bfloat16, 1, 32, 32, 128, 128)
    sizes = row_bytes(operands, torch.bfloat16, backward=False)
    unit = 2 * 32 * 128 * 2  # of two chunks of a row each
    assert sent_bytes((16, 16), sizes, False)[0] / unit == 60 + 15 / 64
    assert sent_bytes((256, 1), sizes, False)[0] / unit == 510
    grouped = best_mesh(64, q_heads=32, kv_heads=8, causal=False)
    assert grouped == (16, 4)  # about √(64 / 4) columns


def test_the_best_shape_inside_usp_sends_least():
    """Of 8 ranks and 4 heads, 2 of each rank: 4 rows, as a mesh of 2 x 2."""
    layout, comm = Layout.zigzag(512, 8), as_mesh(Comm("silent", 0, 8), 4, 2)
    q = torch.empty(64, 4, 8, dtype=torch.bfloat16, device="meta")
    attn = seqpar.USPAttention(comm, outer="mesh")
    assert best_mesh(4, q_heads=2, kv_heads=2, head_dim=8) == (2, 2)
    peers = {row.peer for row in attn.traffic(q, q, q, layout, causal=True)}
    assert peers == {1, 2, 4}  # its row's other rank, and of its column 6 is in no tile's reach


def test_documents_on_one_rank_each_send_nothing():
    layout = Layout.from_spans([[(r, 0, 9)] for r in range(4)], [9 * r for r in range(5)])
    assert not any(sent((2, 2), rank, layout, True, (2, 2)) for rank in range(4))
