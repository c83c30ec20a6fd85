"""How the flash kernels are called: what is decided once, what is copied, and what is refused."""

import dataclasses
import gc
import inspect
import itertools
import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.flash_attention import configs, launching
from seqpar.kernels.flash_attention.backward_kernels import flash_delta
from seqpar.kernels.flash_attention.eight_bit_rows import flash_decode_rows, flash_encode_rows
from seqpar.kernels.flash_attention.forward_kernels import flash_merge
from seqpar.kernels.flash_attention.merge_hops import flash_add_to_rows, flash_merge_hops
from seqpar.kernels.lightning_attention import SegmentTables

from seqpar import Layout
from seqpar.layout.masks.mask import Blocks, Mask, slices_between
from seqpar.linear.inputs import Inputs
from seqpar.linear.states.backends import triton as linear_backend
from seqpar.linear.states.state_options import StateOptions
from seqpar.softmax.backends import triton as backend
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, PartialGradients
from tests.kernels.flash_cases import (
    DEVICE,
    SMALL,
    Operands,
    assert_close,
    causal,
    forward,
    joined,
    table,
    zigzag_hops,
)
from tests.kernels.lightning_cases import spans_of
from tests.support.tiers import few_rows
from tests.tools.aot import KERNELS

DESCRIBED = kernels.Config(16, 16, 4, 1, tma=True, cut_resources=(4, 1))


@pytest.fixture
def launched(monkeypatch):
    """The launches of this test, which are not run."""
    found = []
    monkeypatch.setattr(launching, "_run", lambda launch, tensors: found.append((launch, tensors)))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("one_pass", [False, True])
def test_very_negative_lse_works_in_short_tiles(one_pass):
    """Behind the last key of a short tile p is infinite, and nothing of it may reach dq."""
    slices = causal(20)
    x = Operands.draw(slices, dlse=False)
    x = dataclasses.replace(x, q=x.q.abs() + 8, k=-x.k.abs() - 8)  # all scores are below −128
    assert x.expected(slices)[1].max() < -128
    full = table([(0, 20, 0, 20, -(2**40), 2**40)], range(20), range(20))
    for y in (slices, full):
        got, expected = x.computed(y, one_pass=one_pass), x.expected(y)
        assert_close(got, expected, torch.float16)


@pytest.mark.parametrize(
    ("switch", "value", "expected"),
    [
        ("fp32_precision", "tf32", "tf32"),
        ("fp32_precision", "ieee", "ieee"),
        ("allow_tf32", True, "tf32"),
        ("allow_tf32", False, "ieee"),
    ],
)
def test_torchs_switch_decides_the_precision_of_fp32(launched, switch, value, expected):
    """Its new form and its old one, between two calls over the same tables."""
    matmul, slices = torch.backends.cuda.matmul, causal(20)
    before, x = matmul.fp32_precision, Operands.draw(causal(20))
    launches = kernels.backward_launches(slices, SMALL, DEVICE, False)

    def precision():
        dq, delta = torch.zeros_like(x.q), x.dlse
        operands = x.q, x.k, x.v, x.dout, delta, delta
        kernels.backward_q(*operands, launches, SMALL, dq=dq, scale=1.0)
        return launched[-1][0].flags["PRECISION"]

    assert precision() == "ieee"
    try:
        setattr(matmul, switch, value)
        assert precision() == expected
    finally:
        matmul.fp32_precision = before
    assert precision() == "ieee"


def test_calls_of_few_scales_are_kept(launched, monkeypatch):
    """A scale may differ in every call over the same tables."""
    monkeypatch.setattr("seqpar.kernels.flash_attention.tables._MOST_PREPARED", 4)
    slices = causal(20)
    x, launches = Operands.draw(slices), kernels.backward_launches(slices, SMALL, DEVICE, False)
    for scale in range(1, 10):
        operands = x.q, x.k, x.v, x.dout, x.dlse, x.dlse
        kernels.backward_q(*operands, launches, SMALL, dq=torch.zeros_like(x.q), scale=scale)
        assert len(launches.prepared) <= 4
    assert len({launch.arguments for launch, _ in launched}) == 9


def test_grids_have_one_dimension(launched):
    """The others end at 65,535, and there are more (batch, head) than that."""
    heads, slices = 70_000, causal(3)
    q = torch.zeros(1, 3, 1, 16, device=DEVICE).expand(1, 3, heads, 16)
    rows = torch.zeros(1, 3, 1, device=DEVICE).expand(1, 3, heads)
    x = Operands(q, q, q, q, None, None, 1.0, 0.0)
    for config in (SMALL, kernels.Config(16, 16, 4, 1, cut_resources=(4, 1))):
        x.computed(slices, config)
    kernels.delta(q, q, rows)
    assert {len(launch.grid) for launch, _ in launched} == {1}
    assert min(launch.grid[0] for launch, _ in launched) >= heads


