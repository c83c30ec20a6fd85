"""The loss of all ranks' tokens, and gradients that are its own on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.exchange import Comm
from seqpar.torch_private import at_end_of_backward

_BUCKET = 1 << 24  # elements that are summed at once


class LossOfRanks(torch.autograd.Function):
    """The sum of all ranks' losses, the same bits on every rank; `begin` is called in backward.

    Its gradient is that of the sum, times `scale`: the ranks' number, where gradients are averaged
    over them.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, comm: Comm, scale: int, begin: Callable[[], None] | None
    ) -> Tensor:
        ctx.scale, ctx.begin = scale, begin
        parts = comm.all_gather(local.detach().reshape(1).to(comm.device), label="loss")
        return torch.stack(parts).sum().to(local.device).to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.begin is not None:
            ctx.begin()
        return gradient * ctx.scale, None, None, None


class GradientSum:
    """Gradients of parameters that each rank has whole, summed over the ranks in backward.

    A parameter's hook keeps its gradient until backward is at its end; all are then summed, in one
    order on all ranks, and added to what the parameters have.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._model, self._comm = model, comm
        self._found: dict[nn.Parameter, Tensor] = {}
        self._hooked: dict[nn.Parameter, Any] = {}
        self._collecting = False

    def begin(self) -> None:
        """Collect the gradients of the backward that runs now."""
        if not self._collecting:
            self._collecting = True
            self._found.clear()
            at_end_of_backward(self._sum)

    def prepare(self) -> None:
        """Watch all parameters that now need a gradient."""
        for x in self._model.parameters():
            if x.requires_grad and x not in self._hooked:
                self._hooked[x] = x.register_hook(self._hook_of(x))

    def remove(self) -> None:
        """Watch no parameter any more."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _hook_of(self, x: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        def keep(gradient: Tensor) -> Tensor | None:
            if not self._collecting:
                return None
            self._found[x] = gradient
            return torch.zeros_like(gradient)  # what it adds now; the sum comes at the end

        return keep

    @torch.no_grad()
    def _sum(self) -> None:
        self._collecting = False
        parameters = [x for x in self._model.parameters() if x in self._hooked]
        own = torch.tensor([x in self._found for x in parameters], dtype=torch.uint8)
        ranks = self._comm.all_gather(own.to(self._comm.device), label="gradients")
        anywhere = torch.stack(ranks).any(0).tolist()
        summed = [x for x, found in zip(parameters, anywhere, strict=True) if found]
        for bucket in _buckets(summed):
            parts = [self._found.pop(x, torch.zeros_like(x)).reshape(-1) for x in bucket]
            total = sum_of_ranks(torch.cat(parts), self._comm).split([x.numel() for x in bucket])
            for x, gradient in zip(bucket, total, strict=True):
                gradient = gradient.view_as(x)
                x.grad = gradient.clone() if x.grad is None else x.grad.add_(gradient)
        self._found.clear()


def sum_of_ranks(x: Tensor, comm: Comm) -> Tensor:
    """Return the sum of all ranks' (N,), in rank order and in fp32 at least.

    Each rank sums a part and sends it to all, so it sends 2·(P − 1)/P·N elements.
    """
    parts = [part.contiguous() for part in x.tensor_split(comm.size)]
    call = comm.call()
    call.join(x.device)
    own = parts[comm.rank]
    others = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]
    sends = [(peer, parts[peer]) for peer in comm.peers]
    recvs = [(peer, others[peer]) for peer in comm.peers]
    call.exchange(sends, recvs, label="gradients").wait()
    wide = torch.promote_types(x.dtype, torch.float32)
    total = others[0].to(wide)
    for other in others[1:]:
        total = total + other
    parts[comm.rank] = total.to(x.dtype)
    sends = [(peer, parts[comm.rank]) for peer in comm.peers]
    recvs = [(peer, parts[peer]) for peer in comm.peers]
    call.exchange(sends, recvs, label="gradients", step=1).wait()
    return torch.cat(parts)


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in groups of one dtype and device, of some size at most."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for x in parameters:
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (x.dtype, x.device)
        if not alike or size + x.numel() > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(x)
        size += x.numel()
    return buckets
