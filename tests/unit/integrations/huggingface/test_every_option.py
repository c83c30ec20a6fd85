"""Every option of an enabled model: what one process computes, or a refusal by name before anything
is sent."""

import copy
import inspect

import pytest
import torch
import transformers
from transformers.utils import TransformersKwargs

from seqpar import RingAttention, Routing
from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.generation import prompts
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

OF = hf.batch("left")
PACKED = hf.batch("packed")
CU = torch.tensor([0, 9, 10, 22], dtype=torch.int32)
MASKED = torch.ones(2, 22, dtype=torch.long)
MASKED[1, :9] = 0


def embeddings(model):
    return model.get_input_embeddings()(OF["input_ids"]).detach()


# Keyword of a model: its value, or a function of the model that makes it.
VALUES = {
    "input_ids": OF["input_ids"].flip(1),
    "attention_mask": MASKED,
    "position_ids": torch.arange(22)[None].repeat(2, 1) + 5,
    "past_key_values": lambda model: transformers.DynamicCache(),
    "inputs_embeds": embeddings,
    "labels": OF["labels"].roll(1, 1),
    "use_cache": True,
    "logits_to_keep": 3,
    "return_dict": False,
    "num_items_in_batch": 7,
    "output_hidden_states": True,
    "output_attentions": True,
    "output_router_logits": True,
    "cu_seq_lens_q": CU,
    "cu_seq_lens_k": CU,
    "max_length_q": 12,
    "max_length_k": 12,
    "is_causal": False,
    "seq_idx": torch.zeros(2, 22, dtype=torch.int32),
}
DOCUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
ALWAYS = {"past_key_values", "use_cache", "logits_to_keep", "return_dict", "output_attentions"}
# Where a keyword is given: in the batch that is sharded, or in the model's call.
REFUSED = {
    "batch": ALWAYS,
    # Which need to be cut, or say documents.
    "call": ALWAYS | DOCUMENTS | {"attention_mask", "input_ids", "inputs_embeds", "labels"}
    | {"position_ids", "seq_idx"},
}  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


def test_every_keyword_has_a_value():
    own = set(inspect.signature(transformers.LlamaForCausalLM.forward).parameters)
    assert own - {"self", "kwargs"} | set(TransformersKwargs.__annotations__) <= set(VALUES)


def with_keyword(model, name, of):
    """A batch with the keyword: of documents with those of a packed batch."""
    value = VALUES[name](model) if callable(VALUES[name]) else VALUES[name]
    if name in DOCUMENTS:
        return PACKED | {name: value}
    if name == "attention_mask":  # transformers counts labels of padding, and seqpar does not
        return of | {name: value, "labels": of["labels"].masked_fill(MASKED.cumsum(1) < 2, -100)}
    less = {x: y for x, y in of.items() if (x, name) != ("input_ids", "inputs_embeds")}
    return less | {name: value}


def refusal_or(run, name, comm):
    """What a call returns, or its refusal, which says the keyword and has sent nothing."""
    before = comm.sent_messages
    try:
        return run()
    except (ValueError, TypeError) as refusal:
        text = str(refusal)
    assert name in text and comm.sent_messages == before, text
    return text


@few_rows()
@pytest.mark.parametrize("where", REFUSED)
@pytest.mark.parametrize("name", VALUES)
def test_a_model_keyword_is_right_or_refused(llama, name, where):
    given = with_keyword(llama, name, OF)
    refused = name in REFUSED[where]
    if not refused:
        model = copy.deepcopy(llama)
        documents = name in DOCUMENTS
        expected = hf.alone(model, PACKED) if documents else model(**given)
        wanted = (expected[0], ()) if documents else (expected.loss, expected.hidden_states or ())

    def run(comm):
        model = copy.deepcopy(llama)
        sp = huggingface.enable(model, comm, check_ranks=False)

        def call():
            if where == "batch":
                return model(**sp.shard(given))
            batch = PACKED if name in DOCUMENTS else OF
            return model(**sp.shard(batch) | {name: given[name]})

        found = refusal_or(call, name, comm)
        if isinstance(found, str):
            return found
        states = sp.unshard(found).hidden_states if found.get("hidden_states") else ()
        return found.loss.detach(), [x.detach() for x in states or ()]

    for result in virtual(2, run):
        if refused:
            assert isinstance(result, str), f"{name} was accepted"
            continue
        assert not isinstance(result, str), result
        torch.testing.assert_close(result[0], wanted[0].detach())
        for x, y in zip(result[1], wanted[1], strict=True):
            torch.testing.assert_close(x[hf.real(OF)], y[hf.real(OF)], rtol=2e-5, atol=2e-5)


