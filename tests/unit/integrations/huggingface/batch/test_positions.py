"""Position ids of every kind: what transformers makes of them, or a refusal that names them."""

import copy
import itertools

import pytest
import torch

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.unit.integrations.huggingface import test_families as families

TOKENS = 22
CHUNKS = {"attention_chunk_size": 5, "num_local_experts": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "reads documents": ("LlamaForCausalLM", {}),
    "reads documents, windows": ("MistralForCausalLM", {"sliding_window": 5}),
    "reads documents, two kinds of layers": ("Gemma3ForCausalLM", {"sliding_window": 4}),
    "reads documents, chunks": ("Llama4ForCausalLM", CHUNKS),
    "reads none, a table": ("OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    "reads none, a table of columns": ("BioGptForCausalLM", NO_DROPOUT),
    "reads none, both directions": ("BertForMaskedLM", NO_DROPOUT),
}
SMALL = {"max_position_embeddings": 600, "dropout": 0.0, "layerdrop": 0.0}


def positions(kind):
    """(B, 22) or (1, 22) position ids."""
    steps = torch.ones(TOKENS, dtype=torch.long)
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "two jumps":
        steps[9], steps[15] = 30, 7
    elif kind == "stride":
        steps[:] = 2
    elif kind == "decrease":
        steps[11] = -4
    elif kind == "repeat":
        steps[6] = steps[7] = 0
    elif kind == "random":
        steps = torch.randint(1, 4, (TOKENS,), generator=generator)
    elif kind == "rows":
        other = steps.clone()
        other[5] = 9
        return torch.stack([steps, other]).cumsum(1) + 4
    return steps.cumsum(0)[None] + 4


KINDS = ("offset", "two jumps", "stride", "decrease", "repeat", "random", "rows")
MASKS = ("ones", "none", "none, a cache", "left")


def batch(kind, mask):
    of = {**hf.batch("left" if mask == "left" else "whole"), "position_ids": positions(kind)}
    if mask.startswith("none"):
        del of["attention_mask"]
        of |= {} if mask == "none, a cache" else {"use_cache": False}
    return of


def result(model, of):
    outputs = model(**of)
    outputs.loss.backward()
    return outputs.loss.detach(), outputs.logits.detach(), hf.gradients(model)


def on_rank(comm, model, of):
    own = copy.deepcopy(model)
    sp = huggingface.enable(own, comm)
    outputs = own(**sp.shard(of))
    outputs.loss.backward()
    sp.average_gradients()
    return outputs.loss.detach(), sp.unshard(outputs).logits.detach(), hf.gradients(own)


QUICK = "reads none, a table of columns"
EVERY = [
    name if name == QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS
]


@pytest.mark.parametrize("name", EVERY)
def test_positions_are_those_of_transformers_or_refused(name):
    kind_of_model, options = MODELS[name]
    model = hf.tiny(kind_of_model, **SMALL | options)
    exact, reasons = 0, []
    for kind, mask in itertools.product(KINDS, MASKS):
        of = batch(kind, mask)
        if not hasattr(model.config, "use_cache"):
            of.pop("use_cache", None)
        try:
            results = virtual(2, lambda comm, of=of: on_rank(comm, model, of))
        except ValueError as refused:
            reasons.append(str(refused))
            continue
        exact += 1
        hf.assert_same(results, result(copy.deepcopy(model), of), hf.real(of))
    assert all(reason.startswith("position_ids ") for reason in reasons)
    assert exact >= 14


def test_only_a_cache_is_refused_by_name():
    model = hf.tiny("LlamaForCausalLM")
    text = hf.refusal(lambda comm: on_rank(comm, model, batch("two jumps", "none, a cache")))
    assert text.startswith("position_ids jump from 13 to 43 at token 9 of row 0")
    model.config.use_cache = False
    of = batch("two jumps", "none, a cache")
    results = virtual(2, lambda comm: on_rank(comm, model, of))
    hf.assert_same(results, result(copy.deepcopy(model), of), hf.real(of))


def test_fractions_and_positions_that_jump_with_documents():
    model = hf.tiny("LlamaForCausalLM")
    ids = hf.batch()["input_ids"][:1]
    ones = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    of = ones | {"position_ids": torch.arange(TOKENS)[None] * 0.5}
    results = virtual(2, lambda comm: on_rank(comm, model, of))
    hf.assert_same(results, result(copy.deepcopy(model), of), hf.real(of))
    jump = torch.arange(TOKENS)[None] + 10 * (torch.arange(TOKENS) > 4)
    cut = {"cu_seq_lens_q": torch.tensor([0, 9, 22]), "position_ids": jump}
    text = hf.refusal(lambda comm: on_rank(comm, model, {"input_ids": ids, "labels": ids, **cut}))
    assert text.startswith("position_ids restart at token 5, where cu_seq_lens_q")


def test_jumps_in_a_recurrent_model_need_a_mask():
    model = families.build("causal/qwen3_next")
    of = batch("two jumps", "none")
    text = hf.refusal(lambda comm: on_rank(comm, model, of))
    assert text.startswith("position_ids jump from 13 to 43")
    of = batch("two jumps", "ones")
    results = virtual(2, lambda comm: on_rank(comm, model, of))
    hf.assert_same(results, result(copy.deepcopy(model), of), hf.real(of))


def test_positions_with_an_encoder_are_refused():
    model = families.build("encoder-decoder/marian")
    of = hf.batch() | {"position_ids": positions("stride")}
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm).shard(of))
    assert text.startswith("position_ids must be None: MarianMTModel")


