"""generate of models over virtual ranks: the tokens and logits of one process, or a refusal."""

import copy

import pytest
import torch
import transformers

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.generation import (
    CASES,
    MORE,
    NEW,
    PROMPT,
    WINDOWS,
    assert_same,
    check,
    generated,
    on_ranks,
    prompts,
)
from tests.support.ranks import virtual


@pytest.mark.parametrize("case", CASES)
def test_a_model_generates_what_one_process_does(case):
    name, options, padding, *rest = CASES[case]
    check(hf.tiny(name, **options).eval(), prompts(padding), *rest)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE)
def test_other_models_generate_what_one_process_does(case):
    name, options, padding, *rest = MORE[case]
    check(hf.tiny(name, **options).eval(), prompts(padding), *rest)


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM").eval()


def test_an_assistant_proposes_tokens(llama):
    assistant = hf.tiny("LlamaForCausalLM", hidden_size=16).eval()
    batch = prompts()
    expected = generated(llama, batch, assistant_model=assistant)

    def run(comm):
        own, helper = copy.deepcopy(llama), copy.deepcopy(assistant)
        huggingface.enable(own, comm)
        huggingface.enable(helper, comm)
        return generated(own, batch, assistant_model=helper)

    for found in virtual(2, run):
        assert_same(found, expected, found)


@pytest.mark.parametrize("columns", [8, 48])
def test_bytes_per_token_do_not_depend_on_prompts(llama, columns):
    """out and lse of 4 heads of 8 in fp32, to the other rank, and the rank check."""
    for _, report in on_ranks(llama, prompts((0, 0), columns), 2):
        assert [layer.steps for layer in report.layers] == [NEW - 1] * 2
        assert report.step_bytes == 2 * (NEW - 1) * (2 * 4 * (8 + 1) * 4 + 64)
        assert f"{2 * (NEW - 1)} of them decoding steps, {report.step_bytes:,} bytes" in str(report)


def test_a_cache_goes_on_in_another_call(llama):
    """generate goes on from a copy of its cache; and a sharded batch and steps by hand."""
    batch = prompts((0, 4))
    expected = generated(llama, batch)
    more = {
        "input_ids": expected.sequences,
        "attention_mask": torch.cat([batch["attention_mask"], torch.ones(2, NEW).long()], 1),
    }
    longer = generated(llama, more, max_new_tokens=2 * NEW)

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        first = sp.cache(reserve=8)
        generated(own, batch, past_key_values=first)
        again = generated(own, more, max_new_tokens=2 * NEW, past_key_values=copy.deepcopy(first))
        by_hand, positions = sp.cache(block=1), (more["attention_mask"].cumsum(1) - 1).clamp(min=0)
        whole = batch | {"position_ids": positions[:, :PROMPT]}
        with torch.no_grad():
            outputs = own(**sp.shard(whole), past_key_values=by_hand)
            logits = [sp.unshard(outputs).logits[:, -1]]
            for i in range(PROMPT, PROMPT + NEW - 1):
                step = {"input_ids": more["input_ids"][:, i : i + 1]}
                step["position_ids"] = positions[:, i : i + 1]
                logits.append(own(**step, past_key_values=by_hand).logits[:, -1])
        return again, logits, (first.get_seq_length(), len(by_hand), repr(by_hand))

    for again, logits, told in virtual(2, run):
        assert torch.equal(again.sequences, longer.sequences)
        torch.testing.assert_close(logits, list(expected.logits), rtol=2e-5, atol=2e-5)
        assert told == (PROMPT + NEW - 1, 2, "Cache(25 tokens over 2 ranks)")


def test_a_prefill_keeps_last_logits_of_padded_rows(llama):
    """Also if a row has fewer tokens."""
    batch = prompts((0, PROMPT - 2))
    with torch.no_grad():
        expected = llama(**batch, logits_to_keep=5).logits

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        with torch.no_grad():
            return own(**batch, logits_to_keep=5, past_key_values=sp.cache()).logits

    for found in virtual(2, run):
        assert found.shape == expected.shape
        torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(found[1, -2:], expected[1, -2:], rtol=2e-5, atol=2e-5)


