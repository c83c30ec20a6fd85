"""Which families of transformers run over ranks, and why each other one does not."""

import copy
import re
from pathlib import Path
from zlib import crc32

import pytest

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.loss.losses import RouterLoss
from tests.support import families, generation
from tests.support import huggingface as hf
from tests.support import image_families as images
from tests.support.ranks import virtual


def words(text):
    return tuple(text.split())


EXACT = {
    "causal": words("""
    afmoe apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet camembert cohere
    cohere2 cohere2_moe ctrl cwm data2vec-text deepseek_v2 deepseek_v3 diffllama dots1 electra ernie
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt_bigcode gpt_neox
    gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 jais2 jetmoe kolibri1 laguna lfm2
    llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xlm-roberta xlm-roberta-xl xmod youtu
    """),
    "masked": words("""
    albert bart bert camembert data2vec-text distilbert electra ernie esm esmc eurobert gte
    jina_embeddings_v3 mbart modernbert neomme nomic_bert roberta roberta-prelayernorm roc_bert
    ultrabert xlm-roberta xlm-roberta-xl xmod
    """),
    "encoder-decoder": words("""
    blenderbot blenderbot-small m2m_100 marian pegasus plbart seamless_m4t seamless_m4t_v2
    """),
}
RECURRENT = words("""
    bamba falcon_h1 granitemoehybrid kimi_linear lfm2_moe lfm3 mamba2 minimax nemotron_h olmo_hybrid
    qwen3_5_moe_text qwen3_5_text qwen3_next zamba2
""")  # families whose recurrences and short convolutions are computed over ranks
EXACT["causal"] += RECURRENT
COUNTING = words("""
causal/biogpt causal/opt
""")  # need position ids for rows padded on the left, of which their tables may count columns
REFUSED = {  # when they are enabled, by what the refusal says
    # keys chosen by an indexer, or compressed
    "layer_types of its config has": words("""
    causal/axk2 causal/deepseek_v32 causal/deepseek_v4 causal/dots3_note_text causal/glm_moe_dsa
    causal/hy_v4
    """),
    # attention of their own
    "attention layers can be reached": words("""
    causal/bailing_hybrid causal/big_bird causal/bloom causal/codegen causal/cpmant causal/falcon
    causal/gpt_neo causal/gpt_neox_japanese causal/gptj causal/megatron-bert causal/mpt causal/mvp
    causal/openai-gpt causal/prophetnet causal/rembert causal/roformer causal/trocr causal/xglm
    causal/xlm causal/xlnet encoder-decoder/bigbird_pegasus encoder-decoder/fsmt encoder-decoder/led
    encoder-decoder/longt5 encoder-decoder/pegasus_x encoder-decoder/prophetnet masked/big_bird
    masked/convbert masked/deberta masked/deberta-v2 masked/flaubert masked/funnel masked/ibert
    masked/longformer masked/luke masked/megatron-bert masked/mpnet masked/mra masked/mvp
    masked/nystromformer masked/rembert masked/roformer masked/tapas masked/yoso
    """),
    # relative biases
    "adds a bias to its scores": words("""
    encoder-decoder/mt5 encoder-decoder/t5 encoder-decoder/umt5
    """),
    # layers that mix tokens otherwise
    "mixes tokens along": words("""
    causal/falcon_mamba causal/inkling2_text causal/inkling_text causal/jamba causal/mamba
    causal/qwen4_exp_text causal/recurrent_gemma causal/rwkv causal/zaya
    """),
    # no attention
    "has no attention layers": words("""
    causal/xlstm
    """),
    # one token for a sequence
    "takes one token of each sequence": words("""
    masked/fnet masked/layoutlm masked/squeezebert
    """),
    # neighbouring tokens in embeddings
    "trigram_input is set": words("""
    masked/mobilebert
    """),
    # masks of their own
    "its model_type is t5gemma": words("""
    encoder-decoder/t5gemma
    """),
    # experts that are full
    "expert_capacity is set": words("""
    encoder-decoder/nllb-moe encoder-decoder/switch_transformers
    """),
}
OWN_LOSS = words("""
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart whisper
""")  # causal families that refuse labels, because they do not make a loss by `loss_function`
REFUSED_IN_CALLS = {
    "causal/doge": "make their own mask",
}
REFUSED_IN_CALLS |= {f"causal/{x}": "computes no loss by its loss_function" for x in OWN_LOSS}
NOT_MADE = {  # by why there is no tiny model of them here
    "images or sound beside text, whose table is image_families": words("""
    causal/emu3 causal/fuyu causal/gemma3 causal/gemma3n causal/gemma4 causal/gemma4_unified
    causal/git causal/got_ocr2 causal/mllama causal/moss_transcribe_diarize causal/musicgen
    causal/musicgen_melody causal/phi4_multimodal encoder-decoder/audioflamingo3
    encoder-decoder/glmasr encoder-decoder/granite_speech encoder-decoder/granite_speech_plus
    encoder-decoder/musicflamingo encoder-decoder/nemo_speechlm encoder-decoder/qwen2_audio
    encoder-decoder/qwen3_asr encoder-decoder/vibevoice_asr encoder-decoder/voxtral
    encoder-decoder/voxtral_realtime masked/modernvbert masked/perceiver masked/ultravbert
    """),
    "two models in one, each with a family of its own": words("""
    causal/gemma4_assistant causal/gemma4_unified_assistant encoder-decoder/encoder-decoder
    encoder-decoder/t5gemma2
    """),
    "configs that transformers makes in their usual sizes alone": words("""
    causal/blt causal/cohere_compass_text causal/dbrx causal/reformer causal/zamba
    masked/reformer
    """),
}
ROUTERS = words("""
    ernie4_5_moe flex_olmo gpt_oss granitemoe granitemoe_swa granitemoeshared jetmoe laguna mellum
    minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_moe
""")  # families whose loss has a part that balances them
ROUTERS += words("granitemoehybrid minimax qwen3_5_moe_text qwen3_next")
_T5GEMMA = hf.SIZES | {"sliding_window": 6, "attention_dropout": 0.0, "dropout_rate": 0.0}
OPTIONS = {
    "t5gemma": {"encoder": _T5GEMMA, "decoder": _T5GEMMA | {"cross_attention_hidden_size": 32}},
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
    },
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cpmant": {
        "dim_head": 8,
        "dim_ff": 48,
        "segment_types": 2,
        "prompt_types": 2,
        "prompt_length": 2,
        "position_bias_num_buckets": 8,
        "position_bias_max_distance": 16,
    },
    "ctrl": {"dff": 48},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
    },
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
    },
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 0,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mpt": {"use_cache": True},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen4_exp_text": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 16,
        "shape_vocab_size": 16,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "t5": {"decoder_start_token_id": 2},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 8},
    "neomme": {"head_dim": 16},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
    },
    "fsmt": {
        "src_vocab_size": 64,
        "tgt_vocab_size": 64,
        "langs": ["en", "de"],
        "max_position_embeddings": 64,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
}


