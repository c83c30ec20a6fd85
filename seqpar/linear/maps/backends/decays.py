"""Compute the decays within chunks of rows, for each head or each key channel, and gradients.

Keys are (M, N, C, K): C rows for each chunk. Rows that read from the state, such as queries, are
(M, N, X, C, K), because X heads share a state. A row reads the keys and values of earlier rows,
multiplied by the decays between the two rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 16  # about how many elements the tensors of a block of chunks have


def exp(x: Tensor) -> Tensor:
    """Return exp x for x ≤ 0. Results that are nearly subnormal are set to 0."""
    return flush_(torch.exp(x))


def flush_(powers: Tensor) -> Tensor:
    """Set very small powers to 0, because products with them might be subnormal, which CPUs compute
    slowly.
    """
    limits = torch.finfo(powers.dtype)
    return torch.threshold_(powers, limits.tiny / limits.eps, 0.0)


def lower_ones(size: int, like: Tensor) -> Tensor:
    """Return a matrix (size, size) with ones on and below the diagonal, and zeros above the
    diagonal.

    The product `lower_ones(…) @ A` has the cumulative sums of the rows of A.
    """
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril_()


class _Powers:
    decays = True  # whether anything decays; if not, the tensors do not exist
    head: Tensor  # (M, N, C, K or 1), powers from the chunk's start to each row
    tail: Tensor  # (M, N, C, K or 1), powers from each row to the chunk's end

    def read(self, x: Tensor) -> Tensor:
        """Return x (M, N, X, C, K), with each row multiplied by the decay from the start of the
        chunk to the row.
        """
        return x * self.head[:, :, None] if self.decays else x

    def write(self, k: Tensor) -> Tensor:
        """Return k (M, N, C, K), with each row multiplied by the decay from the row to the end of
        the chunk.
        """
        return k * self.tail if self.decays else k


class PerHead(_Powers):
    """The decays of chunks with one log decay g (M, N, C) per head and row, or without decay if g
    is None.

    For each pair of rows, the sum of g over the rows between them is computed directly, so that it
    is accurate, and correct if g is −∞.
    """

    def __init__(self, log_decay: Tensor | None, size: int) -> None:
        self.log_decay, self.size = log_decay, size
        self.total: Tensor | None = None  # (M, N, 1), the logarithm of the decay over a chunk
        if log_decay is None:
            self.decays = False
            return
        lower = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
        between = torch.where(lower, log_decay[..., None], 0).cumsum(-2)
        self.weights = exp(between).tril_()  # (M, N, C, C): the weight of row j for row i
        self.head = exp(log_decay.cumsum(-1))[..., None]
        self.tail = self.weights[..., -1, :, None]
        self.total = log_decay.sum(-1, dtype=torch.float64)[..., None]

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        """Return the product of each row of x with each row of k, times a decay, as (M, N, X, C,
        C).

        The decay is over the rows between the row of k and the row of x. If the row of k comes
        after the row of x, the entry is 0.
        """
        scores = (x.flatten(2, 3) @ k.mT).unflatten(2, x.shape[2:4])
        return scores.tril_() if self.log_decay is None else scores.mul_(self.weights[:, :, None])


class PerHeadGradients:
    """The gradients of the results of `PerHead`. The object also adds up the gradient of g."""

    def __init__(self, powers: PerHead) -> None:
        self.powers, g = powers, powers.log_decay
        if g is not None:
            self.head, self.tail = (torch.zeros_like(g) for _ in range(2))
            self.between = torch.zeros_like(powers.weights)
            self.total = torch.zeros_like(g[..., :1])

    def read(self, x: Tensor, dread: Tensor) -> Tensor:
        if self.powers.log_decay is None:
            return dread
        dx = dread * self.powers.head[:, :, None]
        self.head += (dx * x).sum((2, -1))
        return dx

    def write(self, k: Tensor, dwrite: Tensor) -> Tensor:
        if self.powers.log_decay is None:
            return dwrite
        dk = dwrite * self.powers.tail
        self.tail += (dk * k).sum(-1)
        return dk

    def scores(
        self, x: Tensor, k: Tensor, scores: Tensor, dscores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return dx and dk, given the gradient `dscores` of `scores(x, k)`.

        The memory of `dscores` is overwritten.
        """
        if self.powers.log_decay is None:
            products = dscores.tril_()
        else:
            self.between += (dscores * scores).sum(2)
            products = dscores.mul_(self.powers.weights[:, :, None])
        products = products.flatten(2, 3)
        return (products @ k).view(x.shape), products.mT @ x.flatten(2, 3)

    def state(self, products: Tensor) -> None:
        """Add to the gradient of g the part that comes from the decay of states over a chunk.

        `products` (M, N, K) has products of states and the gradients of these states, summed over
        V.
        """
        total = self.powers.total
        if total is not None:
            self.total += products.sum(-1, keepdim=True) * exp(total).to(products.dtype)

    def log_decay(self) -> Tensor | None:
        if self.powers.log_decay is None:
            return None
        inclusive = lower_ones(self.powers.size, self.head)
        # The weight of row j for row i includes gₘ for all m with j < m ≤ i.
        rows = self.between @ inclusive.tril(-1).mT
        through = (rows.tril_()).sum(-2)
        return through + self.head @ inclusive + self.tail @ inclusive.tril(-1).mT + self.total


