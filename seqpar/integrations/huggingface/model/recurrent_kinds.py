"""The recurrent layers of transformers that can be computed over ranks, by class name."""

from __future__ import annotations

# Class -> a kind of `RecurrentAttention`, or "convolution" if only a convolution mixes tokens.
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
# Kind -> the global functions that mix tokens, which the forwards of this kind call.
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
# Entries of a config's `layer_types` that are allowed in a model with recurrent layers.
TYPES = {"conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"}


def kind_of(layer: type) -> str | None:
    """Return a layer's kind of recurrence, if any. FSDP's subclasses share the forward."""
    for base in layer.__mro__:
        ours = base.__module__.startswith("transformers.models.") and base.__name__ in _KINDS
        if ours and getattr(layer, "forward", None) is base.forward:  # type: ignore[attr-defined]
            return _KINDS[base.__name__]
    return None
