"""Sharded batches in models that are not enabled, or enabled otherwise, are refused."""

import copy

import pytest
import torch
import transformers

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
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


def test_positional_tokens_and_outputs_are_refused():
    model, other = hf.tiny("LlamaForCausalLM"), hf.tiny("LlamaForCausalLM")

    def with_tokens(comm):
        other(huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch())["input_ids"])

    def with_states(comm):
        enabled = copy.deepcopy(model)
        sp = huggingface.enable(enabled, comm)
        outputs = enabled(**sp.shard(hf.batch()), output_hidden_states=True)
        other(inputs_embeds=outputs.hidden_states[-1].detach())

    assert_refused(hf.refusal(with_tokens))
    assert_refused(hf.refusal(with_states))


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
        other(input_ids=(local["input_ids"] + 1) % hf.VOCABULARY)
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
    "a model with labels of another kind": "LlamaForTokenClassification",
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
