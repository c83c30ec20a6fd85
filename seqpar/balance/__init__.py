"""Balance documents of uneven length over the ranks of a cluster."""

from seqpar.balance.micro_batch import MicroBatch
from seqpar.balance.planner import METHODS, plan
from seqpar.balance.plans import Plan
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Device, Link
from seqpar.costs.grid import Tasks
from seqpar.costs.model import Model

__all__ = [
    "METHODS",
    "Cluster",
    "Costs",
    "Device",
    "Link",
    "MicroBatch",
    "Model",
    "Plan",
    "Tasks",
    "plan",
]
