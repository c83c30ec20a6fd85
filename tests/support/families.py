"""The smallest possible model of every family with a head for each token in transformers' lists."""

import copy

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from tests.support.huggingface import SIZES

LISTS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
MOST_PARAMETERS = 4_000_000
_NO_DROPOUT = [
    "activation_dropout",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "decoder_layerdrop",
    "dropout",
    "dropout_rate",
    "embd_pdrop",
    "encoder_layerdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "layerdrop",
    "resid_pdrop",
    "residual_dropout",
    "router_jitter_noise",
]
_SIZES = SIZES | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "d_kv": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 6,
    "attention_chunk_size": 8,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "decoder_start_token_id": 2,
}


def sizes_of(config_kind, sizes=_SIZES):
    """Return small values for the sizes that a kind of config has, and dropout of 0."""
    known = {*config_kind.__dataclass_fields__, *(config_kind.attribute_map or ())}
    sizes = dict.fromkeys(_NO_DROPOUT, 0.0) | sizes
    if "kv_lora_rank" in known:  # latent attention has a key for each head
        sizes = sizes | {"num_key_value_heads": 4, "head_dim": 4}
    return {x: y for x, y in sizes.items() if x in known}


def build(family, name, **options):
    """Return a model of class `name` with the family's config, random weights and no dropout."""
    kind, config_kind = getattr(transformers, name), CONFIG_MAPPING[family]
    config = config_kind(**sizes_of(config_kind) | options)
    with torch.device("meta"):
        parameters = sum(x.numel() for x in kind(copy.deepcopy(config)).parameters())
    assert parameters < MOST_PARAMETERS, f"{family} has {parameters:,} parameters"
    torch.manual_seed(0)
    return kind(config).train()


def names():
    """Return (list, family, class) for every family; each class occurs once."""
    found = {}
    for kind, families in LISTS.items():
        for family, name in families.items():
            head = name if isinstance(name, str) else name[0]
            if head not in found or family.endswith(
                "_text"
            ):  # prefer the text model, which has no images
                found[head] = kind, family
    return [(kind, family, name) for name, (kind, family) in found.items()]
