"""Divide devices into data, pipeline, tensor and context ranks, and documents into micro-batches.

A *data group* is the set of all devices that compute the same documents. The documents of a data
group are divided into micro-batches, and each micro-batch is laid out over a group of context
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from seqpar.balance.planning.divide import to_lightest
from seqpar.balance.planning.planner import plan
from seqpar.core.arguments import Ints
from seqpar.costs.costs import CHECKPOINTING, Costs
from seqpar.costs.grid import Floats
from seqpar.layout.layout import Layout
from seqpar.simulate.steps.divided import DividedCosts, Parallelism, tensor_sizes
from seqpar.simulate.steps.training_step import head_seconds

LAYOUTS = ("zigzag", "contiguous")
MAX_CONTEXT_RANKS = 2048  # in one group, because larger groups make a search too slow
# Up to this many devices are also tried as one group, with all strategies and with servers.
MAX_RANKS_AS_ONE = 128
_MICRO_BATCHES_PER_STAGE = (2, 4)
# The documents of each micro-batch of each data group.
Batches = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class Division:
    divided: DividedCosts  # the costs on the divided cluster
    lengths: Ints = field(repr=False)  # (documents,) tokens of all documents
    batches: Batches = field(repr=False)  # micro-batches of similar work
    # The next three fields describe the data group with the most work. Its largest micro-batch is
    # the one with the most work.
    shares: Floats = field(repr=False)  # (micro_batches,) work / work of the largest micro-batch
    largest: tuple[int, ...] = field(repr=False)  # the documents of the largest micro-batch
    # Seconds of the attention and matrix products of the largest micro-batch on one device.
    attending: float

    @property
    def parallelism(self) -> Parallelism:
        return self.divided.parallelism

    @property
    def least_seconds(self) -> float:
        """A lower bound on the seconds of a step, which assumes that all context ranks have equal
        work.
        """
        return self.least_seconds_with(self.attending / self.parallelism.context)

    def least_seconds_with(self, micro_batch: float) -> float:
        """Return a lower bound on a step whose largest micro-batch takes `micro_batch` seconds."""
        costs = self.divided.context
        layers = costs.model.layers
        tokens = float(self.lengths[[*self.largest]].sum()) / self.parallelism.context
        head = min(micro_batch, head_seconds(costs, tokens))
        computing = micro_batch - head + len(layers) * self.divided.tensor_seconds(tokens)
        exchanging = sum(self.divided.layer_seconds(0, x, tokens, "none") for x in layers)
        return self.divided.least_seconds(max(computing, exchanging) + head, self.shares)

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the micro-batch with the most tokens."""
        return max(int(self.lengths[[*x]].sum()) for micro in self.batches for x in micro)

    @property
    def micro_batches(self) -> int:
        return len(self.batches[0])


def divisions(lengths: Ints, costs: Costs) -> Iterator[Division]:
    """Yield all divisions of a cluster's devices that are tried.

    For up to 128 devices, the division in which all devices compute one micro-batch together is
    left out. Tensor ranks are in one node and divide the heads among them. Pipeline ranks divide
    the layers. A group of context ranks has at most 2,048 ranks. The group either consists of whole
    nodes, or is one of several groups of equal size in a node.

    Four numbers of micro-batches per data group are tried: one, two per pipeline stage, four per
    pipeline stage, and the smallest number that fits into memory with as little recomputation as
    possible. Each micro-batch has at least one document.
    """
    devices, kept = costs.cluster.ranks, np.flatnonzero(lengths)
    layers = len(costs.model.layers)

    @cache
    def dealt(tensor: int, bins: int) -> list[tuple[float, Ints]]:
        """Return micro-batches as (work, documents). The micro-batch with the most work is
        first.
        """
        divided = DividedCosts(costs, Parallelism(tensor=tensor))
        latency = divided.tensor_seconds(0)
        sent = np.array([divided.tensor_seconds(x) - latency for x in lengths[kept].tolist()])
        work = _attending(lengths[kept], divided.context) + layers * sent
        order = np.argsort(-work, kind="stable")
        numbers = to_lightest(lengths[kept][order], work[order], bins, np.inf)
        assert numbers is not None
        parts = [order[numbers == number] for number in range(bins)]
        once = layers * latency
        made = [(once + float(work[part].sum()), kept[np.sort(part)]) for part in parts]
        return sorted(made, key=lambda x: -x[0])

    for parallelism in _parallelisms(costs):
        if parallelism.data > kept.size:
            continue
        divided = DividedCosts(costs, parallelism)
        most = kept.size // parallelism.data
        for count in _numbers_of_micro_batches(divided, lengths, most):
            if parallelism.context == devices <= MAX_RANKS_AS_ONE and count == 1:
                continue
            bins = dealt(parallelism.tensor, parallelism.data * count)
            yield _division(divided, lengths, bins)