def build(family):
    """A tiny model of a family, by its list and name."""
    names = {f"{kind}/{family}": name for kind, family, name in families.names()}
    options = OPTIONS.get(family.partition("/")[2], {})
    return families.build(family.partition("/")[2], names[family], **options)


def exact():
    return [f"{kind}/{family}" for kind, names in EXACT.items() for family in names]


def on_ranks(families):
    """Rows (family, ranks): about each fourth family has 4 ranks, and the others have 2."""
    return [
        pytest.param(family, 2 if crc32(family.encode()) % 4 else 4, marks=pytest.mark.exhaustive)
        for family in families
    ]


def refused():
    return [(family, reason) for reason, names in REFUSED.items() for family in names]


def test_every_family_of_transformers_is_in_one_table():
    known = [*exact(), *(family for family, _ in refused()), *REFUSED_IN_CALLS]
    known += [family for names in NOT_MADE.values() for family in names]
    assert len(known) == len(set(known))
    installed = {f"{kind}/{family}" for kind, family, _ in families.names()}
    assert not installed - set(known), "families of this transformers in no table"
    assert not set(known) - installed, "families in a table that this transformers lacks"


def test_the_guide_counts_the_families_of_the_tables():
    guide = (Path(__file__).parents[4] / "docs/guides/huggingface_rules.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| [^|]+ \|$", guide, re.MULTILINE)
    of_text, of_images = (sum(map(int, column)) for column in zip(*rows, strict=True))
    assert of_text == len(refused()) + len(REFUSED_IN_CALLS)
    assert of_images == len(images.REFUSED) + len(images.REFUSED_IN_CALLS)
    words_of = " ".join(guide.split())
    assert f"For {len(ROUTERS)} families, the tests also compare the router loss." in words_of
    exactly = f"for {len(exact())} text families, and for {len(images.EXACT)} families with images"
    assert exactly in words_of


@pytest.mark.parametrize(("family", "ranks"), on_ranks(exact()))
def test_a_family_computes_what_one_process_does(family, ranks):
    model = build(family)
    # An encoder takes no packed rows.
    packed = "padded" if model.config.is_encoder_decoder else "packed"
    kinds = packed, "padded" if family in COUNTING else "sides"
    hf.compare_all(model, [hf.batch(kind) for kind in kinds], ranks)
    # The tiny model of one has no router, though there is such a loss.
    balances = RouterLoss.of(model) is not None and family != "causal/flint"
    assert balances == (family.partition("/")[2] in ROUTERS)


@pytest.mark.parametrize(
    ("family", "ranks"), on_ranks([x for x in exact() if x.partition("/")[2] in ROUTERS])
)
def test_router_balancing_loss_matches_one_process(family, ranks):
    model = build(family)
    model.config.output_router_logits = True
    hf.compare(model, hf.batch("padded"), ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "reason"), refused())
def test_unsupported_families_are_refused_on_enable(family, reason):
    model = build(family)
    with pytest.raises(ValueError, match=reason):
        virtual(1, lambda comm: huggingface.enable(copy.deepcopy(model), comm))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REFUSED_IN_CALLS)
def test_families_with_their_own_masks_or_losses_are_refused(family):
    model = build(family)
    with pytest.raises(ValueError, match=REFUSED_IN_CALLS[family]):
        virtual(1, lambda comm: hf.on_rank(comm, model, hf.batch()))


# Of what moshi returns, other outputs than logits are cut to the last tokens too.
NOT_GENERATING = {"moshi": "outputs must be tensors that the model returned"}
NOT_GENERATING |= dict.fromkeys(RECURRENT, "a sharded cache cannot store states")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "family", [x for x in EXACT["causal"] + OWN_LOSS if x not in NOT_GENERATING]
)
def test_a_family_generates_what_one_process_does(family):
    """Also those that make keys of what they cache, or take those of other layers."""
    batch = generation.prompts((0, 7))
    generation.check(build(f"causal/{family}").eval(), batch, {}, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", NOT_GENERATING)
def test_a_family_that_does_not_generate_says_why(family):
    model = build(f"causal/{family}").eval()
    with pytest.raises(ValueError, match=NOT_GENERATING[family]):
        generation.on_ranks(model, generation.prompts((0, 7)), 2)
