"""Parameters of a linear attention call: what it says besides its tensors, checked before anything is sent."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar import linear
from seqpar.attend import accumulator_dtype
from seqpar.comm import Comm
from seqpar.geometry import Geometry
from seqpar.linear import Recurrence
from seqpar.strategies.call import check_layouts, check_operands, naming_rank
from seqpar.strategies.states import Plan

_MANY = 4  # spans of a document on a rank, above which their states must not outweigh their tokens


class Parameters(NamedTuple):
    """The operators' arguments that are not data, as their schema has them: the tail of `SCHEMA`."""

    layout: Tensor
    entering: int  # how many states enter this rank's spans
    documents: int
    engine: str
    backend: str
    causal: bool
    scale: float
    return_state: bool

    def shared(self, log_decay: Tensor | None, initial: Tensor | None) -> dict[str, Any]:
        """What all ranks must agree on, by the names that users know."""
        return {
            "layout": Geometry.of(self.layout).digest[:16],
            "causal": self.causal,
            "scale": self.scale,
            "log_decay": None if log_decay is None else log_decay.tolist(),
            "initial_state": initial is not None,
            "return_state": self.return_state,
            "backend": self.backend,
        }

    def work(self, begun: bool, log_decay: Tensor | None, device: torch.device) -> tuple[Plan, Recurrence]:
        plan = Plan.of(Geometry.of(self.layout), self.causal, self.return_state, begun)
        decay = None if log_decay is None else log_decay.to(device, torch.float64)
        return plan, Recurrence(self.scale, self.causal, self.backend, decay)


SCHEMA = (
    "Tensor layout, SymInt entering, SymInt documents, str engine, str backend, bool causal, float scale, bool return_state"
)


def check(
    comm: Comm, parameters: Parameters, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None
) -> tuple[Plan, Recurrence]:
    """What the strategy works from, or a ValueError naming the argument, its value, what was expected and the rank."""
    layout = Geometry.of(parameters.layout)
    with naming_rank(comm):
        check_layouts(comm, layout=layout)
        tokens = layout.holdings[comm.rank].tokens
        check_operands(q, k, v, tokens, tokens)
        _check_numbers(parameters, q, k, v, log_decay, initial, layout)
        if parameters.causal:
            _check_spans(layout, q, v)
        if parameters.backend not in linear.BACKENDS:
            raise ValueError(f"backend must be one of {sorted(linear.BACKENDS)}, got {parameters.backend!r}")
        reason = getattr(linear.backend(parameters.backend), "refusal", lambda q, k, v: None)(q, k, v)
        if reason:
            raise ValueError(reason)
    return parameters.work(initial is not None, log_decay, q.device)


def _check_numbers(
    parameters: Parameters, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, layout: Geometry
) -> None:
    heads, exact = k.shape[2], accumulator_dtype(q.dtype)
    if not math.isfinite(parameters.scale):
        raise ValueError(f"scale must be finite, got {parameters.scale}")
    if log_decay is not None:
        if not parameters.causal:
            raise ValueError("log_decay must be None with causal=False, where no token is before another")
        if tuple(log_decay.shape) != (heads,) or log_decay.dtype not in (torch.float32, torch.float64):
            found = f"{tuple(log_decay.shape)} of {log_decay.dtype}"
            raise ValueError(f"log_decay must be ({heads},), one a KV head, in fp32 or fp64, got {found}")
        if not bool(((log_decay <= 0) & log_decay.isfinite()).all()):
            raise ValueError(f"log_decay must be finite and at most 0, got {log_decay.tolist()}")
    if initial is not None:
        expected = (layout.lengths.size, q.shape[0], heads, q.shape[3], v.shape[3])
        if tuple(initial.shape) != expected or initial.dtype != exact or initial.device != q.device:
            found = f"{tuple(initial.shape)} of {initial.dtype} on {initial.device}"
            wanted = f"{expected} (documents, B, Hkv, D, Dv) of {exact} on {q.device}"
            raise ValueError(f"initial_state must be {wanted}, got {found}")


def _check_spans(layout: Geometry, q: Tensor, v: Tensor) -> None:
    """Refuse stripes whose states outweigh their tokens."""
    dim, value_dim = q.shape[3], v.shape[3]
    least = dim * value_dim * accumulator_dtype(q.dtype).itemsize / ((dim + value_dim) * q.element_size())
    for rank, held in enumerate(layout.holdings):
        document, first, stop = held.runs
        count, tokens = stop - first, held.offsets[stop] - held.offsets[first]
        short = np.flatnonzero((count > _MANY) & (tokens < least * count))
        if short.size:
            i = int(short[0])
            raise ValueError(
                f"layout must have spans of at least {math.ceil(least)} tokens, shorter than which states outweigh tokens, "
                f"got {count[i]} of {tokens[i] / count[i]:.4g} on average in document {document[i]} on rank {rank}"
            )
