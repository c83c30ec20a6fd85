"""What a training step keeps in a device's memory, from a model's shapes alone."""

from __future__ import annotations

from seqpar.core.arguments import as_int
from seqpar.costs.layers import Layer
from seqpar.costs.model import Model

CHECKPOINTING = ("none", "attention", "full")
LSE_BYTES = 4  # fp32, a row and query head


def activation_bytes(model: Model, itemsize: int, checkpointing: str = "none") -> tuple[int, int]:
    """Return (each, once): bytes that backward needs of each token, from all layers.

    `each` is kept from forward to backward. `once` is what backward of one layer needs beside it,
    while it recomputes the layer; 0 without checkpointing. Both are a token's.

    Args:
        model: whose layers.
        itemsize: bytes of an element of activations.
        checkpointing: "none"; "full", which keeps each layer's input alone; "attention", which
            keeps the results of attention too, as `seqpar.checkpoint` does.

    The head's logits are not in it: losses over large vocabularies are computed in pieces. Nor are
    copies of tokens for several experts.
    """
    if checkpointing not in CHECKPOINTING:
        raise ValueError(f"checkpointing must be one of {CHECKPOINTING}, got {checkpointing!r}")
    whole = {layer: _layer_bytes(model, layer, itemsize) for layer in model.counts}
    if checkpointing == "none":
        return sum(n * whole[layer] for layer, n in model.counts.items()), 0
    kept = dict.fromkeys(model.counts, model.hidden * itemsize)
    if checkpointing == "attention":
        kept = {layer: x + _result_bytes(model, layer, itemsize) for layer, x in kept.items()}
    each = sum(n * kept[layer] for layer, n in model.counts.items())
    return each, max(whole[layer] - kept[layer] for layer in whole)


def _result_bytes(model: Model, layer: Layer, itemsize: int) -> int:
    """Return the bytes of a token's output of attention, and of its lse."""
    if layer.kind == "linear":
        assert model.recurrence is not None
        return model.recurrence.value_heads * model.recurrence.value_dim * itemsize
    return model.heads * (model.head_dim * itemsize + LSE_BYTES)


def _layer_bytes(model: Model, layer: Layer, itemsize: int) -> int:
    """Return what a layer keeps of a token, as plain PyTorch does with fused norms.

    That is the inputs of two norms and of the projections behind them; what the projections before
    attention make, and its results; in a feed-forward part the gate before and after its function,
    what it scales, and the product. Where it is not gated, it is what goes through its function,
    and the result.
    """
    if layer.kind == "linear":
        assert model.recurrence is not None
        r = model.recurrence
        projected = 2 * r.key_heads * r.key_dim + 2 * r.value_heads * r.value_dim
    else:
        queries = model.heads * model.head_dim
        projected = queries * (2 if model.output_gate else 1) + model.key_value_elements
    ffn = layer.ffn * (4 if model.gated else 2)
    elements = 4 * model.hidden + projected + ffn
    return elements * itemsize + _result_bytes(model, layer, itemsize)


def parameter_bytes(model: Model, itemsize: int, ranks: int, stage: int = 3) -> int:
    """Return the bytes of parameters, gradients and Adam's state on each of `ranks` ranks.

    Parameters and gradients have `itemsize` bytes each, Adam's two moments 4 each, and parameters
    of less than 4 bytes a copy in fp32. Of these, ZeRO's stage 0 shards nothing, stage 1 Adam's
    state and the copy, stage 2 gradients too, and stage 3 (FSDP) all; with it come the gathered
    parameters of two layers, the one that computes and the next one.
    """
    ranks, stage = as_int("ranks", ranks, 1), as_int("stage", stage, 0)
    if stage > 3:
        raise ValueError(f"stage must be 0 to 3, got {stage}")
    state = 8 + (4 if itemsize < 4 else 0)
    parts = [state, itemsize, itemsize]  # in the order in which stages shard them
    sharded, whole = sum(parts[:stage]), sum(parts[stage:])
    gathered = 0
    if stage == 3 and ranks > 1:
        largest = max(model.layer_parameters(layer) for layer in model.counts)
        gathered = min(2, len(model.layers)) * largest * itemsize
    return model.parameters * whole - (-model.parameters * sharded // ranks) + gathered


def optimizer_bytes(model: Model, itemsize: int, ranks: int, stage: int = 3) -> int:
    """Return the bytes that Adam reads and writes in a step, on each of `ranks` ranks.

    Of each parameter that a rank updates, all with stage 0 and else its part, it reads the
    gradient, reads and writes two moments of 4 bytes, and writes the parameter. It also reads that,
    or if it has less than 4 bytes, reads and writes its copy in fp32.
    """
    ranks, stage = as_int("ranks", ranks, 1), as_int("stage", stage, 0)
    updated = model.parameters if stage == 0 else -(-model.parameters // ranks)
    return updated * (2 * itemsize + 2 * 8 + (2 * 4 if itemsize < 4 else itemsize))
