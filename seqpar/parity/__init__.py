"""Find the first place where two runs of a model differ.

A run is one training step, or one call of a model, on one or several ranks. `record` writes a
recording of a run, which contains short summaries of three things: each module's output for each
token, the gradients of these outputs, and the parameters. `compare` reads two recordings. Start
with `recording.py`; `compare.py` finds the first difference, `bounds.py` computes how large a
difference rounding explains, and `diagnosis.py` names the fault.
"""

from seqpar.parity.compare import compare
from seqpar.parity.recording import record
from seqpar.parity.report import Report

__all__ = ["Report", "compare", "record"]
