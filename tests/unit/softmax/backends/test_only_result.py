"""Kernels whose first results remain the only ones: nothing is summed or copied."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from seqpar import Layout, use_backend
from seqpar.layout.masks.mask import Blocks, Mask, slices_between
from seqpar.softmax.attend import attend_blocks
from seqpar.softmax.backends import aten, flash_attn
from seqpar.softmax.backends.flash_attn import load_package
from seqpar.softmax.backends.varlen import VarlenKernel
from seqpar.softmax.call import Operands
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.cases import Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows
from tests.unit.softmax.backends.test_flash_attn import MODULES, install

DOCUMENTS = [0, 40, 41, 90]
RANGES = (0, 0, 40, 0, 9, None, None), (2, 5, 49, 0, 40, None, 0)
BF16 = torch.bfloat16
ONE_RANK = (Layout.contiguous(DOCUMENTS, 1),) * 2
KERNEL = "kernel", None
events = []  # operators that write, and kernels


def unseen(function):
    """Hide a stand-in's operators from dispatch modes: on a GPU it is one kernel."""

    def call(*arguments, **options):
        events.append(KERNEL)
        with _disable_current_modes():
            return function(*arguments, **options)

    call.__signature__ = inspect.signature(function)
    return call


@pytest.fixture(params=MODULES)
def package(request, monkeypatch):
    install(monkeypatch, request.param, {x: unseen(y) for x, y in MODULES[request.param].items()})
    monkeypatch.setattr(flash_attn, "gpu_major", lambda device: 9)
    monkeypatch.setattr(flash_attn, "refusal", lambda q, v: None)
    load_package.cache_clear()
    yield request.param
    load_package.cache_clear()


class Written(TorchDispatchMode):
    """Records operators that write at least `elements`, or allocate that many in fp32."""

    def __init__(self, elements):
        super().__init__()
        self.elements = elements

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, returns = function(*args, **(kwargs or {})), function._schema.returns
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements:
            is_view = any(x.alias_info and not x.alias_info.is_write for x in returns)
            writes = "empty" not in str(function) or result.dtype == torch.float32
            events.extend([(str(function), result.dtype)] * (writes and not is_view))
        return result


def written(strategy, batch=1, sinks=False, layouts=ONE_RANK, **arguments):
    """The kernels of the last rank's forward and backward, and what writes as much as k has."""
    options = {"head_groups": 1} if strategy == "ulysses" else {}
    layout, kv_layout = layouts
    rank = layout.ranks - 1
    attn = module(strategy, SilentComm(rank, layout.ranks), deterministic=False, **options)
    tokens, keys = layout.tokens_on(rank), kv_layout.tokens_on(rank)
    q, dout = (torch.randn(batch, tokens, 4, 8).to(BF16) for _ in range(2))
    k, v = (torch.randn(batch, keys, 2, 8).to(BF16) for _ in range(2))
    elements = k.numel() or q.numel()
    sinks = torch.randn(4) if sinks else None
    with use_backend("flash_attn"):
        arguments = {"causal": True, "kv_layout": kv_layout} | arguments
        call, bound = attn._resolve(q, k, v, layout, **arguments), attn._bound
    events.clear()
    with Written(elements):
        out, lse, kept = bound.strategy.forward(bound.comm.call(), call, Operands(q, k, v, sinks))
    forward = list(events)
    events.clear()
    kept = kept or [q, k, v, out, lse]
    with Written(elements):
        gradients = bound.strategy.backward(bound.comm.call(), call, dout, None, sinks, kept)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert rank or {x.dtype for x in (out, *gradients)} == {BF16}
    return forward, list(events)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("options", [{}, {"window_size": (9, 0)}, {"batch": 2}])
def test_only_results_are_returned_as_they_are(package, strategy, options):
    assert written(strategy, **options) == ([KERNEL], [KERNEL])