PADDING = ("left", "padded", "a row of padding")


@pytest.mark.parametrize("family", ["opt", "biogpt", "roberta"])
def test_counted_positions_follow_the_mask_like_the_models(family):
    """Tables that may count tokens or columns need positions for rows padded on the left."""
    model = families.build(f"causal/{family}")
    for kind in PADDING:
        of = hf.batch("left" if kind == "left" else "padded")
        if kind == "a row of padding":
            of["attention_mask"][1] = 0
            of["labels"][1] = -100
        if kind == "left" and family != "roberta":
            text = hf.refusal(lambda comm, of=of: on_rank(comm, model, of))
            assert text.startswith("position_ids must be given for rows padded on the left"), text
            of["position_ids"] = (of["attention_mask"].cumsum(1) - 1).clamp(min=0)
        results = virtual(2, lambda comm, of=of: on_rank(comm, model, of))
        hf.assert_same(results, result(copy.deepcopy(model), of), hf.real(of))


@pytest.mark.parametrize("length", [7, 11])
def test_a_rank_may_have_no_jump(length):
    """With a contiguous layout of two ranks, a document of 11 tokens ends where a rank's do."""
    ids = hf.batch()["input_ids"][:1]
    position_ids = torch.arange(TOKENS)[None] + 10 * (torch.arange(TOKENS) >= length)
    of = {"input_ids": ids, "labels": ids, "position_ids": position_ids, "use_cache": False}

    def contiguous(comm, model):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm, layout="contiguous")
        outputs = own(**sp.shard(of))
        return outputs.loss.detach(), sp.unshard(outputs).logits.detach()

    llama, gpt_oss = hf.tiny("LlamaForCausalLM"), families.build("causal/gpt_oss")
    if length == 11:
        text = hf.refusal(lambda comm: contiguous(comm, llama))
        assert text.startswith("position_ids jump only where one rank's tokens end")
    else:
        expected = llama(**of)
        for loss, logits in virtual(2, lambda comm: contiguous(comm, llama)):
            torch.testing.assert_close(loss, expected.loss)
            torch.testing.assert_close(logits, expected.logits)
    text = hf.refusal(lambda comm: contiguous(comm, gpt_oss))
    assert text.startswith("position_ids "), text
