"""Calls of short convolutions to test with, and their oracle.

The oracle is PyTorch's convolution in fp64, document by document.
"""

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from seqpar import Layout, causal_conv1d, token_shift
from seqpar.comm.messages.comm import Comm
from tests.support.cases import cu_seqlens, layouts


@dataclasses.dataclass(frozen=True)
class ConvCase:
    """One call on some ranks, with all that is needed to make its inputs on each rank."""

    layout: Layout
    width: int | None = 4  # None: a token shift
    bias: bool = True
    activation: str | None = "silu"
    batch: int | None = None
    channels: int = 5
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype | None = None
    seed: int = 0

    def inputs(self):
        """Return x and dout of the whole packed batch, the weight, and the bias or None."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = () if self.batch is None else (self.batch,)

        def draw(*shape, dtype=None):
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(dtype or self.dtype)

        x, dout = (draw(*batch, self.layout.tokens, self.channels) for _ in range(2))
        if self.width is None:
            return x, dout, None, None
        weight = draw(self.channels, self.width, dtype=self.weight_dtype)
        return x, dout, weight, draw(self.channels, dtype=self.weight_dtype) if self.bias else None


def call(group, case, x, weight, bias):
    if case.width is None:
        return token_shift(x, case.layout, group)
    return causal_conv1d(x, weight, case.layout, group, bias, case.activation)


def run(group, case):
    """Make the call and its backward on this rank; return packed out and dx, dweight and dbias.

    The gradients of weight and bias are summed over ranks.
    """
    comm, dim = Comm.of(group), 0 if case.batch is None else 1
    x, dout, weight, bias = case.inputs()
    x, dout = (case.layout.shard(y, comm.rank, dim) for y in (x, dout))
    leaves = [y.requires_grad_() for y in (x, weight, bias) if y is not None]
    out = call(group, case, x, weight, bias)
    assert out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()
    out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    assert [y.grad.dtype for y in leaves] == [y.dtype for y in leaves]
    found = {name: case.layout.unshard(y, comm, dim) for name, y in found.items()}
    for name, leaf in (("dweight", weight), ("dbias", bias)):
        if leaf is not None:
            found[name] = torch.stack(comm.all_gather(leaf.grad, label="test")).double().sum(0)
    return {name: y.double().numpy() for name, y in found.items()}


def oracle(case):
    """Return what `run` should return."""
    x, dout, weight, bias = (None if y is None else y.double() for y in case.inputs())
    leaves = [y.requires_grad_() for y in (x, weight, bias) if y is not None]
    edges, outs = case.layout.cu_seqlens.tolist(), []
    for start, stop in itertools.pairwise(edges):
        document = x[..., start:stop, :]
        if case.width is None:
            outs.append(F.pad(document, (0, 0, 1, 0))[..., : stop - start, :])
        elif stop > start and x.numel():
            rows = F.pad(document.transpose(-2, -1), (case.width - 1, 0))
            out = F.conv1d(rows, weight[:, None], bias, groups=case.channels)
            outs.append((F.silu(out) if case.activation else out).transpose(-2, -1))
    out = torch.cat(outs, -2) if outs else x * 0
    gradients = torch.autograd.grad(
        (out * dout).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    names = ["dx", "dweight", "dbias"][: len(leaves)]
    found = {"out": out.detach(), **dict(zip(names, gradients, strict=True))}
    return {name: y.numpy() for name, y in found.items()}


@st.composite
def conv_cases(draw, dtype, max_tokens=50):
    """Draw a number of ranks and a call on them."""
    ranks = draw(st.integers(1, 4))
    return ranks, ConvCase(
        draw(layouts(draw(cu_seqlens(max_tokens)), ranks)),
        width=draw(st.sampled_from([None, 1, 2, 3, 4, 4, 7, 60])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from([None, "silu", "swish"])),
        batch=draw(st.sampled_from([None, None, 2])),
        channels=draw(st.sampled_from([1, 5, 8])),
        dtype=dtype,
        seed=draw(st.integers(0, 1000)),
    )
