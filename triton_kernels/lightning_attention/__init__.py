"""Lightning attention in Triton: causal linear attention with a decay for each head, and its gradients."""

from .configs import Config, choose
from .recurrence import recurrence
from .states import carry, states
from .tables import Plan, cut, segment_rows

__all__ = ["Config", "Plan", "carry", "choose", "cut", "recurrence", "segment_rows", "states"]
