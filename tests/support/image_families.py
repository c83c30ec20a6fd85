"""Which families of text with images or sound run over ranks, and why the others do not."""

from tests.support import images


def words(text):
    return text.split()


def rope(**more):
    """Return RoPE options for images, whose positions have three parts in a head of 8."""
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
EXACT = {  # (how the family gets images, tokens of an image, options of the model)
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
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
RECURRENT = {
    "lfm3_vl": ("patches", 4, {"text": {"layer_types": ["conv", "full_attention"]}}),
    "qwen3_5": ("patches", 4, {"text": DELTA}),
    "qwen3_5_moe": ("patches", 4, {"text": DELTA}),
}
EXACT |= RECURRENT
REFUSED = {  # families that `enable` refuses, with a part of the error
    "blip": "attention layers can be reached",
    "diffusion_gemma": "must take position_ids",
    "mistral_large4": "layer_types of its config has",
    "pix2struct": "adds a bias to its scores",
    "qwen4_exp": "mixes tokens along",
    "vision-encoder-decoder": "takes one token of each sequence",
}
REFUSED_IN_CALLS = {
    "kosmos-2": ("masked", 4, {"latent_query_num": 4}, "that the model made itself"),
}
NOT_MADE = {  # reason: families of which there is no tiny model here
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
    minicpm_ocr minicpmv4_6 minicpmv4_7
    granite_speech granite_speech_plus qwen3_asr voxtral_realtime
    fun_asr_nano fuyu gemma4_unified granite_docling instructblipvideo kosmos-2.5
    kyutai_speech_to_text mllama video_llama_3
    """),
    "several models without a forward: enable the thinker, which has a family of its own": words("""
    qwen2_5_omni qwen3_omni_moe
    """),
}
