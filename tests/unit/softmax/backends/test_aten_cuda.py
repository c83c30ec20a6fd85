"""ATen's varlen kernel with one call per hop. A stand-in of its signature computes on CPUs."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from seqpar import Layout
from seqpar.softmax.backends import aten_cuda, kernel_order, varlen
from seqpar.softmax.call import Operands
from seqpar.softmax.compute.partial import Partial
from tests.support import varlen_kernels
from tests.support.cases import Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows

DOCUMENTS = [0, 40, 41, 90]
RANKS, MANY = 8, [i * 48 for i in range(33)]


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


class Operators(TorchDispatchMode):
    """Counts operators that make no view."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns = function._schema.returns
        is_view = bool(returns) and all(x.alias_info and not x.alias_info.is_write for x in returns)
        self.count += not is_view
        return function(*args, **(kwargs or {}))


def count_operators(rank, monkeypatch):
    """Operators of forward and backward of one rank, without the kernels' calls."""
    attn = module("ring", SilentComm(rank, RANKS), deterministic=False)  # else Triton's backward
    layout, mode = Layout.zigzag(MANY, RANKS), Operators()

    def count_once(owner, name):
        """Count a function as one operator: on CUDA it is one kernel of ours."""
        function = getattr(owner, name)

        def counted(*arguments):
            mode.count += 1
            with _disable_current_modes():
                function(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count_once(Partial, "merge")
    count_once(varlen, "_add")
    q, k, v, dout = (
        torch.randn(1, layout.tokens_on(rank), heads, 8).bfloat16() for heads in (2, 1, 1, 2)
    )
    call = attn._resolve(q, k, v, layout, causal=True)
    strategy, comm = attn._bound.strategy, attn._bound.comm
    with mode:
        out, lse, _ = strategy.forward(comm.call(), call, Operands(q, k, v))
    forward, mode.count = mode.count, 0
    with mode:
        strategy.backward(comm.call(), call, dout, None, None, [q, k, v, out, lse])
    return forward, mode.count


@pytest.mark.parametrize("rank", [0, 3, RANKS - 1])
def test_a_hop_of_many_documents_is_one_call(calls, rank):
    with pytest.MonkeyPatch.context() as patched:
        forward, backward = count_operators(rank, patched)
    assert calls["forward"] <= 8 and calls["backward"] <= 9
    assert calls["forward"] + forward <= 60 and calls["backward"] + backward <= 90
