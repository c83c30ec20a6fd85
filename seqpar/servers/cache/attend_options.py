"""The options of `ServerCache.attend`, which computes one layer of a decoding step."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor

from seqpar.attention.backend import DEFAULT, current_backend
from seqpar.attention.operands import OperandShape
from seqpar.core.arguments import WindowSize, as_bool, as_float, parse_window
from seqpar.core.dtypes import DTYPES
from seqpar.core.ranges import UNLIMITED
from seqpar.servers.wire.limits import MAX_HEADS
from seqpar.softmax.compute.call_options import CallOptions, parse_softcap


class AttendKeywords(TypedDict, total=False):
    causal: bool
    window_size: WindowSize
    softmax_scale: float | Tensor | None
    softcap: float | None
    sinks: Tensor | None
    return_lse: bool


class AttendOptions(NamedTuple):
    # The window: a query attends to this many keys on the left and on the right of its position.
    bounds: tuple[int, int]
    scores: CallOptions  # the scale and the softcap of the scores
    sinks: Tensor | None  # (Hq,)
    return_lse: bool

    @classmethod
    def of(
        cls,
        shape: OperandShape,
        *,
        causal: bool,
        window_size: WindowSize,
        softmax_scale: float | Tensor | None,
        softcap: float | None,
        sinks: Tensor | None,
        return_lse: bool,
    ) -> AttendOptions:
        """Return the checked options, or raise a ValueError that names a wrong option.

        `shape` is the shape of q, k and v.
        """
        heads = shape.heads
        if heads > MAX_HEADS:
            raise ValueError(f"q must have at most {MAX_HEADS} heads on servers, got {heads}")
        if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in DTYPES):
            given = f"{tuple(sinks.shape)} of {sinks.dtype}"
            raise ValueError(f"sinks must be ({heads},) floats, one per query head, got {given}")
        if (backend := current_backend("softmax")) != DEFAULT:
            given = f"use_backend({backend!r})"
            why = "each server chooses its backend; make the call outside of use_backend"
            raise ValueError(f"backend must be {DEFAULT!r}, got {given}: {why}")
        scale = shape.dim**-0.5 if softmax_scale is None else softmax_scale
        numbers = as_float("softmax_scale", scale), parse_softcap("softcap", softcap)
        scores = CallOptions(*numbers, DEFAULT, deterministic=True)
        scores.check(shape.dtype)
        left, right = (UNLIMITED if x == -1 else x for x in parse_window(window_size))
        bounds = left, 0 if as_bool("causal", causal) else right
        return cls(bounds, scores, sinks, as_bool("return_lse", return_lse))
