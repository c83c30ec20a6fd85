"""`enable(..., memory=...)`: the loss and gradients of the plain model, with fewer bytes held."""

import copy
import re
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.memory import blocks, head
from seqpar.integrations.huggingface.memory.parts import PARTS
from seqpar.memory.offload import offload
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.support.tiers import few_rows
from tests.unit.integrations.huggingface.test_families import build, exact

SHORT = 5  # tokens of a chunk


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(head, "CHUNK", SHORT)
    monkeypatch.setattr(blocks, "CHUNK", SHORT)


def on_rank(comm, model, of, memory="lean", strategy="ring"):
    """Loss and gradients of a rank, and the report on memory."""
    model = copy.deepcopy(model)
    sp = huggingface.enable(model, comm, strategy, memory=memory)
    outputs = model(**sp.shard(of))
    assert "logits" not in outputs or "loss" not in [x.part for x in sp.report().memory]
    outputs.loss.backward()
    sp.average_gradients()
    report = sp.report().memory
    sp.disable()
    return outputs.loss.detach(), hf.gradients(model), report


def compare(model, of, ranks=2, **options):
    """Assert that the ranks train as the plain model. Return rank 0's report on memory."""
    loss, logits, gradients = hf.unmodified(model, of)
    results = virtual(ranks, partial(on_rank, model=model, of=of, **options))
    found = [(x[0], logits, x[1]) for x in results]
    hf.assert_same(found, (loss, logits, gradients), hf.real(of))
    return {x.part: x for x in results[0][2]}


FAMILIES = (  # dense, windows and softcap, factors of logits, experts, hybrids, no causal mask
    "causal/qwen3", "causal/gemma2", "causal/cohere", "causal/granite", "causal/minicpm3",
    "causal/qwen3_moe", "causal/gpt_oss", "causal/qwen3_next", "causal/falcon_h1", "masked/bert",
)  # fmt: skip


