"""What the tests of flash attention's kernels share: operands, slices and calls."""

import dataclasses
import functools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.flash_attention import reference

from tests.kernels.operands import stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
SMALL = kernels.Config(16, 16, 4, 1)
# Descriptors work in the interpreter too.
HOPPER = kernels.Config(16, 32, 4, 1, tma=True, cut_resources=(4, 1))
if torch.cuda.is_available():
    HOPPER = kernels.Config(128, 64, 8, 2, tma=True, cut_resources=(8, 2))


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
    slopes: torch.Tensor | None = None

    @classmethod
    def draw(
        cls,
        slices,
        dtype=torch.float32,
        batch=1,
        heads=2,
        kv_heads=1,
        dim=16,
        value_dim=16,
        *,
        seed=0,
        dlse=True,
        sinks=False,
        scale=0.25,
        softcap=0.0,
        slopes="",  # of "heads", or of each "batch" entry's
        layout="bthd",
    ):
        generator = torch.Generator().manual_seed(seed)
        tokens, keys = slices.q_positions.size, slices.k_positions.size

        def draw(*shape, dtype=dtype):
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
            return stored(x, layout) if x.dim() == 4 else x

        return cls(
            q=draw(batch, tokens, heads, dim),
            k=draw(batch, keys, kv_heads, dim),
            v=draw(batch, keys, kv_heads, value_dim),
            dout=draw(batch, tokens, heads, value_dim),
            dlse=draw(batch, tokens, heads, dtype=torch.float32) if dlse else None,
            sinks=draw(heads, dtype=torch.float32) if sinks else None,
            scale=scale,
            softcap=softcap,
            slopes={
                "": None,
                "heads": 0.1 * draw(heads, dtype=torch.float32),
                "batch": 0.1 * draw(batch, heads, dtype=torch.float32),
            }[slopes],
        )

    def expected(self, slices):
        """out, lse, dq, dk, dv of the reference in fp64. With sinks, the gradients are those of the
        keys' part alone.
        """
        q, k, v = (x.double().cpu().requires_grad_() for x in (self.q, self.k, self.v))
        out, lse = reference.attention(
            q, k, v, slices, self.scale, self.softcap,
            slopes=None if self.slopes is None else self.slopes.double().cpu(),
        )  # fmt: skip
        loss = (out * self.dout.double().cpu()).sum()
        if self.dlse is not None:
            loss = loss + (lse.masked_fill(lse.isneginf(), 0) * self.dlse.double().cpu()).sum()
        gradients = (
            torch.autograd.grad(loss, (q, k, v))
            if loss.requires_grad
            else [torch.zeros_like(x) for x in (q, k, v)]
        )
        if self.sinks is not None:
            out = out * torch.sigmoid(lse - self.sinks.double().cpu())[..., None]
        return out.detach(), lse.detach(), *gradients

    def usable(self, config):
        """Return the configuration, or a small one: a GPU's large tiles are for half precision."""
        return SMALL if DEVICE.type == "cuda" and self.q.dtype == torch.float32 else config

    def computed(self, slices, config=SMALL, *, one_pass=False, hops=None):
        """The kernels' answer; with `hops`, parts of the slices' keys, one after another."""
        config = self.usable(config)
        out, lse = forward(self, [slices] if hops is None else hops, config)
        keys_only = (
            out
            if self.sinks is None
            else forward(dataclasses.replace(self, sinks=None), [slices], config)[0]
        )
        finite = lse.masked_fill(lse.isneginf(), 0.0)
        delta = kernels.delta(keys_only, self.dout, self.dlse)
        gradients = [torch.zeros(x.shape, device=DEVICE) for x in (self.q, self.k, self.v)]
        for hop in [slices] if hops is None else hops:
            options = {"scale": self.scale, "softcap": self.softcap, "slopes": self.slopes}
            operands = self.q, self.k, self.v, self.dout, finite, delta
            launches = functools.partial(kernels.backward_launches, hop, config, DEVICE)
            dq = gradients[0] if one_pass else None
            kernels.backward_kv(
                *operands,
                launches(True),
                config,
                dk=gradients[1],
                dv=gradients[2],
                dq=dq,
                **options,
            )
            if not one_pass:
                kernels.backward_q(*operands, launches(False), config, dq=gradients[0], **options)
        return out, lse, *gradients


