"""Simulate a step on devices that are divided into data, pipeline, tensor and context ranks.

A *stage* is the layers of one pipeline rank. Attention is simulated on one group of context ranks,
by the strategy's own code, and all other groups of context ranks are assumed to take the same time.
The time of all other exchanges is computed by formulas:

* Tensor ranks divide a layer's matrices and heads, and the tokens of its activations. Each half of
  a layer gathers its input and reduces its result, in forward and in backward. No computation hides
  these exchanges (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
  Models", 2022, section 4.2.2).
* Without pipeline ranks, parameters are sharded over all data and context ranks, as in FSDP. Each
  micro-batch gathers a layer's parameters twice and reduces its gradients once, while the layer
  computes.
* With pipeline ranks, all of them have the same number of consecutive layers and follow the
  schedule 1F1B. A rank holds its stage's parameters and gradients, and Adam's state is sharded over
  the data and context ranks, as in ZeRO's stage 1. Gradients are reduced and parameters are
  gathered once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import FatTree
from seqpar.costs.grid import Floats
from seqpar.costs.model import Layer, Model
from seqpar.layout.layout import Layout
from seqpar.simulate.steps.pipeline import pipeline
from seqpar.simulate.steps.step_memory import StepMemory
from seqpar.simulate.steps.training_step import Step, step

_TENSOR_EXCHANGES = 8  # per layer: 2 gathers and 2 reductions in forward, and the same in backward
_RECOMPUTED_TENSOR_EXCHANGES = 4
_SHARDING_PASSES = 3  # parameters gathered twice, gradients reduced once
T = TypeVar("T")
_BACKWARD_SHARE = 2 / 3  # backward's part of a stage's time; does not affect the total time of 1F1B


class MicroBatches(NamedTuple):
    """The micro-batches that one data group computes in a step."""

    layout: Layout  # the layout of the largest micro-batch, on the context ranks
    shares: Floats  # (micro_batches,) time / time of the largest micro-batch
    most_tokens: int  # the most tokens of any micro-batch, on which memory depends


class Parallelism(NamedTuple):
    """The number of ranks in each dimension into which the devices are divided.

    Devices are numbered as in Megatron-LM: the tensor rank changes fastest, then the context rank,
    the data rank and the pipeline rank.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        return prod(self)

    def __str__(self) -> str:
        sizes = zip(self._fields, self, strict=True)
        return ", ".join(f"{name} {size}" for name, size in sizes if size > 1) or "context 1"


def tensor_sizes(model: Model, cluster: Cluster) -> list[int]:
    """Return the numbers of tensor ranks by which a node's devices and the model's heads can be
    divided.
    """
    heads = [model.kv_heads]
    if (r := model.recurrence) is not None:
        heads += [r.key_heads, r.value_heads]
    devices = cluster.devices_per_node
    return [n for n in range(1, devices + 1) if not any(x % n for x in (devices, *heads))]


