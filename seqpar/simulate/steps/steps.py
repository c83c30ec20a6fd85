"""Simulate a training step of a model: attention by its strategy's code, all else by its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import Ints, as_bool, as_float, as_int, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats
from seqpar.costs.layers import Layer
from seqpar.costs.memory import CHECKPOINTING, activation_bytes
from seqpar.costs.model import Model
from seqpar.layout.layout import Layout
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Compute, Operators, Program
from seqpar.simulate.recording.recording import record
from seqpar.simulate.steps.attending import Attending, Products
from seqpar.simulate.steps.overlapped_traffic import offload_beside, shard_beside
from seqpar.simulate.steps.served_layers import record_layers, whole_documents
from seqpar.strategies.recurrent import TRANSPORTS
from seqpar.strategies.registry import SOFTMAX

SHARDING = ("none", "gradients", "full")
SPENT = ("busy", "waiting")


@dataclass(frozen=True, eq=False)
class Step:
    """A simulated step; with servers, its ranks are trainers, and behind them servers.

    Attributes:
        seconds: of the step: all layers, forward and backward, the head, and the optimizer.
        layers: the outcome of a forward and a backward of one layer, and how many layers are like
            it, by kind and window.
        head: the seconds of the head, of the rank with most tokens.
        optimizer: the seconds of the optimizer; 0 without it.
        memory: (ranks,) bytes: parameters and optimizer, sharded over all ranks unless `sharding`
            is "gradients", activations, and what attention holds beside them while it runs.
        bytes: (ranks,) bytes that attention sends, in all layers.
    """

    seconds: float
    layers: dict[tuple[str, int | None], tuple[Outcome, int]] = field(repr=False)
    head: float
    optimizer: float
    memory: Floats
    bytes: Ints
    _spent: dict[str, Floats] = field(repr=False)

    def spent(self, kind: str) -> Floats:
        """Return (ranks,) the seconds that each is "busy" or "waiting" in all layers."""
        return self._spent[kind]


def step(
    strategy: str,
    layout: Layout,
    cluster: Cluster,
    model: Model,
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

    Each different layer is recorded and played once, with causal attention forward and backward,
    between its linear modules, and counts as often as there are such layers, which all ranks begin
    together. Linear layers go through `RecurrentAttention`, of the kind that the model says.

    With `servers` the layout's ranks are trainers, each with whole documents, and so many devices
    behind them are servers, which compute softmax attention. A trainer's documents are in two
    nano-batches of about as many tokens that take turns, or in one, if there is but one document.
    Two layers that follow each other are played, too; each further one takes what the second does.

    Args:
        strategy: of softmax attention, as for `make_attention`.
        layout: which rank holds which tokens.
        cluster: the devices; there must be as many as the layout has ranks, or more. Messages are
            NCCL's where they travel while devices compute, and gloo's elsewhere.
        model: the shapes of the layers. Tensors are of the device's dtype.
        mesh: (rows, ranks of a row), for "mesh" and "usp".
        checkpointing: "none", "attention" or "full", as in `Costs.activation_bytes`.
        sharding: "none": parameters and gradients do not travel. "gradients": all ranks have all
            parameters, and reduce a layer's gradients, as DDP does, in two passes over the layer.
            "full": parameters and gradients are sharded over all ranks, as FSDP does: a layer's are
            gathered twice and its gradients reduced once. Each rank does this with all others,
            beside the layer's other work. Servers have no parameters.
        offload: the share of what layers keep for backward that waits in host memory, as with
            `seqpar.offload`: it is copied there beside a layer's forward, and back beside its
            backward. It changes no `memory`.
        optimizer: whether Adam's update is in it, of what a rank has of the parameters: its bytes
            over the memory's bandwidth.
        transport: of linear layers: "all_gather", "scan" or "tree".
        servers: how many devices are attention servers; only with "disaggregated", and without a
            mesh, offloading or full checkpointing. Tensors go through their hosts' memory, where
            messages travel while devices compute.
        options: of the strategy; with servers, of `DisaggregatedAttention` on a pool.

    Raises:
        ValueError: naming an argument that is wrong, or what the strategy cannot compute.
    """
    for name, value, kind in (
        ("layout", layout, Layout), ("cluster", cluster, Cluster), ("model", model, Model),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {shown(value)}")
    if not isinstance(strategy, str) or strategy not in SOFTMAX:
        raise ValueError(f"strategy must be one of {sorted(SOFTMAX)}, got {shown(strategy)}")
    for name, given, known in (
        ("checkpointing", checkpointing, CHECKPOINTING),
        ("sharding", sharding, SHARDING),
        ("transport", transport, TRANSPORTS),
    ):
        if given not in known:
            raise ValueError(f"{name} must be one of {known}, got {given!r}")
    offload, optimizer = as_float("offload", offload), as_bool("optimizer", optimizer)
    if not 0 <= offload <= 1:
        raise ValueError(f"offload must be between 0 and 1, got {offload}")
    ranks, servers = layout.ranks, as_int("servers", servers, 0)
    if servers:
        whole_documents(layout)
        fixed: dict[str, tuple[Any, Any]] = {
            "strategy": (strategy, "disaggregated"), "mesh": (mesh, None), "offload": (offload, 0.0)
        }  # fmt: skip
        for name, (found, needed) in fixed.items():
            if found != needed:
                raise ValueError(f"{name} must be {needed!r} with servers, got {shown(found)}")
        if checkpointing == "full":
            raise ValueError('checkpointing must be "none" or "attention" with servers, got "full"')
    if ranks + servers > cluster.ranks:
        got = f"{ranks} and {servers} servers" if servers else str(ranks)
        most = f"the cluster's {cluster.ranks} ranks at most"
        raise ValueError(f"layout must be of {most}, got {got}")
    costs, all_ranks = Costs(cluster, model), ranks + servers
    tokens = np.array(layout.tokens_per_rank)
    kinds: dict[tuple[str, int | None], list[Layer]] = {}
    for layer in model.layers:
        kinds.setdefault((layer.kind, layer.window), []).append(layer)
    playing = _Playing(costs, layout, strategy, mesh, checkpointing, sharding, offload, servers)
    layers, seconds = {}, 0.0
    beside, sent = np.zeros(all_ranks), np.zeros(all_ranks, np.int64)
    spent = {way: np.zeros(all_ranks) for way in SPENT}
    for key, alike in kinds.items():
        attending = Attending(model, alike[0], getattr(torch, cluster.device.dtype), transport)
        weights = np.mean([model.attention_weights(x) + model.ffn_weights(x) for x in alike])
        products = Products(float(weights), 3 if checkpointing != "none" else 2)
        n = len(alike)
        first, sent_of_one = playing.layers(attending, products, 1, options)
        second = first
        if servers and n > 1 and not attending.linear:  # nano-batches hide what a layer ends with
            second, _ = playing.layers(attending, products, 2, options)
        seconds += _of_all(n, first.seconds, second.seconds, second is first)
        for way in SPENT:
            one, two = getattr(first, way), getattr(second, way)
            spent[way] = spent[way] + _of_all(n, one, two, second is first)
        kept = tokens * model.attention_elements(alike[0]) * costs.itemsize
        beside = np.maximum(beside, first.peak_bytes - _and_servers(kept, servers))
        sent += n * sent_of_one
        layers[key] = first, n
    device = cluster.device
    head = 6 * int(tokens.max()) * model.vocabulary * model.hidden
    head_seconds = head / (device.matmul_rate * device.matmul_share)
    stage = 0 if sharding == "gradients" else 3
    held_bytes = costs.activation_bytes(tokens, checkpointing)
    held_bytes = held_bytes + costs.parameter_bytes(ranks, stage)
    updating = costs.optimizer_seconds(ranks, stage) if optimizer else 0.0
    return Step(
        seconds + head_seconds + updating,
        layers,
        head_seconds,
        updating,
        _and_servers(held_bytes, servers) + beside,
        sent,
        spent,
    )


def _of_all(layers: int, one: Any, two: Any, alone: bool) -> Any:
    """Return what layers take: each what one does alone, or the others what the second does."""
    return layers * one if alone else one + (layers - 1) * (two - one)


def _and_servers(values: Floats, servers: int) -> Floats:
    """Return trainers' values, and zeros of servers."""
    return np.r_[values, np.zeros(servers)]


@dataclass(frozen=True)
class _Playing:
    """How layers are played."""

    costs: Costs
    layout: Layout
    strategy: str
    mesh: tuple[int, int] | None
    checkpointing: str
    sharding: str
    offload: float
    servers: int

    def layers(
        self, attending: Attending, products: Products, count: int, options: dict[str, Any]
    ) -> tuple[Outcome, Ints]:
        """Play layers, one after another; return the outcome, and (ranks,) what attention sends."""
        layout, costs, cluster = self.layout, self.costs, self.costs.cluster
        if self.servers:
            programs = record_layers(
                *(layout, self.servers, attending, products, count),
                copies=cluster.overlaps,
                **options,
            )
        else:
            programs = self._in_place(attending, products, options)
        sent = np.array([program.sent_bytes for program in programs])
        trainers = programs[: layout.ranks]
        if self.sharding != "none" and layout.ranks > 1:
            parameters = count * int(products.weights * costs.itemsize)
            shard_beside(trainers, parameters, 3 if self.sharding == "full" else 2)
        if self.offload:
            model = costs.model
            each, _ = activation_bytes(model, costs.itemsize, self.checkpointing)
            per_layer = self.offload * each / len(model.layers)
            for program, held in zip(trainers, layout.tokens_per_rank, strict=True):
                offload_beside(program, int(per_layer * held))
        return play(programs, cluster), sent

    def _in_place(
        self, attending: Attending, products: Products, options: dict[str, Any]
    ) -> list[Program]:
        """Record a layer of ranks that compute their attention themselves."""
        layout, again = self.layout, self.checkpointing == "full"
        strategy, mesh = ("ring", None) if attending.linear else (self.strategy, self.mesh)
        call = strategy, layout, attending, mesh, again, self.costs.cluster.overlaps
        programs = _recorded(*call, **options) if options else _known(*call)
        programs = [replace(x, actions=[*x.actions]) for x in programs]
        for program, held in zip(programs, layout.tokens_per_rank, strict=True):
            forward, backward = products.flops(held)
            program.actions.insert(0, Compute(Operators(forward, 0)))
            program.actions.append(Compute(Operators(backward, 0)))
        return programs


def _recorded(
    strategy: str,
    layout: Layout,
    attending: Attending,
    mesh: tuple[int, int] | None,
    again: bool,
    ordered: bool,
    **options: Any,
) -> list[Program]:
    """Record a layer's attention, forward (twice, if it is computed again) and backward."""

    def code(comm: Comm) -> None:
        tokens = layout.tokens_on(comm.rank)
        attn: Any = attending.module(comm, strategy, **options)
        operands, call = attending.operands(tokens), attending.call(tokens)
        if again:
            with torch.no_grad():
                attn(*operands, layout, **call)
        out = attn(*operands, layout, **call)
        out.backward(torch.empty_like(out))

    return record(code, layout.ranks, mesh=mesh, ordered=ordered)


# Ways to keep activations differ in what is beside attention, and strategies share linear layers.
_known = lru_cache(maxsize=4)(_recorded)
