"""ATen's varlen kernel with one call per hop. A stand-in of its signature computes on CPUs."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from seqpar import Layout
from seqpar.softmax.backends import aten_cuda, kernel_order
from tests.support import varlen_kernels
from tests.support.cases import Case, assert_right, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

DOCUMENTS = [0, 40, 41, 90]


@pytest.fixture
def calls(monkeypatch):
    """The stand-in computes in place of the kernel; the number of its calls."""
    counts = {"forward": 0, "backward": 0}

    def counted(way, kernel):
        def call(*args, **options):
            counts[way] += 1
            with _disable_current_modes():
                return kernel(*args, **options)

        return lambda: call

    kernels = varlen_kernels.aten_forward, varlen_kernels.aten_backward
    monkeypatch.setattr(aten_cuda, "computes", lambda q: True)
    monkeypatch.setattr(
        kernel_order, "gpu_major", lambda device: 8
    )  # FlashAttention-2 is the default
    monkeypatch.setattr(aten_cuda, "cuda_attention", counted("forward", kernels[0]))
    monkeypatch.setattr(aten_cuda, "cuda_attention_backward", counted("backward", kernels[1]))
    return counts


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_stand_ins_have_atens_signature(way):
    operator = getattr(torch.ops.aten, f"_flash_attention_{way}").default._schema
    stand_in = inspect.signature(getattr(varlen_kernels, f"aten_{way}"))
    names = [(x.name, x.kwarg_only) for x in operator.arguments]
    only = inspect.Parameter.KEYWORD_ONLY
    assert names[: len(stand_in.parameters)] == [
        (x.name, x.kind is only) for x in stand_in.parameters.values()
    ]
    assert len(names) == len(stand_in.parameters)


@pytest.fixture
def atens_backward(monkeypatch):
    """Backward takes ATen's kernel also for deterministic calls."""
    monkeypatch.setattr(aten_cuda, "KERNEL", aten_cuda.KERNEL._replace(deterministic=True))


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "token_ring"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (9, 0)},
        {"window": (9, 4), "causal": False},
        {"dlse": True, "sinks": True},
        {"scale": -0.5},
        {"scale": 0.0},
        {"softcap": 2.0},
    ],
)
def test_equals_the_oracle(calls, atens_backward, strategy, options):
    case = Case(
        strategy,
        Layout.zigzag(DOCUMENTS, 3),
        dtype=torch.bfloat16,
        backend="aten",
        **{"causal": True} | options,
    )
    assert_right(virtual(3, run, case)[0], oracle(case), case.dtype, roundings=4)
    used = "softcap" not in options
    assert bool(calls["forward"]) == bool(calls["backward"]) == used


@pytest.mark.parametrize("dim", [192, 224])
def test_head_dims_that_backward_refuses(calls, atens_backward, dim):
    """The gradient of lse makes 200 of 192."""
    layout = Layout.zigzag(DOCUMENTS, 1)
    case = Case("ring", layout, True, dlse=True, dim=dim, value_dim=192, dtype=torch.bfloat16)
    assert_right(virtual(1, run, case)[0], oracle(case), case.dtype, roundings=4)
    assert calls["backward"]
