"""Models of text with images in it: their text is spread over ranks, and the rest is not."""

import copy
import inspect

import pytest
import torch

from seqpar.integrations import huggingface
from tests.support import generation, images
from tests.support import huggingface as hf
from tests.support.ranks import virtual


def words(text):
    return text.split()


def rope(**more):
    """Positions of images have three parts of a head of 8."""
    base = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    return {"text": {"rope_parameters": base | more}}


GEMMA3 = {"mm_tokens_per_image": 4}
GEMMA4 = {
    "text": {
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
        "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
    },
}
PERCEIVER = {
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 4,
    "resampler_head_dim": 8,
    "num_key_value_heads": 2,
}
CROPS = {"image_grid_pinpoints": [[8, 8]]}
EXACT = {  # how each family is given images, of how many tokens, and its model's options
    "aria": ("types", 2, {"projector_patch_to_query_dict": {4: 2}}),
    "aya_vision": ("types", 1, {}),
    "blip-2": ("types", 4, {"num_query_tokens": 4, "image_token_index": images.IMAGE}),
    "cosmos3_omni": ("patches", 4, {}),
    "deepseek_vl": ("types", 4, {}),
    "exaone4_5": ("patches", 4, {}),
    "gemma3": ("types", 4, GEMMA3),
    "gemma4": ("placed", 1, GEMMA4),
    "glm46v": ("patches", 4, rope()),
    "glm4v": ("patches", 4, rope()),
    "glm4v_moe": ("patches", 4, rope(partial_rotary_factor=1.0)),
    "glm_ocr": ("patches", 4, rope()),
    "glmga": ("patches", 4, rope()),
    "got_ocr2": ("types", 1, {}),
    "hyperclovax_vision_v2": ("patches", 4, {}),
    "idefics2": ("rows", 4, {"perceiver_config": PERCEIVER}),
    "idefics3": ("rows", 1, {}),
    "instructblip": ("queries", 4, {"num_query_tokens": 4, "image_token_index": images.IMAGE}),
    "internvl": ("types", 1, {}),
    "lfm2_vl": ("sets", 1, {"vision": {"num_patches": 4}}),
    "lighton_ocr": ("sizes", 1, {}),
    "llama4": ("types", 1, {"vision": {"intermediate_size": 128}}),
    "llava": ("types", 4, {}),
    "llava_next": ("crops", 10, CROPS),
    "llava_next_video": ("crops", 10, CROPS),
    "llava_onevision": ("crops", 10, CROPS),
    "minimax_m3_vl": ("patches", 4, {}),
    "mistral3": ("sizes", 1, {}),
    "ovis2": ("types", 4, {}),
    "paddleocr_vl": ("squares", 4, rope()),
    "paligemma": ("types", 4, {}),
    "pp_chart2table": ("types", 1, {}),
    "qianfan_ocr": ("types", 1, {}),
    "qwen2_5_omni_thinker": ("patches", 4, rope() | {"vision_start_token_id": 61}),
    "qwen2_5_vl": ("patches", 4, rope()),
    "qwen2_vl": ("patches", 4, rope()),
    "qwen3_vl": ("patches", 4, {}),
    "qwen3_vl_moe": ("patches", 4, {}),
    "shieldgemma2": ("types", 4, GEMMA3),
    "smolvlm": ("rows", 1, {}),
    "step3p7": ("types", 1, {}),
    "video_llava": ("types", 4, {}),
    "vipllava": ("types", 4, {"vision_feature_layers": [-1]}),
}
SOUND = {
    "audioflamingo3": ("sound, input_features_mask", 4, {}),
    "glmasr": ("sound, input_features_mask", 2, {"vision": {"intermediate_size": 128}}),
    "moss_transcribe_diarize": ("sound, input_features_mask", 2, {}),
    "musicflamingo": ("sound, input_features_mask", 4, {}),
    "qwen2_audio": ("sound, feature_attention_mask", 4, {}),
    "voxtral": ("sound", 2, {}),
}
EXACT |= SOUND
REFUSED = {  # when they are enabled, by what the refusal says
    "blip": "attention layers can be reached",
    "diffusion_gemma": "must take position_ids",
    "lfm3_vl": "mixes tokens along",
    "minicpm_ocr": "mixes tokens along",
    "minicpmv4_6": "mixes tokens along",
    "minicpmv4_7": "mixes tokens along",
    "mistral_large4": "layer_types of its config has",
    "pix2struct": "adds a bias to its scores",
    "qwen3_5": "mixes tokens along",
    "qwen3_5_moe": "mixes tokens along",
    "qwen4_exp": "mixes tokens along",
    "vision-encoder-decoder": "takes one token of each sequence",
}
REFUSED_IN_CALLS = {
    "kosmos-2": ("masked", 4, {"latent_query_num": 4}, "that the model made itself"),
}
NOT_MADE = {  # by why there is no tiny model of them here
    "configs that transformers makes in their usual sizes alone": words("""
    chameleon cohere2_vision cohere_compass cosmos3_edge deepseek_ocr2 deepseek_vl_hybrid dots3_note
    emu3 ernie4_5_vl_moe evolla florence2 git glm5_next granite4_vision hunyuan_vl idefics inkling2
    janus kimi_k25 mistral4 molmo2 muse_glimmer muse_spark nemotron_h_omni pi0 pp_formulanet
    nemo_speechlm phi4_multimodal qwen3_omni_moe_thinker t5gemma2 udop unlimited_ocr vibevoice_asr
    """),
    "packages that are not among the extras: timm, scipy": words("""
    fast_vlm gemma3n inkling_mm_model perception_lm
    """),
    "inputs of a form of their own": words("""
    granite_speech granite_speech_plus qwen3_asr voxtral_realtime
    fuyu gemma4_unified granite_docling instructblipvideo kosmos-2.5 mllama video_llama_3
    """),
}


