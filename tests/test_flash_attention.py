"""The Triton kernels against their reference: on a CPU in Triton's interpreter (fp32, fp16), on a GPU in bf16 too."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.flash_attention import configs, reference
from seqpar.kernels.flash_attention.configs import TABLE, architecture

from tests.cases import stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
SMALL = kernels.Config(16, 16, 4, 1)
HOPPER = kernels.Config(16, 32, 4, 1, tma=True, specialise=True, cut=(4, 1))  # descriptors work in the interpreter too
if torch.cuda.is_available():
    HOPPER = TABLE[architecture(DEVICE), "half", 128][0]


@dataclasses.dataclass
class Slices:
    """A slice table, written by hand."""

    q_rows: np.ndarray
    k_rows: np.ndarray
    bands: np.ndarray
    q_positions: np.ndarray
    k_positions: np.ndarray


def table(entries, q_positions, k_positions):
    """From (q start, q stop, k start, k stop, low, high) entries."""
    array = np.array(entries, dtype=np.int64).reshape(-1, 3, 2)
    positions = (np.asarray(x, dtype=np.int32) for x in (q_positions, k_positions))
    return Slices(array[:, 0], array[:, 1], array[:, 2], *positions)


def causal(n):
    return table([(0, n, 0, n, -(2**40), 0)], range(n), range(n))


@dataclasses.dataclass
class Operands:
    """Random inputs (B, T, H, D) and upstream gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float
    softcap: float

    @classmethod
    def draw(cls, slices, dtype=torch.float32, batch=1, heads=2, kv_heads=1, dim=16, value_dim=16, *, seed=0, dlse=True,
             sinks=False, scale=0.25, softcap=0.0, layout="bthd"):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        tokens, keys = slices.q_positions.size, slices.k_positions.size

        def draw(*shape, dtype=dtype):
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
            return stored(x, layout) if x.dim() == 4 else x

        return cls(
            draw(batch, tokens, heads, dim), draw(batch, keys, kv_heads, dim), draw(batch, keys, kv_heads, value_dim),
            draw(batch, tokens, heads, value_dim), draw(batch, tokens, heads, dtype=torch.float32) if dlse else None,
            draw(heads, dtype=torch.float32) if sinks else None, scale, softcap,
        )  # fmt: skip

    def expected(self, slices):
        """out, lse, dq, dk, dv of the reference in fp64. With sinks, the gradients are those of the keys' part alone."""
        q, k, v = (x.double().cpu().requires_grad_() for x in (self.q, self.k, self.v))
        out, lse = reference.attention(q, k, v, slices, self.scale, self.softcap)
        loss = (out * self.dout.double().cpu()).sum()
        if self.dlse is not None:
            loss = loss + (lse.masked_fill(lse.isneginf(), 0) * self.dlse.double().cpu()).sum()
        gradients = torch.autograd.grad(loss, (q, k, v)) if loss.requires_grad else [torch.zeros_like(x) for x in (q, k, v)]
        if self.sinks is not None:
            out = out * torch.sigmoid(lse - self.sinks.double().cpu())[..., None]
        return out.detach(), lse.detach(), *gradients

    def computed(self, slices, config=SMALL, *, one_pass=False, hops=None):
        """The kernels' answer; with `hops`, parts of the slices' keys, one after another."""
        if DEVICE.type == "cuda" and self.q.dtype == torch.float32:
            config = SMALL  # the large tiles are for half precision
        out, lse = forward(self, [slices] if hops is None else hops, config)
        keys_only = out if self.sinks is None else forward(dataclasses.replace(self, sinks=None), [slices], config)[0]
        finite = lse.masked_fill(lse.isneginf(), 0.0)
        delta = kernels.delta(keys_only, self.dout, self.dlse)
        gradients = [torch.zeros(x.shape, device=DEVICE) for x in (self.q, self.k, self.v)]
        for hop in [slices] if hops is None else hops:
            options = {"scale": self.scale, "softcap": self.softcap}
            operands = self.q, self.k, self.v, self.dout, finite, delta
            plan = functools.partial(
                kernels.backward_launches, hop, config.rows, config.columns, DEVICE, config.cut is not None
            )
            dq = gradients[0] if one_pass else None
            kernels.backward_kv(*operands, plan(True), config, dk=gradients[1], dv=gradients[2], dq=dq, **options)
            if not one_pass:
                kernels.backward_q(*operands, plan(False), config, dq=gradients[0], **options)
        return out, lse, *gradients


