"""Which models may be enabled, and sharded batches in models that are not enabled."""

import copy
import functools
import inspect

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support import images
from tests.support.compiling import compiling_elsewhere
from tests.support.ranks import virtual

OTHERS = (  # with and without **kwargs, with learned, rotary and bucketed positions
    "LlamaForCausalLM",
    "LlamaModel",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "FNetForMaskedLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "MambaForCausalLM",
    "RobertaForMaskedLM",
    "DebertaV2ForMaskedLM",
)
PARTS = {
    "all": lambda local: local,
    "tokens": lambda local: {"input_ids": local["input_ids"]},
    "tokens of a view": lambda local: {"input_ids": local["input_ids"][:, :-1]},
    "tokens and positions": lambda local: {
        "input_ids": local["input_ids"],
        "position_ids": local["position_ids"],
    },
    "without the key": lambda local: {x: y for x, y in local.items() if x != "seqpar"},
    "copies of all": lambda local: {x: y.clone() for x, y in local.items() if x != "seqpar"},
    "changed tokens": lambda local: {"input_ids": (local["input_ids"] + 1) % hf.VOCABULARY},
    "copied tokens": lambda local: {"input_ids": local["input_ids"].to(torch.int32, copy=True)},
    "detached tokens": lambda local: {"input_ids": local["input_ids"].detach()},
    "a BatchEncoding": lambda local: transformers.BatchEncoding(
        {x: y.clone() for x, y in local.items() if x in ("input_ids", "position_ids")}
    ).to("cpu"),
    "other labels": lambda local: local | {"labels": local["labels"].clone()},
}


def assert_refused(text):
    assert text.startswith("model must be enabled by seqpar for a sharded batch"), text
    assert "or give it the whole batch" in text


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_not_enabled_refuses_shards(name):
    other = hf.tiny(name)

    def run(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        other(**sp.shard(hf.batch()))

    assert_refused(hf.refusal(run))


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_sharded_batch_are_refused(part):
    model, other = hf.tiny("LlamaForCausalLM"), hf.tiny("LlamaForCausalLM")

    def run(comm):
        local = huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch())
        other(**PARTS[part](local))

    assert_refused(hf.refusal(run))


@pytest.mark.parametrize("part", ["all", "tokens", "copies of all"])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_refuses_shards(part, compiled_first):
    model, other = hf.tiny("LlamaForCausalLM"), hf.tiny("LlamaForCausalLM")
    around = torch.nn.ModuleDict({"reference": other})  # as wrappers are around a model
    around.forward = lambda **local: other(**local)

    def run(comm, module):
        if compiled_first:
            module = torch.compile(module, backend="eager")
        local = huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch())
        module = module if compiled_first else torch.compile(module, backend="eager")
        module(**PARTS[part](local))

    for module in other, around:
        assert_refused(hf.refusal(lambda comm, module=module: run(comm, module)))


def test_positional_tokens_and_sharded_embeddings_are_refused():
    model, other = hf.tiny("LlamaForCausalLM"), hf.tiny("LlamaForCausalLM")

    def with_tokens(comm):
        other(huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch())["input_ids"])

    def with_embeddings(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        of = hf.batch()
        embeddings = sp.model.get_input_embeddings()(of.pop("input_ids"))
        other(**sp.shard(of | {"inputs_embeds": embeddings}))

    assert_refused(hf.refusal(with_tokens))
    assert_refused(hf.refusal(with_embeddings))


def test_ids_of_a_ranks_tokens_act_as_a_tensor():
    """In everything but a model that is not enabled, and also in embeddings of the user's."""
    model, table = hf.tiny("LlamaForCausalLM"), torch.nn.Embedding(hf.VOCABULARY, 4)

    def run(comm):
        ids = huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch())["input_ids"]
        plain = torch.tensor(ids.tolist())
        assert torch.equal(table(ids), table(plain)) and type(table(ids)) is torch.Tensor
        assert type(ids != 3) is torch.Tensor and type(ids / 2) is torch.Tensor
        scores = torch.randn(1, ids.shape[1], hf.VOCABULARY)
        assert torch.equal(scores.gather(-1, ids[..., None]), scores.gather(-1, plain[..., None]))
        assert type(torch.nn.functional.cross_entropy(scores[0], ids[0])) is torch.Tensor

    virtual(2, run)


