"""Read a model's shapes off a configuration of transformers, by its attributes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqpar.core.arguments import as_int
from seqpar.costs.layers import Layer, Recurrence

LAYER_KINDS = {
    "full_attention": "softmax",
    "attention": "softmax",
    "sliding_attention": "window",
    "linear_attention": "linear",
    1: "softmax",  # of MiniMax
    0: "linear",
}
# Decoders whose feed-forward parts have two matrices; those of all others are gated.
UNGATED = {
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nemotron", "opt", "persimmon", "phi", "starcoder2",
}  # fmt: skip
# Attributes of models that nothing here describes: a cost would be silently wrong.
UNKNOWN = {
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "attention in chunks",
    "layers_block_type": "mixed blocks",
    "hybrid_override_pattern": "mixed blocks",
    "block_types": "mixed blocks",
    "attn_layer_period": "mixed blocks",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "state_size": "Mamba layers",
}


class _Config:
    """A configuration's attributes, or a mapping's entries."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these attributes that there is and is not None."""
        for name in names:
            if isinstance(self._config, Mapping):
                value = self._config.get(name)
            else:
                value = getattr(self._config, name, None)
            if value is not None:
                return value
        return default

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of these attributes as an integer.

        Raise a ValueError if there is none and no default, or if it is no integer from 1 on (from 0
        on, if that is the default).
        """
        value = self.get(*names, default=default)
        if value is None:
            raise ValueError(f"config has no {' or '.join(names)}")
        return as_int(f"config.{names[0]}", value, 0 if default == 0 else 1)


def read_config(config: Any) -> dict[str, Any]:
    """Return the fields of a Model; see `Model.from_config`."""
    found = _Config(config)
    if found.get("hidden_size") is None and found.get("text_config") is not None:
        found = _Config(found.get("text_config"))  # of a model that reads images too
    if found.get("is_encoder_decoder"):
        raise ValueError("config.is_encoder_decoder: only decoders are described")
    for name, what in UNKNOWN.items():
        if found.get(name):
            raise ValueError(f"config.{name}: {what} is not described")
    hidden, heads = found.number("hidden_size"), found.number("num_attention_heads")
    head_dim = found.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"config has no head_dim, and {heads} heads do not divide {hidden}")
        head_dim = hidden // heads
    kinds = _kinds(found)
    model_type = str(found.get("model_type", default="model"))
    return {
        "name": model_type,
        "layers": tuple(
            Layer(kind, window, *_feed_forward(found, i)) for i, (kind, window) in enumerate(kinds)
        ),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": found.number("num_key_value_heads", default=heads),
        "head_dim": as_int("config.head_dim", head_dim, 1),
        "vocabulary": found.number("vocab_size"),
        "gated": model_type not in UNGATED,
        "tied": bool(found.get("tie_word_embeddings", default=False)),
        "output_gate": model_type.startswith(("qwen3_next", "qwen3_5")),
        "recurrence": _recurrence(found, heads) if ("linear", None) in kinds else None,
    }


def _kinds(config: _Config) -> list[tuple[str, int | None]]:
    """Return each layer's kind, and its window."""
    count = config.number("num_hidden_layers")
    types = config.get("layer_types", "attn_type_list")
    if types is None:
        types = _unsaid_types(config, count)
    if isinstance(types, str) or len(types) != count:
        entries = f"num_hidden_layers = {count} entries"
        raise ValueError(f"config.layer_types must have {entries}, got {types!r}")
    unknown = {*types} - {*LAYER_KINDS}
    if unknown:
        raise ValueError(
            f"config.layer_types: {min(unknown, key=str)!r} is not described, only {[*LAYER_KINDS]}"
        )
    kinds = [LAYER_KINDS[name] for name in types]
    window = config.number("sliding_window") if "window" in kinds else None
    return [(kind, window if kind == "window" else None) for kind in kinds]


def _unsaid_types(config: _Config, count: int) -> list[str]:
    """Return the layer types of a configuration that has no layer_types, as its model has them."""
    model_type, layers = config.get("model_type"), range(count)
    if config.get("full_attention_interval") is not None:
        # Qwen3-Next: the last of so many layers is not linear
        interval = config.number("full_attention_interval")
        full = [(i + 1) % interval == 0 for i in layers]
        return ["full_attention" if x else "linear_attention" for x in full]
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    # Gemma 2 has windows in every other layer, Gemma 3 and Cohere 2 in all but each so many-th
    pattern = config.number(
        "sliding_window_pattern",
        "_sliding_window_pattern",
        default=2 if model_type == "gemma2" else 0,
    )
    if pattern:
        full = [(i + 1) % pattern == 0 for i in layers]
    else:  # Qwen2 has none below max_window_layers, Mistral has them everywhere
        first = config.number("max_window_layers", default=0) if model_type != "mistral" else 0
        full = [i < first for i in layers]
    return ["full_attention" if x else "sliding_attention" for x in full]


def _feed_forward(config: _Config, layer: int) -> tuple[int, int, int]:
    """Return the width that a token meets in a layer, the width stored, and how many experts."""
    experts = config.number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    period = config.number("decoder_sparse_step", default=1)
    sparse = (
        layer not in config.get("mlp_only_layers", default=())
        and layer >= config.number("first_k_dense_replace", default=0)
        and (layer + 1) % period == 0
    )
    if not experts or not sparse:
        dense = config.number("intermediate_size")
        return dense, dense, 0
    width = config.number("moe_intermediate_size", "intermediate_size")
    shared = config.number("shared_expert_intermediate_size", default=0)
    shared += width * config.number("n_shared_experts", default=0)
    chosen = config.number("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"config.num_experts_per_tok is {chosen}, of {experts} experts")
    return width * chosen + shared, width * experts + shared, experts


def _recurrence(config: _Config, heads: int) -> Recurrence:
    """Return what linear layers have: the gated delta rule, or MiniMax's lightning attention."""
    if str(config.get("model_type")).lower().startswith("minimax"):
        dim = config.number("head_dim", default=config.number("hidden_size") // heads)
        return Recurrence(heads, heads, dim, dim, "constant_decay")
    return Recurrence(
        config.number("linear_num_key_heads"),
        config.number("linear_num_value_heads"),
        config.number("linear_key_head_dim"),
        config.number("linear_value_head_dim"),
        "gated_delta",
    )
