"""A baseline of several papers: Megatron-LM's tensor and sequence parallelism, as programs.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section
4.2.2: ranks share a layer's weights and heads. Before each of a layer's two blocks they gather all
tokens, and after it they reduce and scatter them; backward does the same with gradients. This
library has no such strategy, so its programs are written here, and simulated like our code's.

Where papers give no details, it is favoured: a collective between nodes uses all NICs, its parts
inside and between nodes overlap, and inputs that backward gathers again are free.
"""

from __future__ import annotations

from itertools import count

from seqpar import simulate
from seqpar.balance import Cluster, Costs, Model, Tasks
from seqpar.core.arguments import Ints
from seqpar.costs.grid import causal_pairs
from seqpar.simulate.recording.program import (
    Action,
    Compute,
    Operators,
    Post,
    Program,
    SoftmaxCompute,
    Wait,
)


def step(
    lengths: Ints, ranks: int, cluster: Cluster, model: Model, checkpointing: str = "full"
) -> float:
    """Return the seconds of a step of documents on `ranks` ranks that share all weights.

    Heads are padded to a multiple of the ranks. Only with `checkpointing` "full", layers are
    computed twice.
    """
    call = ranks, lengths, cluster, model, checkpointing
    layer = simulate.play([_program(rank, *call) for rank in range(ranks)], cluster).seconds
    device, tokens = cluster.device, int(lengths.sum())
    head = 6 * tokens * model.vocabulary * model.hidden / ranks
    return len(model.layers) * layer + head / (device.matmul_rate * device.matmul_share)


def held_bytes(costs: Costs, tokens: int, ranks: int, checkpointing: str = "full") -> float:
    """Return the bytes of a rank: parameters, the whole optimizer's state, and activations."""
    states = costs.model.parameters / ranks * (2 * costs.itemsize + 12)
    gathered = 2 * tokens * costs.model.hidden * costs.itemsize  # a block's input, and its result
    return states + float(costs.activation_bytes(tokens / ranks, checkpointing)) + gathered


def _program(
    rank: int, ranks: int, lengths: Ints, cluster: Cluster, model: Model, checkpointing: str
) -> Program:
    """Return a rank's layer, forward and backward."""
    parts = [False, True] if checkpointing != "full" else [False, False, True]
    numbers = count()
    actions = [
        action
        for backward in parts
        for action in _pass(rank, ranks, lengths, cluster, model, backward, numbers)
    ]
    return Program(actions)


def _pass(
    rank: int,
    ranks: int,
    lengths: Ints,
    cluster: Cluster,
    model: Model,
    backward: bool,
    numbers: count[int],
) -> list[Action]:
    """Return a rank's pass through a layer. The order of its blocks does not change the cost."""
    tokens, layer = int(lengths.sum()), model.layers[0]
    heads = -(-model.heads // ranks)
    padding = heads * ranks / model.heads
    tasks = Tasks.of(lengths, lengths, causal_pairs(0 * lengths, lengths))
    itemsize = Costs(cluster, model).itemsize
    shard = tokens * model.hidden * itemsize // ranks

    def linear(weights: float) -> Compute:
        return Compute(Operators(int((4 if backward else 2) * weights * tokens / ranks), 0))

    def collective(what: str) -> list[Action]:
        return _collective(rank, ranks, cluster.devices_per_node, shard, what, numbers)

    core = Compute(SoftmaxCompute(tasks, heads, model.head_dim, backward), "attention")
    return [
        *collective("all-gather"),
        linear(padding * model.attention_weights(layer)),
        core,
        *collective("reduce-scatter"),
        *collective("all-gather"),
        linear(model.ffn_weights(layer)),
        *collective("reduce-scatter"),
    ]


def _collective(
    rank: int, ranks: int, node: int, shard: int, what: str, numbers: count[int]
) -> list[Action]:
    """Return an all-gather of shards: between nodes to the same place, and inside to each place.

    A reduce-scatter sends the same bytes in the opposite order.
    """
    node = min(node, ranks)
    first, place = rank - rank % node, rank % node
    across = [peer for peer in range(place, ranks, node) if peer != rank]
    inside = [peer for peer in range(first, first + node) if peer != rank]
    actions: list[Action] = []
    of_nodes = shard * ranks // node  # the shards of the same place on all nodes
    for channel, peers, nbytes in (("between", across, shard), ("inside", inside, of_nodes)):
        if peers:
            messages = tuple((peer, nbytes) for peer in peers)
            actions.append(Post(next(numbers), messages, messages, channel, what))
    return [*actions, *(Wait(x.number) for x in actions if isinstance(x, Post))]