@dataclass(frozen=True)
class DividedCosts:
    """The costs of a model on a cluster that is divided into ranks of several dimensions."""

    costs: Costs  # the costs of the model on the whole cluster
    parallelism: Parallelism  # the division of all devices

    @cached_property
    def context(self) -> Costs:
        """The costs of one group of context ranks. A device computes only the heads of its tensor
        rank.
        """
        cluster, (_, _, tensor, context) = self.costs.cluster, self.parallelism
        per_node = min(context, cluster.devices_per_node // tensor)
        part = per_node / cluster.devices_per_node
        group = _with_nics(cluster, cluster.nics * part, context // per_node, per_node)
        return Costs(group, _tensor_share(self.costs.model, tensor))

    @property
    def sharding_ranks(self) -> int:
        """The number of ranks over which parameters, or Adam's state, are sharded."""
        return self.parallelism.data * self.parallelism.context

    def tensor_seconds(self, tokens: float, checkpointing: str = "none") -> float:
        """Return the seconds in which tensor ranks exchange the activations of one layer."""
        ranks, cluster = self.parallelism.tensor, self.costs.cluster
        if ranks == 1:
            return 0.0
        count = _TENSOR_EXCHANGES
        count += _RECOMPUTED_TENSOR_EXCHANGES if checkpointing != "none" else 0
        nbytes = tokens * self.costs.model.hidden * self.costs.itemsize * (ranks - 1) / ranks
        return count * ((ranks - 1) * cluster.inside.latency + nbytes / cluster.inside.rate)

    def sharded_seconds(self, parameters: float, passes: int) -> float:
        """Return the seconds in which NCCL's rings gather parameters, or reduce their gradients,
        `passes` times.

        `parameters` is the number of parameters on one tensor rank.
        """
        cluster, ranks = self.costs.cluster, self.sharding_ranks
        nbytes = passes * parameters * self.costs.itemsize
        nodes = -(-ranks * self.parallelism.tensor // cluster.devices_per_node)
        inside = nbytes * (ranks - 1) / ranks / cluster.inside.rate
        if nodes == 1:
            return inside
        into_each_node = nbytes * self.parallelism.tensor * (nodes - 1) / nodes
        seconds = max(inside, into_each_node / (cluster.nics * cluster.between.rate))
        if isinstance(tree := cluster.fabric, FatTree) and nodes > tree.nodes_per_leaf:
            leaves = -(-nodes // tree.nodes_per_leaf)
            into_its_nodes = nbytes * self.parallelism.tensor * (leaves - 1) / leaves
            uplinks = cluster.nics * cluster.between.rate / tree.oversubscription
            seconds = max(seconds, into_its_nodes / uplinks)
        return seconds

    def least_seconds(self, micro_batch: float, shares: Floats) -> float:
        """Return a lower bound on the seconds of a step, for any division of layers into stages.

        The largest micro-batch takes `micro_batch` seconds in all layers and the head together.
        `shares` (micro_batches,) are the times of all micro-batches divided by the time of the
        largest one. Let w₁, w₂, … be the seconds of the largest micro-batch in each stage, a the
        sum of the shares, and b the least share. For each stage s, a step takes at least

            a·wₛ + b·(w₁ + … + wₛ₋₁)

        because stage s computes all micro-batches, and the earlier stages compute the forward of
        one micro-batch before stage s begins, and its backward after stage s ends. If t is the
        largest of these times over all stages, the sum w₁ + … + w_S is at most

            t/b·(1 − (1 − b/a)^S)

        The first bound is the t for which this expression is equal to the given total time. The
        second bound is the time of the largest micro-batch, because its stages run one after
        another.
        """
        total, least, most = float(shares.sum()), float(shares.min()), float(shares.max())
        part = 1 - (1 - least / total) ** self.parallelism.pipeline
        return max(least / part, most) * micro_batch + self.end_seconds

    def played(
        self, layers: list[float], head: float, shares: Floats, boundary_bytes: int
    ) -> float:
        """Simulate the pipeline, and return the seconds of a step.

        `layers` are the seconds of each layer for the largest micro-batch, forward and backward
        together, and `head` the seconds of the head. `shares` is as in `least_seconds`. For each
        micro-batch, a stage sends `boundary_bytes` bytes to the next stage.
        """
        if self.parallelism.pipeline == 1:
            return self.least_seconds(sum(layers) + head, shares)
        of_stages = [sum(x) for x in self._of_stages(layers)]
        of_stages[-1] += head
        seconds = np.outer(of_stages, shares)
        forward, backward = seconds * (1 - _BACKWARD_SHARE), seconds * _BACKWARD_SHARE
        stages = self.parallelism.pipeline
        outcome = pipeline(forward, backward, self._stage_cluster, boundary_bytes, stages=stages)
        return outcome.seconds + self.end_seconds

    def layer_seconds(
        self, attending: float, layer: Layer, tokens: float, checkpointing: str
    ) -> float:
        """Return the seconds of a layer, exchanges included. `attending` is the seconds of the
        layer's attention and matrix products.
        """
        seconds = attending + self.tensor_seconds(tokens, checkpointing)
        if self.parallelism.pipeline > 1 or self.sharding_ranks == 1:
            return seconds
        parameters = self.context.model.layer_parameters(layer)
        return max(seconds, self.sharded_seconds(parameters, _SHARDING_PASSES))

    def parameter_bytes(self) -> int:
        """Return the bytes of parameters, gradients and Adam's state on a device."""
        stage = 3 if self.parallelism.pipeline == 1 else 1
        return self._stage_costs.parameter_bytes(self.sharding_ranks, stage)

    def activation_bytes(self, tokens: float, checkpointing: str, micro_batches: int) -> float:
        """Return the bytes of activations on a device of the first stage, which needs more memory
        than the devices of later stages.
        """
        each, once = self.costs.activation_bytes_per_token(checkpointing)
        stages = self.parallelism.pipeline
        held = each * min(stages, micro_batches) / stages
        return tokens * (held + once) / self.parallelism.tensor

    def memory(self, checkpointing: str, micro_batches: int) -> StepMemory:
        """Return the memory of a device, without its tokens."""
        if self.parallelism.pipeline == 1:
            return StepMemory.over_layers(
                self.costs,
                checkpointing,
                self.sharding_ranks,
                divided=self.context.model,
                tensor_ranks=self.parallelism.tensor,
                accumulates=micro_batches > 1,
            )
        # All gradients exist, because most of them are sums over micro-batches.
        held = self.activation_bytes(1, checkpointing, micro_batches)
        ffn = max(map(self.costs.ffn_gradient_bytes, self.costs.model.counts))
        per_token = np.array([held, held + ffn / self.parallelism.tensor])
        fixed = np.full(2, float(self.parameter_bytes()))
        return StepMemory(fixed, per_token, np.zeros(2), np.array([1.0, 0.0]))

    @property
    def _stage_cluster(self) -> Cluster:
        """A cluster with one device for each stage."""
        cluster, stages = self.costs.cluster, self.parallelism.pipeline
        per_stage = self.parallelism.devices // stages
        per_node = max(1, cluster.devices_per_node // per_stage)  # stages in one node
        nics = cluster.nics / cluster.devices_per_node * per_node
        flat = replace(cluster, fabric=None)  # the fabric is ignored, because stages send little
        return _with_nics(flat, nics, stages // per_node, per_node)

    @cached_property
    def _stage_costs(self) -> Costs:
        """The costs of the stage with the most parameters. With several stages, the embedding and
        the head count as one matrix, because only the first stage holds the embedding, and only the
        last stage holds the head.
        """
        model = self.context.model
        if self.parallelism.pipeline == 1:
            return self.context
        stages = self._of_stages(model.layers)
        largest = max(stages, key=lambda x: sum(map(model.layer_parameters, x)))
        return Costs(self.context.cluster, replace(model, layers=tuple(largest), tied=True))

    @property
    def end_seconds(self) -> float:
        """The seconds at the end of a step: of Adam's update and, with several stages, of
        exchanging gradients and parameters.
        """
        ranks = self.sharding_ranks
        update = self._stage_costs.optimizer_seconds(ranks)
        if self.parallelism.pipeline == 1 or ranks == 1:
            return update
        return update + self.sharded_seconds(self._stage_costs.model.parameters, 2)

    def _of_stages(self, layers: Sequence[T]) -> list[Sequence[T]]:
        each = len(layers) // self.parallelism.pipeline
        return [layers[i : i + each] for i in range(0, len(layers), each)]


def _with_nics(cluster: Cluster, nics: float, nodes: int, devices: int) -> Cluster:
    """Return a cluster with `nodes` nodes, each with `devices` devices and `nics` NICs.

    `nics` can be a fraction. The number of NICs is rounded to an integer, and the rate of a NIC is
    scaled so that the total rate stays the same.
    """
    if nodes == 1:
        return replace(cluster, nodes=1, devices_per_node=devices)
    whole = max(1, int(nics))
    between = replace(cluster.between, rate=cluster.between.rate * nics / whole)
    return replace(cluster, nodes=nodes, devices_per_node=devices, nics=whole, between=between)


def _tensor_share(model: Model, ranks: int) -> Model:
    """Return the fraction of a model that one of `ranks` tensor ranks computes."""
    layers = tuple(
        replace(x, ffn=-(-x.ffn // ranks), stored_ffn=-(-x.stored_ffn // ranks))
        for x in model.layers
    )
    recurrence = model.recurrence
    if recurrence is not None:
        key_heads, value_heads = recurrence.key_heads // ranks, recurrence.value_heads // ranks
        recurrence = replace(recurrence, key_heads=key_heads, value_heads=value_heads)
    return replace(
        model,
        layers=layers,
        heads=model.heads // ranks,
        kv_heads=model.kv_heads // ranks,
        vocabulary=-(-model.vocabulary // ranks),
        recurrence=recurrence,
    )


def divided_step(
    strategy: str,
    micro_batches: MicroBatches,
    divided: DividedCosts,
    *,
    checkpointing: str = "none",
    offload: float = 0.0,
    mesh: tuple[int, int] | None = None,
    transport: str = "all_gather",
) -> Step:
    """Simulate a step of a group of context ranks, and of all groups in the same pipeline.

    All arguments but the first three are as in `step`. With several stages, activations are not
    offloaded.

    Returns:
        A step whose `memory` and `bytes` are those of one context group, and whose `seconds` are
        those of all groups. The waiting time of a rank includes waiting for tensor ranks, for
        parameters and for other stages. With several stages, `optimizer` includes the time for
        exchanging gradients and parameters.
    """
    layout, shares, most_tokens = micro_batches
    costs, context = divided.costs, divided.context
    tokens = max(layout.tokens_per_rank)
    if offload:  # `context` counts the activations of all tensor ranks on each of them
        offload *= divided.activation_bytes(tokens, "none", 1) / float(context.kept_bytes(tokens))
    one = step(
        *(strategy, layout, context.cluster, context.model),
        mesh=mesh,
        checkpointing=checkpointing,
        offload=offload,
        transport=transport,
    )
    unshared = [one.layers[x.kind, x.window][0].seconds for x in context.model.layers]
    layers = [
        divided.layer_seconds(seconds, x, tokens, checkpointing)
        for seconds, x in zip(unshared, context.model.layers, strict=True)
    ]
    boundary_bytes = tokens * costs.model.hidden * costs.itemsize // divided.parallelism.tensor
    seconds = divided.played(layers, one.head, shares, boundary_bytes)
    most = most_tokens / layout.tokens  # in proportion to the tokens of this layout
    held = divided.memory(checkpointing, shares.size)
    stages = divided.parallelism.pipeline
    per_device = float(shares.sum()) / stages
    head = one.head * float(shares.sum())
    exchanged = (sum(layers) - sum(unshared)) * per_device
    working = sum(layers) * per_device + head / stages
    between_stages = max(0.0, seconds - divided.end_seconds - working) if stages > 1 else 0.0
    spent = {
        "busy": one.spent("busy") * per_device,
        "waiting": one.spent("waiting") * per_device + exchanged + between_stages,
    }
    return Step(
        seconds=seconds,
        layers=one.layers,
        head=head,
        optimizer=divided.end_seconds,
        bytes=(one.bytes * per_device).astype(np.int64),
        held=held.on(most * one.held.tokens, most * one.held.temporary),
        _spent=spent,
    )
