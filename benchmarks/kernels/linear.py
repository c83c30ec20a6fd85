"""Workloads of linear attention: shapes, contenders, and checks of their results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.kernels import softmax_contenders as contenders
from benchmarks.kernels.softmax_workloads import Workload
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions

CHUNK = 64  # rows, for the count of FLOPs
SOFTMAX = 2**17  # the most tokens for which softmax attention is timed too


@dataclass(frozen=True)
class Lightning:
    """Causal linear attention over one document, each head with its own decay.

    The slowest decay is exp(−1 / 512) per token.
    """

    tokens: int
    heads: int
    dim: int
    batch: int = 1

    others: ClassVar[tuple[str, ...]] = (
        "SDPA, softmax",
        "FA2, softmax",
    )  # contenders that compute something else

    @property
    def softmax(self) -> Workload:
        return Workload("causal", self.tokens, self.heads, self.heads, self.dim, self.batch)

    @property
    def name(self) -> str:
        length = f"{self.tokens // 1024}k" if self.tokens < 2**20 else f"{self.tokens // 2**20}m"
        return f"lightning {length} {self.heads} d{self.dim}"

    @property
    def log_decay(self) -> Tensor:
        return -torch.logspace(-9, -3, self.heads, base=2, dtype=torch.float64)

    @property
    def flops(self) -> float:
        """Return the FLOPs of a forward; a backward counts 2.5 times these.

        In a chunk of 64 rows these are half of QKᵀ and of its product with V, and q·S and kᵀv.
        """
        return (2.0 * CHUNK * self.dim + 4 * self.dim**2) * self.tokens * self.heads * self.batch

    def bytes(self, element: int, on_chip: int) -> float:
        """Return the fewest bytes that a forward moves: each operand once."""
        return 4.0 * self.tokens * self.heads * self.dim * self.batch * element

    def operands(self, dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
        """Return random q, k, v and dout (B, T, H, D)."""
        generator, shape = (
            torch.Generator(device).manual_seed(seed),
            (self.batch, self.tokens, self.heads, self.dim),
        )
        return [
            torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(4)
        ]

    @cached_property
    def spans(self) -> SpanStates:
        return SpanStates(np.array([0, self.tokens]), np.array([-1]), np.array([-1]))

    def ours(self, backend: str, device: torch.device) -> contenders.Attention:
        """Return our primitive, forward and backward."""
        options = StateOptions(1.0, True, backend, self.log_decay.to(device))

        class Ours(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                ctx.save_for_backward(q, k, v)
                return begin_forward(Inputs(q, k, v), self.spans, options).finish(None)

            @staticmethod
            def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
                inputs = Inputs(*ctx.saved_tensors)
                work = begin_backward(inputs, dout, self.spans, options, None)
                return tuple(x.to(dout.dtype) for x in work.finish(None))

        return Ours.apply

    def parallel_form(self, device: torch.device) -> contenders.Attention:
        """Return (Q Kᵀ ⊙ Λ) V of all tokens, head by head, in a few lines of PyTorch."""
        distance = (
            torch.arange(self.tokens, device=device)[:, None]
            - torch.arange(self.tokens, device=device)
        ).float()

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs = []
            for head, rate in enumerate(self.log_decay.tolist()):
                decays = torch.exp(rate * distance).tril_().to(q.dtype)
                outs.append((q[:, :, head] @ k[:, :, head].mT * decays) @ v[:, :, head])
            return torch.stack(outs, 2)

        return call

    def field(self, device: torch.device) -> dict[str, contenders.Attention | None]:
        """Return the contenders by name; None for one that cannot compute this."""
        if device.type != "cuda":
            made = {"aten": self.ours("aten", device), "parallel form": self.parallel_form(device)}
            return made | {self.others[0]: contenders.sdpa(self.softmax, None)}
        softmax = (
            contenders.sdpa(self.softmax, SDPBackend.FLASH_ATTENTION)
            if self.tokens <= SOFTMAX
            else None
        )
        made = {"triton": self.ours("triton", device), "fla": simple_gla(self.log_decay.to(device))}
        return made | {self.others[1]: softmax}

    def errors(
        self, operands: list[Tensor], out: Tensor, gradients: list[Tensor] | None
    ) -> dict[str, float]:
        """Return relative errors against fp64 in 16 rows of the last sequence's last head."""
        q, k, v, dout = (x[-1, :, -1].double() for x in operands)
        rate = float(self.log_decay[-1])
        rows = torch.randint(self.tokens, (16,), generator=torch.Generator().manual_seed(1)).to(
            q.device
        )
        distance = rows[:, None] - torch.arange(self.tokens, device=q.device)
        before, behind = (torch.exp(rate * x).masked_fill(x < 0, 0) for x in (distance, -distance))
        found = {"out": (out, (q[rows] @ k.T * before) @ v)}
        if gradients is not None:
            expected = (
                (dout[rows] @ v.T * before) @ k,
                (v[rows] @ dout.T * behind) @ q,
                (k[rows] @ q.T * behind) @ dout,
            )
            found |= dict(
                zip(("dq", "dk", "dv"), zip(gradients, expected, strict=True), strict=True)
            )
        return {
            name: float((x[-1, rows, -1].double() - y).norm() / y.norm())
            for name, (x, y) in found.items()
        }


def simple_gla(log_decay: Tensor) -> Callable[..., Tensor] | None:
    """Return flash-linear-attention's simple GLA (`pip install fla-core`), if installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.simple_gla import chunk_simple_gla

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_simple_gla(q, k, v, g_gamma=log_decay.float(), scale=1.0)[0]

    return call
