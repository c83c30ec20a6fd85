"""Arguments on which Triton must not specialise, so that a kernel is compiled only once for all
packs of documents.

Triton compiles a kernel again for each set of integers that are 1 or multiples of 16, and for each
set of addresses that are multiples of 16. For operands this is useful, because the model sets their
strides, and multiples of 16 make loads wider. The arguments below change from pack to pack.
"""

from __future__ import annotations

import triton

VARYING = (  # integers: counts of tiles and rows, and strides over that many rows
    *("tile_count", "batch_heads", "head_block", "key_rows", "query_rows", "rows_total", "parts"),
    *("l_b", "d_b", "r_b", "r_s", "u_b", "u_s", "a_b"),
    *("batches", "pairs", "hops"),
    *(f"{name}{hop}" for name in ("first", "count", "w_b", "w_h") for hop in range(8)),
)
UNALIGNED = (  # tensors that are read element by element and may begin at any element
    *("lse", "delta", "dlse", "partial_lse", "sinks", "slopes", "index"),
    *("log_decay", "segments", "chains", "lengths"),
    *(f"{name}{hop}" for name in ("lse", "place") for hop in range(8)),
)
kernel = triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
