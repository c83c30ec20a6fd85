"""Wrong uses of an enabled model: each is exact, or an error that names the argument or thing."""

import copy
import io
import pickle
import re

import pytest
import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from seqpar.integrations import huggingface
from tests.support import huggingface as hf

IDS = hf.batch()["input_ids"]


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


def save(sp, model):
    torch.save(model, io.BytesIO())


def called(**more):
    return lambda sp, model: model(**sp.shard(hf.batch()), **more)


def sharded(**more):
    return lambda sp, model: model(**sp.shard(hf.batch() | more))


def differing(name, change):
    """A batch whose entry rank 1 changes."""

    def run(sp, model):
        of = hf.batch()
        if sp.comm.rank:
            of[name] = change(of[name])
        sp.shard(of)

    return run


def generated(**settings):
    """`generate` with settings, of which a tuple has one for each rank; ... is none."""

    def run(sp, model):
        mine = {
            name: x[sp.comm.rank] if isinstance(x, tuple) else x for name, x in settings.items()
        }
        model.eval().generate(
            input_ids=IDS[:, :6], **{name: x for name, x in mine.items() if x is not ...}
        )

    return run


def totalled(change):
    """`sp.total` of a change of the model's own loss."""
    return lambda sp, model: sp.total(change(model(**sp.shard(hf.batch())).loss))


def divided(count):
    """A call whose divisor each rank computes of its number of labels."""

    def run(sp, model):
        part = sp.shard(hf.batch())
        labels = (part["labels"] != -100).sum()
        model(**part, num_items_in_batch=count(sp.comm.rank, labels))

    return run


def with_a_cache_by_hand(sp, model):
    model(**sp.shard(hf.batch()), past_key_values=transformers.DynamicCache())


def of_whole_logits(sp, model):
    sp.unshard(torch.ones(2, 22, 4))


def after_disable(sp, model):
    batch = sp.shard(hf.batch())
    sp.disable()
    sp.compile()
    model(**batch)


