"""Mesh attention: queries travel within rows of ranks, keys and values within columns.

This strategy runs the loop `token_ring` of docs/internals/in_300_lines.md within each row of a mesh
of ranks, over the keys that the loop `ring` brings within each column.

A rank receives C − 1 blocks of queries and R − 1 blocks of keys, where Ring receives P − 1 blocks
of keys. One row is TokenRing; one column has the traffic of Ring. Unlike in the paper, only
necessary rows travel, directly to the rank that needs them, and some local work hides the last
results.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch

from seqpar.attention.module import NO_OPTION, make_strategy
from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import Deterministic, Ints, as_bool, as_int, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.module import COMMON_OPTIONS, Attention
from seqpar.softmax.queries.tile_strategy import TileStrategy, partial_bytes
from seqpar.softmax.wire.message_dtypes import check_digits, check_message_dtype, encoded_width
from seqpar.strategies.registry import register

MAX_COUNT = 2**16  # of ranks, heads and dims: their products fit into 64 bits


@dataclass(frozen=True)
class Mesh(TileStrategy):
    """Queries travel within a row of ranks, keys and values within a column."""

    name = "mesh"
    message_dtype: torch.dtype | None = None  # of keys and values: None (their own) or 8 bits
    columns: int = field(default=0, metadata=NO_OPTION)  # 0: fewest bytes, for each call

    def __post_init__(self) -> None:
        super().__post_init__()
        check_message_dtype(self.message_dtype)

    def check(self, call: ResolvedCall) -> None:
        super().check(call)
        check_digits(self.message_dtype, call.shape.dtype)

    @property
    def keys_dtype(self) -> torch.dtype | None:
        return self.message_dtype

    def columns_of(self, call: ResolvedCall) -> int:
        if self.columns:
            return self.columns
        causal = call.mask.ranges is None and call.mask.right == 0
        dtypes = self.partial_dtype, self.message_dtype, self.gradient_dtype
        sizes = row_bytes(call.shape, *dtypes)
        return _best(call.ranks, sizes, causal)[1]


@register
class MeshAttention(Attention):
    """Softmax attention on a 2-D mesh whose ranks compute tiles of queries and keys.

    The mesh has R rows of C ranks. One layout covers all ranks in row-major order: rank r·C + c is
    at (r, c) in the mesh. A rank computes the queries of its row with the keys of its column. See
    `Attention` for the call, which all strategies share.

    With zigzag under a causal mask, all tiles have the same work. A contiguous layout makes tiles
    as uneven as the work of Ring. `mask_area` returns the work of a rank for any layout and mask.

    Args:
        mesh: a 2-D DeviceMesh. `seqpar.best_mesh` returns the shape that sends least. If it is a
            part of a larger mesh, all ranks of the larger mesh must make the first module on it, at
            the same point of their programs: it makes a group.
        check_ranks, deterministic, routing: as in `Attention`. `deterministic="ranks"` is refused.
        partial_dtype: the dtype of travelling partial outputs, as in `TokenRingAttention`. By
            default it adds no error: it is the accumulator's on meshes with several rows.
        message_dtype: the dtype of travelling keys and values, as in `RingAttention`; by default
            their own.
        gradient_dtype: the dtype of travelling contributions to dq, dk and dv, as in
            `RingAttention` and `TokenRingAttention`. By default dk and dv travel in the
            accumulator's dtype, and so does dq on meshes with several rows.

    A rank posts all exchanges of its column's keys first, and computes its own queries with them as
    they arrive; these keys stay. Queries of the other ranks of the row then arrive one rank at a
    time, while the previous results leave in the other direction of the links. Some local work at
    the end hides the last results, and in backward the departure of dk and dv. Owners merge results
    and add gradients in fp32 in the order of the steps.

    Bytes sent by rank r, with m(r, s) its query rows that attend to a key of the column of s, n(r,
    s) its key rows that a query of the row of s attends to, b the bytes of an element, w those of a
    partial output, d those of a contribution to dq, and e = 4 (8 for fp64). If no dtype is given, w
    and d are e; on a mesh with one row they are as in `TokenRingAttention`. Sums are over the other
    ranks p of its row and o of its column. `traffic` returns these numbers.

    * forward: queries Σ m(r, p)·B·Hq·D·b, results Σ m(p, r)·B·Hq·(Dv·w + e), keys and values Σ n(r,
      o)·B·Hkv·(D + Dv)·b;
    * backward: queries Σ m(r, p)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), results Σ m(p,
      r)·B·Hq·D·d, keys and values as in forward, and their gradients Σ n(o, r)·B·Hkv·(D + Dv)·e.

    Messages: one to each rank of the column with keys and values, in backward another one with
    their gradients; to each rank of the row, as in `TokenRingAttention`.

    Memory in addition to inputs and results, for T local rows that all travel, with g groups of
    heads and c as in `TokenRingAttention`: the same for queries and results, and

    * forward: R − 1 blocks of keys, B·T·Hkv·(D + Dv)·b each, and this rank's keys, packed, while
      they leave;
    * backward: the same, their fp32 gradients, 2·(R − 1)·B·T·Hkv·(D + Dv)·4, half of which arrive
      for this rank's keys, and dk and dv.

    Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved
    Data Locality" (2025), section 3.
    """

    strategy = Mesh
    dimensions = 2

    def __init__(
        self,
        mesh: Group,
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        routing: Routing | None = None,
        **options: object,
    ) -> None:
        comm = Comm.of(mesh)
        strategy = make_strategy(Mesh, options, COMMON_OPTIONS, self.forward)
        strategy = replace(strategy, columns=comm.shape[-1])
        self._bind(strategy, comm, check_ranks, deterministic, routing)


@outside_graphs
def best_mesh(
    ranks: int,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int = 128,
    value_dim: int | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    partial_dtype: torch.dtype | None = None,
    message_dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
    backward: bool = True,
) -> tuple[int, int]:
    """Return the shape (rows, columns) of the mesh on which `MeshAttention` sends least.

    The best shape minimises the bytes of the rank that sends most, in a call and its backward, over
    one long document in a zigzag layout. Ties go to fewer columns. All shapes are tried. With Hkv =
    Hq the shape is about square. With G query heads per KV head it has fewer columns, about √(P/G).
    If the result is (P, 1), use Ring: it sends no more and holds fewer keys.

    Args:
        ranks: P, the number of ranks.
        q_heads, kv_heads: Hq and Hkv.
        head_dim: D, the head dim of q and k.
        value_dim: Dv, the head dim of v; by default D.
        causal: True for a causal mask, False for a full mask.
        dtype: the dtype of q, k and v.
        partial_dtype, message_dtype, gradient_dtype: as in `MeshAttention`. If partial_dtype or
            gradient_dtype is None, results are counted in the accumulator's dtype, even for one
            row.
        backward: whether to count backward in addition to forward.

    Raises:
        ValueError: an argument is wrong; the message names it. Nothing is sent.
    """
    ranks = as_int("ranks", ranks, 1, MAX_COUNT)
    q_heads = as_int("q_heads", q_heads, 1, MAX_COUNT)
    kv_heads = as_int("kv_heads", kv_heads, 1, MAX_COUNT)
    if q_heads % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads ({kv_heads}), got {q_heads}")
    dim = as_int("head_dim", head_dim, 1, MAX_COUNT)
    value_dim = dim if value_dim is None else as_int("value_dim", value_dim, 1, MAX_COUNT)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {shown(dtype)}")
    Mesh(partial_dtype, message_dtype, gradient_dtype=gradient_dtype)  # checks the dtypes
    backward, causal = as_bool("backward", backward), as_bool("causal", causal)
    shape = OperandShape(dtype, 1, q_heads, kv_heads, dim, value_dim)
    sizes = row_bytes(shape, partial_dtype, message_dtype, gradient_dtype, backward)
    return _best(ranks, sizes, causal)


def row_bytes(
    shape: OperandShape,
    partial_dtype: torch.dtype | None = None,
    message_dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
    backward: bool = True,
) -> tuple[int, int, int, int]:
    """Return the bytes of a row of queries, of results, of keys, and of gradients of keys."""
    heads, dims = shape.heads, (shape.dim, shape.value_dim)
    b, e = shape.dtype.itemsize, accumulator_dtype(shape.dtype).itemsize
    query, result = heads * shape.dim * b, heads * (partial_bytes(shape, partial_dtype) + e)
    key = shape.kv_heads * (sum(dims) * b if message_dtype is None else encoded_width(dims))
    if not backward:
        return query, result, key, 0
    query += heads * (sum(dims) * b + 2 * e)
    gradient = e if gradient_dtype is None else gradient_dtype.itemsize
    result += heads * shape.dim * gradient
    return query, result, 2 * key, shape.kv_heads * sum(dims) * gradient


@cache
def _best(ranks: int, sizes: tuple[int, int, int, int], causal: bool) -> tuple[int, int]:
    shapes = [(ranks // columns, columns) for columns in range(1, ranks + 1) if not ranks % columns]
    return min(shapes, key=lambda shape: (int(sent_bytes(shape, sizes, causal).max()), shape[1]))


def sent_bytes(shape: tuple[int, int], sizes: tuple[int, int, int, int], causal: bool) -> Ints:
    """Return the rows times bytes that each rank sends for one document in a zigzag layout.

    Each rank has two chunks of the document, and the unit is a chunk. Under a causal mask, queries
    of other ranks always attend to the first chunk of a rank's keys, and to the second if they come
    from a rank before it. The second chunk of its queries always attends to a column's keys; the
    first does so if some rank of the column comes before it.
    """
    (rows, columns), (query, result, key, gradient) = shape, sizes
    ranks = np.arange(rows * columns)
    row, column = ranks // columns, ranks % columns
    if not causal:
        each = 2 * (columns - 1) * (query + result) + 2 * (rows - 1) * (key + gradient)
        return np.full(ranks.size, each)
    # The first rank of a column is its number, and the first rank of row x is columns · x.
    sent_queries = columns - 1 + np.minimum(ranks, columns) - (column < ranks)
    received_queries = columns - 1 + np.where(row > 0, columns - 1, columns - 1 - column)
    sent_keys = rows - 1 + -(-ranks // columns) - (row * columns < ranks)
    returned = rows - 1 + rows - 1 - row
    return sent_queries * query + received_queries * result + sent_keys * key + returned * gradient
