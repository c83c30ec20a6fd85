"""The kernel calls of one rank that a profile times, with their operands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from seqpar.core.ranges import UNLIMITED
from seqpar.costs.profile.harness import Sample
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Blocks, Mask, Slices, slices_between
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions
from seqpar.softmax.attend import attend_backward, attend_blocks
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, PartialGradients


@dataclass(frozen=True)
class Setting:
    """The device, dtype, heads and backend of the timed calls of attention."""

    device: str
    dtype: torch.dtype
    heads: int
    head_dim: int
    backend: str

    @classmethod
    def of_this_machine(cls) -> Setting:
        if torch.cuda.is_available():
            return cls("cuda", torch.bfloat16, 16, 128, "triton")
        return cls("cpu", torch.float32, 4, 64, "aten")

    @property
    def rows(self) -> tuple[int, ...]:
        return (128, 512, 2048, 8192, 16384) if self.device == "cuda" else (64, 256, 1024, 4096)

    @property
    def keys(self) -> tuple[int, ...]:
        # On a CPU, the kernel's tiles for windows change their size between 1,024 and 4,096 keys.
        return self.rows if self.device == "cuda" else (64, 256, 1024, 2048, 4096)

    @property
    def width(self) -> int:
        return 4096 if self.device == "cuda" else 512


@dataclass(frozen=True)
class Shape:
    """One call of softmax attention on several documents of equal length.

    Each of the `documents` has `rows` queries and `keys` keys. The queries are the last positions
    of their document. The mask is causal, except for the kind "full".
    """

    kind: str  # full, causal or window
    rows: int
    keys: int
    documents: int = 1
    window: int | None = None  # number of keys to which a query attends, including its own key

    def as_sample(self) -> Sample:
        return cast(Sample, asdict(self))

    def slices(self) -> Slices:
        if self.kind == "full":
            q_rows, k_rows = np.array([[0, self.rows]]), np.array([[0, self.keys]])
            band = np.array([[-UNLIMITED, UNLIMITED]])
            queries, keys = (np.arange(n, dtype=np.int32) for n in (self.rows, self.keys))
            return Slices(q_rows, k_rows, band, queries, keys, k_rows)
        edges = np.arange(self.documents + 1)
        q, k = (Layout.contiguous(edges * n, 1).geometry for n in (self.rows, self.keys))
        window = (-1 if self.window is None else self.window - 1, -1)
        return slices_between(q, 0, k, 0, Mask.of(True, window, None, k))


def _random(setting: Setting, *tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator(setting.device).manual_seed(0)
    return [
        torch.randn(size, generator=generator, dtype=setting.dtype, device=setting.device)
        for size in [(1, n, setting.heads, setting.head_dim) for n in tokens]
    ]


class SoftmaxCalls:
    def __init__(self, slices: Slices, setting: Setting) -> None:
        self._slices = slices
        rows, keys = slices.query_rows, slices.key_rows
        self._q, self._k, self._v, dout = _random(setting, rows, keys, keys, rows)
        self._blocks = Blocks((self._slices,))
        self._options = CallOptions(setting.head_dim**-0.5, 0.0, setting.backend, True)
        out, lse = self.forward()
        self._output = OutputGradient.of(dout, None, out, lse, None)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = [(self._k, self._v)]
        return attend_blocks(self._q, blocks, self._blocks, self._options, None)

    def backward(self) -> None:
        gradients = PartialGradients.zeros(self._q, self._k, self._v)
        inputs = self._q, self._k, self._v
        attend_backward(self._output, *inputs, self._slices, gradients, self._options)


class LinearCalls:
    """Calls of linear attention on one document."""

    def __init__(self, tokens: int, setting: Setting) -> None:
        self._inputs = _random(setting, *[tokens] * 4)
        self._spans = SpanStates(np.array([0, tokens]), np.array([-1]), np.array([-1]))
        decay = -torch.logspace(-9, -3, setting.heads, base=2, dtype=torch.float64)
        self._options = StateOptions(1.0, True, setting.backend, decay.to(setting.device))

    def forward(self) -> None:
        q, k, v, _dout = self._inputs
        steps = begin_forward(Inputs(q, k, v), self._spans, self._options)
        steps.local()
        steps.finish(None)

    def backward(self) -> None:
        q, k, v, dout = self._inputs
        steps = begin_backward(Inputs(q, k, v), dout, self._spans, self._options, None)
        steps.local()
        steps.finish(None)


class Modules:
    """Calls of a gated feed-forward part, as in Llama, whose inner width is three times the outer
    one.
    """

    def __init__(self, tokens: int, width: int, setting: Setting) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=setting.dtype, device=setting.device)

        self.flops = 2 * 3 * tokens * width * 3 * width  # FLOPs of a forward
        self._x = random(tokens, width).requires_grad_()
        self._norm = torch.ones(width, dtype=setting.dtype, device=setting.device).requires_grad_()
        self._gate_up = random(width, 2 * 3 * width).requires_grad_()
        self._down = random(3 * width, width).requires_grad_()
        self._dout = random(tokens, width)
        self._out = self._module()

    def _module(self) -> torch.Tensor:
        x = F.rms_norm(self._x, self._norm.shape, self._norm)
        gate, up = (x @ self._gate_up).chunk(2, -1)
        return self._x + (F.silu(gate) * up) @ self._down

    def forward(self) -> None:
        with torch.no_grad():
            self._module()

    def backward(self) -> None:
        inputs = self._x, self._norm, self._gate_up, self._down
        torch.autograd.grad(self._out, inputs, self._dout, retain_graph=True)


Calls = SoftmaxCalls | LinearCalls | Modules