class _Level(NamedTuple):
    """The pairs of neighbouring blocks of `size` rows into which each chunk is cut.

    Tensors of blocks are (M, N, C / 2s, s, K), where s is `size`.
    """

    size: int
    since: Tensor  # powers in the later block of a pair, from the start of the block to each row
    # Powers in the earlier block of a pair, from after each row to the end of the block.
    left: Tensor

    def later(self, x: Tensor) -> Tensor:
        """Return the rows of the second block of each pair from x (…, C, D), as (…, C / 2s, s,
        D).
        """
        return x.unflatten(-2, (-1, 2, self.size))[..., 1, :, :]

    def earlier(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.size))[..., 0, :, :]

    def readers(self, x: Tensor) -> Tensor:
        """Return the rows of x (M, N, X, C, K) in the second block of each pair, (M, N, C / 2s, X ·
        s, K).

        A pair is two neighbouring blocks of s rows. Each row is multiplied by the decay from the
        start of its block to the row.
        """
        blocks = self.later(x).movedim(2, 3)
        return (blocks * self.since[:, :, :, None]).flatten(3, 4)

    def writers(self, k: Tensor) -> Tensor:
        """Return the rows of k (M, N, C, K) in the first block of each pair, (M, N, C / 2s, s, K).

        A pair is two neighbouring blocks of s rows. Each row is multiplied by the decay from the
        row to the end of its block.
        """
        return self.earlier(k) * self.left

    def scores(self, scores: Tensor) -> Tensor:
        """Return the scores between two neighbouring blocks of rows, for all pairs of blocks of a
        chunk.

        The argument `scores` (M, N, X, C, C) has all scores of a chunk of C rows. The result is (M,
        N, C / 2s, X, s, s). A pair is two neighbouring blocks of s rows. The result has the scores
        between the rows of the second block and the rows of the first block of each pair.
        """
        blocks = scores.unflatten(-1, (-1, 2, self.size)).unflatten(-4, (-1, 2, self.size))
        # (M, N, X, b, 2, s, b, 2, s): later rows read from earlier rows
        return blocks[:, :, :, :, 1, :, :, 0].diagonal(0, 3, 5).permute(0, 1, 5, 2, 3, 4)


