"""Tiny models of text and images, and batches with images for them."""

import copy

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.support import huggingface as hf
from tests.support.families import MOST_PARAMETERS, sizes_of

_SOUND = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
_OTHERS = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
FAMILIES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
MULTIMODAL = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
SOUND = ["audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus"]
SOUND += ["moss_transcribe_diarize", "musicflamingo", "nemo_speechlm", "phi4_multimodal"]
SOUND += ["qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral", "voxtral_realtime"]
IMAGE = 63  # the token that a feature of an image or of a sound replaces
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "depth": 1,
    "num_heads": 4,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "hidden_dim": 32,
    "depths": [1],
    "mlp_dim": 48,
    "num_layers": 1,
    "spatial_merge_size": 1,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projection_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 32,
    "output_dim": 32,
}
_TOP = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "audio_token_id": IMAGE,
    "audio_token_index": IMAGE,
    "video_token_id": 62,
    "hidden_size": 32,
    "projection_dim": 32,
}


def build(family, text=(), vision=(), **options):
    """Make a tiny model of a family, with random weights and no dropout."""
    kind = getattr(transformers, {**_OTHERS, **_SOUND, **FAMILIES}[family])
    config_kind = kind.config_class
    parts = {}
    for name in config_kind.sub_configs:
        part = getattr(config_kind(), name, None)
        if part is not None and name == "text_config":
            parts[name] = sizes_of(type(part)) | dict(text) | {"model_type": part.model_type}
        elif part is not None:
            sizes = sizes_of(type(part), _VISION)
            parts[name] = sizes | dict(vision) | {"model_type": part.model_type}
    config = config_kind(**parts | sizes_of(config_kind, _TOP) | options)
    with torch.device("meta"):
        parameters = sum(x.numel() for x in kind(copy.deepcopy(config)).parameters())
    assert parameters < MOST_PARAMETERS, f"{family} has {parameters:,} parameters"
    torch.manual_seed(0)
    model = kind(config).train()
    for x in model.parameters():  # some parameters, such as features of images, are 0 at first
        if not x.any():
            torch.nn.init.normal_(x, std=0.1)
    return model


def batch(kind, pixels, tokens):
    """Make a batch of `hf.batch` with four images, each of this many tokens.

    `pixels` says in which form the family gets the images.
    """
    of = hf.batch(kind, rows=2, columns=40)
    ids = of["input_ids"]
    ids[ids >= 60] -= 20
    for first in (8, 8 + tokens + 1):
        ids[:, first : first + tokens] = IMAGE
    shown = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    if pixels in ("patches", "squares"):
        grid = torch.tensor([[1, 2, 2]] * 4)
        patches = random(16, 96) if pixels == "patches" else random(16, 3, 4, 4)
        of |= {"pixel_values": patches, "image_grid_thw": grid}
        return of | {"mm_token_type_ids": shown}
    if pixels.startswith("sound"):
        mask = pixels.removeprefix("sound, ")
        of["input_features"] = random(4, 8, 16)
        return of | ({} if mask == pixels else {mask: torch.ones(4, 16, dtype=torch.long)})
    if pixels == "placed":
        places = torch.cartesian_prod(torch.arange(2), torch.arange(2)).expand(4, 4, 2)
        of |= {"pixel_values": random(4, 4, 48), "image_position_ids": places}
        return of | {"mm_token_type_ids": shown}
    if pixels == "sets":
        of |= {"pixel_values": random(4, 4, 48), "spatial_shapes": torch.full((4, 2), 2)}
        return of | {"pixel_attention_mask": torch.ones(4, 4, dtype=torch.long)}
    shape = {"crops": (4, 2), "rows": (2, 2), "one a row": (2,)}.get(pixels, (4,))
    of["pixel_values"] = random(*shape, 3, 8, 8)
    if pixels in ("sizes", "crops"):
        of["image_sizes"] = torch.full((4, 2), 8)
    if pixels == "types":
        of["token_type_ids"] = shown
    if pixels == "queries":
        of["qformer_input_ids"] = torch.ones(4, 3, dtype=torch.long)
    if pixels == "masked":
        of["image_embeds_position_mask"] = shown
    return of
