"""Simulate a training step. Attention runs the strategy's code; all other times follow from
FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from seqpar.core.arguments import Ints, as_bool, as_choice, as_float, as_int, check_type, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import beside_the_caller
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.costs.costs import CHECKPOINTING, Costs
from seqpar.costs.grid import Floats
from seqpar.costs.model import Layer, Model, as_model
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.playback.one_rank import least_seconds
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play_with_stand_ins
from seqpar.simulate.playback.stand_ins import choose_stand_ins, exchange_alike
from seqpar.simulate.recording.program import (
    Begin,
    Compute,
    Copy,
    End,
    Operators,
    Post,
    Program,
    ShardExchange,
    Wait,
)
from seqpar.simulate.steps.recorded_layers import (
    Attending,
    Products,
    record_attention,
    record_attention_once,
    record_layers,
    whole_documents,
)
from seqpar.simulate.steps.step_memory import StepMemory
from seqpar.strategies.recurrent import TRANSPORTS
from seqpar.strategies.registry import SOFTMAX

SHARDING = ("none", "gradients", "full")
ACTIVITIES = ("busy", "waiting")
_Amount = TypeVar("_Amount", float, Floats)
_SHARDED_PARAMETERS = -1  # an exchange number that recorded code never uses


@dataclass(frozen=True, eq=False)
class Step:
    """A simulated step. With servers, the first ranks are the trainers, and the last ranks the
    servers.

    Attributes:
        seconds: the time of the whole step: forward and backward of all layers, head and optimizer.
        layers: for each kind and window of layers, the outcome of one layer's forward and backward,
            and the number of such layers.
        head: seconds of the head on the rank with the most tokens.
        optimizer: seconds of the optimizer; 0 without it.
        bytes: (ranks,) bytes that attention sends in all layers.
        held: the memory at each moment of the step that may need the most memory.
    """

    seconds: float
    layers: dict[tuple[str, int | None], tuple[Outcome, int]] = field(repr=False)
    head: float
    optimizer: float
    bytes: Ints
    held: StepMemory = field(repr=False)
    _spent: dict[str, Floats] = field(repr=False)

    @property
    def memory(self) -> Floats:
        """(ranks,) the most bytes of parameters, gradients, optimizer state, activations and
        attention's temporary tensors that each rank holds at once. Parameters and optimizer state
        are sharded over all ranks, unless `sharding` is "gradients". Logits are not included.
        """
        return self.held.peak()

    def spent(self, activity: str) -> Floats:
        """Return (ranks,): the seconds that each rank spends with an activity in all layers.
        `activity` is "busy" (computing) or "waiting".
        """
        return self._spent[activity]


@outside_graphs
@beside_the_caller()
def step(
    strategy: str,
    layout: Layout,
    cluster: Cluster | str,
    model: Model | str,
    *,
    mesh: tuple[int, int] | None = None,
    checkpointing: str = "none",
    sharding: str = "none",
    offload: float = 0.0,
    optimizer: bool = False,
    transport: str = "all_gather",
    servers: int = 0,
    **options: Any,
) -> Step:
    """Simulate a training step of a model on one packed batch.

    One layer of each kind is simulated: its causal attention and linear modules, forward and
    backward. All ranks begin the layer at the same time. The time of the layer is multiplied by the
    number of such layers. Linear layers run `RecurrentAttention` of the model's kind.

    In groups of more than 128 ranks with the same work, most strategies are simulated on a few
    nodes only, which represent all nodes (`simulate.playback.stand_ins`).

    With `servers`, the ranks of the layout are trainers, which hold whole documents, and `servers`
    further devices compute softmax attention for the trainers. A trainer divides its documents into
    two parts of similar length, called nano-batches, and alternates between the two. A trainer with
    a single document has one nano-batch. Because consecutive layers overlap, two consecutive layers
    are also simulated together, and each further layer is assumed to add as much time as the second
    layer.

    Args:
        strategy: the strategy of softmax attention, as in `make_attention`.
        layout: which rank holds which tokens.
        cluster: the devices, at least one for each rank of the layout, or the name of a preset.
            Messages follow NCCL's rules if devices send messages while they compute, and gloo's
            rules otherwise.
        model: the shapes of the layers, or the name of a preset. Tensors have the device's dtype.
        mesh: (rows, ranks per row), for "mesh" and "usp".
        checkpointing: "none", "attention" or "full", as in `Costs.activation_bytes`.
        sharding: how ranks exchange parameters and gradients while a layer computes. With "none",
            ranks exchange neither parameters nor gradients. With "gradients", each rank holds all
            parameters, and a layer's gradients are all-reduced, as in DDP. With "full", parameters
            and gradients are sharded over all ranks, as in FSDP: a layer's parameters are gathered
            twice, and its gradients are reduced once. Servers hold no parameters.
        offload: a number from 0 to 1. The fraction of the tensors kept for backward that is kept in
            host memory, as by `seqpar.offload`. These tensors are copied to the host during a
            layer's forward, and back during the layer's backward. `memory` does not take offloading
            into account.
        optimizer: whether the step includes Adam's update of the rank's parameters. The time of the
            update is its bytes divided by the memory bandwidth.
        transport: the transport of linear layers: "all_gather", "scan" or "tree".
        servers: the number of attention servers. Servers need the strategy "disaggregated". A mesh,
            offloading and full checkpointing are not possible with servers. If devices send
            messages while they compute, tensors are copied through host memory.
        options: options of the strategy. With servers, options of `DisaggregatedAttention` on a
            pool.

    Raises:
        ValueError: if an argument is wrong, or if the strategy cannot compute the layout. The
            message names the argument.
    """
    check_type("layout", layout, Layout)
    cluster, model = as_cluster(cluster), as_model(model)
    if not isinstance(strategy, str) or strategy not in SOFTMAX:
        raise ValueError(f"strategy must be one of {sorted(SOFTMAX)}, got {shown(strategy)}")
    for name, choice, known in (
        ("checkpointing", checkpointing, CHECKPOINTING),
        ("sharding", sharding, SHARDING),
        ("transport", transport, TRANSPORTS),
    ):
        as_choice(name, choice, known)
    offload = as_float("offload", offload)
    optimizer = as_bool("optimizer", optimizer)
    if not 0 <= offload <= 1:
        raise ValueError(f"offload must be between 0 and 1, got {offload}")
    ranks = layout.ranks
    servers = as_int("servers", servers, 0)
    if servers:
        whole_documents(layout)
        required: dict[str, tuple[object, object]] = {
            "strategy": (strategy, "disaggregated"), "mesh": (mesh, None), "offload": (offload, 0.0)
        }  # fmt: skip
        for name, (value, needed) in required.items():
            if value != needed:
                raise ValueError(f"{name} must be {needed!r} with servers, got {shown(value)}")
        if checkpointing == "full":
            raise ValueError('checkpointing must be "none" or "attention" with servers, got "full"')
    if ranks + servers > cluster.ranks:
        got = f"{ranks} and {servers} servers" if servers else str(ranks)
        raise ValueError(f"layout must have at most the cluster's {cluster.ranks} ranks, got {got}")
    costs = Costs(cluster, model)
    simulator = _LayerSimulator(
        costs, layout, Candidate(strategy, mesh), checkpointing, sharding, offload, servers, options
    )
    tokens = np.array(layout.tokens_per_rank)
    no_servers = np.zeros(servers)
    outcomes = {}
    seconds = 0.0
    temporary_bytes = np.zeros(ranks + servers)
    sent_bytes = np.zeros(ranks + servers, np.int64)
    spent = {activity: np.zeros(ranks + servers) for activity in ACTIVITIES}
    for attending, products, count in _kinds_of_layers(costs, checkpointing, transport):
        one, sent_by_one = simulator.play(attending, products, 1)
        two = None
        if servers and count > 1 and not attending.linear:
            # The end of a layer overlaps the nano-batches of the next layer, so each further layer
            # adds less time than one layer takes alone. The second layer shows how much.
            two, _ = simulator.play(attending, products, 2)
        seconds += _all_layers(count, one.seconds, None if two is None else two.seconds)
        for activity in ACTIVITIES:
            of_two = None if two is None else getattr(two, activity)
            spent[activity] = spent[activity] + _all_layers(count, getattr(one, activity), of_two)
        bytes_per_token = model.attention_elements(attending.layer) * costs.itemsize
        kept_bytes = tokens[one.stand_ins[:ranks]] * bytes_per_token
        temporary_bytes = np.maximum(
            temporary_bytes, one.peak_bytes - np.r_[kept_bytes, no_servers]
        )
        sent_bytes += count * sent_by_one
        outcomes[attending.layer.kind, attending.layer.window] = one, count
    of_head = head_seconds(costs, max(layout.tokens_per_rank))
    stage = 0 if sharding == "gradients" else 3
    held = StepMemory.over_layers(costs, checkpointing, ranks, stage=stage)
    optimizer_seconds = costs.optimizer_seconds(ranks, stage) if optimizer else 0.0
    return Step(
        seconds=seconds + of_head + optimizer_seconds,
        layers=outcomes,
        head=of_head,
        optimizer=optimizer_seconds,
        bytes=sent_bytes,
        held=held.on(tokens, temporary_bytes[:ranks], temporary_bytes[ranks:]),
        _spent=spent,
    )


def least_step_seconds(
    strategy: str,
    layout: Layout,
    costs: Costs,
    ranks: tuple[int, ...],
    *,
    mesh: tuple[int, int] | None = None,
    transport: str = "all_gather",
) -> float:
    """Return a lower bound on the seconds of a step without servers. Only the programs of `ranks`
    are recorded.

    The bound holds for all values of the arguments `checkpointing`, `sharding` and `offload` of
    `step`.
    """
    candidate = Candidate(strategy, mesh)
    simulator = _LayerSimulator(costs, layout, candidate, "none", "none", 0.0, 0, {})
    seconds = head_seconds(costs, max(layout.tokens_per_rank))
    for attending, products, count in _kinds_of_layers(costs, "none", transport):
        stand_ins = simulator.stand_ins(attending)[[*ranks]]
        programs = simulator.record_each(attending, products, stand_ins)
        seconds += count * least_seconds(programs, costs.cluster)
    return seconds


def least_trainer_seconds(layout: Layout, costs: Costs) -> float:
    """Return a lower bound on the seconds of a step with servers: the time of the matrix products
    on the trainer with the most tokens.
    """
    tokens = max(layout.tokens_per_rank)
    kinds = _kinds_of_layers(costs, "none", "all_gather")
    flops = sum(count * sum(products.flops(tokens)) for _, products, count in kinds)
    return head_seconds(costs, tokens) + flops / costs.cluster.device.reached_rate


def _kinds_of_layers(
    costs: Costs, checkpointing: str, transport: str
) -> Iterator[tuple[Attending, Products, int]]:
    model, dtype = costs.model, getattr(torch, costs.cluster.device.dtype)
    alike: dict[tuple[str, int | None], list[Layer]] = {}
    for layer in model.layers:
        alike.setdefault((layer.kind, layer.window), []).append(layer)
    for layers in alike.values():
        weights = np.mean([model.attention_weights(x) + model.ffn_weights(x) for x in layers])
        stored = np.mean([model.layer_parameters(x) for x in layers])
        backward = 3 if checkpointing != "none" else 2
        products = Products(float(weights), float(stored), backward)
        yield Attending(model, layers[0], dtype, transport), products, len(layers)


def head_seconds(costs: Costs, tokens: float) -> float:
    """Return the seconds of forward and backward of the model's head on a rank with `tokens`
    tokens.
    """
    flops = 6 * tokens * costs.model.vocabulary * costs.model.hidden
    return flops / costs.cluster.device.reached_rate


def _all_layers(count: int, one: _Amount, two: _Amount | None) -> _Amount:
    """Return the seconds or bytes of `count` layers, given the seconds or bytes of one layer.

    `one` is the value of one layer, and `two` is the value of two consecutive layers. Each layer
    after the first layer adds `two` − `one`. If `two` is None, each layer adds `one`.
    """
    return count * one if two is None else one + (count - 1) * (two - one)


@dataclass(frozen=True)
class _LayerSimulator:
    """Simulates one kind of layer at a time. Its fields are arguments of `step`."""

    costs: Costs
    layout: Layout
    candidate: Candidate
    checkpointing: str
    sharding: str
    offload: float
    servers: int
    options: Mapping[str, Any]

    def play(self, attending: Attending, products: Products, count: int) -> tuple[Outcome, Ints]:
        """Simulate `count` consecutive layers. Returns the outcome, and the bytes (ranks,) that
        attention sends.
        """
        layout, cluster = self.layout, self.costs.cluster
        if self.servers:
            recorded = record_layers(
                *(layout, self.servers, attending, products, count),
                copies=cluster.overlaps,
                **self.options,
            )
            stand_ins, programs = np.arange(len(recorded)), dict(enumerate(recorded))
        else:
            stand_ins, programs = self._record_with_stand_ins(attending, products)
        sent_bytes = {rank: program.sent_bytes for rank, program in programs.items()}
        trainers = {rank: program for rank, program in programs.items() if rank < layout.ranks}
        if self.sharding != "none" and layout.ranks > 1:
            parameters = count * int(products.stored * self.costs.itemsize)
            passes = 3 if self.sharding == "full" else 2
            _exchange_parameters(trainers, layout.ranks, parameters, passes)
        if self.offload:
            kept_bytes, _ = self.costs.activation_bytes_per_token(self.checkpointing)
            per_layer = self.offload * kept_bytes / len(self.costs.model.layers)
            for rank, program in trainers.items():
                _offload_activations(program, int(per_layer * layout.tokens_on(rank)))
        outcome = play_with_stand_ins(programs, stand_ins.tolist(), cluster)
        return outcome, np.array([sent_bytes[rank] for rank in stand_ins.tolist()])

    def _record_with_stand_ins(
        self, attending: Attending, products: Products
    ) -> tuple[Ints, dict[int, Program]]:
        stand_ins = self.stand_ins(attending)
        programs = self.record_each(attending, products, stand_ins)
        if len(programs) < stand_ins.size and not exchange_alike(programs.values()):
            stand_ins = np.arange(stand_ins.size)
            programs = self.record_each(attending, products, stand_ins)
        return stand_ins, programs

    def stand_ins(self, attending: Attending) -> Ints:
        strategy = attending.transport if attending.linear else self.candidate.strategy
        return choose_stand_ins(strategy, self.layout.geometry, self.costs.cluster)

    def record_each(
        self, attending: Attending, products: Products, stand_ins: Ints
    ) -> dict[int, Program]:
        ranks = tuple(np.unique(stand_ins).tolist())
        return dict(zip(ranks, self.record_in_place(attending, products, ranks), strict=True))

    def record_in_place(
        self, attending: Attending, products: Products, ranks: tuple[int, ...]
    ) -> list[Program]:
        """Record one layer on these ranks, without servers."""
        candidate = Candidate("ring") if attending.linear else self.candidate
        recompute = self.checkpointing == "full"
        record_it = record_attention if self.options else record_attention_once
        programs = record_it(
            *(candidate, self.layout, attending, recompute, self.costs.cluster.overlaps, ranks),
            **self.options,
        )
        programs = [replace(program, actions=[*program.actions]) for program in programs]
        for rank, program in zip(ranks, programs, strict=True):
            forward, backward = products.flops(self.layout.tokens_on(rank))
            program.actions.insert(0, Compute(Operators(forward, 0)))
            program.actions.append(Compute(Operators(backward, 0)))
        return programs


def _exchange_parameters(
    programs: Mapping[int, Program], ranks: int, nbytes: int, passes: int
) -> None:
    """Add an exchange with all other ranks to the program of each rank. The exchange begins at the
    start of the program, and ends at the end of the program.

    `nbytes` bytes are divided into equal shards, one for each rank. A message has the bytes of
    `passes` shards.
    """
    shard = -(-nbytes // ranks)
    shards = [(peer, passes * shard) for peer in range(ranks)]
    for rank, program in programs.items():
        post = ShardExchange if program.ordered else Post
        others = (*shards[:rank], *shards[rank + 1 :])
        program.actions.insert(
            0, post(_SHARDED_PARAMETERS, others, others, "parameters", "parameters")
        )
        program.actions.append(Wait(_SHARDED_PARAMETERS))


def _offload_activations(program: Program, nbytes: int) -> None:
    """Add copies of `nbytes` to the host in forward, and back in backward."""
    actions = program.actions
    backward = (i for i, x in enumerate(actions) if getattr(x, "what", "").endswith("backward"))
    # If there is no attention, only the last action, the matrix products, belongs to backward.
    first_of_backward = next(backward, len(actions) - 1)
    program.actions = []
    for part in (actions[:first_of_backward], actions[first_of_backward:]):
        copy = Program([Copy(nbytes, "offload")])
        program.actions += [Begin(copy), *part, End(copy)]
