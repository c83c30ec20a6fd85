"""Layers that compute attention by themselves: ALiBi, masks of their own, and what is refused."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.attention.own_attention import (
    Bias,
    Recording,
    band_of,
    slopes_of,
)
from seqpar.integrations.huggingface.model.code import computes_itself
from tests.support import families, generation
from tests.support import huggingface as hf
from tests.support.ranks import virtual

slow = pytest.mark.exhaustive
MODELS = [  # family, its options, ranks, batch
    ("bloom", {}, 2, "packed"),
    ("falcon", {"alibi": True}, 4, "left"),
    pytest.param("bloom", {"n_head": 6, "hidden_size": 48}, 4, "left", marks=slow),
    pytest.param("mpt", {"n_heads": 6, "d_model": 48}, 4, "left", marks=slow),
    pytest.param("mpt", {"max_seq_len": 22}, 2, "full", marks=slow),
    pytest.param("falcon", {"alibi": True, "multi_query": False}, 2, "packed", marks=slow),
    pytest.param("falcon", {"new_decoder_architecture": True}, 2, "packed", marks=slow),
    pytest.param("gpt_neo", {"attention_types": [[["local"], 2]]}, 4, "packed", marks=slow),
]
NAMES = {"bloom": "Bloom", "falcon": "Falcon", "mpt": "Mpt", "gpt_neo": "GPTNeo"}
SIZES = {"gpt_neo": {"num_layers": 2, "window_size": 5}}


def build(family, options):
    options = SIZES.get(family, {}) | options
    return families.build(family, f"{NAMES[family]}ForCausalLM", **options)


@pytest.mark.parametrize(("family", "options", "ranks", "kind"), MODELS)
def test_a_model_computes_what_one_process_does(family, options, ranks, kind):
    hf.compare(build(family, options), hf.batch(kind), ranks)


def test_an_alibi_model_generates_like_one_process():
    model = build("falcon", {"alibi": True}).eval()
    generation.check(model, generation.prompts((0, 7)), {}, 2)


def test_slopes_and_bands_are_those_of_the_layers():
    attention = build("bloom", {"n_head": 4}).transformer.h[0].self_attention
    torch.testing.assert_close(slopes_of(attention), torch.tensor([2.0**-x for x in (2, 4, 6, 8)]))
    neo = build("gpt_neo", {"attention_types": [[["global", "local"], 1]]}).transformer.h
    bands = [band_of(layer.attn.attention.bias) for layer in neo]
    assert [(x.causal, x.left) for x in bands] == [(True, -1), (True, 4)]
    assert band_of(torch.ones(1, 1, 4, 4)) is None and band_of(torch.ones(4, 4).tril()) is None


def test_disable_restores_the_forward_and_its_bits():
    model = build("bloom", {}).eval()
    of = {"input_ids": hf.batch("full")["input_ids"]}
    before = {name: vars(x).copy() for name, x in model.named_modules()}
    expected = model(**of).logits

    def run(comm):
        enabled = copy.deepcopy(model)
        huggingface.enable(enabled, comm).disable()
        assert all(vars(x).keys() == before[name].keys() for name, x in enabled.named_modules())
        return enabled(**of).logits

    assert torch.equal(*virtual(1, run), expected)


def test_attention_dropout_in_training_is_refused_on_enable():
    for family, name in (("bloom", "attention_dropout"), ("gpt_neo", "attention_dropout")):
        model = build(family, {name: 0.1} | {"attention_types": [[["global"], 2]]})
        told = hf.refusal(lambda comm, x=model: huggingface.enable(copy.deepcopy(x), comm))
        assert "have attention dropout" in told


class Attention(nn.Module):
    """A layer whose scores become what a case does to them."""

    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, q, k, v, mask):
        weights = F.softmax(self.case(torch.matmul(q, k.transpose(-1, -2)), mask), dim=-1)
        return torch.matmul(weights, v)


UNKNOWN = {
    "it applies tanh to its scores": lambda scores, mask: torch.tanh(scores),
    "it applies getitem to its scores": lambda scores, mask: scores[..., 1:],
    "is a tensor (5, 5)": lambda scores, mask: scores + torch.ones(5, 5),
    "by something other than a number": lambda scores, mask: scores * torch.ones(5),
    "it applies sub to its scores": lambda scores, mask: scores.sub(mask),
    "two biases of one kind": lambda scores, mask: scores + mask + other(mask),
    "it applies masked_fill to its scores": lambda scores, mask: scores.masked_fill(mask, 0.0),
    "it applies sigmoid to its mask": lambda scores, mask: scores + mask.sigmoid(),
    "dropout is 0.5": lambda scores, mask: F.dropout(scores),
}
SAME = [
    lambda scores, mask: 3 * (scores + mask) / 3,
    lambda scores, mask: (mask + scores).float().view(1, 2, 5, 5),
    lambda scores, mask: torch.max(scores + mask, torch.tensor(torch.finfo(scores.dtype).min)),
    lambda scores, mask: scores.masked_fill_(mask, torch.finfo(scores.dtype).min),
    lambda scores, mask: torch.where(mask, scores, torch.tensor(-1e9, device=scores.device)),
    lambda scores, mask: F.dropout(scores + mask.to(scores.dtype), p=0.5, training=False),
]


def other(mask):
    return Bias(like=mask.like, device=mask.device, mask="another")


def recorded(case):
    """What a layer's scores are when their weights meet the values (1, 2, 5, 4)."""
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    mask = Bias(like=torch.empty(1, 1, 5, 5, device="meta"), device=q.device, mask="the mask")
    seen = []
    with Recording(lambda scores, value: seen.append(scores) or value, {}):
        Attention(case)(q, k, v, mask)
    (scores,) = seen
    return scores


@pytest.mark.parametrize("case", SAME)
def test_what_leaves_scores_as_they_are_is_understood(case):
    scores = recorded(case)
    assert (scores.mask, scores.weights) == ("the mask", True)
    assert scores.scale == pytest.approx(1.0) and tuple(scores.shape) == (1, 2, 5, 5)


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_is_done_to_scores_otherwise_is_refused(reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        recorded(UNKNOWN[reason])


def test_layers_with_other_products_are_not_recorded():
    assert computes_itself(type(build("bloom", {}).transformer.h[0].self_attention))
    assert not computes_itself(nn.MultiheadAttention) and not computes_itself(nn.Linear)
    model = hf.tiny("LlamaForCausalLM")
    assert not computes_itself(type(model.model.layers[0].self_attn))