def forward(x, hops, config, programs=0):
    """out and lse, which start as NaN, as does what passes between hops."""
    out = torch.full((*x.q.shape[:-1], x.v.shape[-1]), torch.nan, dtype=x.q.dtype, device=DEVICE)
    lse = torch.full(x.q.shape[:-1], torch.nan, device=DEVICE)
    partial_out, partial_lse = (
        y.fill_(torch.nan) for y in kernels.empty_partial(x.q, x.v.shape[-1])
    )
    for launches in kernels.forward_launches(hops, config, DEVICE, programs=programs):
        assert len(launches) <= 2
        results = {"out": out, "lse": lse, "partial_out": partial_out, "partial_lse": partial_lse}
        options = {"scale": x.scale, "softcap": x.softcap, "sinks": x.sinks}
        options["slopes"] = x.slopes
        kernels.forward(x.q, x.k, x.v, launches, config, **results, **options)
    return out, lse


UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_close(got, expected, dtype, names=("out", "lse", "dq", "dk", "dv")):
    """RMS error within eight roundings of results of size one.

    That is the size of the terms that are summed.
    """
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
def slice_tables(draw, longest=50):
    """Runs of queries and runs of keys, positions ascending with gaps.

    Some pairs of runs see each other under a band.
    """
    rows, positions = {}, {}
    for side in "qk":
        lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=3))
        edges = np.cumsum([0, *lengths])
        rows[side] = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        generator = np.random.default_rng(draw(st.integers(0, 1000)))
        gap = draw(st.integers(1, 4))
        steps = [
            generator.integers(1, gap + 1, n).cumsum() + generator.integers(0, 30) for n in lengths
        ]
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


def drawn(longest):
    """Draw the arguments of a comparison with the reference, of runs of at most so many tokens."""
    return given(
        slices=slice_tables(longest),
        dtype=st.sampled_from(DTYPES),
        heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
        dims=st.sampled_from([(16, 16), (5, 24), (33, 16), (40, 48)]),
        options=st.fixed_dictionaries(
            {
                "batch": st.sampled_from([1, 1, 2]),
                "seed": st.integers(0, 99),
                "dlse": st.booleans(),
                "sinks": st.booleans(),
                "scale": st.sampled_from([0.25, -0.4, 0.0]),
                "softcap": st.sampled_from([0.0, 0.0, 1.5]),
                "slopes": st.sampled_from(["", "", "heads", "batch"]),
                "layout": st.sampled_from(["bthd", "bhtd", "strided"]),
            }
        ),
        config=st.sampled_from([SMALL, kernels.Config(32, 16, 4, 1, cut_resources=(4, 1)), HOPPER]),
    )


def zigzag_hops(n, ranks, rank):
    """The slices of a causal ring over zigzag chunks, over one buffer of all keys.

    They are several documents' worth of hops.
    """
    chunk = n // (2 * ranks)
    chunks = [[c, 2 * ranks - 1 - c] for c in range(ranks)]
    q_positions = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in chunks[rank]])
    k_positions = np.concatenate(
        [np.arange(c * chunk, (c + 1) * chunk) for pair in chunks for c in pair]
    )
    hops = []
    for step in range(ranks):
        peer = (rank - step) % ranks
        hops.append(
            table(
                [(0, 2 * chunk, 2 * chunk * peer, 2 * chunk * (peer + 1), -(2**40), 0)],
                q_positions,
                k_positions,
            )
        )
    return hops


def joined(hops):
    return dataclasses.replace(
        hops[0],
        **{
            name: np.concatenate([getattr(hop, name) for hop in hops])
            for name in ("q_rows", "k_rows", "bands")
        },
    )
