"""Which backend computes where users force none: on CPUs aten, on CUDA another, by
the order of kernels for the GPU. Meta tensors pass for CUDA's."""

import types

import pytest
import torch
import triton
from seqpar.kernels.flash_attention import launching

from seqpar import Layout, use_backend
from seqpar.softmax import attend
from seqpar.softmax.backends import aten_cuda, flash_attn, kernel_order
from seqpar.softmax.backends.flash_attn import PACKAGES
from seqpar.softmax.backends.kernel_order import ORDERS, kernel_table
from seqpar.softmax.call import Operands
from tests.support.cases import STRATEGIES, module
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows

RANKS = 4
DOCUMENTS = [0, 1600, 4096]
ZIGZAG, STRIPED = Layout.zigzag(DOCUMENTS, RANKS), Layout.striped(DOCUMENTS, RANKS, stripe=64)
ATEN, TRITON = {"aten"}, {"triton"}


@pytest.fixture
def cuda(monkeypatch):
    """Meta tensors pass for CUDA's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(launching, "_run", lambda launch, tensors: None)
    monkeypatch.setattr(aten_cuda, "is_recent", lambda device: True)
    monkeypatch.setattr(kernel_order, "gpu_major", lambda device: 8)
    monkeypatch.setattr(kernel_order, "load_package", lambda name, major: "not installed")


@pytest.fixture
def used(monkeypatch):
    """The names of backends that compute each way; nothing is computed."""
    names = {"forward": set(), "backward": set()}

    def loaded(kind, name):
        def forward_blocks(q, blocks, slices, options, sinks, into):
            names["forward"].add(name)
            values = [v for _, v in blocks]
            assert len(values) == len(slices.slices)
            shape = *q.shape[:-1], values[0].shape[-1]
            return into or (q.new_empty(shape), q.new_empty(shape[:-1]))

        code = modules.setdefault(name, types.ModuleType(name))
        code.forward = lambda *_: names["forward"].add(name)
        code.backward = lambda *_: names["backward"].add(name)
        code.forward_blocks = forward_blocks if name == "triton" else None
        return code

    modules = {}
    monkeypatch.setattr(attend, "load_backend", loaded)
    return names


def call(strategy, layout, rank=0, device="meta", dtype=torch.bfloat16, dim=16, value_dim=16,
         return_lse=False, **mask):  # fmt: skip
    """Forward and backward of one rank."""
    attn = module(strategy, SilentComm(rank, RANKS))
    q, k, v, dout = (
        torch.zeros(1, layout.tokens_on(rank), heads, width, dtype=dtype, device=device)
        for heads, width in ((4, dim), (4, dim), (4, value_dim), (4, value_dim))
    )
    call = attn._resolve(q, k, v, layout, return_lse=return_lse, **{"causal": True} | mask)
    strategy, comm = attn._bound.strategy, attn._bound.comm
    out, lse, residuals = strategy.forward(comm.call(), call, Operands(q, k, v))
    dlse = torch.zeros_like(lse) if return_lse else None
    strategy.backward(comm.call(), call, dout, dlse, None, residuals or [q, k, v, out, lse])


@few_rows()
@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        (ZIGZAG, {}, ATEN),
        (ZIGZAG, {"causal": False}, ATEN),
        (ZIGZAG, {"dtype": torch.float16, "return_lse": True}, ATEN),
        (ZIGZAG, {"window_size": (100, 0)}, ATEN),
        (ZIGZAG, {"softcap": 20.0}, TRITON),
        (ZIGZAG, {"alibi_slopes": torch.empty(4, device="meta")}, TRITON),
        (ZIGZAG, {"dtype": torch.float32}, TRITON),
        (ZIGZAG, {"dtype": torch.float32, "window_size": (100, 0)}, TRITON),
        (ZIGZAG, {"dtype": torch.float64}, ATEN),  # plain PyTorch: Triton's take none
        (ZIGZAG, {"dim": 264}, ATEN),
        (ZIGZAG, {"value_dim": 264}, ATEN),
        (ZIGZAG, {"dim": 256, "value_dim": 254}, ATEN),
        (ZIGZAG, {"dim": 256, "value_dim": 255}, TRITON),  # its gradient of lse takes two columns
        (STRIPED, {"causal": False}, ATEN),
        (STRIPED, {}, ATEN | TRITON),  # its own keys are a causal square
        (STRIPED, {"softcap": 20.0}, TRITON),
        (STRIPED, {"window_size": (100, 0)}, ATEN),  # it lies within a stripe or two of them
        (STRIPED, {"window_size": (300, 0)}, TRITON),
    ],
)
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_aten_is_the_cuda_default_where_complete(cuda, used, layout, options, expected, rank):
    call("ring", layout, rank, **options)
    assert used == {"forward": expected, "backward": expected}


@few_rows()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("mask", "expected"), [({"softcap": 20.0}, TRITON), ({}, ATEN)])
def test_every_strategy_leaves_the_choice(cuda, used, strategy, mask, expected):
    call(strategy, ZIGZAG, **mask)
    assert used == {"forward": expected, "backward": expected}


def test_whoever_has_all_tokens_has_no_cut_pieces(cuda, used):
    call("ulysses", STRIPED)
    assert used == {"forward": ATEN, "backward": ATEN}


@pytest.mark.parametrize("options", [{}, {"window_size": (100, 0)}, {"softcap": 20.0}])
def test_on_cpus_it_is_aten(used, options):
    call("ring", ZIGZAG, device="cpu", **options)
    assert used == {"forward": ATEN, "backward": ATEN}


@pytest.mark.parametrize("mask", [{}, {"window_size": (100, 0)}])
def test_on_old_gpus_it_is_aten(cuda, used, monkeypatch, mask):
    monkeypatch.setattr(aten_cuda, "is_recent", lambda device: False)
    layout = Layout.zigzag([0, 1024, 2048], RANKS)  # ZIGZAG keeps the choices for a newer GPU
    call("ring", layout, dtype=torch.float32, **mask)
    assert used == {"forward": ATEN, "backward": ATEN}


@pytest.mark.parametrize("name", ["aten", "triton", "reference"])
def test_users_force_another(cuda, used, name):
    with use_backend(name):
        call("ring", ZIGZAG, window_size=(100, 0))
        call("ring", ZIGZAG)
    assert used == {"forward": {name}, "backward": {name}}


def packages(*names):
    """Return `load_package` where only these packages are installed."""
    return lambda name, major: (
        PACKAGES[name].kernel(types.ModuleType(PACKAGES[name].modules[0]), major)
        if name in names
        else "not installed"
    )


@pytest.mark.parametrize(
    ("major", "installed", "options", "expected"),
    [
        (9, {"FlashAttention-4"}, {}, "flash_attn"),
        (9, {"FlashAttention-4"}, {"softcap": 20.0, "window_size": (100, 0)}, "flash_attn"),
        (9, {"FlashAttention-4"}, {"dim": 256, "value_dim": 256}, "flash_attn"),
        (9, {"FlashAttention-4"}, {"alibi_slopes": torch.empty(4, device="meta")}, "triton"),
        (9, {"FlashAttention-3"}, {"dim": 256, "value_dim": 248, "softcap": 20.0}, "flash_attn"),
        (9, {"FlashAttention-3"}, {"dim": 256, "value_dim": 256, "softcap": 20.0}, "triton"),
        (8, {"FlashAttention-2"}, {}, "flash_attn"),
        (8, {"FlashAttention-2"}, {"softcap": 20.0}, "flash_attn"),
        (9, {"FlashAttention-2"}, {}, "triton"),
        (9, {"FlashAttention-2", "cuDNN"}, {}, "aten"),
        (9, {"FlashAttention-2", "cuDNN"}, {"window_size": (100, 0)}, "triton"),
        (9, {"FlashAttention-4", "cuDNN"}, {}, "flash_attn"),
        (9, {}, {"dtype": torch.float64}, "aten"),
        (10, {"FlashAttention-4"}, {}, "flash_attn"),
        (10, {"FlashAttention-4"}, {"dim": 192}, "aten"),
        (10, {"FlashAttention-2", "cuDNN"}, {}, "aten"),
        (10, {"FlashAttention-4"}, {"dim": 192, "softcap": 20.0}, "triton"),
    ],
)
def test_the_first_kernel_of_the_order_computes(
    cuda, used, monkeypatch, major, installed, options, expected
):
    monkeypatch.setattr(kernel_order, "gpu_major", lambda device: major)
    monkeypatch.setattr(kernel_order, "load_package", packages(*installed))
    monkeypatch.setattr(flash_attn, "installed_version", lambda distribution: "4.0.0b36")
    cudnn = aten_cuda.cudnn_kernel if "cuDNN" in installed else lambda major: "not installed"
    monkeypatch.setattr(kernel_order, "load_cudnn", cudnn)
    # A layout keeps the choices for a GPU, so each test makes a new one.
    call("ulysses", Layout.zigzag([0, 2048, 4096], RANKS), **options)
    assert used == {"forward": {expected}, "backward": {expected}}


def test_the_table_names_all_gpus_and_packages():
    table = kernel_table()
    assert list(table) == list(dict.fromkeys(order.gpus for order in ORDERS.values()))
    cells = {cell for rows in table.values() for cell in rows.values()}
    names = *PACKAGES, "aten", "cuDNN", "triton"
    assert all(any(name in cell for cell in cells) for name in names)