def test_rows_are_repeated_selected_and_dropped(llama):
    batch = prompts((0, 4))
    rows = {name: x.repeat_interleave(2, 0)[[3, 0, 1]] for name, x in batch.items()}
    expected = generated(llama, rows)

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        cache = sp.cache()
        generated(own, batch, past_key_values=cache, max_new_tokens=2, min_new_tokens=2)
        cache.crop(-1)
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        return generated(own, rows, past_key_values=cache), cache.batch_size

    for found, size in virtual(2, run):
        assert torch.equal(found.sequences, expected.sequences) and size == 3


def test_disabling_gives_generate_back(llama):
    expected = generated(llama, prompts())

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        assert "generate" in vars(own)
        sp.disable()
        assert "generate" not in vars(own)
        return generated(own, prompts())

    for found in virtual(2, run):
        assert all(map(torch.equal, found.logits, expected.logits))


def test_a_failing_step_leaves_the_cache_unchanged(llama):
    batch = prompts((0, 4))

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        cache, ids = sp.cache(), batch["input_ids"]
        with torch.no_grad():
            own(**batch, past_key_values=cache)
            before = cache.get_seq_length(), cache.store.layout
            handle = own.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                own(input_ids=ids[:, :1], past_key_values=cache)
            handle.remove()
            assert (cache.get_seq_length(), cache.store.layout) == before
            return own(input_ids=ids[:, :1], past_key_values=cache).logits

    with torch.no_grad():
        past = llama(**batch, use_cache=True).past_key_values
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 1).long()], 1)
        step = {"input_ids": batch["input_ids"][:, :1], "attention_mask": mask}
        expected = llama(**step, past_key_values=past).logits
    for logits in virtual(2, run):
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)


def of_other(own, comm):
    """A cache of another model."""
    return huggingface.enable(hf.tiny("LlamaForCausalLM"), comm).cache()


def filled(own, sp, **options):
    cache = sp.cache()
    own(**prompts((0, 4)), past_key_values=cache)
    return cache


