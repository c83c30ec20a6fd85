"""The kernels that pack and unpack messages in 8 bits, against plain PyTorch on a CPU."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from seqpar.kernels.flash_attention import launching

from seqpar import Layout
from seqpar.softmax.wire import message_dtypes
from seqpar.softmax.wire.message_dtypes import (
    CODES,
    decode,
    decode_rows,
    encode,
    encode_rows,
    encoded_width,
)
from seqpar.softmax.wire.row_messages import Rows
from tests.kernels.flash_cases import DEVICE
from tests.support.cases import Case, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows
from tests.tools.aot import TARGETS

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
import itertools
import re

import triton
from seqpar.kernels.flash_attention.eight_bit_rows import flash_decode_rows, flash_encode_rows
from triton.compiler import ASTSource

from tests.tools import sass
from tests.tools.aot import TARGETS

TYPES = {"first": "*bf16", "second": "*bf16", "index": "*i64", "message": "*i8"}
kernels = flash_encode_rows, flash_decode_rows
for name, target in TARGETS.items():
    for kernel, (dim, limit) in itertools.product(kernels, ((64, 127), (256, 448))):
        known = {"LIMIT": limit, "D": dim, "BLOCK_D": dim, "DV": dim, "BLOCK_DV": dim}
        known |= {"WIDTH": 2 * dim + 8, "TILE_ROWS": 4096 // dim}
        known |= {"INDEXED": True, "k_d": 1, "v_d": 1}
        known = {name: x for name, x in known.items() if name in kernel.arg_names}
        kinds = {x: "constexpr" if x in known else TYPES.get(x, "i32") for x in kernel.arg_names}
        positions = {(kernel.arg_names.index(name),): x for name, x in known.items()}
        names = re.compile("first|second|message|[kv]_[bth]")
        aligned = [i for i, x in enumerate(kernel.arg_names) if names.fullmatch(x)]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=positions, attrs=attributes)
        options = {"num_warps": 4, "num_stages": 1}
        asm = triton.compile(source, target=target, options=options).asm
        on_cuda = target.backend == "cuda"
        spilled = sass.usage(asm["cubin"])["spilled"] if on_cuda else 0
        # Subnormal numbers must not become 0, and divisions must be rounded to nearest.
        exact = not on_cuda or not re.search(r"[.]ftz|div[.](full|approx)", asm["ptx"])
        print(name, kernel.__name__, spilled, exact)
"""
T = 50
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = {"all": [[0, T]], "range": [[3, 41]], "index": [[7, 20], [40, 50], [0, 1]]}
each_code = pytest.mark.parametrize("code", CODES, ids=str)


def drawn(dim, dtype, seed=0):
    """Return rows (T, B, H, dim) of sizes from the least to the largest: a view of some heads."""
    # Triton's interpreter converts subnormal bf16 numbers wrongly.
    smallest = -30 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else -45
    sizes = {torch.float16: (-8, 4)}.get(dtype, (smallest, 38))
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(T, 2, 5, dim, generator=generator) * 2 - 1
    x *= torch.logspace(*sizes, T)[:, None, None, None]
    x[::7, 0, 2], x[1::7, 1, 3] = 0.0, -0.0
    x[2::5, ..., 0] = -x[2::5].abs().amax(-1)  # two of the largest
    return x.to(DEVICE, dtype)[:, :, 1:4]


def by_kernel(monkeypatch):
    """Let CPU tensors pass for tensors on CUDA. Returns the names of the kernels launched."""
    monkeypatch.setattr(message_dtypes, "is_on_cuda", lambda x: True)
    launches, launch, one_at_a_time = [], launching._run, threading.Lock()

    def record(prepared, tensors):
        launches.append(prepared.kernel.__name__)
        with one_at_a_time, np.errstate(invalid="ignore"):  # the interpreter of all ranks' threads
            launch(prepared, tensors)

    monkeypatch.setattr(launching, "_run", record)
    return launches


@few_rows()
@each_code
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dims", [(16, 16), (5, 2), (1, 20), (24,)])
def test_bytes_are_those_of_torch(monkeypatch, dims, name, dtype, code):
    parts = [drawn(dim, dtype, seed) for seed, dim in enumerate(dims)]
    rows = Rows(np.array(ROWS[name]))
    expected = encode(rows.pack(*parts).cpu(), dims, code)
    launches = by_kernel(monkeypatch)
    found = encode_rows(parts, rows, code)
    assert torch.equal(found.cpu(), expected)
    assert launches == ["flash_encode_rows"]
    if name == "all":
        apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in parts]
        memory = torch.full((expected.numel() + 1,), 3, dtype=torch.int8, device=DEVICE)
        message = memory[1:].view(expected.shape)  # begins at an odd address
        assert encode_rows(apart, None, code, message) is message
        assert torch.equal(message.cpu(), expected)