def _parallelisms(costs: Costs) -> Iterator[Parallelism]:
    cluster, layers = costs.cluster, len(costs.model.layers)
    devices, per_node = cluster.ranks, cluster.devices_per_node
    for tensor in tensor_sizes(costs.model, cluster):
        for stages in _divisors(devices // tensor):
            if layers % stages or not _aligned(devices // stages, per_node):
                continue
            for context in _divisors(devices // tensor // stages):
                if context <= MAX_CONTEXT_RANKS and _aligned(context * tensor, per_node):
                    data = devices // (tensor * stages * context)
                    yield Parallelism(data, stages, tensor, context)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _aligned(ranks: int, per_node: int) -> bool:
    return ranks % per_node == 0 or per_node % ranks == 0


def _numbers_of_micro_batches(divided: DividedCosts, lengths: Ints, most: int) -> list[int]:
    """Return the numbers of micro-batches to try, each at most `most`.

    The list is empty if the parameters alone do not fit into memory.
    """
    parallelism = divided.parallelism
    free = divided.costs.cluster.device.memory - divided.parameter_bytes()
    if free <= 0:
        return []
    per_device = float(lengths.sum()) / (parallelism.data * parallelism.context)
    stages = parallelism.pipeline
    counts = {1} if stages == 1 else {n * stages for n in _MICRO_BATCHES_PER_STAGE}
    for checkpointing in CHECKPOINTING:
        kept = divided.activation_bytes(per_device, checkpointing, stages)
        fewest = int(np.ceil(1.1 * kept / free))  # 10% more, for temporary tensors
        counts.add(fewest)
        if fewest <= most:
            break
    return sorted({min(x, most) for x in counts})


def _attending(lengths: Ints, costs: Costs) -> Floats:
    """Return (documents,): the seconds that one device needs for the attention and the matrix
    products of each document.
    """
    starts = np.zeros(lengths.size)
    attention = sum(costs.span_work(starts, lengths, backward) for backward in (False, True))
    products = 3 * lengths * costs.model.flops_per_token / costs.cluster.device.reached_rate
    return np.asarray(attention + products)


def _division(divided: DividedCosts, lengths: Ints, bins: list[tuple[float, Ints]]) -> Division:
    """Assign micro-batches to data groups, so that the groups have similar work.

    Micro-batches are sorted by work, the largest first. With n groups, the first n micro-batches
    are assigned to the groups in ascending order, the next n micro-batches in descending order, and
    so on.
    """
    groups = divided.parallelism.data
    turn, place = np.divmod(np.arange(len(bins)), groups)
    group = np.where(turn % 2 == 0, place, groups - 1 - place)
    dealt = [[bins[i] for i in np.flatnonzero(group == number)] for number in range(groups)]
    slowest = max(dealt, key=lambda x: sum(work for work, _ in x))
    most, largest = slowest[0]
    shares = np.array([work for work, _ in slowest]) / most
    batches = tuple(tuple(tuple(x.tolist()) for _, x in micro) for micro in dealt)
    attending = float(_attending(lengths[largest], divided.context).sum())
    return Division(divided, lengths, batches, shares, tuple(largest.tolist()), attending)


class NamedLayout(NamedTuple):
    """A layout, its name, and the order of its documents."""

    name: str
    layout: Layout
    documents: tuple[int, ...]


def layouts(
    lengths: Ints, costs: Costs, documents: Sequence[int] | None = None
) -> Iterator[NamedLayout]:
    """Yield the layouts that are tried: zigzag, contiguous, and the layout of `balance.plan` if it
    differs from these two.

    `documents` are the indices of the documents in the layouts, in order. By default, the layouts
    contain all documents.
    """
    order = tuple(range(lengths.size) if documents is None else documents)
    edges = np.r_[0, np.cumsum(lengths[[*order]])]
    seen = set()
    for name in LAYOUTS:
        layout: Layout = getattr(Layout, name)(edges, costs.cluster.ranks)
        seen.add(layout.geometry.digest)
        yield NamedLayout(name, layout, order)
    named = planned(lengths, costs, order)
    if named is not None and named.layout.geometry.digest not in seen:
        yield named


def planned(lengths: Ints, costs: Costs, documents: Sequence[int]) -> NamedLayout | None:
    """Return the layout of `balance.plan` for these documents, or None if `balance.plan` raises an
    error.
    """
    cluster, lengths = costs.cluster, lengths[[*documents]]
    if cluster.ranks == 1:
        return None
    try:
        capacity = int(lengths.sum())
        found = plan(lengths, cluster, costs.model, capacity=capacity, micro_batches=1)
    except ValueError:  # for example, because planning does not support this number of ranks
        return None
    (batch,) = found.micro_batches
    in_order = tuple(documents[i] for i in batch.documents.tolist())
    return NamedLayout(found.method, batch.layout, in_order)