def compare(family, kind, ranks):
    pixels, tokens, options = EXACT[family]
    model = images.build(family, **options)
    hf.compare(model, images.batch(kind, pixels, tokens), ranks)


def test_every_family_of_images_is_in_one_table():
    known = [*EXACT, *REFUSED, *REFUSED_IN_CALLS, *(x for some in NOT_MADE.values() for x in some)]
    assert len(known) == len(set(known))
    assert set(known) == {*images.FAMILIES, *images.SOUND}


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "qwen3_vl"])
def test_a_model_of_images_computes_what_one_process_does(family):
    """Images that see themselves, also in windows; text that does; features in later layers."""
    compare(family, "left", 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", EXACT)
def test_every_family_of_images_computes_what_one_process_does(family):
    for ranks in (2, 4):
        for kind in ("whole", "padded", "left"):
            compare(family, kind, ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_of_images_that_cannot_be_spread_is_refused(family):
    model = images.build(family)
    with pytest.raises(ValueError, match=REFUSED[family]):
        virtual(1, lambda comm: huggingface.enable(copy.deepcopy(model), comm))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REFUSED_IN_CALLS)
def test_a_family_of_images_with_masks_of_its_own_is_refused_in_calls(family):
    pixels, tokens, options, reason = REFUSED_IN_CALLS[family]
    model = images.build(family, **options)
    of = images.batch("padded", pixels, tokens)
    assert reason in hf.refusal(lambda comm: hf.on_rank(comm, model, of))


@pytest.fixture(scope="module")
def gemma():
    return images.build("gemma3", **GEMMA3)


def generate(family):
    """Compare what ranks generate behind images with what one process does."""
    pixels, tokens, options = EXACT[family]
    model, of = images.build(family, **options).eval(), images.batch("left", pixels, tokens)
    known = inspect.signature(model.forward).parameters
    types = {"token_type_ids", "mm_token_type_ids"} - set(known)
    of = {name: x for name, x in of.items() if name not in types | {"labels"}}
    # No image among new tokens: unmodified models would look for its features.
    generation.check(model, of, {"suppress_tokens": [images.IMAGE]}, 2)


def test_a_model_of_images_generates_what_one_process_does():
    """Transformers computes features before the prefill, whose text sees what is behind it."""
    generate("paligemma")


CALLS_ITS_TEXT = ("blip-2", "instructblip")  # its generate does, with embeddings


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [x for x in EXACT if x not in CALLS_ITS_TEXT])
def test_every_family_of_images_generates_what_one_process_does(family):
    generate(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CALLS_ITS_TEXT)
def test_a_family_of_images_whose_text_generates_alone_is_refused(family):
    with pytest.raises(ValueError, match="the model must be called itself"):
        generate(family)


def packed():
    """Two documents of a row, with two images each."""
    of = images.batch("whole", "types", 4)
    row = {name: x.reshape(1, 80) for name, x in of.items() if x.dim() == 2}
    del row["attention_mask"]
    row["labels"][0, 40] = -100
    positions = torch.arange(40).repeat(2)[None]
    return of, row | {"position_ids": positions, "pixel_values": of["pixel_values"]}


