"""The rank check: all ranks make the same call, or all raise the same error, instead of hanging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch

from seqpar.comm.exchange import Comm

C = TypeVar("C")


def check_on_all_ranks(
    comm: Comm, strategy: object, resolve: Callable[[], C], shared: Callable[[bool], dict[str, Any]]
) -> C:
    """Return `resolve()`, this rank's resolved call, if all ranks make the same call.

    `shared(True)` has what must be the same everywhere, by the names that users know. This sends a
    digest of 32 bytes to each peer, of `shared(False)`, which costs less and may differ for equal
    arguments. Where digests differ, ranks also send the arguments as text. If these differ too, all
    raise the same ValueError, or the TypeError that `resolve` raised on one of them. It must run at
    every call: a rank that skipped it, because it had checked the same call before, would leave a
    rank that is called differently waiting.
    """
    call = fault = None
    try:
        call = resolve()
    except (ValueError, TypeError) as error:
        fault = {"is a TypeError": isinstance(error, TypeError), "text": str(error)}
    first = {"fault": fault}
    last = {"strategy": str(strategy), "group size": comm.size}
    label = "rank check"  # the strategies may differ
    digest = list(hashlib.sha256(json.dumps(first | shared(False) | last).encode()).digest())
    tensor = torch.tensor(digest, dtype=torch.uint8, device=comm.device)
    digests = comm.all_gather(tensor, label=label)
    if any(not torch.equal(other, digests[0]) for other in digests):
        text = json.dumps(first | shared(True) | last)
        _explain([json.loads(of_rank) for of_rank in comm.all_gather_text(text, label=label)])
    if fault is not None:
        _raise(fault)
    return cast(C, call)


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