RIGHT = prompts()["attention_mask"].index_fill(1, torch.tensor([PROMPT - 1]), 0)
NONE = torch.cat([torch.ones(1, PROMPT), torch.zeros(1, PROMPT)]).long()
TOKEN = torch.ones(2, 1).long()
WRONG = [
    (
        lambda own, sp: generated(own, prompts(), use_cache=False),
        "use_cache must be True, got False",
    ),
    (
        lambda own, sp: generated(own, prompts(), cache_implementation="static"),
        "cache_implementation must be None, got 'static'",
    ),
    (
        lambda own, sp: generated(own, prompts(), past_key_values=transformers.DynamicCache()),
        r"past_key_values must be None or of sp.cache\(\), got DynamicCache",
    ),
    (
        lambda own, sp: generated(own, prompts(), past_key_values=of_other(own, sp.comm)),
        "past_key_values must be a cache of this model's",
    ),
    (
        lambda own, sp: own(**sp.shard(prompts()), past_key_values=transformers.DynamicCache()),
        r"past_key_values must not be given: only those of sp.cache\(\)",
    ),
    (lambda own, sp: copy.deepcopy(own).generate(**prompts()), "copy of one that is enabled"),
    (
        lambda own, sp: generated(own, prompts() | {"attention_mask": RIGHT}),
        "attention_mask must have its padding on the left",
    ),
    (
        lambda own, sp: generated(own, prompts((0, 4)) | {"attention_mask": NONE}),
        "attention_mask must leave each row a token",
    ),
    (
        lambda own, sp: own(**hf.batch("packed"), past_key_values=sp.cache()),
        "labels must be None in a call with past_key_values",
    ),
    (
        lambda own, sp: own(
            **{name: hf.batch("packed")[name] for name in ("input_ids", "position_ids")},
            past_key_values=sp.cache(),
        ),
        "position_ids must not restart within a row",
    ),
    (
        lambda own, sp: own(input_ids=TOKEN[:1], past_key_values=filled(own, sp)),
        r"input_ids or inputs_embeds must be \(2, T\), the new tokens of .*, got \(1, 1\)",
    ),
    (
        lambda own, sp: own(input_ids=TOKEN, attention_mask=TOKEN, past_key_values=filled(own, sp)),
        r"attention_mask must be \(2, 21\), got \(2, 1\)",
    ),
    (
        lambda own, sp: own(
            input_ids=TOKEN,
            attention_mask=torch.ones(2, 21),
            past_key_values=filled(own, sp),
        ),
        "attention_mask must have the same padding as in the prefill",
    ),
    (
        lambda own, sp: own(
            input_ids=TOKEN, position_ids=TOKEN[:, [0, 0]], past_key_values=filled(own, sp)
        ),
        r"position_ids must be \(2, 1\)",
    ),
    (
        lambda own, sp: own(**sp.shard(prompts()), past_key_values=filled(own, sp)),
        "past_key_values must be empty for a batch that shard returned",
    ),
    (
        lambda own, sp: own(
            input_ids=TOKEN, logits_to_keep=torch.tensor([0]), past_key_values=filled(own, sp)
        ),
        "logits_to_keep must be an int with past_key_values, got a tensor",
    ),
    (lambda own, sp: own(TOKEN, past_key_values=sp.cache()), "called with keywords only"),
    (
        lambda own, sp: filled(own, sp).crop(1),
        "tokens_to_remove must be the number of tokens to remove, negated",
    ),
    (lambda own, sp: filled(own, sp).crop(-17), "tokens_to_remove must be at least -16"),
    (
        lambda own, sp: (
            cache := filled(own, sp),
            sp.make_linear([1]),
            own(input_ids=TOKEN, past_key_values=cache),
        ),
        "model must have no linear layers for a cache, got model.layers.1.self_attn",
    ),
    (lambda own, sp: generated(own, prompts(), max_time=9.0), "max_time must be None"),
    (
        lambda own, sp: own.generate(TOKEN, transformers.GenerationConfig(max_time=9.0)),
        "max_time must be None",
    ),
    (
        lambda own, sp: (setattr(own.model, "hidden_dropout", 0.1), own.train(), filled(own, sp)),
        r"model must be in eval\(\) for calls with past_key_values: its dropout",
    ),
    (
        lambda own, sp: own(**prompts(), past_key_values=sp.cache(), output_router_logits=True),
        "output_router_logits must be None in a call with past_key_values",
    ),
    (
        lambda own, sp: (
            own.add_module("drop", torch.nn.Dropout(0.1)),
            own.train(),
            filled(own, sp),
        ),
        r"model must be in eval\(\) for calls with past_key_values: its dropout",
    ),
    (lambda own, sp: sp.cache(block=0), "block must be at least 1"),
    (lambda own, sp: sp.cache().update(TOKEN, TOKEN, 0), "must be filled by calls of the enabled"),
    (
        lambda own, sp: (sp.make_linear([1]), generated(own, prompts())),
        "model must have no linear layers for a cache, got model.layers.1.self_attn",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[x[1][:40] for x in WRONG])
def test_refusals_name_the_argument(llama, call, message):
    def refused(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        with pytest.raises(ValueError, match=message), torch.no_grad():
            call(own, sp)

    virtual(2, refused)


def test_a_model_with_an_encoder_is_refused():
    model = hf.tiny("BartForConditionalGeneration", decoder_start_token_id=2, dropout=0.0).eval()

    def refused(comm):
        own = copy.deepcopy(model)
        huggingface.enable(own, comm)
        with pytest.raises(ValueError, match="model must have no encoder"):
            own.generate(**prompts())

    virtual(2, refused)


def test_router_loss_is_skipped_with_a_cache():
    """It would be of a rank's own tokens, and its padding."""
    model = hf.tiny("MixtralForCausalLM", output_router_logits=True).eval()

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        with torch.no_grad():
            return own(**prompts((0, 4)), past_key_values=sp.cache()).aux_loss

    assert virtual(2, run) == [None, None]


def test_ranks_with_other_tokens_all_refuse(llama):
    def refused(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        with pytest.raises(ValueError, match="input_ids must be the same on all ranks"):
            own(input_ids=TOKEN + comm.rank, past_key_values=filled(own, sp))

    with torch.no_grad():
        virtual(2, refused)


def test_a_windowed_layer_keeps_exactly_its_window():
    """Behind a prompt that is longer; the layer beside it keeps all of them."""
    model = hf.tiny("Gemma3ForCausalLM", **WINDOWS).eval()
    batch = prompts((0, 30), columns=170)
    expected = generated(model, batch)

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        cache = sp.cache()
        found = generated(own, batch, past_key_values=cache)
        return found, {x: sum(y.layout.tokens_per_rank) for x, y in cache._stores.items()}

    for found, tokens in virtual(2, run):
        assert_same(found, expected, found)
        kept = 170 + NEW - 1
        assert tokens == {None: 2 * kept - 30, 5: 2 * (5 + 64 + NEW - 1)}
