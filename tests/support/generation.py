"""Models that generate, their prompts, and what unmodified transformers generates from these."""

import copy

import torch

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import virtual

PROMPT, NEW = 20, 6
SINKS = {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {
    "attention_chunk_size": 6,
    "num_local_experts": 2,
    "layer_types": ["chunked_attention"] * 2,
}
TEMPERATURES = CHUNKS | {"floor_scale": 4, "attn_scale": 1.0, "no_rope_layers": [1, 0]}
SHARED = {
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
    "laurel_rank": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "activation_sparsity_pattern": None,
}
LONG_ROPE = {  # from the 24th token on, the rotary factors change
    "original_max_position_embeddings": 23,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 23,
    },
}
SHARED_GEMMA4 = {
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
# (model, its options, padding on the left of each row, options of generate, number of ranks)
CASES = {
    "llama, rows of three lengths": ("LlamaForCausalLM", {}, (0, 7, 19), {}, 4),
    "gemma3, layers with windows": ("Gemma3ForCausalLM", WINDOWS, (0, 7), {}, 2),
    "gpt-oss, sinks": ("GptOssForCausalLM", SINKS, (0, 7), {}, 2),
    "llama, beams": ("LlamaForCausalLM", {}, (3, 0), {"num_beams": 3}, 2),
    "llama, guesses that are cropped": (
        "LlamaForCausalLM",
        {},
        (0,),
        {"prompt_lookup_num_tokens": 3, "max_new_tokens": 16},
        2,
    ),
}
MORE = {
    "llama, one row": ("LlamaForCausalLM", {}, (0,), {}, 2),
    "qwen3": ("Qwen3ForCausalLM", {}, (0, 7), {}, 4),
    "qwen3, one rank": ("Qwen3ForCausalLM", {}, (0, 7), {}, 1),
    "gemma3, on 4 ranks": ("Gemma3ForCausalLM", WINDOWS, (0, 7), {}, 4),
    "gemma3, guesses": ("Gemma3ForCausalLM", WINDOWS, (0,), {"prompt_lookup_num_tokens": 3}, 2),
    "gpt-oss, on 4 ranks": ("GptOssForCausalLM", SINKS, (0, 7), {}, 4),
    "llama4, chunks": ("Llama4ForCausalLM", CHUNKS, (0, 7), {"max_new_tokens": 14}, 2),
    "llama4, temperatures": ("Llama4ForCausalLM", TEMPERATURES, (0, 7), {"max_new_tokens": 6}, 2),
    "gemma3n, shared keys": ("Gemma3nForCausalLM", SHARED, (0, 7), {}, 2),
    "gemma4, shared keys": ("Gemma4ForCausalLM", SHARED_GEMMA4, (0, 7), {}, 2),
    "phi3, rotary factors that change": ("Phi3ForCausalLM", LONG_ROPE, (0, 7), {}, 2),
    "opt, a table of positions": ("OPTForCausalLM", {}, (0, 7), {}, 2),
    "llama, some beams": (
        "LlamaForCausalLM",
        {},
        (3, 0),
        {"num_beams": 3, "num_return_sequences": 2},
        3,
    ),
    "llama, a prefill in parts": ("LlamaForCausalLM", {}, (3, 0), {"prefill_chunk_size": 8}, 2),
    "llama, hidden states": ("LlamaForCausalLM", {}, (3, 0), {"output_hidden_states": True}, 2),
}


def prompts(padding=(0,), columns=PROMPT):
    """Return token ids and mask; row i has `padding[i]` tokens of padding on its left."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, hf.VOCABULARY, (len(padding), columns), generator=generator)
    mask = torch.ones_like(ids)
    for row, tokens in enumerate(padding):
        mask[row, :tokens] = ids[row, :tokens] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, batch, **options):
    """Return the result of transformers' `generate`: tokens and logits of all steps."""
    wanted = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    return model.generate(**batch, **lengths | wanted | options)


def on_ranks(model, batch, ranks, **options):
    """Return the results of `generated` on virtual ranks, and what each rank's layers report."""

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        return generated(own, batch, **options), sp.report()

    return virtual(ranks, run)


def assert_same(found, expected, others):
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=2e-5, atol=2e-5)
    assert all(map(torch.equal, found.logits, others.logits))  # ranks have the same bits
    if expected.hidden_states is not None:
        for step, right in zip(found.hidden_states, expected.hidden_states, strict=True):
            for x, y in zip(step, right, strict=True):
                torch.testing.assert_close(x[:, -1], y[:, -1], rtol=2e-5, atol=2e-5)
                assert x.shape == y.shape


def check(model, batch, of_generate, ranks):
    """Assert that virtual ranks generate what the unmodified model generates."""
    expected = generated(model, batch, **of_generate)
    results = on_ranks(model, batch, ranks, **of_generate)
    for found, report in results:
        assert_same(found, expected, results[0][0])
        assert 0 < report.steps < report.calls