def forward(x, hops, config, programs=0):
    """out and lse, which start as NaN, as does what passes between hops."""
    separate = config.cut is not None
    out = torch.full((*x.q.shape[:-1], x.v.shape[-1]), torch.nan, dtype=x.q.dtype, device=DEVICE)
    lse = torch.full(x.q.shape[:-1], torch.nan, device=DEVICE)
    partial_out, partial_lse = (y.fill_(torch.nan) for y in kernels.empty_partial(x.q, x.v.shape[-1]))
    for launches in kernels.forward_launches(hops, config.rows, config.columns, DEVICE, separate, programs=programs):
        assert len(launches) <= 2
        kernels.forward(
            x.q, x.k, x.v, launches, config, out=out, lse=lse, partial_out=partial_out, partial_lse=partial_lse,
            scale=x.scale, softcap=x.softcap, sinks=x.sinks,
        )  # fmt: skip
    return out, lse


UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_close(got, expected, dtype, names=("out", "lse", "dq", "dk", "dv")):
    """RMS error within eight roundings of results of size one: the size of the terms that are summed."""
    for name, x, y in zip(names, got, expected, strict=True):
        x = x.double().cpu()
        assert torch.equal(x.isneginf(), y.isneginf()), name
        finite = y.isfinite()
        assert x[finite].isfinite().all(), name
        error, size = rms(x[finite] - y[finite]), max(1.0, rms(y[finite]))
        assert error <= 8 * UNIT[dtype] * size, f"{name}: {error} where the size is {size}"


def rms(x):
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


@st.composite
def slice_tables(draw):
    """Runs of queries and runs of keys, positions ascending with gaps; some pairs of runs see each other under a band."""
    rows, positions = {}, {}
    for side in "qk":
        lengths = draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
        edges = np.cumsum([0, *lengths])
        rows[side] = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        generator = np.random.default_rng(draw(st.integers(0, 1000)))
        gap = draw(st.integers(1, 4))
        steps = [generator.integers(1, gap + 1, n).cumsum() + generator.integers(0, 30) for n in lengths]
        positions[side] = np.concatenate(steps)
    entries = []
    for q_run in rows["q"]:
        for k_run in rows["k"]:
            if draw(st.integers(0, 2)):
                low = draw(st.sampled_from([-(2**40), -20, -5, 0, 10]))
                high = draw(st.sampled_from([2**40, 0, 3, 25, low + 1, low]))
                trim = draw(st.integers(0, 20))
                entries.append((min(q_run[0] + trim, q_run[1]), q_run[1], *k_run, low, high))
    return table(entries, positions["q"], positions["k"])


@settings(max_examples=40)
@given(
    slices=slice_tables(),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.sampled_from([(16, 16), (5, 24), (33, 16)]),
    options=st.fixed_dictionaries(
        {
            "batch": st.sampled_from([1, 1, 2]),
            "seed": st.integers(0, 99),
            "dlse": st.booleans(),
            "sinks": st.booleans(),
            "scale": st.sampled_from([0.25, -0.4, 0.0]),
            "softcap": st.sampled_from([0.0, 0.0, 1.5]),
            "layout": st.sampled_from(["bthd", "bhtd", "strided"]),
        }
    ),
    config=st.sampled_from([SMALL, kernels.Config(32, 16, 4, 1, cut=(4, 1)), HOPPER]),
)
def test_random_slice_tables(slices, dtype, heads, dims, options, config):
    x = Operands.draw(slices, dtype, heads=heads[0], kv_heads=heads[1], dim=dims[0], value_dim=dims[1], **options)
    assert_close(x.computed(slices, config), x.expected(slices), dtype)


