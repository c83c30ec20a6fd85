"""Enabled models that are compiled, whole or by blocks: eager's numbers, and no second graph."""

import copy

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from seqpar.integrations import huggingface
from tests.support import generation
from tests.support import huggingface as hf
from tests.support.ranks import hide_from_collector, virtual
from tests.unit.integrations.huggingface.test_token_mixing import around_mlp

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {
    "attention_chunk_size": 6,
    "num_local_experts": 2,
    "layer_types": ["chunked_attention"],
}
ONE = {"num_hidden_layers": 1}  # where layers are alike: the time is that of compiling each
DELTA = {
    "layer_types": ["linear_attention"],
    "num_experts": 0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture(scope="module")
def pool(pool):
    yield pool
    pool(2, hide_from_collector)


MODELS = [
    ("LlamaForCausalLM", {}, "sp.compile"),
    ("MistralForCausalLM", ONE | {"sliding_window": 6}, "sp.compile"),
    ("Gemma3ForCausalLM", WINDOWS, "sp.compile"),
    ("Llama4ForCausalLM", ONE | CHUNKS, "sp.compile"),
    ("OPTForCausalLM", ONE | {"dropout": 0.0}, "sp.compile"),
    ("Lfm2ForCausalLM", ONE | {"layer_types": ["conv"]}, "sp.compile"),
    ("Qwen3NextForCausalLM", ONE | DELTA, "sp.compile"),
    ("LlamaForCausalLM", {}, "blocks"),
    ("LlamaForCausalLM", ONE, "torch.compile"),
    ("Gemma3ForCausalLM", WINDOWS, "torch.compile"),
    ("LlamaForCausalLM", ONE, "model.compile"),
    ("LlamaForCausalLM", ONE, "DDP"),
]
DOCUMENTS = (9, 1, 12), (4, 10, 8), (2, 2, 18)


def batch(lengths):
    of = hf.batch("packed")
    of["input_ids"] = (of["input_ids"] + lengths[0]) % hf.VOCABULARY
    of["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    of["labels"] = of["input_ids"].masked_fill(of["position_ids"] == 0, -100)
    return of


def steps(sp, model, outer):
    """Losses, gradients and what each layer sent in steps on batches of other documents."""
    found = []
    for lengths in DOCUMENTS:
        model.zero_grad()
        before = {x.name: (x.calls, x.forward_bytes, x.backward_bytes) for x in sp.report().layers}
        loss = outer(**sp.shard(batch(lengths))).loss
        loss.backward()
        sp.average_gradients()
        gradients = {name: x.clone() for name, x in hf.gradients(model).items()}
        rows = [(x.calls, x.forward_bytes, x.backward_bytes) for x in sp.report().layers]
        sent = [
            tuple(a - b for a, b in zip(row, old, strict=True))
            for row, old in zip(rows, before.values(), strict=True)
        ]
        found.append((loss.detach(), gradients, sent))
    return found


def compiled(group, name, options, how):
    """The steps of an eager model and of a compiled one, and how many graphs it has."""
    torch._dynamo.reset()
    model = hf.tiny(name, **options)
    sp = huggingface.enable(model, group)
    expected = steps(sp, model, model)
    counter = CompileCounterWithBackend("aot_eager")
    given, outer = {"backend": counter, "fullgraph": True}, model
    if how == "sp.compile":
        sp.compile(**given)
    elif how == "model.compile":
        model.compile(**given)
    elif how == "torch.compile":
        outer = torch.compile(model, **given)
    elif how == "DDP":
        outer = torch.compile(DistributedDataParallel(model, process_group=group), backend=counter)
    else:
        for layer in model.model.layers:
            layer.compile(**given)
    return expected, steps(sp, model, outer), counter.frame_count


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "options", "how"), MODELS)
def test_a_compiled_model_matches_eager_in_one_graph(pool, name, options, how):
    """Of the next batches too; blocks share a graph. What is sent is counted when it runs."""
    for expected, found, graphs in pool(2, compiled, name, options, how):
        assert graphs == 1
        for (loss, gradients, sent), (other, others, counted) in zip(expected, found, strict=True):
            torch.testing.assert_close(other, loss, rtol=1e-6, atol=1e-6)
            assert others.keys() == gradients.keys()
            for key, gradient in gradients.items():
                torch.testing.assert_close(others[key], gradient, rtol=1e-5, atol=1e-6)
            assert counted == sent and all(calls == 1 for calls, _, _ in counted)
            assert all(forward > 0 < backward for _, forward, backward in counted)


def enabled(name, **options):
    def run(comm):
        sp = huggingface.enable(hf.tiny(name, **options), comm)
        sp.compile()

    return run


def compiled_twice(comm):
    sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
    sp.compile()
    sp.compile()


def compiled_when_disabled(comm):
    sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
    sp.disable()
    sp.compile()


