"""The kernels that add results to sums, against plain PyTorch."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from seqpar.kernels import flash_attention as kernels

from seqpar.softmax.compute.partial import OutputGradient, Partial
from seqpar.softmax.wire.row_messages import Rows
from tests.kernels.flash_cases import DEVICE
from tests.support.tiers import few_rows
from tests.tools.aot import TARGETS

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
import itertools

import triton
from seqpar.kernels.flash_attention.merge_hops import flash_accumulate, flash_add_to_rows
from triton.compiler import ASTSource

from tests.tools.aot import TARGETS

TYPES = {"out": "*bf16", "part": "*bf16", "lse": "*fp32", "partial_out": "*fp32", "total": "*fp32"}
TYPES |= {"partial_lse": "*fp64", "index": "*i64"}
kernels = flash_accumulate, flash_add_to_rows
for name, target in TARGETS.items():
    for kernel, dim in itertools.product(kernels, (64, 256)):
        known = {"DV": dim, "BLOCK_DV": dim, "TILE_ROWS": 4096 // dim, "HAS_INDEX": True}
        known = {name: x for name, x in known.items() if name in kernel.arg_names}
        kinds = {x: "constexpr" if x in known else TYPES.get(x, "i32") for x in kernel.arg_names}
        positions = {(kernel.arg_names.index(name),): x for name, x in known.items()}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=positions)
        options = {"num_warps": 4, "num_stages": 1}
        triton.compile(source, target=target, options=options)
        print(name, kernel.__name__, dim)
"""
INDEX = torch.tensor([3, 0, 7, 8, 9], device=DEVICE)


def drawn(rows, value_dim, dtype=torch.float32, batch=1):
    generator = torch.Generator().manual_seed(rows)
    out = torch.randn(batch, rows, 3, value_dim, generator=generator).to(DEVICE, dtype)
    lse = 20 * torch.randn(batch, 3, rows, generator=generator)
    lse[:, 1, ::4] = -torch.inf
    return out, lse.to(DEVICE).transpose(1, 2)  # heads before rows, as varlen kernels have it


def merged(out, lse, rows, value_dim, by_kernel):
    """A partial result of 11 rows, some of them without keys, after the merge."""
    old_out, old_lse = drawn(11, value_dim, batch=len(out))
    old_out[:, ::3, 1], old_lse[:, ::3, 1] = 0, -torch.inf
    partial = Partial.of(old_out, old_lse.double().contiguous())
    if by_kernel:
        part = partial.out, partial.lse
        index = rows if isinstance(rows, torch.Tensor) else None
        part = part if index is not None else tuple(x[:, rows] for x in part)
        kernels.accumulate(out, lse, *part, index)
    else:
        partial.merge(rows, out, lse)
    return partial.out, partial.lse


@few_rows()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [slice(4, 9), INDEX], ids=["range", "index"])
@pytest.mark.parametrize("value_dim", [16, 20])
def test_equals_the_merge_in_torch(monkeypatch, dtype, rows, value_dim):
    monkeypatch.setattr(torch.Tensor, "is_cuda", False, raising=False)  # the merge in PyTorch
    out, lse = drawn(5, value_dim + 1, dtype, batch=2)
    out = out[..., 1:]
    expected = merged(out, lse, rows, value_dim, by_kernel=False)
    found = merged(out, lse, rows, value_dim, by_kernel=True)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-14, atol=1e-14)
    assert expected[1].isneginf().any()


def test_nan_reaches_only_its_own_row():
    out, lse = drawn(11, 16)
    lse[0, 2, 0] = torch.nan
    out, lse = merged(out, lse, slice(0, 11), 16, by_kernel=True)
    assert out.isnan().any(-1).nonzero().tolist() == lse.isnan().nonzero().tolist() == [[0, 2, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_adds_to_the_rows_of_an_index(dtype, sign):
    part, total = drawn(5, 20, dtype, batch=2)[0], drawn(11, 20, batch=2)[0]
    expected = total.index_add(1, INDEX, part.float(), alpha=sign)
    kernels.add_to_rows(part, total, INDEX, sign)
    assert torch.equal(total, expected)


def test_rows_of_messages_are_added_by_a_kernel_on_a_gpu(monkeypatch):
    """Several ranges, in bf16: nothing casts the message in pieces."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "index_add_", None)
    rows, total = Rows(np.array([[7, 10], [0, 2]])), drawn(11, 20, batch=2)[0].transpose(0, 1)
    block = drawn(5, 20, torch.bfloat16, batch=2)[0].transpose(0, 1).contiguous()
    expected = total.index_add(0, rows.local(DEVICE), block.float())
    rows.add(block, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("has_dlse", [False, True])
def test_delta_on_a_gpu_is_computed_by_a_kernel(monkeypatch, has_dlse):
    """The kernel reads bf16, and nothing copies out or dout in fp32."""
    (out, lse), (dout, dlse) = (drawn(rows, 20, torch.bfloat16, batch=2) for rows in (11, 11))
    dout, dlse = dout + 1, lse.nan_to_num(neginf=1.0) if has_dlse else None
    calls, delta = [], kernels.delta

    def recorded(*tensors):
        calls.append(tensors)
        return delta(*tensors)

    monkeypatch.setattr(kernels, "delta", recorded)
    found = []
    for is_cuda in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda, raising=False)
        found.append(OutputGradient(dout, out, lse, dlse).ensure_delta())
    assert len(calls) == 1
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_they_compile_without_a_gpu():
    command = [sys.executable, "-c", COMPILE]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert len(ran.stdout.splitlines()) == 4 * len(TARGETS), ran.stderr