@settings(max_examples=300)
@given(slices=slice_tables(), rows=st.sampled_from([1, 4, 16]), columns=st.sampled_from([1, 4, 16]), transposed=st.booleans())
def test_tables_cover_each_visible_pair_once(slices, rows, columns, transposed):
    expected = reference.visible(slices).numpy().astype(int)
    expected = expected.T if transposed else expected
    for separate in (False, True):
        count = np.zeros_like(expected)
        launches = kernels.backward_launches(slices, rows, columns, torch.device("cpu"), separate, transposed)
        assert len(launches) <= 2
        for launch in launches:
            positions = [x.numpy()[:n].astype(int) for x, n in zip(launch.arrays[3:], expected.shape, strict=True)]
            full, cut = launch.full.numpy(), launch.cut.numpy()
            for start, stop, full_start, full_stop, cut_start, cut_stop, _, _ in launch.tiles.reshape(-1, 8).numpy():
                assert 0 < stop - start <= rows
                for column in full[full_start:full_stop]:
                    count[start:stop, column : column + columns] += 1
                for entry in range(cut_start, cut_stop):
                    column, column_stop, low, high, row_start, row_stop = cut[6 * entry : 6 * entry + 6]
                    assert start <= row_start < row_stop <= stop
                    keys = slice(column, min(column_stop, column + columns))
                    distance = positions[1][keys] - positions[0][row_start:row_stop, None]
                    count[row_start:row_stop, keys] += (distance >= low) & (distance <= high)
        np.testing.assert_array_equal(count, expected)


def zigzag_hops(n, ranks, rank):
    """The slices of a causal ring over zigzag chunks, over one buffer of all keys: several documents' worth of hops."""
    chunk = n // (2 * ranks)
    chunks = [[c, 2 * ranks - 1 - c] for c in range(ranks)]
    q_positions = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in chunks[rank]])
    k_positions = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for pair in chunks for c in pair])
    hops = []
    for step in range(ranks):
        peer = (rank - step) % ranks
        hops.append(table([(0, 2 * chunk, 2 * chunk * peer, 2 * chunk * (peer + 1), -(2**40), 0)], q_positions, k_positions))
    return hops


def joined(hops):
    return dataclasses.replace(
        hops[0], **{name: np.concatenate([getattr(hop, name) for hop in hops]) for name in ("q_rows", "k_rows", "bands")}
    )


@pytest.mark.parametrize(("dtype", "rank"), [(dtype, i % 2 * 2) for i, dtype in enumerate(DTYPES)])
@pytest.mark.parametrize("config", [SMALL, HOPPER])
def test_hops_continue_one_partial(dtype, rank, config):
    """Each query tile is finished in its own last hop: what passes between hops starts as NaN, and so does the result."""
    hops = zigzag_hops(144, 3, rank)
    x = Operands.draw(hops[0], dtype, heads=4, kv_heads=2, sinks=True, batch=2)
    assert_close(x.computed(joined(hops), config, hops=hops), x.expected(joined(hops)), dtype)


def test_hops_over_a_window_leave_tiles_that_nothing_touches():
    positions = np.arange(64)
    hops = [table([(0, 64, start, start + 16, -3, -2)], positions, positions) for start in (0, 16, 32)]
    x = Operands.draw(hops[0])
    out, lse = forward(x, hops, SMALL)
    expected_out, expected_lse, *_ = x.expected(joined(hops))
    assert_close((out, lse), (expected_out, expected_lse), torch.float32, ("out", "lse"))
    assert lse.isneginf().any() and (out[lse.isneginf()] == 0).all()


@pytest.mark.parametrize("config", [SMALL, HOPPER])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_split_where_tiles_are_few(dtype, config):
    """Few queries over many keys: parts of the keys in programs of their own, joined by a second launch, hop by hop."""
    hops = [table([(0, 20, start, start + 300, -450, 300)], range(300, 320), range(900)) for start in (0, 300, 600)]
    x = Operands.draw(joined(hops), dtype, sinks=True, batch=2)
    names = ("out", "lse")
    for plan in (hops, [joined(hops)]):
        assert_close(forward(x, plan, config, programs=9), x.expected(joined(hops))[:2], dtype, names)
    launches = kernels.forward_launches(hops, config.rows, config.columns, DEVICE, False, programs=9)
    assert any(launch.parts > 1 for hop in launches for launch in hop)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_pass_backward(dtype):
    slices = causal(70)
    x = Operands.draw(slices, dtype, heads=4, kv_heads=2, batch=2, softcap=2.0)
    assert_close(x.computed(slices, one_pass=True), x.expected(slices), dtype)