@pytest.mark.parametrize("layout", ["expanded", "strided", "bf16"])
def test_sinks_of_any_stride_and_dtype(layout):
    slices, heads = causal(20), 4
    x = Operands.draw(slices, heads=heads, sinks=True)
    stored = {
        "expanded": x.sinks[:1].expand(heads),
        "strided": torch.stack([x.sinks, torch.full_like(x.sinks, torch.nan)], 1)[:, 0],
        "bf16": x.sinks.bfloat16(),
    }[layout]
    y = dataclasses.replace(x, sinks=stored)
    z = dataclasses.replace(x, sinks=stored.float().contiguous())
    assert torch.equal(forward(y, [slices], SMALL)[0], forward(z, [slices], SMALL)[0])


def packed(tokens, batch, heads, dims, dtype=torch.float32):
    """Return views of keys and values of one buffer, row by row (n, B, H, D + Dv)."""
    buffer = torch.zeros(tokens, batch, heads, sum(dims), dtype=dtype, device=DEVICE)
    return buffer.transpose(0, 1).split(dims, -1)


@few_rows()
@pytest.mark.parametrize("config", [SMALL, DESCRIBED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dims", [(16, 16), (16, 24), (5, 8)])
@pytest.mark.parametrize("batch", [1, 2])
def test_keys_and_values_packed_into_one_buffer(config, dtype, dims, batch):
    """As they travel: k and v, and dk and dv, are views of a message, whose bits are the same."""
    slices, n = causal(35), 35
    x = Operands.draw(slices, dtype, batch, 2, 1, *dims)
    config = x.usable(config)
    k, v = packed(n, batch, 1, dims, dtype)
    y = dataclasses.replace(x, k=k.copy_(x.k), v=v.copy_(x.v))
    expected = x.computed(slices, config)
    assert all(torch.equal(a, b) for a, b in zip(y.computed(slices, config), expected, strict=True))
    lse = expected[1].masked_fill(expected[1].isneginf(), 0.0)
    delta = kernels.delta(expected[0], x.dout, x.dlse)
    dk, dv = packed(n, batch, 1, dims)
    launches = kernels.backward_launches(slices, config, DEVICE, True)
    operands = y.q, y.k, y.v, y.dout, lse, delta
    kernels.backward_kv(*operands, launches, config, dk=dk, dv=dv, scale=x.scale)
    assert torch.equal(dk, expected[3]) and torch.equal(dv, expected[4])


@pytest.mark.parametrize("name", ["out", "partial_out", "dq", "dk", "dv"])
def test_results_whose_rows_are_not_contiguous_are_refused(name):
    slices = causal(20)
    x = Operands.draw(slices, heads=1)
    wrong = torch.zeros(1, 20, 1, 32, device=DEVICE)[..., ::2]
    given = {name: wrong}

    def call():
        rows, zeros = torch.zeros(1, 20, 1, device=DEVICE), torch.zeros_like(x.q)
        if name in ("out", "partial_out"):
            (launches,) = kernels.forward_launches([slices], SMALL, DEVICE)
            results = {"out": zeros, "lse": rows, "partial_out": None, "partial_lse": None} | given
            kernels.forward(x.q, x.k, x.v, launches, SMALL, scale=1.0, **results)
            return
        launches = kernels.backward_launches(slices, SMALL, DEVICE, name != "dq")
        operands = x.q, x.k, x.v, x.dout, rows, rows
        if name == "dq":
            kernels.backward_q(*operands, launches, SMALL, scale=1.0, **given)
        else:
            results = {"dk": zeros, "dv": zeros} | given
            kernels.backward_kv(*operands, launches, SMALL, scale=1.0, **results)

    with pytest.raises(ValueError, match=f"^{name} must have contiguous rows"):
        call()


@pytest.mark.parametrize("variant", configs.VARIANTS)
def test_variants_give_the_same_results(variant):
    """Forward and backward, over hops of a ring and documents both short and long."""
    config = configs.varied(DESCRIBED, variant)
    assert config != DESCRIBED
    positions = [*range(20), *range(23), *range(50)]
    edges = [0, 20, 43, 93]
    short = table(
        [(a, b, a, b, -(2**40), 0) for a, b in itertools.pairwise(edges)],
        positions,
        positions,
    )
    hops = zigzag_hops(84, 3, 2)
    for slices, of, batch in ((short, None, 2), (joined(hops), hops, 1)):
        x = Operands.draw(slices, torch.float16, batch, 2, 1)
        got = x.computed(slices, config, hops=of)
        assert_close(got, x.expected(slices), torch.float16)


def slices_of(layout):
    mask = Mask.of(True, (-1, -1), None, layout.geometry)
    return slices_between(layout.geometry, 0, layout.geometry, 0, mask)


def attend(slices):
    """Call the softmax backend forward and backward; return the tables that it keeps."""
    n, options = slices.query_rows, CallOptions(1.0, 0.0, "triton", True)
    q = torch.zeros(1, n, 2, 16, device=DEVICE)
    blocks = Blocks((slices,))
    out, lse = backend.forward_blocks(q, [(q, q)], blocks, options, None)
    output = OutputGradient(q, out, lse, None)
    backend.backward(output, q, q, q, slices, PartialGradients.zeros(q, q, q), options)
    return list(tables_in([blocks.derived._results, slices.derived._results]))


def tables_in(kept):
    """Yield the tables among what is kept, however it is nested."""
    if hasattr(kept, "tiles") or isinstance(kept, SegmentTables | torch.Tensor):
        yield kept
    elif isinstance(kept, dict | list | tuple):
        for value in kept.values() if isinstance(kept, dict) else kept:
            yield from tables_in(value)


def test_tables_are_freed_with_their_layout(launched):
    """Without the cyclic collector, which may be off while a model trains."""
    gc.disable()
    try:
        layout = Layout.contiguous([0, 40, 70], 1)
        tables = {weakref.ref(launch.tiles) for launch in attend(slices_of(layout))}
        alive = [ref for ref in tables if ref() is not None]
        if DEVICE.type == "cpu":
            assert len(alive) == len(tables) == 3
        assert len(alive) >= 3  # a GPU has copies of them
        launched.clear()
        del layout
        assert {ref() for ref in tables} == {None}
    finally:
        gc.enable()


def test_a_second_call_prepares_nothing(launched, monkeypatch):
    """What a call needs besides its tensors is looked up, and no table is built or copied."""
    slices = slices_of(Layout.contiguous([0, 40, 70], 1))
    blocks, options = Blocks((slices,)), CallOptions(1.0, 0.0, "triton", True)
    q = torch.zeros(1, 70, 2, 16, device=DEVICE)

    def call():
        out, lse = backend.forward_blocks(q, [(q, q)], blocks, options, None)
        output = OutputGradient(q, out, lse, None, lse)
        backend.backward(output, q, q, q, slices, PartialGradients.zeros(q, q, q), options)
        return [launch for launch, _ in launched]

    first = call()
    launched.clear()
    monkeypatch.setattr(launching, "head_block", None)  # any preparation would need it
    second = call()
    assert len(first) == 3 and all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.exhaustive
def test_one_compilation_of_a_configuration():
    """Over 60 random packs, a ring's forward and backward and linear attention, on one GPU's kind.

    Dk with dv has a launch of full blocks and one of cut blocks; the recurrence and its states are
    walked both ways, and dk and dv are each one of the recurrence's four ends.
    """
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.tools.compilations", "sm_90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    flash = {"flash_forward": 1, "flash_backward_kv": 2, "flash_backward_q": 1, "flash_delta": 1}
    lightning = {"lightning_recurrence": 4, "lightning_states": 2, "lightning_scan": 2}
    assert json.loads(done.stdout)["sm_90"] == flash | lightning


def test_states_of_another_alignment_are_another_call(launched):
    """Triton compiles for addresses that are multiples of 16 bytes, or for any address."""
    spans = spans_of([40, 30], [True, False], [False, True])
    x, elements = torch.zeros(1, 70, 2, 16, device=DEVICE), 2 * 16 * 16
    storage = torch.zeros(elements + 4, device=DEVICE)

    def launches_of_out(first):
        state = storage[first : first + elements].view(1, 1, 2, 16, 16)
        launched.clear()
        options = StateOptions(1.0, True, "triton", None)
        linear_backend.Forward(Inputs(x, x, x), spans, options).finish(state)
        return [launch for launch, tensors in launched if any(y is state for y in tensors)]

    (aligned,), (again,), (shifted,) = map(launches_of_out, (0, 4, 1))
    assert aligned is again and aligned is not shifted


@pytest.mark.parametrize(
    "kernel",
    [
        *(*KERNELS.values(), flash_add_to_rows, flash_delta, flash_merge, flash_merge_hops),
        *(flash_decode_rows, flash_encode_rows),
    ],
)
def test_compile_time_arguments_come_last(kernel):
    constexpr = ["constexpr" in x for x in inspect.get_annotations(kernel.fn).values()]
    assert constexpr and all(constexpr)
    assert [*inspect.get_annotations(kernel.fn)] == [*kernel.arg_names][-len(constexpr) :]