BEAMS, GUESSES = {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}
# Setting of `generate`: its value, and the settings without which it does nothing.
GENERATE = {
    "max_length": (26, {}),
    "max_new_tokens": (4, {}),
    "min_length": (24, {}),
    "min_new_tokens": (3, {}),
    "early_stopping": (True, BEAMS),
    "num_beams": (3, {}),
    "length_penalty": (0.5, BEAMS),
    "num_return_sequences": (2, BEAMS),
    "max_cache_len": (30, {}),
    "cache_config": ({"a": 1}, {}),
    "repetition_penalty": (1.5, {}),
    "encoder_repetition_penalty": (1.5, {}),
    "no_repeat_ngram_size": (1, {}),
    "encoder_no_repeat_ngram_size": (2, {}),
    "bad_words_ids": ([[5]], {}),
    "renormalize_logits": (True, {}),
    "forced_bos_token_id": (3, {}),
    "forced_eos_token_id": (7, {}),
    "remove_invalid_values": (True, {}),
    "exponential_decay_length_penalty": ((2, 1.5), {}),
    "suppress_tokens": ([4, 5], {}),
    "begin_suppress_tokens": ([6], {}),
    "sequence_bias": ([[[5], -10.0]], {}),
    "watermarking_config": (transformers.WatermarkingConfig(), {}),
    "output_hidden_states": (True, {}),
    "output_scores": (True, {}),
    "output_logits": (True, {}),
    "return_dict_in_generate": (True, {}),
    "pad_token_id": (1, {}),
    "bos_token_id": (5, {}),
    "eos_token_id": (9, {}),
    "decoder_start_token_id": (3, {}),
    "num_assistant_tokens": (3, {}),
    "num_assistant_tokens_schedule": ("constant", {}),
    "assistant_confidence_threshold": (0.3, {}),
    "assistant_lookbehind": (3, {}),
    "target_lookbehind": (3, {}),
    "assistant_ensemble_weight": (0.5, {}),
    "speculation_type": ("x", {}),
    "prompt_lookup_num_tokens": (2, {}),
    "max_matching_ngram_size": (2, GUESSES),
    "compile_config": (transformers.CompileConfig(), {}),
    "disable_compile": (True, {}),
    "prefill_chunk_size": (8, {}),
    "max_time": (5.0, {}),
    "use_cache": (False, {}),
    "cache_implementation": ("static", {}),
    "guidance_scale": (1.5, {}),
    "assistant_early_exit": (1, {}),
    "output_attentions": (True, {}),
    "prefix_allowed_tokens_fn": (lambda row, ids: [4, 5, 6], {}),
    "negative_prompt_ids": (torch.full((1, 5), 4), {}),
    "negative_prompt_attention_mask": (torch.ones(1, 5).long(), {}),
    "logits_processor": (
        transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.7)]),
        {},
    ),
    "stopping_criteria": (
        transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(23)]),
        {},
    ),
}
REFUSED_BY_GENERATE = {"max_time", "use_cache", "cache_implementation", "guidance_scale"}
REFUSED_BY_GENERATE |= {"assistant_early_exit", "output_attentions"}
# Tests on processes have these: sampling draws random numbers, which threads share.
SAMPLED = {"do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"}
SAMPLED |= {"epsilon_cutoff", "eta_cutoff"}
TESTED_ELSEWHERE = {"assistant_model", "streamer", "generation_config", "inputs", "synced_gpus"}
# Which need a tokenizer, another model or code from the hub, or mean nothing to a call.
NOT_OF_LLAMA = {"stop_strings", "use_mtp", "token_healing", "is_assistant", "penalty_alpha"}
NOT_OF_LLAMA |= {"dola_layers", "diversity_penalty", "num_beam_groups", "constraints"}
NOT_OF_LLAMA |= {"force_words_ids", "continuous_batching_config", "transformers_version"}
NOT_OF_LLAMA |= {"_from_model_config", "custom_generate", "low_memory"}
CHEAP = REFUSED_BY_GENERATE | {"logits_processor", "no_repeat_ngram_size"}