CRITERIA = tuple(
    transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(n)]) for n in (8, 9)
)
REFUSED = {
    "torch.save": (save, "model cannot be pickled while seqpar runs it"),
    "pickle of a batch": (
        lambda sp, model: pickle.dumps(sp.shard(hf.batch())),
        "a sharded batch cannot be pickled: call shard in the process that calls the model",
    ),
    "pickle of a cache": (
        lambda sp, model: pickle.dumps(sp.cache()),
        "past_key_values of sp.cache() cannot be pickled",
    ),
    "pickle of a part": (lambda sp, model: pickle.dumps(model.model), "model cannot be pickled"),
    "logits of the last token": (called(logits_to_keep=1), "logits_to_keep must not be given"),
    "logits of some tokens": (
        called(logits_to_keep=torch.tensor([1])),
        "logits_to_keep must not be given",
    ),
    "logits_to_keep in the batch": (sharded(logits_to_keep=2), "logits_to_keep must not be given"),
    "weights": (called(output_attentions=True), "output_attentions must not"),
    "a tuple": (called(return_dict=False), "return_dict must be True"),
    "a cache": (called(use_cache=True), "use_cache must not be given"),
    "a cache by hand": (with_a_cache_by_hand, "past_key_values must not be given"),
    "a mask of pairs": (
        sharded(attention_mask=torch.ones(2, 1, 22, 22)),
        "attention_mask must be None or (2, 22)",
    ),
    "a mask of other rows": (sharded(attention_mask=torch.ones(1, 22)), "attention_mask must be"),
    "a list as a mask": (sharded(attention_mask=[[1] * 22] * 2), "attention_mask must be"),
    "labels of other rows": (sharded(labels=IDS[:1]), "labels must be (2, 22)"),
    "labels as a list": (sharded(labels=IDS.tolist()), "labels must be a tensor, got a list: call"),
    "positions of other rows": (
        sharded(position_ids=torch.zeros(3, 22, dtype=torch.long)),
        "position_ids must be (2, 22)",
    ),
    "positions as a list": (sharded(position_ids=[1, 2]), "position_ids must be a tensor, got a"),
    "input_ids as a list": (sharded(input_ids=IDS.tolist()), "input_ids must be a tensor, got a"),
    "a list that is counted": (
        lambda sp, model: sp.count_labels({"input_ids": IDS.tolist(), "labels": IDS.tolist()}),
        "labels must be a tensor, got a list: call",
    ),
    "no input_ids": (sharded(input_ids=None), "batch must have either input_ids"),
    "one row without a batch": (sharded(input_ids=IDS[0]), "batch must have either input_ids"),
    "input_ids and inputs_embeds": (
        sharded(inputs_embeds=torch.ones(2, 22, 32)),
        "batch must have either input_ids",
    ),
    "tokens beyond the vocabulary": (sharded(input_ids=IDS + 60), "input_ids must be"),
    "negative tokens": (sharded(input_ids=IDS - 60), "input_ids must be"),
    "tokens of floats": (sharded(input_ids=IDS.float()), "input_ids must be"),
    "prompts beyond the vocabulary": (
        lambda sp, model: model.eval().generate(input_ids=IDS + 60, max_new_tokens=2),
        "input_ids must be from 0 to 63",
    ),
    "labels beyond the vocabulary": (
        sharded(labels=IDS + 60),
        "labels must be -100 or from 0 to 63, the",
    ),
    "negative labels": (sharded(labels=-IDS), "labels must be -100 or from 0 to 63, the"),
    "shifted labels beyond it": (sharded(shift_labels=IDS + 60), "shift_labels must be -100 or"),
    "a loss of all ranks": (totalled(lambda loss: loss), "loss must be this rank's part of a loss"),
    "a loss with one of all ranks": (
        totalled(lambda loss: 2 * loss + 1),
        "loss must be this rank's part of a loss",
    ),
    "a loss of all ranks, evaluated": (
        torch.no_grad()(totalled(lambda loss: loss)),
        "loss must be this rank's part of a loss",
    ),
    "this rank's number of labels": (
        divided(lambda rank, labels: labels),
        "num_items_in_batch must",
    ),
    "another divisor": (
        divided(lambda rank, labels: 100 + rank),
        "num_items_in_batch must be the same on all ranks: rank 0 has 100, rank 1 has 101",
    ),
    "another setting of a call": (
        lambda sp, model: model(**sp.shard(hf.batch()), output_hidden_states=bool(sp.comm.rank)),
        "output_hidden_states must be the same on all ranks",
    ),
    "another number in a batch": (
        lambda sp, model: sp.shard(hf.batch() | {"scale": sp.comm.rank}),
        "batch['scale'] must be the same on all ranks: rank 0 has 0, rank 1 has 1",
    ),
    "other shifted labels": (
        lambda sp, model: sp.shard(hf.batch() | {"shift_labels": IDS - sp.comm.rank}),
        "batch['shift_labels'] must be the same on all ranks",
    ),
    "a part for generate": (
        lambda sp, model: model.generate(**sp.shard(hf.batch()), max_new_tokens=2),
        "batch must be whole for generate, got a sharded one: call model.generate(**batch)",
    ),
    "a part of a part for generate": (
        lambda sp, model: model.generate(sp.shard(hf.batch())["input_ids"], max_new_tokens=2),
        "batch must be whole for generate",
    ),
    "weights in generate": (
        generated(max_new_tokens=2, output_attentions=True),
        "output_attentions must be False",
    ),
    "no tokens": (
        lambda sp, model: sp.shard({"input_ids": IDS[:, :0]}),
        "batch must have tokens",
    ),
    "a batch twice": (lambda sp, model: sp.shard(sp.shard(hf.batch())), "batch must be whole"),
    "a tensor as a batch": (lambda sp, model: sp.shard(IDS), "batch must be a mapping"),
    "a whole batch": (lambda sp, model: model(**hf.batch()), "the model must be called with what"),
    "without keywords": (lambda sp, model: model(IDS), "the model must be called with what"),
    "other tokens": (differing("input_ids", lambda x: x + 1), "batch['input_ids'] must be"),
    "other labels": (differing("labels", lambda x: x - 1), "batch['labels'] must be"),
    "another mask": (differing("attention_mask", torch.ones_like), "batch['attention_mask'] must"),
    "other outputs": (of_whole_logits, "outputs must be tensors that the model returned"),
    "a batch that was not sharded": (
        lambda sp, model: sp.unshard(IDS, hf.batch()),
        "batch must be a sharded batch",
    ),
    "a loss that is no tensor": (lambda sp, model: sp.total(1.0), "loss must be"),
    "a loss of several numbers": (lambda sp, model: sp.total(torch.ones(2)), "loss must be"),
    "a layer that is not there": (lambda sp, model: sp.make_linear([7]), "layers must be"),
    "a layer's other name": (lambda sp, model: sp.make_linear(["x"]), "layers must be names"),
    "a layer of a float": (lambda sp, model: sp.make_linear([0.5]), "layers must be"),
    "compiled after disable": (after_disable, "model cannot be compiled whole: it was disabled"),
    "enabled twice": (
        lambda sp, model: huggingface.enable(model, sp.comm),
        "model must not be enabled twice",
    ),
    "another max_new_tokens": (generated(max_new_tokens=(3, 4)), "max_new_tokens must be"),
    "another min_new_tokens": (
        generated(max_new_tokens=4, min_new_tokens=(..., 2)),
        "min_new_tokens must be the same",
    ),
    "other beams": (generated(max_new_tokens=4, num_beams=(1, 2)), "num_beams must be the same"),
    "another temperature": (
        generated(max_new_tokens=4, do_sample=True, temperature=(1.0, 2.0)),
        "temperature must be the same",
    ),
    "another end": (
        generated(max_new_tokens=4, eos_token_id=(2, [2, 3])),
        "eos_token_id must be the same",
    ),
    "other criteria": (
        generated(max_new_tokens=4, stopping_criteria=CRITERIA),
        "stopping_criteria must be the same",
    ),
    "criteria on one rank": (
        generated(max_new_tokens=4, stopping_criteria=(..., CRITERIA[0])),
        "stopping_criteria must be the same",
    ),
    "an unknown setting on one rank": (
        generated(max_new_tokens=4, foo=(..., 1)),
        "settings must be the same",
    ),
    "another config": (
        generated(
            generation_config=tuple(transformers.GenerationConfig(max_new_tokens=n) for n in (3, 4))
        ),
        "max_new_tokens must be the same",
    ),
    "a clock": (generated(max_new_tokens=4, max_time=1.0), "max_time must be None"),
    "heads that propose": (generated(max_new_tokens=4, use_mtp=True), "use_mtp must be False"),
    "no cache": (generated(max_new_tokens=4, use_cache=False), "use_cache must be True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_use_is_refused_by_name(llama, case):
    run, reason = REFUSED[case]

    def on_each(comm):
        model = copy.deepcopy(llama)
        run(huggingface.enable(model, comm), model)

    assert hf.refusal(on_each).startswith(reason)


def embedded(sp, model):
    of = hf.batch()
    ids = of.pop("input_ids")
    return model(**sp.shard(of | {"inputs_embeds": model.get_input_embeddings()(ids)}))


def disabled_twice(sp, model):
    sp.disable()
    sp.disable()
    return model(**hf.batch())


def evaluated_between(sp, model):
    model.eval()(**sp.shard(hf.batch()))
    return model.train()(**sp.shard(hf.batch()))


def checkpointed(sp, model):
    model.gradient_checkpointing_enable()
    return model(**sp.shard(hf.batch()))


def after_a_refusal(sp, model):
    with pytest.raises(ValueError, match="return_dict"):
        model(**sp.shard(hf.batch()), return_dict=False)
    return model(**sp.shard(hf.batch()))


def interrupt(*_):
    raise KeyboardInterrupt


def after_ctrl_c(sp, model):
    part, cache = sp.shard(hf.batch()), sp.cache()
    ids = {"input_ids": IDS[:, :6]}
    with torch.no_grad():
        model.eval()(**ids, past_key_values=cache)
    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    for grad, arguments in ((True, part), (False, ids | {"past_key_values": cache})):
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(grad):
            model(**arguments)
        assert all(x.is_leaf for x in model.parameters()) and cache.get_seq_length() == 6
        assert hf.refused(lambda: hf.tiny("LlamaForCausalLM")(**part))
    handle.remove()
    with torch.no_grad():
        model(**ids, past_key_values=cache)
    assert cache.get_seq_length() == 12
    return model.train()(**part)


def with_its_own_loss_function(sp, model):
    model.loss_function = ForCausalLMLoss
    return model(**sp.shard(hf.batch()))


def saved(sp, model):
    torch.save(model.state_dict(), io.BytesIO())
    return model(**sp.shard(hf.batch()))


EXACT = {
    "embeddings": embedded,
    "disabled twice": disabled_twice,
    "evaluated between": evaluated_between,
    "checkpointed": checkpointed,
    "after a refusal": after_a_refusal,
    "after ctrl-c": after_ctrl_c,
    "its state saved": saved,
    "its default loss function set": with_its_own_loss_function,
    "a copied batch": lambda sp, model: model(**copy.deepcopy(sp.shard(hf.batch()))),
    "all logits": called(logits_to_keep=0),
    "no cache asked for": called(use_cache=False),
    "a mask of bools": sharded(attention_mask=hf.batch()["attention_mask"].bool()),
    "a mask of floats": sharded(attention_mask=hf.batch()["attention_mask"].float()),
    "labels of another type": sharded(labels=hf.batch()["labels"].long()),
    "keys without values": sharded(position_ids=None, cu_seq_lens_q=None),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", EXACT)
def test_an_unusual_use_is_exact(llama, case):
    expected = llama(**hf.batch()).loss

    def on_each(comm):
        model = copy.deepcopy(llama)
        return EXACT[case](huggingface.enable(model, comm), model).loss.detach()

    for loss in hf.virtual(2, on_each):
        torch.testing.assert_close(loss, expected.detach())


class Streamer:
    def put(self, tokens):
        pass

    def end(self):
        pass


def test_one_rank_may_stream_unless_beams_are_used(llama):
    def on_each(beams):
        def run(comm):
            model = copy.deepcopy(llama).eval()
            huggingface.enable(model, comm)
            streamer = None if comm.rank else Streamer()
            return model.generate(
                input_ids=IDS[:, :6], max_new_tokens=3, streamer=streamer, num_beams=beams
            )

        return run

    first, second = hf.virtual(2, on_each(1))
    assert torch.equal(first, second)
    assert hf.refusal(on_each(2)).startswith("streamer must be the same on all ranks")


def test_a_compiled_model_is_refused_on_enable(llama):
    def run(comm):
        model = copy.deepcopy(llama)
        model.compile(backend="eager")
        huggingface.enable(model, comm)

    assert hf.refusal(run).startswith("model must not be compiled before it is enabled")
    wrapped = torch.compile(copy.deepcopy(llama), backend="eager")
    text = hf.refusal(lambda comm: huggingface.enable(wrapped, comm))
    assert text.startswith("model must not be compiled before it is enabled")


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("GPT2LMHeadModel", {}, "position_ids must be from 0 to 63, the model's table"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 32}, "position_ids must be from"),
        ("BertForMaskedLM", {}, "position_ids must be from 0 to 63"),
    ],
)
def test_positions_beyond_a_table_are_refused(name, more, reason):
    """Only the rank with a document's end would fail."""
    model = hf.tiny(name, **more, attention_dropout=0.0, attention_probs_dropout_prob=0.0)

    def run(columns):
        def on_each(comm):
            sp = huggingface.enable(copy.deepcopy(model).eval(), comm)
            sp.model(**sp.shard(hf.batch("full", columns=columns)))

        return on_each

    hf.virtual(2, run(64))
    assert hf.refusal(run(65)).startswith(reason)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_token_types_beyond_a_table_are_refused(name):
    model = hf.tiny(name, attention_probs_dropout_prob=0.0)

    def run(comm):
        types = torch.zeros_like(IDS)
        types[1, 3] = 64
        of = hf.batch() | {"token_type_ids": types}
        huggingface.enable(copy.deepcopy(model).eval(), comm).shard(of)

    assert hf.refusal(run).startswith("token_type_ids must be from 0 to")