def test_documents_of_a_packed_row_with_images_do_not_see_each_other(gemma):
    """They are what rows of a batch are, which have the same labels."""
    of, row = packed()
    loss, logits, grads = hf.unmodified(gemma, of)
    expected = loss, logits.reshape(1, 80, -1), grads
    results = virtual(3, lambda comm: hf.on_rank(comm, gemma, row))
    hf.assert_same(results, expected, hf.real(row))


def test_a_batch_of_text_alone_is_cut_before_the_model_is_called(gemma):
    of = hf.batch("padded")

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(gemma), comm)
        batch = sp.shard(of)
        assert batch["input_ids"].shape == (1, batch["labels"].shape[1])
        assert sp.report().whole == ("model.vision_tower",)
        assert "model.vision_tower: whole on each rank" in str(sp.report())

    virtual(2, run)
    hf.compare(gemma, of, 2)


def test_tensors_of_tokens_that_the_model_does_not_take_are_cut(gemma):
    of = images.batch("padded", "types", 4)

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(gemma), comm)
        weights = of["input_ids"] * 0.5
        batch = sp.shard(of | {"weights": weights, "names": ["a", "b"]})
        assert torch.equal(batch["token_type_ids"], of["token_type_ids"])
        assert batch["names"] == ["a", "b"]
        whole = sp.unshard(batch["weights"], batch)
        assert torch.equal(whole[hf.real(of)], weights[hf.real(of)])
        text = hf.batch("padded")
        batch = sp.shard(text | {"weights": text["input_ids"] * 0.5})
        whole = sp.unshard(batch["weights"], batch)
        assert torch.equal(whole, sp.unshard(batch["input_ids"], batch) * 0.5)
        assert "past_key_values" not in sp.model(**sp.shard(text))

    virtual(2, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v_moe", "minimax_m3_vl"])
def test_the_loss_that_balances_routers_is_that_of_images_too(family):
    pixels, tokens, options = EXACT[family]
    text = options.get("text", {}) | {"output_router_logits": True}
    model = images.build(family, **options | {"text": text})
    of = images.batch("whole", pixels, tokens) | {"output_router_logits": True}
    assert model(**of).aux_loss > 0
    hf.compare(model, of, 2)
    padded = images.batch("padded", pixels, tokens) | {"output_router_logits": True}
    assert "rows with padding" in hf.refusal(lambda comm: hf.on_rank(comm, model, padded))


def test_features_of_images_come_out_as_they_are(gemma):
    of = images.batch("whole", "types", 4)
    expected = gemma(**of, output_hidden_states=True)

    def run(comm):
        own = copy.deepcopy(gemma)
        sp = huggingface.enable(own, comm)
        found = sp.unshard(own(**sp.shard(of), output_hidden_states=True))
        torch.testing.assert_close(found.image_hidden_states, expected.image_hidden_states)
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
        towers = own.model.vision_tower.config._attn_implementation
        assert towers == gemma.model.vision_tower.config._attn_implementation

    virtual(2, run)


def test_gradients_flow_to_the_tower_and_through_checkpoints(gemma):
    of = images.batch("left", "types", 4)
    expected = hf.unmodified(gemma, of)
    assert any("vision_tower" in name and x.abs().max() > 0 for name, x in expected[2].items())

    def run(comm):
        own = copy.deepcopy(gemma)
        own.activation_checkpointing_enable()
        return hf.on_rank(comm, own, of)

    hf.assert_same(virtual(2, run), expected, hf.real(of))


def changed(gemma, change):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(gemma), comm)
        sp.model(**change(dict(sp.shard(images.batch("padded", "types", 4)))))

    return hf.refusal(run)


CALLS = {
    "another mask of padding": (
        lambda x: x | {"attention_mask": torch.ones_like(x["attention_mask"])},
        "attention_mask must be the one that shard was given",
    ),
    "tokens of one rank": (
        lambda x: x | {"input_ids": x["input_ids"][:, :4]},
        "input_ids must be (2, 40), got (2, 4)",
    ),
    "labels of the whole batch": (
        lambda x: x | {"labels": x["input_ids"]},
        "labels must be (1, ",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_with_images_that_would_be_wrong_is_refused(gemma, case):
    change, reason = CALLS[case]
    assert reason in changed(gemma, change)


def test_dropout_beside_the_text_is_refused_where_it_would_run():
    model = images.build("gemma3", vision={"attention_dropout": 0.1}, **GEMMA3)
    reason = "beside its text, but model.vision_tower.encoder.layers.0.self_attn has 0.1"
    assert reason in hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))

    def run(comm):
        own = copy.deepcopy(model).eval()
        sp = huggingface.enable(own, comm)
        own.train()(**sp.shard(images.batch("padded", "types", 4)))

    assert reason in hf.refusal(run)
