"""Models of text with images in it: their text is spread over ranks, and the rest is not."""

import copy
import inspect

import pytest
import torch

from seqpar.integrations import huggingface
from tests.support import generation, images
from tests.support import huggingface as hf
from tests.support.image_families import (
    EXACT,
    GEMMA3,
    NOT_MADE,
    RECURRENT,
    REFUSED,
    REFUSED_IN_CALLS,
)
from tests.support.ranks import virtual
from tests.unit.integrations.huggingface.test_families import on_ranks

COUNTING = ("blip-2", "instructblip")  # their text is OPT, which has a table that counts tokens


def compare(family, ranks, *kinds):
    pixels, tokens, options = EXACT[family]
    model = images.build(family, **options)
    for kind in kinds:
        hf.compare(model, images.batch(kind, pixels, tokens), ranks)


def test_every_family_of_images_is_in_one_table():
    known = [*EXACT, *REFUSED, *REFUSED_IN_CALLS, *(x for some in NOT_MADE.values() for x in some)]
    assert len(known) == len(set(known))
    assert set(known) == {*images.FAMILIES, *images.SOUND, *images.MULTIMODAL}


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "qwen3_vl"])
def test_an_image_model_matches_one_process(family):
    """Images that see themselves, also in windows; text that does; features in later layers."""
    compare(family, 2, "left")


@pytest.mark.parametrize(("family", "ranks"), on_ranks(EXACT))
def test_every_image_family_matches_one_process(family, ranks):
    compare(family, ranks, "whole", "padded" if family in COUNTING else "sides")


@pytest.mark.parametrize("family", COUNTING)
def test_left_padding_of_texts_that_count_tokens_is_refused(family):
    with pytest.raises(ValueError, match="must be given for rows padded on the left"):
        compare(family, 2, "left")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_image_families_are_refused(family):
    model = images.build(family)
    with pytest.raises(ValueError, match=REFUSED[family]):
        virtual(1, lambda comm: huggingface.enable(copy.deepcopy(model), comm))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REFUSED_IN_CALLS)
def test_image_families_with_their_own_masks_are_refused(family):
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


def test_an_image_model_generates_like_one_process():
    """Transformers computes features before the prefill, whose text sees what is behind it."""
    generate("paligemma")


CALLS_ITS_TEXT = ("blip-2", "instructblip")  # its generate does, with embeddings


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [x for x in EXACT if x not in (*CALLS_ITS_TEXT, *RECURRENT)])
def test_every_image_family_generates_like_one_process(family):
    generate(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CALLS_ITS_TEXT)
def test_image_families_whose_text_generates_are_refused(family):
    with pytest.raises(ValueError, match="the model must be called itself"):
        generate(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", RECURRENT)
def test_image_families_with_recurrent_text_generate_nothing(family):
    with pytest.raises(ValueError, match="a sharded cache cannot store states"):
        generate(family)


def packed():
    """Two documents of a row, with two images each."""
    of = images.batch("whole", "types", 4)
    row = {name: x.reshape(1, 80) for name, x in of.items() if x.dim() == 2}
    del row["attention_mask"]
    row["labels"][0, 40] = -100
    positions = torch.arange(40).repeat(2)[None]
    return of, row | {"position_ids": positions, "pixel_values": of["pixel_values"]}


def test_packed_documents_with_images_stay_separate(gemma):
    """They are what rows of a batch are, which have the same labels."""
    of, row = packed()
    loss, logits, grads = hf.unmodified(gemma, of)
    expected = loss, logits.reshape(1, 80, -1), grads
    results = virtual(3, lambda comm: hf.on_rank(comm, gemma, row))
    hf.assert_same(results, expected, hf.real(row))


def test_a_text_batch_is_sharded_before_the_call(gemma):
    of = hf.batch("padded")

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(gemma), comm)
        batch = sp.shard(of)
        assert batch["input_ids"].shape == (1, batch["labels"].shape[1])
        assert sp.report().whole == ("model.vision_tower",)
        assert "model.vision_tower: whole on each rank" in str(sp.report())

    virtual(2, run)
    hf.compare(gemma, of, 2)


def test_unused_token_tensors_are_sharded_too(gemma):
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
def test_router_balancing_loss_includes_image_tokens(family):
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
        "attention_mask must be the one of the batch",
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
def test_inexact_calls_with_images_are_refused(gemma, case):
    change, reason = CALLS[case]
    assert reason in changed(gemma, change)


def test_dropout_next_to_the_text_is_refused():
    model = images.build("gemma3", vision={"attention_dropout": 0.1}, **GEMMA3)
    layer = "model.vision_tower.encoder.layers.0.self_attn"
    reason = f"outside of its text, but {layer} has a dropout of 0.1"
    assert reason in hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))

    def run(comm):
        own = copy.deepcopy(model).eval()
        sp = huggingface.enable(own, comm)
        own.train()(**sp.shard(images.batch("padded", "types", 4)))

    assert reason in hf.refusal(run)
