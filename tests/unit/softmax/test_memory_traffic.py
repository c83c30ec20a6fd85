"""What a rank does around its attention kernels on a GPU stays within bounds.

`benchmarks/kernels/memory_traffic.py` counts it on meta tensors, and explains each figure.
"""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from seqpar.kernels.flash_attention import launching

from benchmarks import RESULTS
from benchmarks.kernels import memory_traffic
from benchmarks.kernels.memory_traffic import CASES, RANKS, RATES, Counter
from seqpar.comm.messages.comm import Comm
from seqpar.strategies.registry import SOFTMAX
from tests.support.pages import ROOT

# Of a case and a pass, the largest value of some figures. Lower a bound when the code needs less.
BOUNDS = {
    ("ring, 1 document", "forward"): {
        "extra_time": 0.015,
        "calls_per_head": 8,
        "allocations": 12,
        "message_buffers": 2,
    },
    ("ring, 1 document", "backward"): {
        "extra_time": 0.022,
        "sent_bytes": 706e6,
        "allocations": 67,
        "message_buffers": 3,
    },
    ("ring, 32 documents", "forward"): {
        "extra_time": 0.40,
        "attention_calls": 8,
        "calls_per_head": 8,
        "message_buffers": 2,
    },
    ("ring, 32 documents", "backward"): {
        "extra_time": 0.66,
        "calls_per_head": 9,
        "message_buffers": 3,
    },
    ("ring, 1 document, fp8 messages", "forward"): {"extra_time": 0.022, "kernels": 40},
    ("ring, 1 document, fp8 messages", "backward"): {"extra_time": 0.024, "kernels": 149},
    ("all_gather, 32 documents", "forward"): {"extra_time": 0.52, "calls_per_head": 5},
    ("all_gather, 32 documents", "backward"): {"extra_time": 0.79, "calls_per_head": 7},
    ("ulysses, 32 documents", "forward"): {"extra_time": 0.44, "calls_per_head": 1},
    ("token_ring, 1 document", "forward"): {"extra_time": 0.053, "sent_bytes": 1422e6},
    ("token_ring, 1 document", "backward"): {
        "extra_time": 0.030,
        "sent_bytes": 2102e6,
        "message_buffers": 13,
    },
    ("token_ring, 32 documents", "forward"): {"extra_time": 1.18},
    ("token_ring, 32 documents", "backward"): {"extra_time": 0.85},
    ("mesh, 32 documents", "forward"): {"extra_time": 1.07, "message_buffers": 7},
    ("mesh, 32 documents", "backward"): {"extra_time": 0.95},
    ("disaggregated, 32 documents", "forward"): {"extra_time": 0.67, "calls_per_head": 8},
    ("disaggregated, 32 documents", "backward"): {"extra_time": 1.01, "calls_per_head": 12},
    # Three blocks of foreign rows, and in each group and stage results and gradients that return
    ("disaggregated, 1 document", "backward"): {"message_buffers": 17},
}


@functools.cache
def counts(name):
    return memory_traffic.count(CASES[name])


@pytest.mark.parametrize(("name", "direction"), BOUNDS, ids=str)
def test_figures_stay_within_bounds(name, direction):
    found = counts(name)[direction]
    for figure, bound in BOUNDS[name, direction].items():
        assert getattr(found, figure) <= bound, figure


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("documents", ["1 document", "32 documents"])
def test_keys_arrive_in_one_buffer_more_than_are_under_way(strategy, documents):
    """In backward, gradients arrive in one more buffer."""
    ahead = SOFTMAX[strategy](Comm("silent", 0, RANKS))._bound.strategy.ahead(RANKS)
    found = counts(f"{strategy}, {documents}")
    assert found["forward"].message_buffers <= ahead + 1
    assert found["backward"].message_buffers <= ahead + 2


@pytest.mark.parametrize("name", CASES)
def test_second_calls_do_not_wait_on_the_host(name):
    for direction in RATES:
        assert counts(name)[direction].attention_calls > 0
        assert counts(name)[direction].host_waits == 0


def test_bf16_gradients_move_fewer_bytes_than_fp32():
    """In memory as well as in messages. A mesh adds the results of several calls in fp32."""
    name = "mesh, 1 document"
    exact, rounded = (counts(x)["backward"] for x in (name, f"{name}, bf16 gradients"))
    assert rounded.bytes < 0.97 * exact.bytes
    assert rounded.sent_bytes < 0.85 * exact.sent_bytes


def test_the_page_has_the_committed_figures():
    (file,) = RESULTS.glob("*/memory-traffic.json")
    rows = json.loads(file.read_text())["rows"]
    *_, body = memory_traffic.table(rows).partition("\n")
    assert body in (ROOT / "docs/benchmarks/kernels.md").read_text()


def test_operators_are_counted_by_what_they_read_and_write():
    x, whole = (torch.empty(4, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    table = torch.arange(4)
    with Counter() as counter:
        x.copy_(whole)  # 64 bytes each
        sums = x.to(torch.float32)  # reads 64, writes 128
        sums[1:].add_(x[1:])  # reads 96 and 48, writes 96
        sums.copy_(x)  # reads 64, writes 128
        torch.empty_like(x)
        assert counter.counts.host_waits == 0
        table.to("meta")
    found = counter.counts
    assert found.by_kernel["copy_"] == 128 + 192
    assert found.by_kernel["add_"] == 240
    assert found.host_waits == 1
    assert found.bytes == 128 + 192 + 192 + 240 + table.nbytes
    assert (found.kernels, found.allocations) == (5, 3)


def test_kernels_of_unknown_traffic_are_refused():
    launch = SimpleNamespace(kernel=SimpleNamespace(__name__="unknown"))
    with Counter(), memory_traffic.stand_ins(), pytest.raises(KeyError, match="unknown"):
        launching._run(launch, ())