class PerKey(_Powers):
    """Decays with one log decay g (M, N, C, K) for each row and key channel.

    A score is Σ_c x_ic k_jc exp(Σ g_mc over j < m ≤ i). The matrix of scores is not a product of
    two matrices, because the exponential depends on i, j and c. It could be written as a quotient,
    but exp could then overflow. Yang et al., "Gated Linear Attention" (2024), section 4.3, cut a
    chunk into blocks and measure decays from the first row of a block.

    Here, a chunk is cut into halves, each half is cut into halves, and so on. Take two neighbouring
    blocks of s rows. For rows in the later block, the decay is measured from the start of the later
    block. For rows in the earlier block, it is measured to the end of the earlier block. With these
    decays, the scores between the two blocks are a product of two matrices. Pairs of blocks with s
    = 1, 2, 4 … C/2 rows cover all pairs of rows. No decay exceeds 1.
    """

    def __init__(self, log_decay: Tensor, size: int) -> None:
        self.log_decay, self.size = log_decay, size
        self.head, self.tail = torch.empty_like(log_decay), torch.empty_like(log_decay)
        self.total = log_decay.sum(-2, dtype=torch.float64)  # (M, N, K), a logarithm
        for chunks in self.blocks():
            for _ in self.levels(chunks):
                pass

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        scores = x.new_zeros((*x.shape[:4], self.size))
        for chunks in self.blocks():
            x_part, k_part, part = x[chunks], k[chunks], scores[chunks]
            part.diagonal(0, -2, -1).copy_((x_part * k_part[:, :, None]).sum(-1))
            for level in self.levels(chunks):
                found = level.readers(x_part) @ level.writers(k_part).mT
                level.scores(part).copy_(found.unflatten(3, (-1, level.size)))
        return scores

    def blocks(self) -> Iterator[slice]:
        """Yield slices of chunks whose tensors fit into the cache of a core."""
        chunks = self.log_decay.shape[0]
        step = max(1, BLOCK // max(1, self.log_decay[:1].numel()))
        for start in range(0, chunks, step):
            yield slice(start, min(start + step, chunks))

    def levels(self, chunks: slice) -> Iterator[_Level]:
        """Yield a `_Level` for each size of blocks, from single rows to halves of a chunk.

        When the iterator has ended, the attributes `head` and `tail` have their final values for
        these chunks.
        """
        since = exp(self.log_decay[chunks])  # powers from the start of each row's block to the row
        left, size = torch.ones_like(since), 1  # powers from after each row to its block's end
        while size < self.size:
            sinces, lefts = (x.unflatten(2, (-1, 2, size)) for x in (since, left))
            yield _Level(size, sinces[:, :, :, 1], lefts[:, :, :, 0])
            lefts[:, :, :, 0] *= sinces[:, :, :, 1, -1:]
            sinces[:, :, :, 1] *= sinces[:, :, :, 0, -1:]
            size *= 2
            for x in (since, left):
                flush_(x)
        self.head[chunks], self.tail[chunks] = since, left


class PerKeyGradients:
    def __init__(self, powers: PerKey) -> None:
        self.powers = powers
        self.head, self.tail = (torch.zeros_like(powers.log_decay) for _ in range(2))
        self.between = torch.zeros_like(powers.log_decay)
        self.total = torch.zeros_like(powers.log_decay[:, :, 0])

    def read(self, x: Tensor, dread: Tensor) -> Tensor:
        dx = dread * self.powers.head[:, :, None]
        self.head += (dx * x).sum(2)
        return dx

    def write(self, k: Tensor, dwrite: Tensor) -> Tensor:
        dk = dwrite * self.powers.tail
        self.tail += dk * k
        return dk

    def scores(
        self, x: Tensor, k: Tensor, scores: Tensor, dscores: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = dscores.diagonal(0, -2, -1)[..., None]
        dx, dk = own * k[:, :, None], (own * x).sum(2)
        for chunks in self.powers.blocks():
            x_part, k_part, dscores_part = x[chunks], k[chunks], dscores[chunks]
            dx_part, dk_part, between = dx[chunks], dk[chunks], self.between[chunks]
            for level in self.powers.levels(chunks):
                readers, writers = level.readers(x_part), level.writers(k_part)
                dblocks = level.scores(dscores_part).flatten(3, 4)
                dreaders, dwriters = dblocks @ writers, dblocks.mT @ readers
                inclusive = lower_ones(level.size, x)
                rows = readers.mul_(dreaders).unflatten(3, (-1, level.size)).sum(3)
                level.later(between).add_(inclusive.mT @ rows)
                level.earlier(between).add_(inclusive.tril(-1) @ writers.mul_(dwriters))
                dreaders = dreaders.unflatten(3, (-1, level.size)) * level.since[:, :, :, None]
                level.later(dx_part).add_(dreaders.movedim(3, 2))
                level.earlier(dk_part).add_(dwriters.mul_(level.left))
        return dx, dk

    def state(self, products: Tensor) -> None:
        self.total += products * exp(self.powers.total).to(products.dtype)

    def log_decay(self) -> Tensor:
        inclusive = lower_ones(self.powers.size, self.head)
        through = inclusive.mT @ self.head + inclusive.tril(-1) @ self.tail
        return self.between + through + self.total[:, :, None]
