"""What kernels are compiled for: one compilation serves every pack.

Triton compiles a kernel anew for each set of its integers that are 1 or multiples of 16, and of
its addresses that are. For operands that is right, whose strides are a model's, and whose loads are
wider where all are multiples of 16. What changes from pack to pack is named here.
"""

from __future__ import annotations

import triton

VARYING = (  # integers: counts of tiles and rows, and strides over so many rows
    *("tile_count", "batch_heads", "head_block", "key_rows", "query_rows", "rows_total", "parts"),
    *("l_b", "d_b", "r_b", "r_s", "u_b", "u_s", "a_b", "batches", "pairs"),
)
UNALIGNED = (  # tensors of which elements are read one by one, and that may begin at any of them
    *("lse", "delta", "dlse", "partial_lse", "sinks", "slopes"),
    *("log_decay", "segments", "chains", "lengths"),
)
kernel = triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