@few_rows()
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lean_training_equals_the_plain_model(family, kind):
    report = compare(build(family), hf.batch(kind))
    assert tuple(report) == PARTS
    assert all(report[part].saved_bytes > 0 for part in PARTS[:3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", exact())
def test_every_family_trains_lean_or_is_refused_by_name(family):
    """A family that adds a bias to its logits says so, and trains with the other parts.

    On one rank, because only the modelling code differs from family to family. The families of
    `test_lean_training_equals_the_plain_model` train on two ranks.
    """
    model, of = build(family), hf.batch("padded")
    said = hf.refused(lambda: compare(model, of, 1))
    if said is not None:
        assert re.search('must not include "loss": .* logits', said)
        compare(model, of, 1, memory=["tiles"])


@pytest.mark.parametrize("memory", [["loss"], ["tiles"], ["checkpoints", "offload"], []])
def test_each_part_is_exact_alone(memory):
    report = compare(hf.tiny("LlamaForCausalLM"), hf.batch("padded"), memory=memory)
    assert list(report) == [x for x in PARTS if x in memory]


def test_checkpoints_wait_in_host_memory():
    """On a CPU, offload copies only if it is simulated."""
    simulated = partial(offload, least=0, simulate=True)
    with mock.patch.object(blocks, "offload", simulated):
        report = compare(hf.tiny("Qwen3ForCausalLM"), hf.batch("whole"))
    tokens, layers = 22, 2  # of a rank
    of_layer = tokens * 4 * (32 + 4 * 8 + 4)  # the input, and out and lse of 4 heads of 8
    assert layers * of_layer <= report["offload"].saved_bytes <= layers * (of_layer + 64)


def test_the_report_counts_the_bytes_of_logits():
    tokens, words = 22, hf.VOCABULARY
    report = compare(hf.tiny("LlamaForCausalLM"), hf.batch("whole"))
    assert report["loss"].saved_bytes == words * (tokens * (4 + 4) - SHORT * 4)


def test_the_report_is_printed():
    def run(comm):
        model = hf.tiny("LlamaForCausalLM")
        sp = huggingface.enable(model, comm, memory="lean")
        model(**sp.shard(hf.batch("packed"))).loss.backward()
        return str(sp.report())

    (text,) = virtual(1, run)
    assert re.search(r"memory tiles: [\d,]+ bytes saved in 7 modules\n", text)


@pytest.mark.parametrize("frozen", ["head", "all but a norm", "embeddings"])
def test_frozen_parts_and_scaled_losses(frozen):
    model = hf.tiny("Qwen3ForCausalLM")
    for name, x in model.named_parameters():
        x.requires_grad_(
            {
                "head": "lm_head" not in name,
                "all but a norm": name == "model.layers.0.input_layernorm.weight",
                "embeddings": "embed" not in name,
            }[frozen]
        )
    of = hf.batch("padded")
    expected = hf.unmodified(model, of)[2]

    def run(comm):
        enabled = copy.deepcopy(model)
        sp = huggingface.enable(enabled, comm, memory="lean")
        (2.0**10 * enabled(**sp.shard(of)).loss).backward()
        sp.average_gradients()
        return {name: x / 2.0**10 for name, x in hf.gradients(enabled).items()}

    for found in virtual(2, run):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_a_tied_head_gets_the_gradients_of_both_uses():
    model = build("causal/qwen3")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    compare(model, hf.batch("packed"))


def test_hidden_states_may_be_used_again():
    """A loss of hidden states is added to the loss of labels."""
    model, of = hf.tiny("LlamaForCausalLM"), hf.batch("whole")
    plain = copy.deepcopy(model)
    outputs = plain(**of, output_hidden_states=True)
    (outputs.loss + outputs.hidden_states[-1].square().mean()).backward()

    def run(comm):
        enabled = copy.deepcopy(model)
        sp = huggingface.enable(enabled, comm, memory="lean")
        outputs = enabled(**sp.shard(of), output_hidden_states=True)
        (outputs.loss + sp.total(outputs.hidden_states[-1].square().mean() / comm.size)).backward()
        sp.average_gradients()
        return hf.gradients(enabled)

    for found in virtual(2, run):
        torch.testing.assert_close(found, hf.gradients(plain), rtol=2e-5, atol=2e-6)


def test_calls_without_labels_and_disabled_models_have_logits():
    model, of = hf.tiny("LlamaForCausalLM"), hf.batch("whole")
    expected = model(**of).logits
    inputs = {name: x for name, x in of.items() if name != "labels"}

    def run(comm):
        enabled = copy.deepcopy(model)
        sp = huggingface.enable(enabled, comm, memory="lean")
        logits = sp.unshard(enabled(**sp.shard(inputs))).logits
        with sp.memory.keeping_logits():
            kept = sp.unshard(enabled(**sp.shard(of))).logits
        sp.disable()
        assert not any("forward" in vars(x) for x in enabled.modules())
        assert not any("gradient_checkpointing" in vars(x) for x in enabled.model.layers)
        return logits, kept, enabled(**of).logits

    for found in virtual(2, run):
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)


def test_disabling_between_the_passes_is_refused():
    def run(comm):
        model = hf.tiny("LlamaForCausalLM")
        sp = huggingface.enable(model, comm, memory="lean")
        loss = model(**sp.shard(hf.batch("whole"))).loss
        sp.disable()
        return hf.refused(loss.backward)

    for text in virtual(2, run):
        assert text.startswith("sp.disable() must not come between forward and backward"), text


class Own(transformers.LlamaForCausalLM):
    """A class of the user's, whose forward runs on samples of tokens too, to find mixed tokens."""


def test_a_users_class_trains_from_its_first_step():
    model = hf.tiny("LlamaForCausalLM")
    model.__class__ = Own
    compare(model, hf.batch("padded"))


def trained(sp, model):
    """Train a step. Return the bytes that all layers sent in both passes."""
    before = sp.report().bytes
    model(**sp.shard(hf.batch("whole"))).loss.backward()
    sp.average_gradients()
    return sp.report().bytes - before


def test_changes_of_logits_are_refused_after_the_first_step_too():
    made = build("causal/gemma2")

    def run(comm):
        model = copy.deepcopy(made)
        sp = huggingface.enable(model, comm, memory="lean")
        trained(sp, model)
        told = []
        hook = model.lm_head.register_forward_hook(lambda _, args, logits: 2 * logits)
        told.append(hf.refused(lambda: trained(sp, model)))
        hook.remove()
        trained(sp, model)
        model.config.final_logit_softcapping = None
        told.append(hf.refused(lambda: trained(sp, model)))
        return told

    for told in virtual(2, run):
        assert all("changes its logits in a way that a chunked loss" in x for x in told)


def test_generating_in_training_mode_is_refused_with_checkpoints():
    def run(comm):
        model = hf.tiny("LlamaForCausalLM")
        huggingface.enable(model, comm, memory="lean")
        model.generate(hf.batch("whole")["input_ids"], max_new_tokens=2)

    assert "transformers gives no cache to blocks that are checkpointed" in hf.refusal(run)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_checkpoints_stay_if_a_trainer_enables_its_own():
    """Backward would otherwise send the bytes of forward again."""

    def run(comm):
        model = hf.tiny("LlamaForCausalLM")
        sp = huggingface.enable(model, comm, memory="lean")
        sent = [trained(sp, model)]
        model.gradient_checkpointing_enable()
        return [*sent, trained(sp, model)]

    for first, second in virtual(2, run):
        assert second == first > 0


def refusal(change, memory="lean", name="LlamaForCausalLM", call=False):
    made = build(name) if "/" in name else hf.tiny(name)

    def run(comm):
        model = copy.deepcopy(made)
        change(model)
        sp = huggingface.enable(model, comm, memory=memory)
        if call:
            model(**sp.shard(hf.batch("whole")), **({} if call is True else call))

    return hf.refusal(run)


def with_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.sum()


def with_head(model):
    model.lm_head = nn.Sequential(model.lm_head)


class Linear(nn.Module):
    """A linear module with LoRA, whose class has the name of PEFT's."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def with_lora(model):
    model.lm_head = Linear(model.lm_head)


def with_checkpoints(model):
    model.gradient_checkpointing_enable()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (with_loss, {}, "loss_function must be the model's default"),
        (with_head, {}, "its head is a torch.nn.modules.container.Sequential, and not a torch.nn"),
        (with_lora, {}, f"its head is a {__name__}.Linear, and not a torch.nn.Linear; leave"),
        (with_checkpoints, {}, 'must not include "checkpoints": the model checkpoints its'),
        (lambda _: None, {"memory": "much"}, "memory must be None, 'lean' or a list of parts"),
        (lambda _: None, {"memory": ["loss", "speed"]}, "memory must be None, 'lean' or a list"),
        (lambda _: None, {"memory": 3}, "memory must be None, 'lean' or a list"),
        (lambda _: None, {"memory": ["offload"]}, 'must include "checkpoints" with "offload"'),
        (
            lambda model: setattr(model.config, "output_router_logits", True),
            {"name": "MixtralForCausalLM"},
            'output_router_logits must not be set with memory\'s "tiles"',
        ),
        (
            lambda _: None,
            {"name": "MixtralForCausalLM", "call": {"output_router_logits": True}},
            'output_router_logits must not be set with memory\'s "tiles"',
        ),
        (lambda _: None, {"name": "BartForConditionalGeneration"}, "from its logits, which a"),
        (
            lambda _: None,
            {"name": "masked/esm", "call": True},
            "EsmForMaskedLM changes its logits in a way that a chunked loss does not know",
        ),
        (
            lambda _: None,
            {"name": "BertForTokenClassification", "memory": ["loss"]},
            "must not include 'loss': BertForTokenClassification has no head of words",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(change, options, said):
    assert said in refusal(change, **options)


def test_a_refused_model_stays_as_it_was():
    model = hf.tiny("LlamaForCausalLM")
    with_head(model)
    before = [vars(x).keys() for x in model.modules()]
    virtual(1, lambda comm: hf.refused(lambda: huggingface.enable(model, comm, memory="lean")))
    assert [vars(x).keys() for x in model.modules()] == before
    virtual(1, lambda comm: huggingface.enable(model, comm).disable())


def test_compiling_a_lean_model_is_refused():
    def run(comm):
        huggingface.enable(hf.tiny("LlamaForCausalLM"), comm, memory="lean").compile()

    assert "cannot be compiled whole: it was enabled with memory" in hf.refusal(run, 1)
