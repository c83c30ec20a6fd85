"""The arguments of a call of linear attention, and the resolved call that strategies read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.call_arguments import Carried, Count, Option
from seqpar.attention.operands import OperandShape, check_ranks_of
from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import Ints, as_bool, as_float
from seqpar.core.device_tables import kept_on
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.layout.geometry import Geometry
from seqpar.linear.attend import Options
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import StateRoutes

T = TypeVar("T")

# A rank may have this number of spans of a document without further checks. With more spans, a call
# is refused if the states or maps of the spans have more bytes than their keys and values.
_MANY_SPANS = 4


class LinearArguments(NamedTuple):
    """The arguments of a call, except its input tensors, in the form that torch's operator takes.

    The module checks the types of the arguments before it calls the operator.
    `LinearStrategy.resolve` checks the values.
    """

    # Stands for a layout (`seqpar.layout.handle`). All other arguments can be hashed.
    layout: Tensor
    states_in: Count  # the number of states that enter this rank's spans
    documents: Count
    strategy: str  # the key of a BoundStrategy
    backend: str
    causal: Annotated[bool, Option(as_bool, True)]
    scale: Annotated[float, Option(as_float, 1.0)]
    return_state: Annotated[bool, Option(as_bool, False)]


CARRIED: Carried[LinearArguments] = Carried(LinearArguments)


class InputForm(NamedTuple):
    """The properties of a call's tensors that must be the same on all ranks."""

    shape: OperandShape
    value_heads: int
    log_decay: tuple[int, str] | None  # the number of dimensions, and the dtype
    beta: tuple[int, str] | None

    @classmethod
    def of(cls, inputs: Inputs) -> InputForm:
        q, k, v, *gates = inputs
        log_decay, beta = (None if x is None else (x.dim(), str(x.dtype)) for x in gates)
        return cls(OperandShape.of(q, k, v), v.shape[2], log_decay, beta)

    def described(self) -> dict[str, object]:
        return {
            **self.shape.described(),
            "heads of v": self.value_heads,
            "log_decay": self.log_decay,
            "beta": self.beta,
        }


@dataclass(frozen=True)
class LinearCall:
    """A call whose arguments were all checked, in the form that strategies and exchanges read.

    In `shape`, kv_heads is H, dim is K and value_dim is V.
    """

    rank: int  # this process's rank in the group of the call
    layout: Geometry
    routes: StateRoutes
    shape: OperandShape
    form: InputForm
    options: Options[Any]

    @property
    def ranks(self) -> int:
        return self.routes.ranks

    @property
    def kept(self) -> Memo:
        """A memo, stored in the layout, that all calls with the same routes share."""
        return self.routes.derived

    @property
    def variant(self) -> tuple[Hashable, ...]:
        """What the tables of the call depend on besides the layout: the rank, the shape of the
        operands, and the backend.
        """
        return self.rank, self.shape, self.options.backend

    def once_on(self, device: torch.device, key: tuple[Hashable, ...], build: Callable[[], T]) -> T:
        """Return the result of `build`, with its tables on a device.

        `build` is called once for all calls that differ only in their tensors, and the layout
        stores the result. The result must not refer to the layout or to the call, because this
        cycle of references would keep both in memory.
        """
        return kept_on(device, self.kept, (*key, self.rank, self.shape), build)

    @property
    def state_bytes(self) -> int:
        """The bytes of a state: B·H·K·V·4, or B·H·K·V·8 for fp64."""
        s = self.shape
        return s.batch * s.kv_heads * s.dim * s.value_dim * accumulator_dtype(s.dtype).itemsize


def shape_of(inputs: Inputs) -> OperandShape:
    """Return the shape of the operands. Its kv_heads is the number of states."""
    return OperandShape.of(*inputs[:3])._replace(kv_heads=inputs.heads)


def batch_second(initial_state: Tensor, batched: bool, dims: str) -> Tensor:
    """Return initial states with the batch as their second dimension, (documents, B, …). Raise a
    ValueError if the number of dimensions is wrong.

    `dims` names the last dimensions in errors, such as "Hkv, D, Dv".
    """
    if initial_state.dim() != 4 + batched:
        expected = f"({'B, ' * batched}documents, {dims})"
        raise ValueError(f"initial_state must be {expected}, got {tuple(initial_state.shape)}")
    return initial_state.transpose(0, 1) if batched else initial_state[:, None]