@few_rows()
@each_code
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(16, 16), (5, 2), (1, 20), (24,)])
def test_elements_are_those_of_torch(monkeypatch, dims, dtype, code):
    x = torch.cat([drawn(dim, dtype, seed) for seed, dim in enumerate(dims)], -1)
    message = encode(x.cpu(), dims, code)
    expected = decode(message, dims, code, dtype)
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # Triton's interpreter cuts
        exact = decode(message, dims, code, torch.float32)
        expected = [(y.view(torch.int32) & -0x10000).view(torch.float32) for y in exact]
        normal = message.new_tensor(torch.finfo(dtype).tiny, dtype=torch.float32)
        expected = [torch.where(y.abs() < normal, 0.0, y).to(dtype) for y in expected]
    launches = by_kernel(monkeypatch)
    found = decode_rows(message.to(DEVICE), dims, code, dtype)
    assert launches == ["flash_decode_rows"]
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous() and one.dtype == dtype
        one = one.cpu()
        if dtype == torch.bfloat16 and DEVICE.type == "cpu":
            one = torch.where(one.abs() < torch.finfo(dtype).tiny, 0.0, one)
        assert torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@each_code
def test_numbers_between_codes_are_rounded_to_even(monkeypatch, code):
    """All codes, the middles between them, and the numbers beside these; the scale is 1."""
    codes = torch.arange(256, dtype=torch.uint8).view(code).float()
    codes = codes[codes.isfinite() & (codes.abs() <= CODES[code])].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(x * torch.inf)) for x in (-1, 1)]
    x = torch.cat([codes, middles, *beside])[None, None, None]
    by_kernel(monkeypatch)
    message = encode_rows([x.to(DEVICE)], None, code).cpu()
    assert torch.equal(message, encode(x, [x.shape[-1]], code))
    assert message[0, 0, 0, -4:].clone().view(torch.float32).item() == 1.0
    (found,) = decode_rows(message.to(DEVICE), [x.shape[-1]], code, torch.float32)
    assert torch.equal(found[0, 0, 0, : codes.numel()].cpu(), codes)


@each_code
@pytest.mark.parametrize("largest", [8e-43, 3e-43, 1e-38, torch.finfo(torch.float32).max])
def test_quotients_above_the_largest_code_are_limited(monkeypatch, largest, code):
    """A subnormal scale is rounded, to 0 among others."""
    x = torch.rand(1, 1, 40, 64, generator=torch.Generator().manual_seed(0)).mul_(largest)
    x[..., 0] = -largest
    by_kernel(monkeypatch)
    found = encode_rows([x.to(DEVICE)], None, code)
    assert torch.equal(found.cpu(), encode(x, [64], code))


@each_code
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_not_finite_makes_only_its_row_nan(monkeypatch, dtype, code):
    x = drawn(16, dtype)[10:14].clone()
    y = drawn(16, dtype, 1)[10:14]
    expected = encode(torch.cat([x, y], -1).cpu(), [16, 16], code)
    x[0, 0, 1, 3], x[1, 1, 0, 0], x[2, 0, 2, 15] = torch.inf, -torch.inf, torch.nan
    by_kernel(monkeypatch)
    message = encode_rows([x, y], None, code)
    first, second = decode_rows(message, [16, 16], code, torch.float32)
    wrong = torch.zeros(x.shape[:3], dtype=torch.bool)
    wrong[0, 0, 1] = wrong[1, 1, 0] = wrong[2, 0, 2] = True
    assert first.cpu().isnan().all(-1).equal(wrong)
    assert first.cpu().isnan().any(-1).equal(wrong) and not second.isnan().any()
    assert torch.equal(message.cpu()[~wrong], expected[~wrong])
    assert torch.equal(message.cpu()[wrong][:, 16:32], expected[wrong][:, 16:32])


def test_no_rows_launch_nothing(monkeypatch):
    launches = by_kernel(monkeypatch)
    message = encode_rows([drawn(16, torch.float32)[:0]], None, torch.int8)
    assert message.shape == (0, 2, 3, encoded_width([16]))
    (found,) = decode_rows(message, [16], torch.int8, torch.float32)
    assert found.shape == (0, 2, 3, 16) and not launches


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with PyTorch's bytes on a CPU")
@few_rows()
@each_code
@pytest.mark.parametrize(
    ("strategy", "option"),
    [("ring", "message_dtype"), ("all_gather", "message_dtype"), ("mesh", "message_dtype"),
     ("token_ring", "partial_dtype")],
)  # fmt: skip
def test_strategies_have_the_results_of_torch(monkeypatch, strategy, option, code):
    """All bits are equal, and each message takes one launch to pack and one to unpack."""
    layout = Layout.zigzag([0, 40, 41, 96], 4)
    options = {"heads": 4, "kv_heads": 2, "batch": 2, "dtype": torch.float32}
    case = Case(strategy, layout, causal=True, module_options=((option, code),), **options)
    expected = virtual(4, run, case)[0]
    launches = by_kernel(monkeypatch)
    found = virtual(4, run, case)[0]
    assert launches.count("flash_decode_rows") >= 4
    assert launches.count("flash_encode_rows") <= launches.count("flash_decode_rows")
    for x, y in zip(found, expected, strict=True):
        assert np.array_equal(x, y)


@pytest.mark.exhaustive
def test_they_compile_without_a_gpu():
    command = [sys.executable, "-c", COMPILE]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    found = [line.split() for line in ran.stdout.splitlines()]
    assert len(found) == 4 * len(TARGETS), ran.stderr
    assert all(line[2:] == ["0", "True"] for line in found), found
