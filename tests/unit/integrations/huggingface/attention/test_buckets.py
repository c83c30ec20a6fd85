"""T5's biases by distance over ranks, bucket by bucket."""

import copy

import pytest
import torch

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.attention.buckets import bands_of
from tests.support import huggingface as hf
from tests.support.ranks import virtual

T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 2,
}


def test_t5_computes_what_one_process_does():
    hf.compare(hf.tiny("MT5ForConditionalGeneration", **T5), hf.batch("padded"), 2)


@pytest.mark.parametrize("name", ["MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
@pytest.mark.parametrize(("buckets", "farthest"), [(8, 12), (32, 128), (6, 5)])
def test_bands_of_distances_are_a_layers_own_buckets(name, buckets, farthest):
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": farthest}
    model = hf.tiny(name, **T5 | sizes)
    for stack in (model.encoder, model.decoder):
        layer = stack.block[0].layer[0].SelfAttention
        table = layer.relative_attention_bias.weight
        bias = layer.compute_bias(1, 601, past_seen_tokens=300)[0, :, 0]
        for low, high, bucket in bands_of(layer):
            first = 0 if low is None else 300 + low
            stop = 601 if high is None else 301 + high
            assert torch.equal(bias[:, first:stop], table[bucket][:, None].expand(4, stop - first))


def test_t5_gets_its_own_bias_back():
    model = hf.tiny("MT5ForConditionalGeneration", **T5)
    layer = model.encoder.block[0].layer[0].SelfAttention

    def run(comm):
        sp = huggingface.enable(model, comm)
        assert layer.compute_bias(5, 5).shape == (1, 4, 1, 7)
        sp.disable()
        assert layer.compute_bias(5, 5).shape == (1, 4, 5, 5)

    virtual(1, run)


def test_t5_is_recomputed_with_its_bias():
    model, of = hf.tiny("MT5ForConditionalGeneration", **T5 | {"num_layers": 2}), hf.batch()
    expected = hf.unmodified(model, of)

    def run(comm):
        own = copy.deepcopy(model)
        own.activation_checkpointing_enable()
        return hf.on_rank(comm, own, of)

    hf.assert_same(virtual(2, run), expected, hf.real(of))


@torch.no_grad()
def test_an_encoder_without_its_decoder_is_exact():
    model, of = hf.tiny("UMT5EncoderModel", **T5).eval(), hf.batch()
    del of["labels"]
    expected = model(**of).last_hidden_state[hf.real(of)]

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        with torch.no_grad():
            return sp.unshard(own(**sp.shard(of))).last_hidden_state[hf.real(of)]

    for states in virtual(2, run):
        torch.testing.assert_close(states, expected, rtol=2e-5, atol=2e-5)
