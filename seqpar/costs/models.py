"""Published models by name: what their config.json says, as far as costs depend on it."""

from __future__ import annotations

from typing import Any


def _config(
    model_type: str,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    vocab_size: int,
    **others: Any,
) -> dict[str, Any]:
    """Return a configuration with what every model has, and others."""
    return {
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        **others,
    }


_QWEN3_NEXT = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_GEMMA3 = {"tie_word_embeddings": True, "sliding_window": 1024, "sliding_window_pattern": 6}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_OF_TWO = ["sliding_attention", "full_attention"]
_QWEN3 = {"head_dim": 128}

# LLaMA 7B to 30B are those of the first paper; 34B is Code Llama's, which DistCA measures with 16
# heads of keys and values.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3b": _config("llama", 3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-7b": _config("llama", 4096, 32, 32, 32, 11008, 32000),
    "llama-8b": _config("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-13b": _config("llama", 5120, 40, 40, 40, 13824, 32000),
    "llama-30b": _config("llama", 6656, 60, 52, 52, 17920, 32000),
    "llama-34b": _config("llama", 8192, 48, 64, 16, 22016, 32000),
    "llama-70b": _config("llama", 8192, 80, 64, 8, 28672, 128256),
    "mistral-7b": _config("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096),
    "mixtral-8x7b": _config(
        "mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _config(
        "mixtral", 6144, 56, 48, 8, 16384, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12288, 151936, **_QWEN3),
    "qwen3-32b": _config("qwen3", 5120, 64, 64, 8, 25600, 151936, **_QWEN3),
    "gemma3-12b": _config("gemma3_text", 3840, 48, 16, 8, 15360, 262208, head_dim=256, **_GEMMA3),
    "gemma3-27b": _config("gemma3_text", 5376, 62, 32, 16, 21504, 262208, head_dim=128, **_GEMMA3),
    "gpt-oss-20b": _config(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, num_local_experts=32, layer_types=_OF_TWO * 12,
        **_GPT_OSS,
    ),
    "gpt-oss-120b": _config(
        "gpt_oss", 2880, 36, 64, 8, 2880, 201088, num_local_experts=128, layer_types=_OF_TWO * 18,
        **_GPT_OSS,
    ),
    "qwen3-next-80b": _config("qwen3_next", 2048, 48, 16, 2, 5120, 151936, **_QWEN3_NEXT),
    "minimax-text-01": _config(
        "minimax", 6144, 80, 64, 8, 9216, 200064, head_dim=128, num_local_experts=32,
        num_experts_per_tok=2, attn_type_list=([0] * 7 + [1]) * 10,
    ),
}  # fmt: skip
