"""The rank check: all ranks make the same call, or all raise the same error, instead of hanging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqpar.comm import Comm

C = TypeVar("C")


def agree(comm: Comm, strategy: object, check: Callable[[], C], shared: dict[str, Any]) -> C:
    """`check` the call here and on all ranks, and that what they must share is the same everywhere.

    `shared` has that, by the names that users know. Sends 32 bytes to each peer; where they differ, the arguments as text, and
    all ranks raise the same ValueError. It runs at every call: a rank that skipped it because it knew the call already would
    leave another, called differently, waiting.
    """
    call = fault = None
    try:
        call = check()
    except ValueError as error:
        fault = str(error)
    mine = json.dumps({"fault": fault, "strategy": str(strategy), "group size": comm.size, **shared})
    comm.doing = f"{strategy} rank check"
    digests = comm.all_gather(torch.tensor(list(hashlib.sha256(mine.encode()).digest()), dtype=torch.uint8, device=comm.device))
    if any(not torch.equal(digest, digests[0]) for digest in digests):
        _explain([json.loads(text) for text in comm.all_gather_text(mine)])
    if call is None:
        raise ValueError(fault)
    return call


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What ranks share of q, k and v (B, T, H, D)."""
    return {
        "dtype": str(q.dtype),
        "batch size": q.shape[0],
        "heads of q": q.shape[2],
        "heads of k": k.shape[2],
        "head dim of q": q.shape[3],
        "head dim of v": v.shape[3],
    }


def _explain(ranks: list[dict[str, Any]]) -> None:
    """Raise the error that all ranks raise, given what each of them was called with."""
    for theirs in ranks:
        if theirs["fault"]:
            raise ValueError(theirs["fault"])
    for name in ranks[0]:
        values = [theirs[name] for theirs in ranks]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on all ranks: {listed}")
