"""Describe a cluster and a model, and predict the cost of their work and messages.

Start with `costs.py`: `Costs` combines a `Cluster` with a `Model`. `grid.py` holds the measured
seconds of softmax attention, and `profile/` measures this machine.
"""

from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Device, Link
from seqpar.costs.flops import step_flops
from seqpar.costs.grid import Tasks
from seqpar.costs.model import Layer, Model, Recurrence

__all__ = [
    "Cluster",
    "Costs",
    "Device",
    "Layer",
    "Link",
    "Model",
    "Recurrence",
    "Tasks",
    "step_flops",
]
