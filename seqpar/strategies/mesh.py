"""Mesh attention: queries are sent within rows of ranks, and keys and values within columns.

The ranks form a mesh with R rows and C columns. Each rank computes the queries of its row with the
keys of its column. A rank receives queries of C − 1 ranks and keys of R − 1 ranks. In
docs/internals/in_300_lines.md, the loop `ring` shows what happens in a column, and the loop
`token_ring` shows what happens in a row. A mesh with one row is TokenRing. A mesh with one column
sends the same bytes as Ring.

In the paper, ranks pass queries and keys on along rings. Here, the rank that holds a query or a key
sends it directly, and only to ranks that need it.
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

MAX_COUNT = 2**16  # limit for ranks, heads and dims, so that their products fit into 64 bits


@dataclass(frozen=True)
class Mesh(TileStrategy):
    """The strategy that sends queries within a row, and keys and values within a column."""

    name = "mesh"
    # The dtype in which keys and values are sent: an 8-bit dtype, or None for the dtype of k.
    message_dtype: torch.dtype | None = None
    # 0 means the number for which ranks send the fewest bytes in the call.
    columns: int = field(default=0, metadata=NO_OPTION)

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
    """Softmax attention on a 2-D mesh: queries move within rows of ranks, keys within columns.

    The mesh has R rows of C ranks. One layout covers all ranks in row-major order: rank r·C + c is
    at (r, c) in the mesh. A rank computes the queries of its row with the keys of its column. See
    `Attention` for the call, which all strategies share.

    With a zigzag layout and a causal mask, all ranks have the same work. With a contiguous layout,
    work is as uneven as in Ring. `mask_area` returns the work of each rank for any layout and mask.

    Args:
        mesh: a 2-D DeviceMesh. `seqpar.best_mesh` returns the shape with which ranks send the
            fewest bytes. The first module on a mesh makes a process group. If the mesh is a part of
            a larger mesh, all ranks of the larger mesh must therefore make this module at the same
            point of their programs.
        check_ranks, deterministic, routing: as in `Attention`. `deterministic="ranks"` is refused.
        partial_dtype: the dtype in which partial outputs return, as in `TokenRingAttention`. The
            default adds no error. On meshes with several rows, the default is the accumulator's
            dtype.
        message_dtype: the dtype in which keys and values are sent, as in `RingAttention`. The
            default is the dtype of k.
        gradient_dtype: the dtype in which contributions to dq, dk and dv return, as in
            `RingAttention` and `TokenRingAttention`. By default, dk and dv return in the
            accumulator's dtype, and so does dq on meshes with several rows.

    A rank first posts all exchanges of keys in its column, and computes attention of its own
    queries over these keys as they arrive. The rank holds the keys until the end of the pass. After
    that, the queries of the other ranks in its row arrive, one rank after another. While a rank
    computes with the queries of one rank, the results of the preceding rank return in the other
    direction of the links. Some work with the rank's own queries is left for the end. This work
    hides the arrival of the last results and, in backward, of the last dk and dv. The rank that
    holds a query merges its results, or adds its gradients, in fp32 in the order of the steps.

    Bytes sent by rank r. m(r, s) is the number of query rows of r that attend to some key in the
    column of rank s. n(r, s) is the number of key rows of r to which some query in the row of rank
    s attends. b, w and d are the bytes of an element of q, of a partial output, and of a
    contribution to dq. e is 4 (8 for fp64). If no dtype is given, w and d are equal to e, except
    that on a mesh with one row they are as in `TokenRingAttention`. f is 2e, or 3e if lse has a
    gradient. Sums are over the other ranks p in the row of r, and over the other ranks o in the
    column of r. `traffic` returns these numbers.

    * forward: queries Σ m(r, p)·B·Hq·D·b, results Σ m(p, r)·B·Hq·(Dv·w + e), keys and values Σ n(r,
      o)·B·Hkv·(D + Dv)·b;
    * backward: queries Σ m(r, p)·B·Hq·((D + Dv)·b + f), results Σ m(p, r)·B·Hq·D·d, keys and values
      as in forward, and their gradients Σ n(o, r)·B·Hkv·(D + Dv)·e.

    Messages: one message with keys and values to each rank of the column, and in backward a second
    message with gradients of keys and values. The messages to each rank of the row are as in
    `TokenRingAttention`.

    Memory in addition to inputs and results, if all T local rows are sent. Queries and their
    results take the same memory as in `TokenRingAttention`, with the g and c defined there. In
    addition:

    * forward: keys and values of R − 1 ranks, B·T·Hkv·(D + Dv)·b each, and a packed copy of this
      rank's keys and values until they have been sent;
    * backward: the same, dk and dv, and fp32 gradients of keys and values, 2·(R − 1)·B·T·Hkv·(D +
      Dv)·4. Half of these are gradients of other ranks' keys, and half arrive for this rank's keys.

    The method is from Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed
    Attention with Improved Data Locality" (2025), section 3.
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
    """Return the shape (rows, columns) of the mesh with which `MeshAttention` sends the fewest
    bytes.

    The function compares all shapes. It minimises the bytes of the rank that sends the most, for a
    call and its backward over one long document in a zigzag layout. If several shapes send equally
    many bytes, it returns the shape with the fewest columns. With Hkv = Hq, the best mesh is about
    square. With G query heads per KV head, the best mesh has about √(P/G) columns. If the result is
    (P, 1), use Ring. In this case, Ring sends no more bytes than the mesh, and holds fewer keys in
    memory.

    Args:
        ranks: P, the number of ranks.
        q_heads, kv_heads: Hq and Hkv.
        head_dim: D, the head dim of q and k.
        value_dim: Dv, the head dim of v. The default is D.
        causal: True for a causal mask, False for a full mask.
        dtype: the dtype of q, k and v.
        partial_dtype, message_dtype, gradient_dtype: as in `MeshAttention`. If partial_dtype or
            gradient_dtype is None, results are counted in the accumulator's dtype, even on a mesh
            with one row.
        backward: whether to count backward in addition to forward.

    Raises:
        ValueError: if an argument is wrong; the message names it. Nothing is sent.
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
    # This raises an error for wrong dtypes.
    Mesh(partial_dtype, message_dtype, gradient_dtype=gradient_dtype)
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
    """Return how many bytes are sent for one token of queries, results, keys and gradients of keys.

    If `backward` is True, the four numbers are sums over forward and backward. If `backward` is
    False, they are the bytes of forward, and the number for gradients is 0.
    """
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
    """Return the bytes that each rank sends for one document in a zigzag layout, divided by the
    number of tokens of a chunk.

    Each rank holds two chunks of the document. `shape` is the shape of the mesh, and `sizes` has
    the bytes that are sent for one token (`row_bytes`).
    """
    (rows, columns), (query, result, key, gradient) = shape, sizes
    ranks = np.arange(rows * columns)
    row, column = ranks // columns, ranks % columns
    if not causal:
        each = 2 * (columns - 1) * (query + result) + 2 * (rows - 1) * (key + gradient)
        return np.full(ranks.size, each)
    # The first rank of column x is x, and the first rank of row x is columns · x.
    sent_queries = columns - 1 + np.minimum(ranks, columns) - (column < ranks)
    received_queries = columns - 1 + np.where(row > 0, columns - 1, columns - 1 - column)
    sent_keys = rows - 1 + -(-ranks // columns) - (row * columns < ranks)
    returned = rows - 1 + rows - 1 - row
    return sent_queries * query + received_queries * result + sent_keys * key + returned * gradient