def test_classes_beyond_the_head_are_refused():
    model = hf.tiny("LlamaForTokenClassification")  # of two classes

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        sp.shard(hf.batch() | {"labels": IDS % 2})
        sp.shard(hf.batch() | {"labels": IDS % 3})

    assert hf.refusal(run).startswith("labels must be -100 or from 0 to 1, ")


def test_labels_without_a_head_are_refused():
    model = hf.tiny("LlamaModel")
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm).shard(hf.batch()))
    assert "labels must be None: LlamaModel computes no loss by its loss_function; enable a" in text


def test_weights_by_the_config_are_refused():
    model = hf.tiny("LlamaForCausalLM")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        sp.model(**sp.shard(hf.batch()))

    assert hf.refusal(run).startswith("output_attentions must be False in the model's config")


def test_another_setting_of_a_rank_is_refused(llama):
    def run(comm):
        model = copy.deepcopy(llama)
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4 * (1 + comm.rank)}
        model.config._name_or_path = f"/disk-{comm.rank}"
        huggingface.enable(model, comm)

    text = hf.refusal(run)
    assert text.startswith("model.config.rope_parameters must be the same on all ranks: rank 0 has")
    assert "disk" not in text


def test_models_in_other_folders_are_enabled(llama):
    def run(comm):
        model = copy.deepcopy(llama)
        model.config._name_or_path = f"/disk-{comm.rank}"
        huggingface.enable(model, comm)

    hf.virtual(2, run)


