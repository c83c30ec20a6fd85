"""deterministic="ranks" with the Triton kernels, whose interpreter is for one thread at a time."""

import dataclasses
import threading

import pytest
import torch

from seqpar import Layout, use_backend
from seqpar.softmax.backends import triton
from seqpar.softmax.keys import rank_invariant_plan
from tests.support.cases import module
from tests.support.ranks import virtual
from tests.support.same_bits import bits, drawn_cases


@pytest.fixture
def in_turns(monkeypatch):
    """One rank at a time calls a kernel."""
    turns = threading.Lock()

    def locked(function):
        def run(*arguments):
            with turns:
                return function(*arguments)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(triton, name, locked(getattr(triton, name)))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of bf16 in Triton's interpreter
@pytest.mark.parametrize(
    "seed",
    [503, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (504, 505))],
)
def test_random_calls_have_equal_bits_on_any_ranks(seed, in_turns, monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 16)
    one, others = drawn_cases(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = {torch.float64: torch.float32}
    if device == "cpu":
        dtypes[torch.bfloat16] = torch.float16  # Triton's interpreter does not compute bf16
    changes = {"backend": "triton", "dtype": dtypes.get(one.dtype, one.dtype), "device": device}
    one, *others = (dataclasses.replace(case, **changes) for case in (one, *others))
    expected = virtual(1, bits, one)[0]
    for case in others:
        assert all(x == expected for x in virtual(case.layout.ranks, bits, case))


def steps_and_call(comm, device):
    """Attention of some tokens, each in a step over the keys before it, and in a call for all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(41, heads, 32, generator=generator).to(device) for heads in (4, 2, 2))
    attn = module("ring", comm, deterministic="ranks")
    whole = Layout.zigzag(41, comm.size)
    steps = {}
    with use_backend("triton"):
        out = attn(*(whole.shard(x, comm.rank) for x in (q, k, v)), whole, causal=True)
        for i in (0, 20, 33, 40):
            keys = Layout.zigzag(i + 1, comm.size)
            cache = (keys.shard(x[: i + 1], comm.rank) for x in (k, v))
            steps[i] = attn.decode(q[[i]], *cache, keys)[0]
    return steps, whole.unshard(out, comm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_decoding_has_the_bits_of_a_whole_call(ranks, in_turns):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for steps, out in virtual(ranks, steps_and_call, device):
        for i, step in steps.items():
            assert torch.equal(step, out[i]), i
