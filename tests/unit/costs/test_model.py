"""Models: published numbers of parameters, and what configurations of transformers say."""

from types import SimpleNamespace

import pytest
import torch

from seqpar.balance import Model
from seqpar.costs.model import PUBLISHED_CONFIGS, Layer, Recurrence
from tests.support.tiers import few_rows

LLAMA = PUBLISHED_CONFIGS["llama-8b"]


def windows(model):
    """Each layer's window: "linear" where it has none, and None where it sees all."""
    return ["linear" if x.kind == "linear" else x.window for x in model.layers]


@pytest.mark.parametrize(
    ("name", "parameters", "within"),
    [
        ("llama-3b", 3_212_749_824, 0),
        ("llama-7b", 6_738_415_616, 0),
        ("llama-8b", 8_030_261_248, 0),
        ("llama-13b", 13_015_864_320, 0),
        ("llama-30b", 32_528_943_616, 0),
        ("llama-70b", 70_553_706_496, 0),
        ("mistral-7b", 7_241_732_096, 0),
        ("mixtral-8x7b", 46_702_792_704, 0),
        ("mixtral-8x22b", 140_630_071_296, 0),
        ("qwen3-8b", 8_190_735_360, 1e-4),  # with norms of queries and keys
        ("qwen3-32b", 32_762_123_264, 1e-4),
        ("gpt-oss-20b", 20.9e9, 1e-2),
        ("gpt-oss-120b", 116.8e9, 1e-2),
        ("qwen3-next-80b", 79.7e9, 1e-2),
        ("minimax-text-01", 456e9, 1e-2),
    ],
)
def test_parameters_are_those_published(name, parameters, within):
    assert Model.preset(name).parameters == pytest.approx(parameters, rel=within, abs=0)


MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in ("apertus", "arcee", "biogpt", "jais2", "nanochat")),
        *((name, {}) for name in ("bert-generation", "gpt_neox", "llama", "phi", "starcoder2")),
        ("granitemoeshared", MIXTURE | {"shared_intermediate_size": 96}),
        ("mixtral", MIXTURE),
    ],
)
def test_parameters_match_modules_of_transformers(model_type, changes):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128}
    config = transformers.CONFIG_MAPPING[model_type](**sizes, **changes)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(
        p.numel() for name, p in module.named_parameters() if p.dim() > 1 and "position" not in name
    )
    model = Model.from_config(config)
    norms = 17 * model.hidden
    assert model.parameters - norms == matrices


@pytest.mark.parametrize(
    ("name", "active"),  # of mixtures, published
    [("mixtral-8x22b", 39e9), ("gpt-oss-20b", 3.61e9), ("gpt-oss-120b", 5.13e9)],
)
def test_a_token_goes_through_its_experts_alone(name, active):
    model = Model.preset(name)
    assert model.flops_per_token / 2 == pytest.approx(active, rel=0.02)


def test_flops_are_those_of_the_published_formula():
    """2(2h² + 2h·h_kv + 3h·i) a layer and token, and the head."""
    h, h_kv, i = 4096, 1024, 14336
    expected = 32 * 2 * (2 * h * h + 2 * h * h_kv + 3 * h * i) + 2 * h * 128256
    assert Model.preset("llama-8b").flops_per_token == expected


def test_what_travels():
    assert Model.preset("llama-8b").key_value_elements == 2 * 8 * 128
    assert Model.preset("llama-8b").state_elements == 0
    assert Model.preset("qwen3-next-80b").state_elements == 32 * 128 * 128
    lightning = Recurrence(64, 64, 128, 128, "constant_decay")
    assert Model.preset("minimax-text-01").recurrence == lightning


