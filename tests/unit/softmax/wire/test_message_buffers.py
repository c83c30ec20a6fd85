"""Messages of a pass use few buffers, which nothing overwrites while they are read."""

import itertools

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.softmax.backends import aten
from seqpar.softmax.call import Operands
from seqpar.softmax.keys import key_plan
from seqpar.softmax.wire.message_buffers import MessageBuffers
from seqpar.strategies import disaggregated
from tests.support.cases import Case, module, run
from tests.support.nccl import NcclComm, nccl
from tests.support.poison import one_buffer_fewer, poisoned
from tests.support.ranks import VirtualComm, virtual
from tests.support.steady import SilentComm

CPU = torch.device("cpu")


def test_a_buffer_is_used_in_turn_and_freed_with_its_last_message():
    sizes = [3, 5, 4, 1, 2]
    buffers = MessageBuffers(2, sizes)
    taken = [buffers.take((size,), torch.float32, CPU) for size in sizes]
    assert [x.numel() for x in taken] == sizes
    storages = [x.untyped_storage() for x in taken]
    assert [x.data_ptr() == storages[i % 2].data_ptr() for i, x in enumerate(storages)] == 5 * [
        True
    ]
    assert [x.nbytes() for x in storages] == [16, 20, 16, 20, 16]  # the largest message of each
    assert buffers._blocks == [None, None]


def test_a_buffer_that_grows_begins_small():
    buffers = MessageBuffers(2, [1, 2, 3, 2], grow=True)
    taken = [buffers.take((size,), torch.int8, CPU) for size in (1, 2, 3, 2)]
    assert [x.untyped_storage().nbytes() for x in taken] == [1, 2, 3, 2]
    assert taken[1].data_ptr() == taken[3].data_ptr()


def test_no_more_buffers_than_messages():
    buffers = MessageBuffers(9, [7, 2])
    taken = [buffers.take((size,), torch.int8, CPU) for size in (7, 2)]
    assert [x.untyped_storage().nbytes() for x in taken] == [7, 2]


CASES = {
    "ring": Case("ring", Layout.zigzag([0, 41, 42, 50, 121], 4), True, heads=4, kv_heads=4),
    "ring in 8 bits": Case(
        "ring", Layout.zigzag(96, 4), True, heads=4, kv_heads=4, dtype=torch.float32,
        module_options=(("message_dtype", torch.int8), ("gradient_dtype", torch.bfloat16)),
    ),
    "ring, uneven": Case("ring", Layout.contiguous([0, 5, 90, 121], 5), True, heads=6, kv_heads=3),
    "all_gather": Case("all_gather", Layout.zigzag(121, 5), True, heads=4, kv_heads=4),
    "usp": Case("usp", Layout.contiguous(120, 6), True, heads=8, kv_heads=4),
    "token_ring": Case("token_ring", Layout.zigzag(121, 4), True, heads=4, kv_heads=4, sinks=True),
    "token_ring, one group": Case("token_ring", Layout.contiguous(120, 4), False, kv_heads=1),
    "mesh": Case("mesh", Layout.striped(121, 6, stripe=3), True, heads=4, kv_heads=4, batch=2),
    "disaggregated": Case(
        "disaggregated+half to next", Layout.zigzag(121, 4), True, heads=8, kv_heads=4
    ),
    "disaggregated, kept": Case(
        "disaggregated+at random+server", Layout.contiguous(121, 4), True, heads=4, kv_heads=4
    ),
}  # fmt: skip
# How many buffers there are for keys, for queries and for results, where there are several.
COUNTS = {"ring": [2], "all_gather": [3], "usp": [2], "token_ring": [2, 3], "mesh": [2, 3]}
COMMS = {"gloo": (virtual, VirtualComm), "nccl": (lambda *x: nccl(*x)[0], NcclComm)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Rows for a group of heads that small cases have."""
    for of_rows in (key_plan, disaggregated):
        monkeypatch.setattr(of_rows, "_ROWS_PER_GROUP", 10)


def equal(found, expected):
    """Return whether all ranks found the same bits."""
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("play", "kind"), COMMS.values(), ids=COMMS)
def test_what_is_read_is_not_overwritten(play, kind, case):
    """NCCL's exchanges run in order, and each may start as soon as it is posted."""
    ranks = case.layout.ranks
    plain = play(ranks, run, case)
    with poisoned(kind) as wrong:
        found = play(ranks, run, case)
    assert not wrong and equal(found, plain)
    for count in COUNTS.get(case.strategy, ()):
        with one_buffer_fewer(count), poisoned(kind) as wrong:
            found = play(ranks, run, case)
        assert wrong or not equal(found, plain)


class Recording(SilentComm):
    """A silent rank that keeps what its exchanges would receive."""

    def start(self, sends, recvs, exchange):
        self.__dict__.setdefault("received", []).extend(x for _, x in recvs)
        return super().start(sends, recvs, exchange)


# Storages that messages are received into, in forward and in backward, in any number of groups of
# heads. Keys have ahead + 1: two of Ring's, and one for each of AllGather's four exchanges on 8
# ranks. Gradients have one. Queries have two, and their results three; a mesh of 2 rows and 4
# columns has one more for keys.
STORAGES = {"ring": (2, 3), "all_gather": (4, 5), "token_ring": (5, 5), "mesh": (6, 7)}


@pytest.mark.parametrize("tokens", [8 * 10, 8 * 80])
@pytest.mark.parametrize("strategy", STORAGES)
def test_a_pass_receives_into_few_storages(monkeypatch, strategy, tokens):
    monkeypatch.setattr(aten, "forward", lambda *arguments: arguments[4].allocate())
    monkeypatch.setattr(aten, "backward", lambda *arguments: arguments[5].allocate())
    of_keys = strategy in ("ring", "all_gather")
    layout = Layout.zigzag(tokens, 8)
    attn = module(strategy, Recording(3, 8))
    q, k, v = (torch.empty(1, tokens // 8, heads, 8, device="meta") for heads in (16, 8, 8))
    # The hops of queries differ under a causal mask, and their buffers then grow.
    call, code = attn._resolve(q, k, v, layout, causal=of_keys), attn._bound.strategy
    groups = len(key_plan.head_groups(call.shape, call.layout, call.mask))
    assert groups == tokens // 80
    comm = attn._bound.comm

    def storages():
        found, comm.received = comm.received, []
        return len({x.untyped_storage()._cdata for x in found})

    comm.received = []
    out, lse, _ = code.forward(comm, call, Operands(q, k, v, None))
    found = [storages()]
    code.backward(comm, call, torch.empty_like(out), None, None, [q, k, v, out, lse])
    assert (*found, storages()) == STORAGES[strategy]