def test_another_threads_compilation_refuses_no_embeddings():
    with compiling_elsewhere():
        test_ids_of_a_ranks_tokens_act_as_a_tensor()


def test_a_disabled_model_refuses_shards_and_runs():
    model, of = hf.tiny("LlamaForCausalLM"), hf.batch()
    expected = hf.tiny("LlamaForCausalLM")(**of).loss

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        local = sp.shard(of)
        sp.disable()
        torch.testing.assert_close(own(**of).loss, expected, rtol=0, atol=0)
        own(**local)

    assert_refused(hf.refusal(run))


def test_other_tokens_of_the_same_shape_are_taken():
    model, other = hf.tiny("LlamaForCausalLM"), hf.tiny("LlamaForCausalLM")

    def run(comm):
        local = huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch())
        other(input_ids=torch.randint(hf.VOCABULARY, local["input_ids"].shape))
        other(**hf.batch())

    virtual(2, run)


def test_one_rank_alone_has_whole_batches():
    """Whose tokens other models may be given too."""
    model, other, of = *map(hf.tiny, 2 * ["LlamaForCausalLM"]), hf.batch(rows=1)

    def run(comm):
        huggingface.enable(copy.deepcopy(model), comm).shard(of)
        return other(**of).loss

    assert torch.isfinite(virtual(1, run)[0])


def test_a_deep_copy_names_seqpar():
    def run(comm):
        model = hf.tiny("LlamaForCausalLM")
        sp = huggingface.enable(model, comm)
        copy.deepcopy(model)(**sp.shard(hf.batch()))

    assert "copy a model before seqpar enables it" in hf.refusal(run)


OTHER_SESSIONS = {
    "a model with a different kind of labels": "LlamaForTokenClassification",
    "a model of transformers.models.llama": "MistralForCausalLM",
}