@few_rows()
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, [None] * 32),
        (PUBLISHED_CONFIGS["mistral-7b"], [4096] * 32),
        (PUBLISHED_CONFIGS["gemma3-12b"], ([1024] * 5 + [None]) * 8),
        (PUBLISHED_CONFIGS["gpt-oss-20b"], [128, None] * 12),
        (PUBLISHED_CONFIGS["qwen3-next-80b"], (["linear"] * 3 + [None]) * 12),
        (PUBLISHED_CONFIGS["minimax-text-01"], (["linear"] * 7 + [None]) * 10),
        (LLAMA | {"model_type": "gemma2", "sliding_window": 64}, [64, None] * 16),
        (LLAMA | {"sliding_window": 64, "use_sliding_window": False}, [None] * 32),
        (
            LLAMA | {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 28},
            [None] * 28 + [64] * 4,
        ),
        (
            LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 16}
            | {"sliding_window": 9},
            [9, None] * 16,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_windows_of_layers(config, expected, kind):
    """A mapping, as config.json holds it, and an object with attributes."""
    assert windows(Model.from_config(kind(**config))) == expected


def test_configurations_within_others_and_unsaid_values():
    text = {**LLAMA, "num_key_value_heads": None, "head_dim": None}
    model = Model.from_config(SimpleNamespace(text_config=SimpleNamespace(**text)))
    assert (model.kv_heads, model.head_dim, model.name) == (32, 128, "llama")
    assert Model.from_config(LLAMA | {"model_type": "gpt_neox"}).gated is False
    dense = PUBLISHED_CONFIGS["qwen3-next-80b"] | {"mlp_only_layers": [1], "decoder_sparse_step": 1}
    layers = Model.from_config(dense).layers
    assert layers[0] == Layer("linear", None, 11 * 512, 513 * 512, 512)
    assert layers[1] == Layer("linear", None, 5120, 5120)
    assert Model.from_config(dense).recurrence == Recurrence(16, 32, 128, 128, "gated_delta")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": 33}, "head_dim"),
        ({"num_key_value_heads": 5}, "kv_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"num_local_experts": "many"}, "num_local_experts"),
        ({"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_num_key_heads"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"moe_num_experts": 64}, "moe_num_experts"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"v_head_dim": 7}, "v_head_dim"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"H_cycles": 2}, "H_cycles"),
        ({"block_auto_adjust_ff_dim": True}, "block_auto_adjust_ff_dim"),
        ({"keep_window_size": 2048}, "keep_window_size"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"kv_channels": 128}, "kv_channels"),
        ({"type_vocab_size": 2}, "type_vocab_size"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config"),
    ],
)
def test_what_is_missing_or_not_described_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        Model.from_config(SimpleNamespace(**(LLAMA | changes)))


def test_a_value_that_differs_between_layers():
    class Config(SimpleNamespace):
        @property
        def head_dim(self):  # as transformers does for Gemma 4
            raise RuntimeError("'head_dim' is a per-layer attribute")

    with pytest.raises(ValueError, match=r"^config\.head_dim must be the same for all layers"):
        Model.from_config(Config(**(LLAMA | {"model_type": "gemma4_text"})))


def test_an_unknown_preset_lists_those_that_there_are():
    with pytest.raises(ValueError, match=r"llama-7b.*mixtral-8x22b.*got 'llama-9b'"):
        Model.preset("llama-9b")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (("softmax", 4, 1, 1), "window"),
        (("window", None, 1, 1), "window"),
        (("window", 0, 1, 1), "window"),
        (("mamba", None, 1, 1), "kind"),
        (("softmax", None, 2, 1), "stored_ffn"),
    ],
)
def test_layers_that_contradict_themselves(fields, named):
    with pytest.raises(ValueError, match=named):
        Layer(*fields)


def test_models_that_contradict_themselves():
    layer = (Layer("linear", None, 1, 1),)
    with pytest.raises(ValueError, match="recurrence"):
        Model("mine", layer, 8, 2, 1, 4, 10)
    with pytest.raises(ValueError, match="layers"):
        Model("mine", (), 8, 2, 1, 4, 10)
