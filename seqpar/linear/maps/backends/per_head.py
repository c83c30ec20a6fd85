"""Decays of each row and head within chunks, or none.

Σ gₘ over the rows m between two is summed for each pair, and not subtracted from one another: no
digits cancel, and −∞ is a decay like others.

Chunks are (M, N, C, K), and readers (M, N, X, C, K): several rows in each row's place that read
what earlier rows wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.linear.maps.backends.powers import exp, until


class PerHead:
    """The powers of g (M, N, C); g is None if nothing decays."""

    def __init__(self, log_decay: Tensor | None, size: int) -> None:
        self.log_decay, self.size = log_decay, size
        self.total: Tensor | None = None  # (M, N, 1), a logarithm
        if log_decay is None:
            return
        lower = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
        between = torch.where(lower, log_decay[..., None], 0).cumsum(-2)
        self.weights = exp(between).tril_()  # (M, N, C, C): the weight of row j for row i
        self.head = exp(log_decay.cumsum(-1))[..., None]  # of the entering state, at each row
        self.tail = self.weights[..., -1, :, None]  # of each row, at the chunk's end
        self.total = log_decay.sum(-1, dtype=torch.float64)[..., None]

    def read(self, x: Tensor) -> Tensor:
        """Return the rows x (M, N, X, C, K) as they read the state that enters the chunk."""
        return x if self.log_decay is None else x * self.head[:, :, None]

    def write(self, k: Tensor) -> Tensor:
        """Return the keys (M, N, C, K) as they write to the state that leaves the chunk."""
        return k if self.log_decay is None else k * self.tail

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        """Return (M, N, X, C, C): what each row of x reads from each row of k, 0 from later."""
        scores = (x.flatten(2, 3) @ k.mT).unflatten(2, x.shape[2:4])
        return scores.tril_() if self.log_decay is None else scores.mul_(self.weights[:, :, None])


class PerHeadGradients:
    """The gradients of the results of `PerHead`, summed to the gradient of g."""

    def __init__(self, powers: PerHead) -> None:
        self.powers, g = powers, powers.log_decay
        if g is not None:
            self.head, self.tail = (torch.zeros_like(g) for _ in range(2))
            self.between = torch.zeros_like(powers.weights)
            self.total = torch.zeros_like(g[..., :1])

    def read(self, x: Tensor, dread: Tensor) -> Tensor:
        """Return dx, given the gradient of `read(x)`."""
        if self.powers.log_decay is None:
            return dread
        dx = dread * self.powers.head[:, :, None]
        self.head += (dx * x).sum((2, -1))
        return dx

    def write(self, k: Tensor, dwrite: Tensor) -> Tensor:
        """Return dk, given the gradient of `write(k)`."""
        if self.powers.log_decay is None:
            return dwrite
        dk = dwrite * self.powers.tail
        self.tail += (dk * k).sum(-1)
        return dk

    def scores(
        self, x: Tensor, k: Tensor, scores: Tensor, dscores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return dx and dk, given the gradient of `scores(x, k)`, whose memory is reused."""
        if self.powers.log_decay is None:
            products = dscores.tril_()
        else:
            self.between += (dscores * scores).sum(2)
            products = dscores.mul_(self.powers.weights[:, :, None])
        products = products.flatten(2, 3)
        return (products @ k).view(x.shape), products.mT @ x.flatten(2, 3)

    def state(self, products: Tensor) -> None:
        """Add the gradient of `total`: `products` (M, N, K) are of states and their gradients."""
        total = self.powers.total
        if total is not None:
            self.total += products.sum(-1, keepdim=True) * exp(total).to(products.dtype)

    def log_decay(self) -> Tensor | None:
        """Return the gradient of g (M, N, C)."""
        if self.powers.log_decay is None:
            return None
        inclusive = until(self.powers.size, self.head)
        # A weight of row i and row j has all gₘ with j < m ≤ i.
        rows = self.between @ inclusive.tril(-1).mT
        through = (rows.tril_()).sum(-2)
        return through + self.head @ inclusive + self.tail @ inclusive.tril(-1).mT + self.total