@pytest.mark.parametrize("dims", [(16, 16), (40, 72), (80, 80), (128, 96), (192, 128), (256, 256), (1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype, dims):
    slices = causal(33)
    x = Operands.draw(slices, dtype, dim=dims[0], value_dim=dims[1], scale=dims[0] ** -0.5)
    assert_close(x.computed(slices, kernels.choose("forward", x.q, x.v)), x.expected(slices), dtype)


def test_the_same_bits_whatever_the_neighbours():
    """A document's bits, forward and backward, are those it has alone."""
    n, before = 41, 23
    alone = causal(n)
    x = Operands.draw(alone, heads=2, kv_heads=1)
    positions = np.r_[np.arange(before), np.arange(n)]
    entries = [(0, before, 0, before, -5, 0), (before, before + n, before, before + n, -(2**40), 0)]
    packed = table(entries, positions, positions)
    y = Operands.draw(packed, heads=2, kv_heads=1, seed=1)
    for name in ("q", "k", "v", "dout", "dlse"):
        getattr(y, name)[:, before:] = getattr(x, name)
    for a, b in zip(x.computed(alone), y.computed(packed), strict=True):
        assert torch.equal(a, b[:, before:])
    for a, b in zip(y.computed(packed), y.computed(packed), strict=True):
        assert torch.equal(a, b)


def test_garbage_beyond_a_document_does_not_leak():
    """NaN in the rows of a neighbour, on both sides, reaches neither results nor gradients."""
    positions = np.r_[np.arange(19), np.arange(21), np.arange(19)]
    packed = table([(19, 40, 19, 40, -(2**40), 0)], positions, positions)
    x = Operands.draw(packed)
    expected = x.expected(packed)
    for name in ("q", "k", "v", "dout"):
        getattr(x, name)[:, :19] = torch.nan
        getattr(x, name)[:, 40:] = torch.nan
    out, lse, *gradients = x.computed(packed)
    for got, want in zip((out, lse, *gradients), expected, strict=True):
        assert_close([got[:, 19:40]], [want[:, 19:40]], torch.float32, ["packed"])


def test_each_launch_has_its_own_warps_and_stages(monkeypatch):
    """Full blocks those of the configuration, cut blocks those of its `cut`; together, where `cut` is None, the former."""
    seen, run = set(), configs.run

    def recorded(kernel, grid, device, arguments, flags, warps, stages):
        if "FULL" in flags:
            seen.add((flags["FULL"], flags["CUT"], warps, stages))
        run(kernel, grid, device, arguments, flags, warps, stages)

    monkeypatch.setattr(configs, "run", recorded)
    x = Operands.draw(causal(40))
    x.computed(causal(40), kernels.Config(16, 16, 4, 2, cut=(8, 1)))
    assert seen == {(True, False, 4, 2), (False, True, 8, 1)}
    seen.clear()
    x.computed(causal(40), kernels.Config(16, 16, 4, 2))
    assert seen == {(True, True, 4, 2)}


@pytest.mark.parametrize("tokens", [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs(tokens):
    slices = table([], range(tokens[0]), range(tokens[1]))
    x = Operands.draw(slices)
    out, lse, *gradients = x.computed(slices)
    assert (out == 0).all() and lse.isneginf().all() and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("stride", [2**22, 2**26])
def test_offsets_past_2_to_the_31(stride):
    """Rows so far apart that the last lies beyond 2**31 elements. (Of the memory only what is touched is real.)"""
    n = 2**31 // stride + 8
    slices = table([(0, n, 0, n, -5, 0)], range(n), range(n))
    x = Operands.draw(slices, torch.float16, heads=1)
    y = dataclasses.replace(x)
    for name in ("q", "k", "v", "dout"):
        dense = getattr(x, name)
        storage = torch.empty((n - 1) * stride + dense[0, 0].numel(), dtype=torch.float16, device=DEVICE)
        strided = storage.as_strided(dense.shape, (0, stride, *dense.stride()[2:]))
        setattr(y, name, strided.copy_(dense))
    config = kernels.Config(32, 32, 4, 1)
    for a, b in zip(x.computed(slices, config), y.computed(slices, config), strict=True):
        assert torch.equal(a, b)