def called_by_torch(name, **options):
    """A call of a model that torch.compile compiled, whole."""

    def run(comm):
        model = hf.tiny(name, **options)
        sp = huggingface.enable(model, comm)
        torch.compile(model, backend="eager")(**sp.shard(hf.batch()))

    return run


def called_in_a_graph(comm):
    """A call within a function that torch.compile compiled into one graph."""
    model = hf.tiny("LlamaForCausalLM")
    sp = huggingface.enable(model, comm)
    part = sp.shard(hf.batch())

    @torch.compile(fullgraph=True, backend="eager")
    def step():
        return model(**part).loss

    try:
        step()
    except torch._dynamo.exc.Unsupported as broken:
        raise ValueError(str(broken)) from None


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
REFUSED = {
    "it is compiled already": compiled_twice,
    "it was disabled": compiled_when_disabled,
    "its masks are not those of causal models": enabled("BertForMaskedLM", **NO_DROPOUT),
}


def with_a_cache(comm):
    model = hf.tiny("LlamaForCausalLM").eval()
    cache = huggingface.enable(model, comm).cache()
    torch.compile(model, backend="eager")(input_ids=hf.batch()["input_ids"], past_key_values=cache)


def with_own_code(comm):
    model = around_mlp(lambda _, x: 2 * x)(hf.tiny("LlamaForCausalLM"))
    sp = huggingface.enable(model, comm)
    torch.compile(model, backend="eager")(**sp.shard(hf.batch()))


BY_TORCH = {
    "past_key_values must not be given to a compiled model": with_a_cache,
    "model must not be compiled by torch.compile if it has code of your own": with_own_code,
    "its masks are not those of causal models; compile its blocks one by one": called_by_torch(
        "BertForMaskedLM", **NO_DROPOUT
    ),
}


@pytest.mark.parametrize("reason", BY_TORCH)
def test_what_torch_compile_cannot_compile_is_refused_in_the_first_call(reason):
    text = hf.refusal(BY_TORCH[reason])
    assert reason in text and ("sp.compile" in text or "one by one" in text)


def test_a_graph_around_the_model_is_refused_and_names_sp_compile():
    with pytest.raises(ValueError, match=r"call sp\.compile"):
        virtual(1, called_in_a_graph)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_compiled_is_refused(reason):
    assert f"model cannot be compiled whole: {reason}" in hf.refusal(REFUSED[reason])


def test_a_compiled_model_generates_and_restores_its_forward():
    model = hf.tiny("LlamaForCausalLM").eval()
    expected = generation.generated(model, generation.prompts((0, 7)))

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        sp.compile()
        found = generation.generated(own, generation.prompts((0, 7)))
        sp.disable()
        return found, vars(own).keys() == vars(model).keys()

    ((found, restored),) = virtual(1, run)
    generation.assert_same(found, expected, found)
    assert restored


def losses(group, folder, by_trainer=False):
    """The losses of a Trainer that drops the columns which the model's forward does not take."""
    model, base, options = hf.tiny("LlamaForCausalLM", **ONE), transformers.Trainer, {}
    if group is not None:
        hf.launched(group)
        torch._dynamo.reset()
        sp = huggingface.enable(model, group)
        base = huggingface.trainer(base)
        if by_trainer:
            options = {"torch_compile": True, "torch_compile_backend": "eager"}
        else:
            sp.compile(backend="eager")
    of = hf.batch()
    rows = [{name: x[i] for name, x in of.items()} | {"note": i} for i in (0, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = base(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.exhaustive  # test_enabled_and_compiled_forwards... holds the signature alone
@pytest.mark.parametrize("by_trainer", [False, True])
def test_a_trainer_keeps_the_columns_of_a_compiled_model(pool, tmp_path, by_trainer):
    expected = losses(None, str(tmp_path / "alone"))
    for found in pool(4, losses, str(tmp_path / "ranks"), by_trainer):
        assert found == pytest.approx(expected, abs=2e-5)


def with_users_code(group, how):
    """(how many graphs there are after each call, what is said of code that mixes tokens)."""
    made = []
    for change in (lambda _, x: 2 * x, lambda _, x: x.cumsum(1)):
        counter = CompileCounterWithBackend("eager")
        model = around_mlp(change)(hf.tiny("LlamaForCausalLM"))
        layers = model.model.layers
        if how == "modules":
            layers[0] = torch.compile(layers[0], backend=counter)
        sp = huggingface.enable(model, group)
        if how == "whole":
            sp.compile(backend=counter)
        elif how == "blocks":
            layers[0].compile(backend=counter)
        for _ in range(0 if made else 2):
            model(**sp.shard(hf.batch("packed")))
            made.append(counter.frame_count)
    return made, hf.refused(lambda: model(**sp.shard(hf.batch("packed"))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["whole", "blocks", "modules"])
def test_users_code_is_checked_before_it_is_compiled(pool, how):
    for made, told in pool(2, with_users_code, how):
        assert made == [0, 1]
        assert "model.layers.0" in told and "(Around) mixes tokens" in told
