"""Workloads of the softmax kernels: shapes, documents, masks, and checks of results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seqpar import Layout
from seqpar.layout.masks.mask import Mask, Slices, slices_between

LENGTHS = Path(__file__).parents[1] / "data/length_distributions.json"


def pretrain_documents(tokens: int, mean: int | None = None, seed: int = 0) -> list[int]:
    """Return cu_seqlens of documents drawn from the published Pretrain quantiles.

    The last document is cut at `tokens`. With `mean`, lengths are scaled to this mean.
    """
    quantiles = np.array(
        json.loads(LENGTHS.read_text())["distributions"]["pretrain"][
            "quantiles_at_0_to_1_step_0.001"
        ]
    )
    scale = 1.0 if mean is None else mean / quantiles.mean()
    generator, edges = np.random.default_rng(seed), [0]
    while edges[-1] < tokens:
        length = int(
            np.interp(generator.random(), np.linspace(0, 1, quantiles.size), quantiles) * scale
        )
        edges.append(min(tokens, edges[-1] + max(1, length)))
    return edges


@dataclass(frozen=True)
class Workload:
    """One attention: `batch` sequences of `tokens` queries.

    A ring step has the queries and keys of two of 8 ranks, zigzag.
    """

    kind: str  # causal, full, window, packed, fused shards, or ring step
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    batch: int = 1
    window: int = 4096
    mean_document: int | None = None
    softcap: float = 0.0  # only `ours` applies it

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens // 1024}k {self.heads}:{self.kv_heads} d{self.dim}"

    @property
    def causal(self) -> bool:
        return self.kind in ("causal", "window", "packed", "fused shards")

    @property
    def window_size(self) -> tuple[int, int]:
        return (self.window - 1, 0) if self.kind == "window" else (-1, -1)

    @cached_property
    def cu_seqlens(self) -> list[int]:
        if self.kind == "packed":
            return pretrain_documents(self.tokens, self.mean_document)
        if self.kind == "fused shards":  # shards of 128 to 4,096 tokens, as on an attention server
            lengths = np.random.default_rng(0).integers(1, 33, 4 * self.tokens // 128) * 128
            edges = np.r_[0, np.cumsum(lengths)]
            return [*edges[edges < self.tokens].tolist(), self.tokens]
        return [0, self.tokens]

    @cached_property
    def slices(self) -> Slices:
        if self.kind == "ring step":
            layout = Layout.zigzag(8 * self.tokens, 8).geometry
            return slices_between(layout, 5, layout, 2, Mask.of(True, (-1, -1), None, layout))
        layout = Layout.contiguous(self.cu_seqlens, 1).geometry
        return slices_between(
            layout, 0, layout, 0, Mask.of(self.causal, self.window_size, None, layout)
        )

    @property
    def flops(self) -> float:
        """Return a forward's FLOPs by the mask's area; a backward counts 2.5 times these."""
        return 4.0 * self.slices.area * self.dim * self.heads * self.batch

    def bytes(self, element: int, on_chip: int) -> float:
        """Return the fewest bytes that a forward moves between memory and chip.

        It moves each operand once or, if that is more, N²d²/M elements, with M elements on chip.
        """
        rows = self.tokens * self.heads * 2 + self.slices.key_rows * self.kv_heads * 2
        once = rows * self.dim * self.batch * element
        return max(
            once,
            self.slices.area
            * self.dim**2
            * self.heads
            * self.batch
            / (on_chip / element)
            * element,
        )

    def operands(self, dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
        """Return random q, k, v and dout (B, T, H, D)."""
        generator = torch.Generator(device).manual_seed(seed)
        q, kv = (
            (self.batch, self.tokens, self.heads, self.dim),
            (self.batch, self.slices.key_rows, self.kv_heads, self.dim),
        )
        return [
            torch.randn(shape, generator=generator, dtype=dtype, device=device)
            for shape in (q, kv, kv, q)
        ]

    def seen(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return whether each query attends to each key, (n, m), on the device of `rows`.

        The slices decide each pair.
        """
        result = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=rows.device)
        q_positions, k_positions = (
            torch.from_numpy(x).to(rows.device)
            for x in (self.slices.q_positions, self.slices.k_positions)
        )
        distance = k_positions[keys] - q_positions[rows][:, None]
        for (q_start, q_stop), (k_start, k_stop), (low, high) in zip(
            self.slices.q_rows.tolist(),
            self.slices.k_rows.tolist(),
            self.slices.bands.tolist(),
            strict=True,
        ):
            i = torch.nonzero((rows >= q_start) & (rows < q_stop)).flatten()
            j = torch.nonzero((keys >= k_start) & (keys < k_stop)).flatten()
            if len(i) and len(j):
                part = distance[i[:, None], j]
                result[i[:, None], j] |= (part >= max(low, -(2**31))) & (
                    part <= min(high, 2**31 - 1)
                )
        return result

    def errors(
        self, operands: list[Tensor], out: Tensor, gradients: list[Tensor] | None
    ) -> dict[str, float]:
        """Return relative errors against fp64 on the last sequence of the batch.

        out and dq are checked in 16 queries of the last head, dk and dv in 16 keys of the last KV
        head, with contributions from all query heads of its group.
        """
        q, k, v, dout = (x[-1].double() for x in operands)
        generator = torch.Generator().manual_seed(1)
        rows, keys = (
            torch.randint(n, (16,), generator=generator)
            for n in (self.tokens, self.slices.key_rows)
        )
        expected_out, dq, _ = self._exact(q[rows, -1], k[:, -1], v[:, -1], dout[rows, -1], rows)
        errors = {"out": _relative(out[-1, rows, -1], expected_out)}
        if gradients is not None:
            errors["dq"] = _relative(gradients[0][-1, rows, -1], dq)
            dk, dv = torch.zeros_like(k[keys, -1]), torch.zeros_like(v[keys, -1])
            for head in range(self.heads - self.heads // self.kv_heads, self.heads):
                for block in torch.arange(self.tokens).split(2048):
                    _, _, (p, ds) = self._exact(
                        q[block, head], k[:, -1], v[:, -1], dout[block, head], block
                    )
                    dv += p[:, keys].T @ dout[block, head]
                    dk += ds[:, keys].T @ q[block, head]
            errors |= {
                "dk": _relative(gradients[1][-1, keys, -1], dk),
                "dv": _relative(gradients[2][-1, keys, -1], dv),
            }
        return errors

    def _exact(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return out and dq of these query rows of one head, and their p and dscore."""
        seen = self.seen(rows.to(q.device), torch.arange(self.slices.key_rows, device=q.device))
        p = torch.softmax((q @ k.T * self.dim**-0.5).masked_fill(~seen, -torch.inf), -1).nan_to_num(
            0.0
        )
        out = p @ v
        ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True)) * self.dim**-0.5
        return out, ds @ k, (p, ds)


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp_min(1e-30))
