"""Which recurrent layers of transformers can be computed over ranks, by their classes' names."""

from __future__ import annotations

# What mixes tokens in them besides a short convolution: a kind of `RecurrentAttention`, or nothing.
_KINDS = {
    "BambaMixer": "scalar_decay",
    "FalconH1Mixer": "scalar_decay",
    "GraniteMoeHybridMambaLayer": "scalar_decay",
    "KimiLinearDeltaAttention": "kda",
    "Lfm2MoeShortConv": "convolution",
    "Lfm2ShortConv": "convolution",
    "Lfm3ShortConv": "convolution",
    "Mamba2Mixer": "scalar_decay",
    "MiniMaxLightningAttention": "constant_decay",
    "NemotronHMamba2Mixer": "scalar_decay",
    "OlmoHybridGatedDeltaNet": "gated_delta",
    "Qwen3NextGatedDeltaNet": "gated_delta",
    "Qwen3_5GatedDeltaNet": "gated_delta",
    "Qwen3_5MoeGatedDeltaNet": "gated_delta",
    "Zamba2MambaMixer": "scalar_decay",
}
# What the forwards of each kind call for it, besides what is theirs.
CALLED: dict[str, tuple[str, ...]] = {
    "constant_decay": (),
    "convolution": ("causal_conv1d_fn",),
    "gated_delta": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "kda": ("causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "scalar_decay": (
        "causal_conv1d_fn",
        "mamba2_chunk_scan",
        "mamba2_split_conv1d_scan_combined",
    ),
}
# Kinds of blocks that a model which has such layers may say that it has.
TYPES = {"conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"}


def kind_of(layer: type) -> str | None:
    """Return the kind of recurrence of a class of layers, or None if it cannot be computed.

    FSDP makes subclasses, whose forward is that of the class in the table.
    """
    for base in layer.__mro__:
        ours = base.__module__.startswith("transformers.models.") and base.__name__ in _KINDS
        if ours and getattr(layer, "forward", None) is base.forward:  # type: ignore[attr-defined]
            return _KINDS[base.__name__]
    return None
