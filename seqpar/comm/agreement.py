"""The rank check: all ranks make the same call, or all raise the same error, instead of hanging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm

C = TypeVar("C")
Described = dict[str, object]  # a call's arguments by the names that users know, as JSON has them


class Fault(NamedTuple):
    """The error with which a rank refuses a call: a TypeError or a ValueError."""

    is_type_error: bool
    text: str

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Return an error's fault, which keeps no tensor alive, unlike the error."""
        return cls(isinstance(error, TypeError), str(error))

    def described(self) -> Described:
        return {"is a TypeError": self.is_type_error, "text": self.text}


def check_on_all_ranks(
    comm: Comm, strategy: object, resolve: Callable[[], C], shared: Callable[[bool], Described]
) -> C:
    """Return `resolve()`, this rank's resolved call, if all ranks make the same call.

    Otherwise raise on all of them; see `compare_calls`.
    """
    call = fault = None
    try:
        call = resolve()
    except (ValueError, TypeError) as error:
        fault = Fault.of(error)
    compare_calls(comm, strategy, fault, shared)
    return cast(C, call)


def compare_calls(
    comm: Comm, strategy: object, fault: Fault | None, shared: Callable[[bool], Described]
) -> None:
    """Raise the same error on all ranks unless they make the same call and none has a fault.

    `shared(True)` has what must be the same everywhere, by the names that users know. This sends a
    digest of 32 bytes to each peer, of `shared(False)`, which costs less and may differ for equal
    arguments. Where digests differ, ranks also send the arguments as text. If these differ too, all
    raise the same ValueError, or the TypeError with which one of them refuses the call. It must run
    at every call: a rank that skipped it, because it had checked the same call before, would leave
    a rank that is called differently waiting.
    """
    described = None if fault is None else fault.described()
    first: Described = {"fault": described}
    last: Described = {"strategy": str(strategy), "group size": comm.size}
    label = "rank check"  # the strategies may differ
    digest = list(hashlib.sha256(json.dumps(first | shared(False) | last).encode()).digest())
    tensor = torch.tensor(digest, dtype=torch.uint8, device=comm.device)
    digests = comm.all_gather(tensor, label=label)
    if any(not torch.equal(other, digests[0]) for other in digests):
        text = json.dumps(first | shared(True) | last)
        _explain([json.loads(of_rank) for of_rank in comm.all_gather_text(text, label=label)])
    if described is not None:
        _raise(described)


def check_same_weights(comm: Comm, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a ValueError that names the first tensor in which ranks differ, on all of them.

    Each rank reads its tensors once and sends 64 bits of each. Tensors that one rank does not have,
    because they are on the meta device there, are not compared.
    """
    if comm.size == 1:
        return
    named = [(name, x) for name, x in weights if type(x) in (Tensor, torch.nn.Parameter)]
    digests = [_digest(x).to(comm.device) for _, x in named]
    numbers = torch.stack(digests).tolist() if digests else []
    own = {
        name: [str(x.dtype), list(x.shape), number]
        for (name, x), number in zip(named, numbers, strict=True)
    }
    texts = comm.all_gather_text(json.dumps(own), label="weights")
    ranks = [json.loads(text) for text in texts]
    for name in ranks[0]:
        values = [described.get(name) for described in ranks]
        if None not in values and any(value != values[0] for value in values):
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            reason = f"{name} is not the same on rank {other} as on rank 0"
            raise ValueError(f"model must have the same weights on all ranks: {reason}")


@torch.no_grad()
def _digest(x: Tensor) -> Tensor:
    """Return (), int64, which tells tensors apart by their bits; it is computed on their device."""
    x = torch.view_as_real(x) if x.is_complex() else x
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.contiguous().view(-1).view(kind)
    rows = bits[: bits.numel() // 1024 * 1024].view(-1, 1024)
    sums = [
        rows.sum(0, dtype=torch.int64),
        rows.sum(1, dtype=torch.int64),
        bits[rows.numel() :].to(torch.int64),
    ]
    flat = torch.cat(sums)
    weights = torch.arange(1, 2 * flat.numel(), 2, device=x.device) * 6364136223846793005
    return (flat * weights).sum()


def _explain(ranks: list[dict[str, Any]]) -> None:
    """Raise the error that all ranks raise, if they were not all called with the same."""
    for described in ranks:
        if described["fault"]:
            _raise(described["fault"])
    for name in ranks[0]:
        values = [described.get(name) for described in ranks]  # strategies may say other things
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on all ranks: {listed}")


def _raise(fault: dict[str, Any]) -> NoReturn:
    """Raise the error of a rank's arguments."""
    raise (TypeError if fault["is a TypeError"] else ValueError)(fault["text"])
