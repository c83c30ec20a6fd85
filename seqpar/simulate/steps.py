"""Simulate a training step of a model: attention by its strategy's code, all else by its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from seqpar.arguments import Ints, as_bool, as_float, shown
from seqpar.comm.exchange import Comm
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats
from seqpar.costs.layers import Layer
from seqpar.costs.memory import CHECKPOINTING, activation_bytes
from seqpar.costs.model import Model
from seqpar.layout.layout import Layout
from seqpar.simulate.outcome import Outcome
from seqpar.simulate.playing import play
from seqpar.simulate.program import Begin, Compute, Copy, End, Operators, Post, Program, Wait
from seqpar.simulate.recording import record
from seqpar.softmax.module import Attention
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.registry import SOFTMAX, make_attention

SHARDING = ("none", "gradients", "full")
_SHARDED = -1  # the number of an exchange that no rank's code has posted


@dataclass(frozen=True, eq=False)
class Step:
    """A simulated step.

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

    def spent(self, kind: str) -> Floats:
        """Return (ranks,) the seconds that each is "busy" or "waiting" in all layers."""
        return np.sum([n * getattr(x, kind) for x, n in self.layers.values()], axis=0)


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
    **options: Any,
) -> Step:
    """Simulate a training step of a model on one packed batch.

    Each different layer is recorded and played once, with causal attention forward and backward,
    between its linear modules, and counts as often as there are such layers, which all ranks begin
    together. Linear attention goes through `LASP2Attention`.

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
            beside the layer's other work.
        offload: the share of what layers keep for backward that waits in host memory, as with
            `seqpar.offload`: it is copied there beside a layer's forward, and back beside its
            backward. It changes no `memory`.
        optimizer: whether Adam's update is in it, of what a rank has of the parameters: its bytes
            over the memory's bandwidth.
        options: of the strategy.

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
    if checkpointing not in CHECKPOINTING:
        raise ValueError(f"checkpointing must be one of {CHECKPOINTING}, got {checkpointing!r}")
    if sharding not in SHARDING:
        raise ValueError(f"sharding must be one of {SHARDING}, got {sharding!r}")
    offload, optimizer = as_float("offload", offload), as_bool("optimizer", optimizer)
    if not 0 <= offload <= 1:
        raise ValueError(f"offload must be between 0 and 1, got {offload}")
    if layout.ranks > cluster.ranks:
        raise ValueError(
            f"layout must be of the cluster's {cluster.ranks} ranks at most, got {layout.ranks}"
        )
    costs, ranks = Costs(cluster, model), layout.ranks
    tokens = np.array(layout.tokens_per_rank)
    kinds: dict[tuple[str, int | None], list[Layer]] = {}
    for layer in model.layers:
        kinds.setdefault((layer.kind, layer.window), []).append(layer)
    layers, beside, sent = {}, np.zeros(ranks), np.zeros(ranks, np.int64)
    for key, alike in kinds.items():
        code = _layer(strategy, layout, cluster, model, alike[0], checkpointing, options)
        shape = None if key[0] == "linear" else mesh
        programs = record(code, ranks, mesh=shape, ordered=cluster.overlaps)
        weights = np.mean([model.attention_weights(x) + model.ffn_weights(x) for x in alike])
        again = checkpointing != "none"
        for program, held in zip(programs, tokens.tolist(), strict=True):
            flops = int(2 * weights * held)
            program.actions.insert(0, Compute(Operators(flops, 0)))
            program.actions.append(Compute(Operators((3 if again else 2) * flops, 0)))
        sent += len(alike) * np.array([program.sent_bytes for program in programs])
        if sharding != "none" and ranks > 1:
            _shard(programs, int(weights * costs.itemsize), 3 if sharding == "full" else 2)
        if offload:
            each, _ = activation_bytes(model, costs.itemsize, checkpointing)
            per_layer = offload * each / len(model.layers)
            for program, held in zip(programs, tokens.tolist(), strict=True):
                _offload(program, int(per_layer * held))
        outcome = play(programs, cluster)
        kept = tokens * model.attention_elements(alike[0]) * costs.itemsize
        beside = np.maximum(beside, outcome.peak_bytes - kept)
        layers[key] = outcome, len(alike)
    device = cluster.device
    head = 6 * int(tokens.max()) * model.vocabulary * model.hidden
    head_seconds = head / (device.matmul_rate * device.matmul_share)
    stage = 0 if sharding == "gradients" else 3
    held_bytes = costs.activation_bytes(tokens, checkpointing)
    held_bytes = held_bytes + costs.parameter_bytes(ranks, stage)
    updating = costs.optimizer_seconds(ranks, stage) if optimizer else 0.0
    return Step(
        sum(n * x.seconds for x, n in layers.values()) + head_seconds + updating,
        layers,
        head_seconds,
        updating,
        held_bytes + beside,
        sent,
    )


def _shard(programs: list[Program], nbytes: int, passes: int) -> None:
    """Let ranks gather and reduce what a layer has, in so many passes, while they compute.

    A rank has as many of the layer's bytes as any other.
    """
    part = -(-nbytes // len(programs))
    for rank, program in enumerate(programs):
        others = tuple((peer, passes * part) for peer in range(len(programs)) if peer != rank)
        program.actions.insert(0, Post(_SHARDED, others, others, "parameters", "parameters"))
        program.actions.append(Wait(_SHARDED))


def _offload(program: Program, nbytes: int) -> None:
    """Let a rank copy bytes to its host beside forward, and back beside backward."""
    actions, halves = program.actions, []
    split = (i for i, x in enumerate(actions) if getattr(x, "what", "").endswith("backward"))
    first = next(split, len(actions) - 1)  # without attention the products of backward are last
    for half in (actions[:first], actions[first:]):
        copy = Program([Copy(nbytes, "offload")])
        halves += [Begin(copy), *half, End(copy)]
    program.actions = halves


def _layer(
    strategy: str,
    layout: Layout,
    cluster: Cluster,
    model: Model,
    layer: Layer,
    checkpointing: str,
    options: dict[str, Any],
) -> Any:
    """Return the code of a rank: a layer's attention, forward and backward."""
    dtype = getattr(torch, cluster.device.dtype)
    recurrence = model.recurrence

    def code(comm: Comm) -> None:
        def empty(heads: int, dim: int) -> torch.Tensor:
            shape = layout.tokens_on(comm.rank), heads, dim
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        attn: LASP2Attention | Attention
        call: dict[str, Any]
        if layer.kind == "linear":
            assert recurrence is not None
            r, attn, call = recurrence, LASP2Attention(comm), dict[str, Any]()
            # heads of keys that several heads of values share are repeated
            q, k = (empty(r.value_heads, r.key_dim) for _ in range(2))
            v = empty(r.value_heads, r.value_dim)
        else:
            attn = make_attention(strategy, comm, **options)
            window = -1 if layer.window is None else layer.window - 1
            call = {"causal": True, "window_size": (window, -1)}
            q = empty(model.heads, model.head_dim)
            k, v = (empty(model.kv_heads, model.head_dim) for _ in range(2))
        if checkpointing == "full":
            with torch.no_grad():
                attn(q, k, v, layout, **call)
        out = attn(q, k, v, layout, **call)
        out.backward(torch.empty_like(out))

    return code