def test_another_batch_is_described_with_a_hint(llama):
    text = hf.refusal(
        lambda comm: enabled(llama, comm).shard(hf.batch("full", columns=22 - 2 * comm.rank))
    )
    expected = r"rank 0 has int64 \(2, 22\) \(digest \w{8}\), rank 1 has int64 \(2, 20\) "
    assert re.search(expected, text) and "give the sampler the group's number as its rank" in text

    def called(comm):
        sp = enabled(llama, comm)
        parts = [sp.shard(hf.batch()), sp.shard(hf.batch("full"))]
        sp.model(**parts[comm.rank])

    expected = (
        r"batch must be the same on all ranks: rank 0 has 35 labels, 37 tokens in 2 documents"
    )
    assert re.search(expected, hf.refusal(called))


def enabled(model, comm):
    return huggingface.enable(copy.deepcopy(model), comm)


class Passing(torch.nn.Module):
    """A module around a model that only passes labels on."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels=None, **more):
        return self.model(input_ids=input_ids, labels=labels, **more)


class Adding(Passing):
    def forward(self, input_ids, labels=None, **more):
        outputs = self.model(input_ids=input_ids, labels=labels, **more)
        if labels is not None:
            outputs.loss = outputs.loss + sum(x.square().sum() for x in self.parameters())
        return outputs


class Reading(Passing):
    def forward(self, **batch):
        outputs = self.model(**batch)
        return self.with_term(outputs, batch.get("labels"))

    def with_term(self, outputs, given):
        return outputs


class Weighing(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, labels=None, **more):
        outputs = super().forward(input_ids=input_ids, position_ids=position_ids, **more)
        return outputs if labels is None else self.weighed(outputs, labels)


class Renaming(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, labels=None, **more):
        return super().forward(input_ids, None, position_ids, labels=labels, **more)


class Headed(transformers.PreTrainedModel):
    """A model of no family of transformers."""

    config_class = transformers.LlamaConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, llama):
        super().__init__(llama.config)
        self.model, self.lm_head = llama.model, llama.lm_head

    def get_output_embeddings(self):
        return self.lm_head

    def logits(self, **batch):
        return self.lm_head(self.model(**batch).last_hidden_state)


class Plain(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class Joining(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, return_dict=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        if return_dict is False:
            outputs = (logits,)
            return ((loss,) + outputs) if loss is not None else outputs  # noqa: RUF005
        return CausalLMOutput(loss=loss, logits=logits)


class WithTerm(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss = None
        if labels is not None:
            ce_loss = self.loss_function(logits, labels, self.config.vocab_size)
            loss = logits.logsumexp(-1).mean() + ce_loss
        return CausalLMOutput(loss=loss, logits=logits)


class WithAuxiliaryTerm(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            aux_loss = logits.logsumexp(-1).mean()
            loss += 0.1 * aux_loss
        return CausalLMOutput(loss=loss, logits=logits)


class Scaling(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss = None
        if labels is not None:
            loss = 0.5 * self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class WithoutShift(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss, size = None, self.config.vocab_size
        if labels is not None:
            loss = self.loss_function(logits, None, size, shift_labels=labels)
        return CausalLMOutput(loss=loss, logits=logits)


class WeighingForMaskedLM(Headed):
    def forward(self, input_ids=None, position_ids=None, labels=None, **batch):
        logits = self.logits(input_ids=input_ids, position_ids=position_ids, **batch)
        loss = None
        if labels is not None:
            weight = torch.arange(logits.shape[-1], dtype=logits.dtype)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize(
    "kind",
    [
        *(Adding, Reading, Weighing),
        *(WithTerm, WithAuxiliaryTerm, Scaling, WithoutShift, WeighingForMaskedLM),
    ],
)
def test_a_users_own_terms_of_labels_are_refused(llama, kind):
    def run(comm):
        model = copy.deepcopy(llama)
        if kind is Weighing:
            model.__class__ = kind
        else:
            model = kind(model)
        sp = huggingface.enable(model, comm)
        model(**sp.shard({"input_ids": IDS}))
        model(**sp.shard(hf.batch()))

    assert hf.refusal(run).startswith(f"labels must be None: {kind.__name__} uses labels itself")


@pytest.mark.parametrize("kind", [Passing, Renaming, Plain, Joining])
def test_a_users_class_that_passes_labels_is_exact(llama, kind):
    expected = llama(**hf.batch()).loss

    def run(comm):
        model = copy.deepcopy(llama)
        if kind is Renaming:
            model.__class__ = Renaming
        else:
            model = kind(model)
        sp = huggingface.enable(model, comm)
        torch.testing.assert_close(model(**sp.shard(hf.batch())).loss, expected)

    hf.virtual(2, run)


@pytest.mark.parametrize("shards", [True, False])
def test_a_model_that_left_its_wrapper_is_refused(llama, shards):
    """PEFT's merge_and_unload returns the model in it, whose call is not the enabled one."""

    def run(comm):
        around = Passing(copy.deepcopy(llama))
        sp = huggingface.enable(around, comm)
        around.model(**(sp.shard(hf.batch()) if shards else hf.batch()))

    text = hf.refusal(run)
    assert text.startswith("the enabled Passing must be called, and not the LlamaForCausalLM in it")


