"""A request for attention that any process can compute, and the error if none computes it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import check_tensor
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient


@dataclass(frozen=True, eq=False)
class Request:
    """A request for attention of query rows over key rows, or for its backward pass.

    A request for a backward pass contains all tensors that the backward pass needs. The request can
    therefore be sent to any server, and not only to the server that computed the forward pass.
    """

    q: Tensor  # (B, Tq, Hq, D)
    k: Tensor  # (B, Tk, Hkv, D)
    v: Tensor  # (B, Tk, Hkv, Dv)
    slices: Slices  # the mask, as rectangles of query rows and key rows
    options: CallOptions  # the scale, the softcap, the backend and whether to be deterministic
    # Whether the forward pass returns out in fp32 (fp64 for fp64), so that the caller can merge
    # several partial results. Otherwise out has q's dtype.
    exact_out: bool = False
    # None for a forward pass. For a backward pass: dout, lse, delta and dlse of the query rows. The
    # field `out` of this object is not sent.
    output: OutputGradient | None = None

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            check_tensor(name, x, self.q.device if isinstance(self.q, Tensor) else None)
            if x.dim() != 4:
                raise ValueError(f"{name} must be (B, T, H, D), got {tuple(x.shape)}")
        if self.q.dtype not in DTYPES or {self.k.dtype, self.v.dtype} != {self.q.dtype}:
            found = f"{self.q.dtype}, {self.k.dtype} and {self.v.dtype}"
            raise ValueError(f"q, k and v must be floats of one dtype, got {found}")
        batch, _, heads, dim = self.q.shape
        kv_batch, keys, kv_heads, kv_dim = self.k.shape
        if (kv_batch, kv_dim) != (batch, dim) or kv_heads < 1 or heads % kv_heads:
            found = f"{tuple(self.q.shape)} and {tuple(self.k.shape)}"
            expected = "q's batch size and head dim, and a number of heads that divides q's"
            raise ValueError(f"k must have {expected}, got q and k {found}")
        if self.v.shape[:3] != self.k.shape[:3]:
            found = f"{tuple(self.k.shape)} and {tuple(self.v.shape)}"
            raise ValueError(f"v must have k's batch size, rows and heads, got k and v {found}")
        rows = self.slices.query_rows, self.slices.key_rows
        if rows != (self.q.shape[1], keys):
            expected = f"{self.q.shape[1]} query positions and {keys} key positions, one per row"
            raise ValueError(f"slices must have {expected}, got {rows[0]} and {rows[1]}")
        for name, default in CallOptions._field_defaults.items():
            given = getattr(self.options, name)
            if given is not default and (isinstance(given, Tensor) or given != default):
                reason = f"a request to a server cannot have {name}; use a process group"
                raise ValueError(f"options.{name} must be {default!r}: {reason}")
        if self.output is not None:
            self._check_output(self.output)

    def _check_output(self, output: OutputGradient) -> None:
        rows, exact = self.q.shape[:3], accumulator_dtype(self.q.dtype)
        expected = {
            "dout": (output.dout, (*rows, self.v.shape[-1]), self.q.dtype),
            "lse": (output.lse, rows, exact),
            "delta": (output.ensure_delta(), rows, exact),
        }
        if output.dlse is not None:
            expected["dlse"] = (output.dlse, rows, exact)
        for name, (x, shape, dtype) in expected.items():
            check_tensor(f"output.{name}", x, self.q.device)
            if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
                found = f"{tuple(x.shape)} of {x.dtype}"
                raise ValueError(f"output.{name} must be {tuple(shape)} of {dtype}, got {found}")

    @property
    def operation(self) -> Literal["forward", "backward"]:
        return "forward" if self.output is None else "backward"

    @property
    def nbytes(self) -> int:
        """The number of bytes of tensors that are sent to a server."""
        return sum(x.nbytes for x in self.tensors())

    @cached_property
    def work(self) -> int:
        """The cost of the request, by which the pool balances servers.

        The cost is the product of the number of (query, key) pairs, the batch size, the number of
        query heads and D + Dv. The cost of a backward pass is twice this product.
        """
        dims = self.q.shape[-1] + self.v.shape[-1]
        passes = 1 if self.output is None else 2
        return self.slices.area * self.q.shape[0] * self.q.shape[2] * dims * passes

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the task in the order in which they are sent.

        Three tables come first: an int64 table (n, 6) of slices, the int32 positions of queries,
        and the int32 positions of keys. A slice is a range of query rows, a range of key rows, and
        two limits of the difference between the positions of a key and a query.
        """
        tensors = [*self.slices.derived("tables", self._tables), self.q, self.k, self.v]
        if self.output is not None:
            tensors += [self.output.dout, self.output.lse, self.output.ensure_delta()]
            tensors += [] if self.output.dlse is None else [self.output.dlse]
        return tensors

    def _tables(self) -> list[Tensor]:
        slices = self.slices
        table = np.concatenate([slices.q_rows, slices.k_rows, slices.bands], axis=1)
        arrays = (table.astype(np.int64), slices.q_positions, slices.k_positions)
        return [torch.from_numpy(np.array(array, order="C")) for array in arrays]


class ServersError(RuntimeError):
    """A task has no result: no server computed it in time, or its pool cannot be used.

    A pool cannot be used if it was closed, has failed, or was made before a fork.
    """


def received(answer: Future[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Wait for a result, and make the result usable in the caller's CUDA stream.

    The pool's thread has allocated the result in a different stream. `record_stream` keeps the
    result's memory from being reused while the caller's stream still reads it.
    """
    result = answer.result()
    for x in result:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
    return result
