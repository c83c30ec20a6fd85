"""What the tests of lightning attention's kernels share: operands, spans and calls."""

import dataclasses
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqpar.kernels import lightning_attention as kernels
from seqpar.kernels.lightning_attention import reference

from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.backends import triton as backend
from seqpar.linear.states.state_options import StateOptions
from tests.kernels.operands import stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALL = kernels.Config(16, 16, 4, 1)
# The table's configurations, whose tiles are large for an interpreter.
SHIPPED = [None] * torch.cuda.is_available()


def poisoned(x, *shape, new_empty=torch.Tensor.new_empty, **options):
    new = new_empty(x, *shape, **options)
    return new.fill_(math.nan) if new.is_floating_point() else new


@contextmanager
def arranged(rows, config):
    """Segments have so many rows, and kernels this configuration; new memory is NaN.

    If it is None, it is that of the table.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "_segment_rows", lambda *_: rows)
        if config is not None:
            patched.setattr(backend.kernels, "choose", lambda *_: config)
        patched.setattr(torch.Tensor, "new_empty", poisoned)
        yield


def spans_of(lengths, enter=None, leave=None):
    """Make spans of these lengths; their states count from the last span to the first.

    `enter` and `leave` say which spans a state enters and leaves.
    """

    def numbered(does):
        does = np.array([False] * len(lengths) if does is None else does, dtype=bool)
        return np.where(does, does[::-1].cumsum()[::-1] - 1, -1)

    return SpanStates(np.cumsum([0, *lengths]), numbered(enter), numbered(leave))


@dataclasses.dataclass
class Operands:
    """Random inputs (B, T, H, D), states (n, B, H, D, Dv) and upstream gradients of both."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    initial: torch.Tensor | None
    dfinal: torch.Tensor | None
    log_decay: torch.Tensor | None
    scale: float

    @classmethod
    def draw(
        cls,
        spans,
        dtype=torch.float32,
        batch=1,
        heads=(1, 1),
        dims=(16, 16),
        *,
        seed=0,
        decay=(-0.1, -0.01),
        scale=0.25,
        layout="bthd",
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, dtype=dtype):
            return stored(
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE),
                layout,
            )

        def states(index):
            count = int((index >= 0).sum())
            return draw(count, batch, heads[1], *dims, dtype=torch.float32) if count else None

        rows, (dim, value_dim) = int(spans.edges[-1]), dims
        log_decay = (
            None
            if decay is None
            else torch.tensor(decay, dtype=torch.float64, device=DEVICE)[: heads[1]]
        )
        return cls(
            q=draw(batch, rows, heads[0], dim),
            k=draw(batch, rows, heads[1], dim),
            v=draw(batch, rows, heads[1], value_dim),
            dout=draw(batch, rows, heads[0], value_dim),
            initial=states(spans.state_in),
            dfinal=states(spans.state_out),
            log_decay=log_decay,
            scale=scale,
        )

    def expected(self, spans):
        """out, states, dq, dk, dv and the gradient of the states, of the reference in fp64; all
        from the span's own rows.
        """
        q, k, v = (x.double().cpu().requires_grad_() for x in (self.q, self.k, self.v))
        decay = None if self.log_decay is None else self.log_decay.cpu()
        shape = spans.state_in.size, q.shape[0], k.shape[2], q.shape[3], v.shape[3]
        entering, after = (
            torch.zeros(shape, dtype=torch.float64),
            torch.zeros(shape, dtype=torch.float64),
        )
        for tensor, index, states in (
            (entering, spans.state_in, self.initial),
            (after, spans.state_out, self.dfinal),
        ):
            for span in np.flatnonzero(index >= 0):
                tensor[span] = states[index[span]]
        entering.requires_grad_()
        out, final = reference.attention(
            q, k, v, spans.edges.tolist(), list(entering), decay, self.scale
        )
        _, own = reference.attention(
            q, k, v, spans.edges.tolist(), [None] * spans.state_in.size, decay, self.scale
        )
        loss = (out * self.dout.double().cpu()).sum() + 0 * sum(
            x.sum() for x in (q, k, v, entering)
        )  # if there are no rows
        (dentering,) = torch.autograd.grad(loss, entering, retain_graph=True)
        gradients = torch.autograd.grad(loss + (torch.stack(final) * after).sum(), (q, k, v))
        ordered = [x[np.argsort(i, kind="stable")[i.size - (i >= 0).sum() :]] for x, i in
                   ((torch.stack(own), spans.state_out), (dentering, spans.state_in))]  # fmt: skip
        return tuple(x.detach() for x in (out, ordered[0], *gradients, ordered[1]))

    def computed(self, spans, rows, config=SMALL, *, local=False, causal=True):
        """The kernels' answer, with segments of so many rows; with `local`, in two steps."""
        options = StateOptions(self.scale, causal, "triton", self.log_decay)
        with arranged(rows, config):
            forward = backend.Forward(Inputs(self.q, self.k, self.v), spans, options)
            if local:
                forward.local()
            out = forward.finish(self.initial)
            backward = backend.Backward(
                Inputs(self.q, self.k, self.v), self.dout, spans, options, self.initial
            )
            if local:
                backward.local()
            gradients = backward.finish(self.dfinal)
        assert out.dtype == self.q.dtype and all(x.dtype == torch.float32 for x in gradients)
        return out, forward.outgoing, *gradients, backward.outgoing


NAMES = ("out", "states", "dq", "dk", "dv", "dstates")


def assert_close(got, expected, dtype, names=NAMES):
    """RMS error within eight roundings of results of size one.

    That is the size of the terms that are summed.
    """
    for name, x, y in zip(names, got, expected, strict=True):
        assert x.shape == y.shape, name
        x = x.double().cpu()
        assert x.isfinite().all(), name
        error, size = rms(x - y), max(1.0, rms(y))
        assert error <= 8 * UNIT[dtype] * size, f"{name}: {error} where the size is {size}"


def rms(x):
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def equal(x, y):
    return all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@st.composite
def some_spans(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 16, 35]), min_size=1, max_size=3))
    enter, leave = (
        draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
        for _ in range(2)
    )
    return spans_of(lengths, enter, leave)


drawn = given(
    spans=some_spans(),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([16, 32, 1000]),
    config=st.sampled_from([SMALL, kernels.Config(32, 16, 4, 1), *SHIPPED]),
    local=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "batch": st.sampled_from([1, 1, 2]),
            "heads": st.sampled_from([(1, 1), (2, 2), (2, 1)]),
            "dims": st.sampled_from([(16, 16), (5, 24), (20, 16)]),
            "seed": st.integers(0, 99),
            "decay": st.sampled_from([None, (0.0, -0.5), (-3.0, -0.1), (-0.1, -0.01)]),
            "scale": st.sampled_from([0.25, -0.4]),
            "layout": st.sampled_from(["bthd", "bhtd", "strided"]),
        }
    ),
)