def test_sinks_scale_only_results(package):
    scaled = "aten.mul.out", BF16  # out, and dout
    assert written("ring", sinks=True) == ([KERNEL, scaled], [scaled, KERNEL])


def test_ulysses_exchanges_results_of_kernels(package):
    assert {dtype for x in written("ulysses") for _, dtype in x} == {BF16, None}


@pytest.mark.parametrize("package", ["FlashAttention-4"], indirect=True)
def test_results_become_sums_before_another_kernel(package):
    """Else their memory would be in use together with what that kernel allocates."""
    spans = [[(0, 0, 20)], [(0, 20, 40)], []]
    layouts = (Layout.from_spans(x, [0, 40]) for x in ([[], [], [(0, 0, 40)]], spans))
    for found in written("ring", layouts=layouts, causal=False):
        first, second = (i for i, x in enumerate(found) if x == KERNEL)
        between = [x for x in found[first + 1 : second] if x[1] == torch.float32]
        assert between == [("aten._to_copy.default", torch.float32)]  # out, or dq


@few_rows()
@pytest.mark.parametrize("package", ["FlashAttention-4"], indirect=True)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "token_ring", "mesh"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dlse": True, "sinks": True, "batch": 2},
        {"window": (50, 0)},
        {"value_dim": 16, "dlse": True},
        {"dim": 24, "scale": -0.5},
        {"ranges": RANGES, "dlse": True, "sinks": True},
        {"kv_layout": [0, 20, 70, 70], "causal": False, "dlse": True, "sinks": True},
    ],
)
def test_equals_the_oracle(package, strategy, ranks, options):
    """Also rows without keys, and documents without keys."""
    options = {"causal": True, "heads": 4, "kv_heads": 2} | options
    if "kv_layout" in options:
        options["kv_layout"] = Layout.zigzag(options["kv_layout"], ranks)
    case = Case(
        strategy, Layout.zigzag(DOCUMENTS, ranks), dtype=BF16, backend="flash_attn",
        module_options=(("deterministic", False),), **options,
    )  # fmt: skip
    assert_right(virtual(ranks, run, case)[0], oracle(case), BF16, roundings=4)


@pytest.mark.parametrize("package", ["FlashAttention-4"], indirect=True)
def test_groups_that_share_keys_are_summed_exactly(monkeypatch, package):
    """1 + 2⁻⁸ + 2⁻⁸ in bf16, rounded once, is 1 + 2⁻⁷; rounded twice, 1."""
    sizes = iter([1.0, 2**-8, 2**-8])

    def add_gradients(kernel, *arguments):
        q, k, v, _, gradients, _ = arguments[1:]
        size = next(sizes)
        gradients.queries.keep(torch.zeros_like(q))
        gradients.keys.keep(torch.full_like(k, size), torch.full_like(v, size))

    monkeypatch.setattr(VarlenKernel, "add_gradients", add_gradients)
    options = (("deterministic", False), ("head_groups", 3))
    case = Case(
        "ulysses", Layout.contiguous(DOCUMENTS, 1), True, heads=3, dtype=BF16,
        backend="flash_attn", module_options=options,
    )  # fmt: skip
    *_, dk, dv = virtual(1, run, case)[0]
    assert (dk == 1 + 2**-7).all() and (dv == 1 + 2**-7).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_atens_only_result_is_returned_on_cpus(monkeypatch, dtype):
    monkeypatch.setattr(aten, "half_is_faster_in_forward", lambda dtype: True)
    rows = Layout.contiguous([0, 40], 1).geometry
    slices = slices_between(rows, 0, rows, 0, Mask.of(True, (-1, -1), None, rows))
    q, k, v = (torch.randn(2, 40, heads, 8).to(dtype) for heads in (4, 2, 2))
    events.clear()
    with Written(k.numel()):
        out, lse = attend_blocks(
            q, [(k, v)], Blocks((slices,)), CallOptions(0.3, 0.0, "aten", True), None
        )
    assert events == []
    assert out.is_contiguous() and lse.is_contiguous()