@pytest.mark.parametrize("reason", OTHER_SESSIONS)
def test_a_batch_of_another_session_is_refused(reason):
    def run(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        other = hf.tiny(OTHER_SESSIONS[reason])
        huggingface.enable(other, comm)
        other(**sp.shard(hf.batch()))

    told = hf.refusal(run)
    assert f"the batch must not be sharded for {reason}" in told and "seqpar" in told


def test_a_reference_model_still_takes_the_batch():
    """As in GRPO, where both models are enabled on one group."""
    model, of = hf.tiny("LlamaForCausalLM"), hf.batch()
    expected = model(**of).loss

    def run(comm):
        policy, reference = (copy.deepcopy(model) for _ in range(2))
        local = huggingface.enable(policy, comm).shard(of)
        huggingface.enable(reference, comm)
        return policy(**local).loss.detach(), reference(**local).loss.detach()

    for losses in virtual(2, run):
        for loss in losses:
            torch.testing.assert_close(loss, expected.detach())


def test_a_teacher_next_to_the_model_refuses_shards():
    """As in distillation, where one module has both models, and the first one is enabled."""
    parts = {"student": hf.tiny("LlamaForCausalLM"), "teacher": hf.tiny("Qwen3ForCausalLM")}

    def run(comm):
        both = torch.nn.ModuleDict(copy.deepcopy(parts))
        both.forward = lambda **local: {
            "logits": both.student(**local).logits,
            "teacher_logits": both.teacher(**local).logits,
        }
        sp = huggingface.enable(both, comm)
        both(**sp.shard(hf.batch()))

    assert_refused(hf.refusal(run))


class Around(transformers.PreTrainedModel):
    """A model with an enabled one inside, which reads the batch too."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.inside = transformers.LlamaForCausalLM(config)
        self.post_init()

    def forward(self, **batch):
        return self.inside(**batch).loss + 0 * batch["labels"].sum()


def test_a_model_around_an_enabled_one_takes_shards():
    around = Around(hf.tiny("LlamaForCausalLM").config)

    def run(comm):
        model = copy.deepcopy(around)
        sp = huggingface.enable(model.inside, comm)
        assert torch.isfinite(model(**sp.shard(hf.batch())))

    virtual(2, run)


def doubled(module, query, key, value, mask, **options):
    out, weights = sdpa_attention_forward(module, query, key, value, mask, **options)
    return 2 * out, weights


@functools.wraps(sdpa_attention_forward)
def disguised(*args, **options):
    return doubled(*args, **options)


def narrow(*args, **options):
    return sdpa_mask(*args, **options)


USERS = {  # where a user's function is -> the interface, its name there, the function
    "attention": (transformers.AttentionInterface, "mine", doubled),
    "a partial": (transformers.AttentionInterface, "mine", functools.partial(doubled)),
    "a wrapper": (transformers.AttentionInterface, "mine", disguised),
    "in place of transformers'": (transformers.AttentionInterface, "sdpa", doubled),
    "masks": (transformers.AttentionMaskInterface, "sdpa", narrow),
}


@pytest.mark.parametrize("case", USERS)
def test_a_users_attention_function_is_not_replaced(case, monkeypatch):
    interface, name, function = USERS[case]
    monkeypatch.setitem(interface._global_mapping, name, function)
    model = hf.tiny("LlamaForCausalLM")
    model.set_attn_implementation(name)
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))
    assert f"of transformers: model.layers.0.self_attn has '{name}'" in text, text
    assert "model.set_attn_implementation('sdpa')" in text


def test_a_users_eager_attention_is_not_replaced(monkeypatch):
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    model = hf.tiny("LlamaForCausalLM")
    model.set_attn_implementation("eager")
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))
    assert "model.layers.0.self_attn has 'eager', the function doubled" in text, text


def test_a_users_attention_of_one_part_is_not_replaced(monkeypatch):
    """Of the text of a model with images, and not of its images, which keep their attention."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "mine", doubled)
    model = images.build("gemma3", mm_tokens_per_image=4)
    model.set_attn_implementation({"vision_config": "mine"})
    virtual(1, lambda comm: huggingface.enable(copy.deepcopy(model), comm))
    model.set_attn_implementation({"text_config": "mine"})
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))
    assert "has 'mine', the function doubled" in text, text


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_every_attention_of_transformers_is_accepted(name):
    model = hf.tiny("LlamaForCausalLM")
    model.set_attn_implementation(name)
    virtual(1, lambda comm: huggingface.enable(copy.deepcopy(model), comm))


@pytest.mark.parametrize("generates", [False, True])
def test_attention_that_is_switched_later_is_refused(generates):
    model = hf.tiny("LlamaForCausalLM").eval()

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        own.set_attn_implementation("eager")
        own.set_attn_implementation("seqpar")
        own(**sp.shard(hf.batch()))
        own.set_attn_implementation("sdpa")
        if generates:
            own.generate(input_ids=hf.batch("whole")["input_ids"], max_new_tokens=2)
        own(**sp.shard(hf.batch()))

    text = hf.refusal(run)
    assert "attention must be seqpar's: it was set to 'sdpa' after enable" in text, text
    assert "model.set_attn_implementation('seqpar')" in text and "sp.disable()" in text


SIGNED = {  # models whose forwards are replaced, and whether they can be compiled
    "LlamaForCausalLM": ({}, True),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "full_attention"]}, True),
}


@pytest.mark.parametrize("name", SIGNED)
def test_enabled_and_compiled_forwards_keep_their_signatures(name):
    """Trainers, and other tools, read from it which arguments a module takes."""
    options, compiles = SIGNED[name]
    model = hf.tiny(name, **options)

    def signatures():
        signed = {key: inspect.signature(x.forward) for key, x in model.named_modules()}
        return {
            key: [(x.name, x.kind, x.default) for x in signature.parameters.values()]
            for key, signature in signed.items()
        }

    def run(comm):
        sp = huggingface.enable(model, comm)
        if compiles:
            sp.compile(backend="eager")
        return signatures()

    before = signatures()
    assert virtual(1, run) == [before]
