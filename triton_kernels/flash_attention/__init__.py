"""FlashAttention-2 over the slices of a mask, in Triton. A slice is a range of query rows and a
range of key rows.

The forward can continue a partial result, which is the result over some of the keys. The backward
adds to gradients.

Start with `reference.py`, then `forward_kernels.py`. `tables.py` makes the tables that list the
work of a launch.
"""

from .backward import Queries, backward, backward_kv, backward_q, delta
from .configs import Config, choose
from .eight_bit_rows import decode_rows, encode_rows
from .forward import Results, empty_partial, forward, forward_block
from .merge_hops import MOST_HOPS, HopResult, add_to_rows, merge_hops
from .tables import Launch, Launches, SliceTable, backward_launches, forward_launches

__all__ = [
    "MOST_HOPS",
    "Config",
    "HopResult",
    "Launch",
    "Launches",
    "Queries",
    "Results",
    "SliceTable",
    "add_to_rows",
    "backward",
    "backward_kv",
    "backward_launches",
    "backward_q",
    "choose",
    "decode_rows",
    "delta",
    "empty_partial",
    "encode_rows",
    "forward",
    "forward_block",
    "forward_launches",
    "merge_hops",
]
