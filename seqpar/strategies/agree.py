"""The rank check: all ranks make the same call, or all raise the same error, instead of hanging."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.geometry import Geometry
from seqpar.strategies.call import Call, Parameters, check


def agree(comm: Comm, strategy: object, parameters: Parameters, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Call:
    """`check` the call here and on all ranks, and that what they must share is the same everywhere.

    Sends 32 bytes to each peer; where they differ, the arguments as text, and all ranks raise the same ValueError. It runs
    at every call: a rank that skipped it because it knew the call already would leave another, called differently, waiting.
    """
    call = fault = None
    try:
        call = check(comm, parameters, q, k, v, sinks)
    except ValueError as error:
        fault = str(error)
    mine = json.dumps({"fault": fault, **_shared(comm, strategy, parameters, q, k, v, sinks)})
    comm.doing = f"{strategy} rank check"
    digests = comm.all_gather(torch.tensor(list(hashlib.sha256(mine.encode()).digest()), dtype=torch.uint8, device=comm.device))
    if any(not torch.equal(digest, digests[0]) for digest in digests):
        _explain([json.loads(text) for text in comm.all_gather_text(mine)])
    if call is None:
        raise ValueError(fault)
    return call


def _shared(
    comm: Comm, strategy: object, parameters: Parameters, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> dict[str, Any]:
    """What all ranks must agree on, by the names that users know."""
    return {
        "strategy": str(strategy),
        "group size": comm.size,
        "dtype": str(q.dtype),
        "batch size": q.shape[0],
        "heads of q": q.shape[2],
        "heads of k": k.shape[2],
        "head dim of q": q.shape[3],
        "head dim of v": v.shape[3],
        "layout": Geometry.of(parameters.layout).digest[:16],
        "kv_layout": Geometry.of(parameters.kv_layout).digest[:16],
        "causal": parameters.causal,
        "window_size": [parameters.left, parameters.right],
        "prefix_lens": None if parameters.prefix_lens is None else parameters.prefix_lens.tolist(),
        "softmax_scale": parameters.scale,
        "softcap": parameters.softcap,
        "backend": parameters.backend,
        "sinks": sinks is not None,
        "return_lse": parameters.return_lse,
        "deterministic": parameters.deterministic,
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
