"""Descriptions of a cluster and a model, and what work and messages cost on them."""

from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Device, Link
from seqpar.costs.grid import Tasks
from seqpar.costs.layers import Layer, Recurrence
from seqpar.costs.model import Model

__all__ = ["Cluster", "Costs", "Device", "Layer", "Link", "Model", "Recurrence", "Tasks"]
