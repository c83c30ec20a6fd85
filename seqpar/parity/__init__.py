"""Find the first place where two runs of a model differ, whatever computes their attention.

`record` writes what one step of a run computed, as short summaries of each token. `compare` reads
two recordings. Start with `recording.py`; `compare.py` finds the first difference, `bounds.py` says
how large a difference may be, and `diagnosis.py` names the fault.
"""

from seqpar.parity.compare import compare
from seqpar.parity.recording import record
from seqpar.parity.report import Report

__all__ = ["Report", "compare", "record"]
