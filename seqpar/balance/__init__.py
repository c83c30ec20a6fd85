"""Balance documents of uneven length over the ranks of a cluster.

Start with `methods/`, one file for each method, which `planning/` calls.

These words have special meanings in this package:

* A *piece* is one span of a document that a rank holds. A rank's *share* of a document is all
  pieces of that document that the rank holds.
* A rank's *capacity* is the number of tokens whose activations fit on its device. If a fraction of
  a token's activations is offloaded to host memory, the token uses less than one token of the
  capacity.
* The *room* of a rank is the part of its capacity, or of its time, that is still free.
* The ranks that share one document form a *ring*, because `RingAttention` computes the attention of
  this document.
"""

from seqpar.balance.data.batches import Batches, LocalStep
from seqpar.balance.data.collate import collate
from seqpar.balance.disaggregation.disaggregate import Stage, disaggregate, disaggregate_stages
from seqpar.balance.disaggregation.homes import place_homes
from seqpar.balance.disaggregation.row_bytes import RowBytes
from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.balance.planning.planner import METHODS, plan
from seqpar.balance.planning.plans import Plan
from seqpar.balance.predict.token_balance import token_balanced
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Device, FatTree, Link, Torus
from seqpar.costs.grid import Tasks
from seqpar.costs.model import Model
from seqpar.layout.tasks.tasks import TaskRectangles

__all__ = [
    "METHODS",
    "Batches",
    "Cluster",
    "Costs",
    "Device",
    "FatTree",
    "Link",
    "LocalStep",
    "MicroBatch",
    "Model",
    "Plan",
    "RowBytes",
    "Stage",
    "TaskRectangles",
    "Tasks",
    "Torus",
    "collate",
    "disaggregate",
    "disaggregate_stages",
    "place_homes",
    "plan",
    "token_balanced",
]
