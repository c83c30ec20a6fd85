"""deterministic="ranks" with the Triton kernels, whose interpreter is for one thread at a time."""

import dataclasses
import threading

import pytest
import torch

from seqpar.softmax.backends import triton
from seqpar.softmax.keys import rank_invariant_plan
from tests.support.ranks import virtual
from tests.support.same_bits import bits, drawn_cases


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of bf16 in Triton's interpreter
@pytest.mark.parametrize(
    "seed",
    [503, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (504, 505))],
)
def test_random_calls_have_equal_bits_on_any_ranks(seed, monkeypatch):
    turns = threading.Lock()

    def in_turns(function):
        def run(*arguments):
            with turns:
                return function(*arguments)

        return run

    monkeypatch.setattr(rank_invariant_plan, "TILE", 16)
    for name in ("forward", "backward"):
        monkeypatch.setattr(triton, name, in_turns(getattr(triton, name)))
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
