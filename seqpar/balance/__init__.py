"""Balance documents of uneven length over the ranks of a cluster."""

from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Device, Link
from seqpar.costs.grid import Tasks
from seqpar.costs.model import Model

__all__ = ["Cluster", "Costs", "Device", "Link", "Model", "Tasks"]
