"""How long steps take by tasks, in virtual time: the planner's price is that of real messages."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from seqpar import Exposure, Layout
from seqpar.balance import RowBytes, disaggregate, place_homes
from seqpar.core.hooks import set_hooks
from tests.support.cases import module
from tests.support.nccl import nccl
from tests.support.nccl_exchanges import Speeds

HEADS, KV_HEADS, DIM = 8, 2, 64
PAIR = 5e-9  # seconds of a pair of one head: what a core of a CPU takes
CUTS = np.r_[0, np.cumsum([571, 236, 8192, 579, 272, 413, 513, 654, 53, 716, 2392, 1793])]
CONTIGUOUS, ZIGZAG = Layout.contiguous(CUTS, 4), Layout.zigzag(CUTS, 4)


@dataclass(frozen=True)
class Priced:
    row_bytes: RowBytes
    price: float

    def __call__(self, queries, keys, mask):
        return disaggregate(queries, mask, row_bytes=self.row_bytes, price=self.price)


def step(comm, strategy, layout, options):
    n = layout.tokens_on(comm.rank)
    q, k, v, dout = (torch.zeros(n, x, DIM) for x in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(strategy, comm, **options)(*leaves, layout, causal=True)
    torch.autograd.grad(out, leaves, dout)


def seconds(strategy, layout, mbit, pair=PAIR, **options):
    """A forward and backward, of equal work, where links have so many Mbit/s."""
    speeds = Speeds(area=pair, backward=1.0, rate=mbit * 1e6 / 8)
    with set_hooks(replace_compute=lambda area: None):
        return max(nccl(4, step, strategy, layout, options, speeds=speeds)[1].now)


def plan_for(mbit, row_bytes):
    return Priced(row_bytes, 8 / (mbit * 1e6) / (PAIR * HEADS))


def planned(layout, mbit, row_bytes):
    return seconds("disaggregated", layout, mbit, plan=plan_for(mbit, row_bytes))


SENT = RowBytes.sent(HEADS, KV_HEADS, DIM, itemsize=4, backward=1.0)
FORWARD = RowBytes.of(HEADS, KV_HEADS, DIM, itemsize=4)
PLACED = place_homes(np.diff(CUTS), 4, row_bytes=FORWARD)


@pytest.mark.exhaustive
def test_on_slow_links_little_moves():
    """A price of what forward alone sends moves so much that a step takes as long as by Ring."""
    ring, found = seconds("ring", ZIGZAG, 200), planned(ZIGZAG, 200, SENT)
    assert found < 0.85 * ring and planned(ZIGZAG, 200, FORWARD) > 1.15 * found


def test_moving_work_pays():
    assert planned(CONTIGUOUS, 400, SENT) < 0.65 * seconds("ring", CONTIGUOUS, 400)


def test_steps_beat_fixed_packing_and_match_ring():
    assert planned(PLACED, 1000, SENT) < 0.5 * seconds("ring", CONTIGUOUS, 1000)
    assert planned(ZIGZAG, 1000, SENT) <= 1.001 * seconds("ring", ZIGZAG, 1000)


@pytest.mark.parametrize(
    ("layout", "mbit", "share", "exposed"),
    [(PLACED, 700, 0.4, 0.01), (ZIGZAG, 700, 0.4, 0.01), (CONTIGUOUS, 2000, 0.2, 0.1)],
    ids=["placed", "zigzag", "contiguous"],
)
def test_dispatch_hides_under_local_work(layout, mbit, share, exposed):
    """Messages that take `share` of the compute. With documents in order the rank that has the
    longest one sends and receives most of all that travels, so its links must be faster."""
    options = {"plan": plan_for(mbit, SENT)}
    both = seconds("disaggregated", layout, mbit, **options)
    compute = seconds("disaggregated", layout, 1e12, **options)
    messages = seconds("disaggregated", layout, mbit, pair=0.0, **options)
    assert messages > share * compute
    assert Exposure(((both, compute, messages),)).fraction <= exposed
