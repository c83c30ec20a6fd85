"""The memory of a training step on a device, from a model's shapes."""

from __future__ import annotations

from seqpar.core.arguments import as_int
from seqpar.costs.layers import Layer
from seqpar.costs.model import Model

CHECKPOINTING = ("none", "attention", "full")
LSE_BYTES = 4  # fp32, per row and query head


def activation_bytes(model: Model, itemsize: int, checkpointing: str = "none") -> tuple[int, int]:
    """Return (each, once): the bytes per token that backward needs, over all layers.

    `each` is kept from forward to backward, `once` needed while backward recomputes a layer; 0
    without `checkpointing`. That is "none"; "full", which keeps only each layer's input; or
    "attention", which also keeps the results of attention, as `seqpar.checkpoint` does. Neither
    logits, which are computed in pieces, nor copies of tokens for several experts are included.
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
    if layer.kind == "linear":
        assert model.recurrence is not None
        return model.recurrence.value_heads * model.recurrence.value_dim * itemsize
    return model.heads * (model.head_dim * itemsize + LSE_BYTES)


def _layer_bytes(model: Model, layer: Layer, itemsize: int) -> int:
    """Return the bytes per token that a layer keeps in plain PyTorch with fused norms.

    They are the inputs of two norms and of the projections after them, attention's operands and
    results, and the feed-forward part's input and result, if gated also the gate and the product.
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

    Parameters and gradients have `itemsize` bytes each, Adam's two moments 4 each, and a copy of
    parameters of less than 4 bytes 4. ZeRO's stage 0 shards none of these, stage 1 Adam's state and
    the copy, stage 2 also gradients, and stage 3 (FSDP) all; it adds two layers' gathered
    parameters.
    """
    ranks, stage = as_int("ranks", ranks, 1), as_int("stage", stage, 0)
    if stage > 3:
        raise ValueError(f"stage must be 0 to 3, got {stage}")
    state = 8 + (4 if itemsize < 4 else 0)
    parts = [state, itemsize, itemsize]  # in the order in which the stages shard them
    sharded, whole = sum(parts[:stage]), sum(parts[stage:])
    gathered = 0
    if stage == 3 and ranks > 1:
        largest = max(model.layer_parameters(layer) for layer in model.counts)
        gathered = min(2, len(model.layers)) * largest * itemsize
    return model.parameters * whole - (-model.parameters * sharded // ranks) + gathered


def optimizer_bytes(model: Model, itemsize: int, ranks: int, stage: int = 3) -> int:
    """Return the bytes that Adam reads and writes in a step on each of `ranks` ranks.

    For each parameter of its shard (stage 0: of all), a rank reads the gradient, reads and writes
    two moments of 4 bytes, and writes the parameter, which it reads itself or as a copy in fp32.
    """
    ranks, stage = as_int("ranks", ranks, 1), as_int("stage", stage, 0)
    updated = model.parameters if stage == 0 else -(-model.parameters // ranks)
    return updated * (2 * itemsize + 2 * 8 + (2 * 4 if itemsize < 4 else itemsize))