def broken(*_):
    raise RuntimeError("text of a user")


def in_a_block(sp, model):
    model.model.layers[1].register_forward_pre_hook(broken)
    model(**sp.shard(hf.batch()))


def behind_the_model(sp, model):
    model.register_forward_hook(broken)
    model(**sp.shard(hf.batch()))


def in_generate(sp, model):
    model.eval().generate(input_ids=IDS[:, :6], max_new_tokens=2, logits_processor=[broken])


def in_backward(sp, model):
    outputs = model(**sp.shard(hf.batch()))
    model.model.norm.weight.register_hook(broken)
    outputs.loss.backward()


@pytest.mark.parametrize("run", [in_a_block, behind_the_model, in_generate, in_backward])
def test_an_error_of_a_user_is_told_to_peers(llama, run):
    def on_each(comm):
        told = []
        comm.tell_error = told.append
        model = copy.deepcopy(llama)
        sp = huggingface.enable(model, comm)
        with pytest.raises(RuntimeError, match="text of a user"):
            run(sp, model)
        return {str(x) for x in told}

    expected = "its backward failed" if run is in_backward else "text of a user"
    assert hf.virtual(2, on_each) == [{expected}] * 2


def test_no_error_is_told_of_what_the_caller_handles(llama):
    """A program may call the model again in an except clause, for example with fewer tokens."""

    def on_each(comm):
        told = []
        comm.tell_error = told.append
        sp = huggingface.enable(copy.deepcopy(llama).eval(), comm)
        try:
            raise RuntimeError("out of memory")
        except RuntimeError:
            sp.model(**sp.shard(hf.batch()))
            sp.model.generate(input_ids=IDS[:, :6], max_new_tokens=2)
        return told

    assert hf.virtual(2, on_each) == [[], []]
