"""The memory of ranks while backward goes through the layers of a model.

Backward goes from the last layer to the first. In each layer, it frees the activations that forward
kept, and makes the gradients of the layer's parameters. Most activations exist at the start of
backward, and most gradients exist at the end of backward. `StepMemory` therefore has the memory at
several moments: in each layer, while backward computes the feed-forward part and while it computes
attention, and at the end, when the embedding gets its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats
from seqpar.costs.model import Model

_NONE = np.zeros(0)


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The bytes of each rank at the moments of a step that may need the most memory.

    Attributes:
        fixed: (moments,) the bytes of parameters, gradients and Adam's state on a rank.
        per_token: (moments,) the bytes of activations and their gradients, for each of the rank's
            tokens. The temporary tensors of attention are not included.
        movable: (moments,) the part of `per_token` that can be in host memory.
        attends: (moments,) 1 if backward computes attention at this moment, and 0 otherwise.
        tokens: (ranks,) the number of tokens of each rank.
        temporary: (ranks,) the bytes of each rank's temporary tensors of attention.
        of_servers: (servers,) the bytes of each attention server.
    """

    fixed: Floats
    per_token: Floats
    movable: Floats
    attends: Floats
    tokens: Floats = field(default_factory=lambda: _NONE)
    temporary: Floats = field(default_factory=lambda: _NONE)
    of_servers: Floats = field(default_factory=lambda: _NONE)

    @classmethod
    def over_layers(
        cls,
        costs: Costs,
        checkpointing: str,
        ranks: int,
        *,
        stage: int = 3,
        divided: Model | None = None,
        tensor_ranks: int = 1,
        accumulates: bool = False,
    ) -> StepMemory:
        """Return the memory of a rank that computes all layers, without its tokens.

        Args:
            costs: the costs of the whole model.
            checkpointing: "none", "attention" or "full".
            ranks: the number of ranks over which parameters are sharded.
            stage: 3 if FSDP2 shards parameters, or 0 if DDP averages gradients. With FSDP2, each
                layer is a group of parameters, and the embedding and the head are one more group,
                which stays gathered during the step. FSDP2 holds the whole gradients of the layer
                that backward computes, of the layer that it reduces, and of the head. DDP
                allocates all gradients before backward.
            divided: the part of the model's parameters that a tensor rank holds. None stands for
                the whole model.
            tensor_ranks: the number of tensor ranks, which divide activations.
            accumulates: whether gradients of an earlier micro-batch exist.
        """
        itemsize, model = costs.itemsize, costs.model
        kept = np.array([costs.layer_bytes(x, checkpointing) for x in model.layers], float)
        whole = np.array([costs.layer_bytes(x) for x in model.layers], float)
        row = model.hidden * itemsize
        before = np.cumsum(kept) - kept  # what the earlier layers keep
        # The last layer's output is counted too, because the caller may hold it during backward.
        in_layer = before + whole + 2 * row  # one of them is the gradient of the layer's output
        in_ffn = in_layer + [costs.ffn_gradient_bytes(x) for x in model.layers]
        in_attention = in_layer - [costs.ffn_bytes(x) for x in model.layers]
        # Backward copies the kept tensors of two layers back before it needs them.
        movable = before - np.r_[0.0, kept[:-1]]
        fixed = _of_parameters(costs, divided or model, ranks, stage, accumulates)
        count = len(model.layers)
        return cls(
            fixed,
            np.r_[in_ffn, in_attention, row] / tensor_ranks,
            np.r_[movable, movable, 0.0] / tensor_ranks,
            np.r_[np.zeros(count), np.ones(count), 0.0],
        )

    def on(self, tokens: Floats, temporary: Floats, of_servers: Floats = _NONE) -> StepMemory:
        """Return the memory of ranks with these numbers of tokens and bytes of temporary
        tensors.
        """
        return replace(self, tokens=tokens, temporary=temporary, of_servers=of_servers)

    def peak(self, offload: float = 0.0) -> Floats:
        """Return the largest number of bytes on each rank and server during a step, if a fraction
        `offload` of the movable tensors is in host memory.
        """
        most = (self.fixed[:, None] + self._growing(offload)).max(0)
        return np.r_[most, self.of_servers]

    def growth(self, capacity: float, offload: float = 0.0) -> float:
        """Return by which factor all lengths can grow until a rank has `capacity` bytes.

        All memory except the memory of parameters is assumed to be proportional to the number of
        tokens.
        """
        growing = self._growing(offload).max(1)
        free = np.maximum(
            0.0, np.r_[capacity - self.fixed, np.full(self.of_servers.size, capacity)]
        )
        return float((free / np.maximum(np.r_[growing, self.of_servers], 1.0)).min())

    def least_offload(self, capacity: float) -> float:
        """Return the least fraction of the movable tensors that must be in host memory, so that
        each rank has at most `capacity` bytes. The result is infinite if no fraction suffices.
        """
        lacking = self.fixed[:, None] + self._growing(0.0) - capacity
        with np.errstate(divide="ignore", invalid="ignore"):
            fractions = np.where(lacking > 0, lacking / np.outer(self.movable, self.tokens), 0.0)
        least = float(fractions.max())
        return least if least <= 1 and (self.of_servers <= capacity).all() else np.inf

    def _growing(self, offload: float) -> Floats:
        per_token = self.per_token - offload * self.movable
        return np.outer(per_token, self.tokens) + np.outer(self.attends, self.temporary)


def _of_parameters(costs: Costs, model: Model, ranks: int, stage: int, accumulates: bool) -> Floats:
    """Return the bytes of parameters, gradients and Adam's state at the moments of
    `StepMemory.over_layers`.
    """
    itemsize = costs.itemsize
    if stage == 0:
        return np.full(2 * len(model.layers) + 1, float(costs.parameter_bytes(ranks, stage)))
    layers = np.array([model.layer_parameters(x) for x in model.layers], float)
    of_layers, head = layers.sum(), model.vocabulary * model.hidden
    outside = model.parameters - of_layers  # the embedding, the head and the last norm
    # Parameters whose gradients are complete: in each layer, those of later layers, and at the end.
    complete = np.r_[of_layers - np.cumsum(layers), of_layers]
    if accumulates:
        complete[:] = model.parameters
    gathered, waiting = 0.0, np.r_[layers + head, outside]
    if ranks > 1:
        gathered = outside + layers.max() * min(2, layers.size)
        # FSDP2 holds the whole gradients that it reduces: those of the next layer and, at the end,
        # those of the first layer and a copy of the last group.
        waiting += np.r_[layers[1:], 0.0, layers[0] + outside]
    states = (itemsize + costs.optimizer_itemsize) * model.parameters / ranks + itemsize * gathered
    *of_step, end = states + itemsize * (complete / ranks + waiting)
    return np.array([*of_step, *of_step, end])
