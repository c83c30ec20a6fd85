"""Lightning attention in Triton: causal linear attention with a decay per head, with gradients.

Start with `reference.py`, and continue with `recurrence.py`. `tables.py` lists the work of a kernel
launch.
"""

from .arguments import signature
from .configs import Config, choose
from .recurrence import recurrence
from .states import carry, states
from .tables import SegmentTables, segment_length, segment_tables

__all__ = [
    "Config",
    "SegmentTables",
    "carry",
    "choose",
    "recurrence",
    "segment_length",
    "segment_tables",
    "signature",
    "states",
]
