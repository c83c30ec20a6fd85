"""Wrong uses of an enabled model: each is exact, or an error that names the argument or thing."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from seqpar.integrations import huggingface
from tests.support import huggingface as hf

IDS = hf.batch()["input_ids"]


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


def save(sp, model):
    torch.save(model, io.BytesIO())


def compiled_by_torch(sp, model):
    torch.compile(model, backend="eager")(**sp.shard(hf.batch()))


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
    "model.compile": (lambda sp, model: model.compile(), "model.compile cannot be used"),
    "torch.compile": (compiled_by_torch, "model must not be compiled"),
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
    "labels as a list": (sharded(labels=IDS.tolist()), "labels must be (2, 22)"),
    "positions of other rows": (
        sharded(position_ids=torch.zeros(3, 22, dtype=torch.long)),
        "position_ids must be (2, 22)",
    ),
    "positions as a list": (sharded(position_ids=[1, 2]), "position_ids must be (2, 22)"),
    "input_ids as a list": (sharded(input_ids=IDS.tolist()), "batch must have either input_ids"),
    "no input_ids": (sharded(input_ids=None), "batch must have either input_ids"),
    "one row without a batch": (sharded(input_ids=IDS[0]), "batch must have either input_ids"),
    "input_ids and inputs_embeds": (
        sharded(inputs_embeds=torch.ones(2, 22, 32)),
        "batch must have either input_ids",
    ),
    "tokens beyond the vocabulary": (sharded(input_ids=IDS + 60), "input_ids must be"),
    "negative tokens": (sharded(input_ids=IDS - 60), "input_ids must be"),
    "tokens of floats": (sharded(input_ids=IDS.float()), "input_ids must be"),
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
    "other outputs": (of_whole_logits, "outputs must be a model's"),
    "a batch that was not sharded": (
        lambda sp, model: sp.unshard(IDS, hf.batch()),
        "batch must be one that shard returned",
    ),
    "a loss that is no tensor": (lambda sp, model: sp.total(1.0), "loss must be"),
    "a loss of several numbers": (lambda sp, model: sp.total(torch.ones(2)), "loss must be"),
    "a layer that is not there": (lambda sp, model: sp.make_linear([7]), "layers must be"),
    "a layer's other name": (lambda sp, model: sp.make_linear(["x"]), "layers must be names"),
    "a layer of a float": (lambda sp, model: sp.make_linear([0.5]), "layers must be"),
    "compiled after disable": (after_disable, "model cannot be compiled whole: it was disabled"),
    "enabled twice": (
        lambda sp, model: huggingface.enable(model, sp.comm),
        "model is enabled already",
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

    assert hf.refusal(run).startswith("model must not be compiled")
    wrapped = torch.compile(copy.deepcopy(llama), backend="eager")
    text = hf.refusal(lambda comm: huggingface.enable(wrapped, comm))
    assert text.startswith("model must not be compiled")


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_compiles_is_refused(llama, tmp_path):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], torch_compile=True
    )

    def run(comm):
        model = copy.deepcopy(llama)
        huggingface.enable(model, comm)
        huggingface.trainer(transformers.Trainer)(model=model, args=arguments)

    assert "torch_compile must not be set" in hf.refusal(run, ranks=1)