def test_every_setting_of_generate_has_a_value():
    own = set(inspect.signature(transformers.GenerationMixin.generate).parameters)
    settings = own - {"self", "kwargs"} | set(transformers.GenerationConfig().to_dict())
    assert settings <= set(GENERATE) | SAMPLED | TESTED_ELSEWHERE | NOT_OF_LLAMA


@pytest.mark.filterwarnings("ignore")  # transformers' own, of settings that change nothing
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in CHEAP else pytest.mark.exhaustive) for x in GENERATE],
)
def test_a_setting_of_generate_is_right_or_refused(llama, name):
    value, more = GENERATE[name]
    refused = name in REFUSED_BY_GENERATE

    def tokens(model):
        length = {} if name in ("max_length", "max_new_tokens") else {"max_new_tokens": 5}
        found = model.generate(**prompts(), **length, **more, **{name: value})
        return found if isinstance(found, torch.Tensor) else found.sequences

    wanted = None if refused else tokens(copy.deepcopy(llama).eval())

    def run(comm):
        model = copy.deepcopy(llama).eval()
        huggingface.enable(model, comm)
        try:
            return tokens(model)
        except ValueError as refusal:
            return str(refusal)

    for found in virtual(2, run):
        if refused:
            assert isinstance(found, str) and found.startswith(name), found
        else:
            assert torch.equal(found, wanted), found


# Option of `enable`: values that are right, and values that are refused.
ENABLE = {
    "strategy": (["ring", "ulysses"], ["spiral", 3]),
    "layout": (["zigzag", "striped", "contiguous"], ["spiral", 3]),
    "check_ranks": ([True, False], ["x", None]),
    # With "loss", a model returns no logits.
    "memory": ([None, ["tiles", "checkpoints", "offload"]], ["x", 3, ["tiles", "x"], ["offload"]]),
    "deterministic": ([True, False, "ranks"], ["x", None]),
    "routing": ([None, Routing(node_size=2)], [3]),
}
# Option of `sp.cache`, likewise.
CACHE = {"block": ([1, 7], [0, "x"]), "reserve": ([0, 9], [-1, "x"])}
NAMED = {"strategy": "name"}  # as `make_attention` calls it


def test_every_enable_and_cache_option_has_values():
    own = {*inspect.signature(huggingface.enable).parameters}
    own |= {*inspect.signature(RingAttention).parameters}
    assert own - {"model", "group_or_mesh", "options", "group"} <= set(ENABLE)
    cache = inspect.signature(huggingface.SequenceParallel.cache).parameters
    assert {*cache} - {"self"} <= set(CACHE)


@pytest.mark.parametrize("name", ENABLE)
def test_an_option_of_enable_is_right_or_refused(llama, name):
    right, wrong = ENABLE[name]
    expected = hf.unmodified(llama, OF)

    def refused(comm, value):
        model = copy.deepcopy(llama)
        with pytest.raises((ValueError, TypeError)) as raised:
            huggingface.enable(model, comm, **{name: value})
        assert str(raised.value).startswith(NAMED.get(name, name)) and not comm.sent_messages

    for value in wrong:
        virtual(2, refused, value)
    for value in right:
        option = {"kind" if name == "layout" else name: value}
        results = virtual(2, lambda comm, x=option: hf.on_rank(comm, llama, OF, **x))
        hf.assert_same(results, expected, hf.real(OF))


@pytest.mark.parametrize("name", CACHE)
def test_a_cache_option_is_right_or_refused(llama, name):
    right, wrong = CACHE[name]
    wanted = copy.deepcopy(llama).eval().generate(**prompts((0, 4)), max_new_tokens=5)

    def run(comm):
        model = copy.deepcopy(llama).eval()
        sp = huggingface.enable(model, comm)
        before = comm.sent_messages
        for value in wrong:
            with pytest.raises((ValueError, TypeError), match=name):
                sp.cache(**{name: value})
        assert comm.sent_messages == before
        for value in right:
            cache = sp.cache(**{name: value})
            found = model.generate(**prompts((0, 4)), max_new_tokens=5, past_key_values=cache)
            assert torch.equal(found, wanted)

    virtual(2, run)