def returned(
    out: Tensor, states: Tensor | None, batched: bool, heads: HeadPlacement
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out and the final states, if there are any, in the form that the user receives.

    If the operands have a batch dimension, it becomes the first dimension of the final states.
    """
    out = heads.restore(out if batched else out[0], -2)
    if states is None:
        return out
    return out, heads.restore(states.transpose(0, 1) if batched else states[:, 0], -3)


def check_initial_state(
    layout: Geometry, shape: OperandShape, initial: Tensor | None, dims: str
) -> None:
    """Raise an error unless the initial states have the right shape, dtype and device for the call.

    `dims` names the last dimensions in errors, such as "Hkv, D, Dv".
    """
    if initial is None:
        return
    documents, dtype = layout.lengths.size, accumulator_dtype(shape.dtype)
    expected = documents, shape.batch, shape.kv_heads, shape.dim, shape.value_dim
    if tuple(initial.shape) != expected or initial.dtype != dtype:
        found = f"{tuple(initial.shape)} of {initial.dtype}"
        wanted = f"{expected} (documents, B, {dims}) of {dtype}"
        raise ValueError(f"initial_state must be {wanted}, got {found}")


def check_settings(comm: Comm, layout: Geometry, scale: float, dtype: torch.dtype) -> None:
    check_ranks_of(comm, layout=layout)
    if layout.cut.most_documents:
        reason = "what linear attention sends depends on the documents"
        raise ValueError(f"layout must have no most_documents: {reason}")
    largest = torch.finfo(accumulator_dtype(dtype)).max
    if not abs(scale) <= largest:
        raise ValueError(f"scale must be finite, at most {largest:.3g}, got {scale}")


def check_spans(layout: Geometry, shape: OperandShape, elements: int, what: str) -> None:
    """Raise a ValueError on all ranks if the layout has too many short spans.

    A *span* is a range of consecutive tokens of a document on one rank. A layout is refused if a
    rank has more than `_MANY_SPANS` spans of a document, and if the states or maps that are sent
    for these spans have more bytes than their keys and values. A state or map has `elements`
    numbers per head, in the accumulator's dtype. In the error, `what` names these numbers.
    """
    sizes = shape.dim, shape.value_dim, shape.dtype, elements
    why = layout.derived(("short spans", sizes), lambda: _short(layout, shape, elements, what))
    if why is not None:
        raise ValueError(why)


def _short(layout: Geometry, shape: OperandShape, elements: int, what: str) -> str | None:
    size = elements * accumulator_dtype(shape.dtype).itemsize
    least = size / ((shape.dim + shape.value_dim) * shape.dtype.itemsize)
    fine = layout.derived(("runs of many spans",), lambda: _runs_of_many_spans(layout))
    short = np.flatnonzero(fine[3] < least * fine[2])
    if not short.size:
        return None
    rank, document, count, tokens = fine[:, short[0]].tolist()
    where = f"in document {document} on rank {rank}"
    return (
        f"layout must have spans of at least {math.ceil(least)} tokens on average, or at most "
        f"{_MANY_SPANS} spans of a document on a rank, got {count} spans of {tokens / count:.4g} "
        f"tokens {where}: {what} of shorter spans have more bytes than k and v"
    )


def _runs_of_many_spans(layout: Geometry) -> Ints:
    """Return the documents of which a rank has more than `_MANY_SPANS` spans.

    A *span* is a range of consecutive tokens of a document on one rank. The result is an array (4,
    n) of the rank, the document, and the numbers of its spans and tokens on this rank.
    """
    most, tables = layout.cut.most_spans, [np.empty((4, 0), np.int64)]
    for rank, held in enumerate(layout.holdings if most is None or most > _MANY_SPANS else ()):
        documents, first, stop = held.runs
        tokens = held.offsets[stop] - held.offsets[first]
        table = np.stack([np.full_like(documents, rank), documents, stop - first, tokens])
        tables.append(table[:, table[2] > _MANY_SPANS])
    return np.concatenate(tables, axis=1)
