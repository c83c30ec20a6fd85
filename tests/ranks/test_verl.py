"""verl's engines with attention over ranks: one process's log-probabilities, entropy and losses."""

import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import os
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import huggingface as hf
from tests.support import verl
from tests.support.examples import example

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's and transformers' own
TEMPERATURE = 0.7
PARTS = slice(0, 2), slice(2, 4)  # the sequences of each group of ranks
ROOT = Path(__file__).parents[2]
real = pytest.mark.skipif(not verl.INSTALLED, reason="verl is not installed")


@pytest.fixture(scope="module", autouse=True)
def stand_in_ends():
    yield
    verl.forget()
    os.environ.pop("VERL_ENGINE_DEVICE", None)
    os.environ.pop("SEQPAR_VERL", None)


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, hf.VOCABULARY, (n,), generator=generator) for n in verl.LENGTHS]


def alone(model):
    """Log-probabilities of next tokens and entropies of each sequence by itself; the mean loss of
    tokens that are no prompt, and the norm of its gradients."""
    model = copy.deepcopy(model)
    probabilities, entropies, loss, count = [], [], 0.0, 0
    for ids, prompt in zip(sequences(), verl.PROMPTS, strict=True):
        logs = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        own = logs[:-1].gather(1, ids[1:, None])[:, 0]
        probabilities.append(own.detach())
        entropies.append(-(logs.exp() * logs).sum(-1).detach())
        loss, count = loss - own[prompt - 1 :].sum(), count + len(own[prompt - 1 :])
    (loss / count).backward()
    norm = math.sqrt(sum(float(x.square().sum()) for x in hf.gradients(model).values()))
    return probabilities, entropies, float(loss / count), norm


def on_rank(group, folder, settings, options):
    """What verl's engine infers for its group's sequences, and reports of a step of training."""
    part = PARTS[dist.get_rank() // 2]
    integration = verl.on_cpu(settings)
    sft_loss = importlib.import_module("verl.workers.utils.losses").sft_loss
    engine = verl.engine(folder, 2, **options)
    assert isinstance(engine, integration.LanguageModelEngine)
    engine.initialize()
    with engine.train_mode(zero_grad_on_exit=False):
        found = engine.infer_batch(verl.data(part))["model_output"]
        step = engine.train_batch(verl.data(part), functools.partial(sft_loss, None))
    sent = engine._packed.sp.report().bytes
    inferred = [[x.clone() for x in found[name].unbind()] for name in ("log_probs", "entropy")]
    return *inferred, sum(step["loss"]), step["metrics"].get("grad_norm"), sent


@pytest.mark.composes(
    "verl",
    "`ulysses_sequence_parallel_size` ranks share a sequence; verl's FSDP2 shards over all ranks",
    data=2,
    context=2,
    FSDP=4,
    needs="verl",
    equal="log-probabilities, entropies, loss and norm of gradients",
)
@real
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ('{"strategy": "ring"}', {}),
        ('{"strategy": "ulysses", "layout": "striped"}', {"pad_to_length": True}),
        ('{"balance": {"cluster": "1x2-h100", "model": "llama-8b"}}', {}),
    ],
)
def test_an_engine_has_the_numbers_of_one_process(pool, tmp_path, settings, options):
    model = hf.tiny("LlamaForCausalLM", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    probabilities, entropies, loss, norm = alone(model)
    results = pool(4, on_rank, tmp_path, settings, options)
    norms = [x[3] for x in results]  # verl reports them on the first rank of each group
    assert norms[0] == norms[2] == pytest.approx(norm, rel=1e-4)
    assert sum(x[2] for x in results) / 4 == pytest.approx(loss, rel=1e-5)
    for rank, (logs, entropy, _, _, sent) in enumerate(results):
        part = PARTS[rank // 2]
        for found, expected in zip(logs, probabilities[part], strict=True):
            torch.testing.assert_close(found[:-1], expected, rtol=2e-5, atol=2e-5)
        for found, expected in zip(entropy, entropies[part], strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        assert sent > 0


def by_stand_in(group):
    """The largest differences of log-probabilities and of gradients from one process."""
    integration = verl.on_cpu()
    model = hf.tiny("LlamaForCausalLM")
    probabilities, _, loss, norm = alone(model)
    engine = integration.LanguageModelEngine(*verl.configs(2, group, model))
    engine.initialize()
    ids, places = sequences(), [torch.arange(n) for n in verl.LENGTHS]
    batch = {
        name: torch.nested.as_nested_tensor(x, layout=torch.jagged)
        for name, x in (("input_ids", ids), ("position_ids", places))
    }
    inputs, outputs = engine.prepare_model_inputs(batch)
    logits = engine.module(**inputs, use_cache=False).logits[0]
    logs = (logits / outputs["temperature_rmpad"][:, None]).log_softmax(-1)
    logs = logs.gather(1, outputs["input_ids_rmpad_rolled"][:, None])[:, 0]
    whole = engine._gather_and_unpad_packed(logs, outputs["pad_size"])
    found = [x[:-1] for x in whole.split(verl.LENGTHS)]
    worst = max(
        float((x - y).abs().max()) for x, y in zip(found, probabilities, strict=True) if len(x)
    )
    kept = [x[p - 1 :] for x, p in zip(found, verl.PROMPTS, strict=True)]
    total = -torch.cat(kept).mean()
    total.backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad, group=group)
        p.grad /= group.size()  # as FSDP averages
    own = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    return worst, abs(float(total.detach()) - loss), abs(own / norm - 1)


@pytest.mark.skipif(verl.INSTALLED, reason="the package takes the stand-in's place")
def test_log_probabilities_and_gradients_with_the_stand_in(pool):
    for found in pool(2, by_stand_in):
        assert max(found) < 2e-5, found


def trained(group, folder):
    """The losses of the example."""
    verl.on_cpu('{"strategy": "ring"}')
    return example("verl_engine").train(folder, 2)


def trained_alone(folder):
    """The same of one process, which computes each sequence by itself."""
    program = example("verl_engine")
    model, losses = program.make_model(), []
    model.save_pretrained(folder)
    count = sum(program.LENGTHS) - sum(program.PROMPTS)
    for step in range(program.STEPS):
        total = 0.0
        for ids, prompt in zip(program.sequences(step), program.PROMPTS, strict=True):
            logs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            total -= logs.gather(1, ids[1:, None])[prompt - 1 :].sum()
        loss = total / count
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
                p.grad = None
        losses.append(float(loss))
    return losses


def test_the_example_has_the_losses_of_one_process(pool, tmp_path):
    expected = trained_alone(tmp_path)
    assert expected[-1] < expected[0]
    for losses in pool(4, trained, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-4)


def found_at(path, name):
    return functools.reduce(getattr, name.split("."), importlib.import_module(path))


@pytest.mark.parametrize("path", verl.SIGNATURES)
def test_signatures_are_those_of_verls_release(path):
    """Of the stand-in, or of the package where it is installed."""
    verl.on_cpu()
    for name, names in verl.SIGNATURES[path].items():
        assert [*inspect.signature(found_at(path, name)).parameters] == names, name


@real
@pytest.mark.parametrize("path", verl.FIELDS)
def test_configs_have_the_fields_of_the_example(path):
    verl.on_cpu()
    for name, fields in verl.FIELDS[path].items():
        assert {*fields} <= {x.name for x in dataclasses.fields(found_at(path, name))}


@pytest.mark.skipif(verl.INSTALLED, reason="the package takes the stand-in's place")
def test_batches_of_more_than_text_are_refused():
    integration = verl.on_cpu()
    engine = integration.LanguageModelEngine(*verl.configs(2))
    ids = torch.nested.as_nested_tensor(sequences(), layout=torch.jagged)
    batch = {"input_ids": ids, "position_ids": ids, "multi_modal_inputs": {"input_features": 1}}
    with pytest.raises(ValueError, match=r"multi_modal_inputs must be empty.*input_features"):
        engine.prepare_model_inputs(batch)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model_type": "qwen3_5"}, "model must be of text alone, got model_type 'qwen3_5'"),
        ({"fused": True}, "use_fused_kernels must be False"),
        ({"mtp": True}, "mtp.enable must be False"),
        ({"replay": "R2"}, "router_replay.mode must be 'disabled', got 'R2'"),
    ],
)
def test_what_it_cannot_do_is_refused_when_an_engine_is_made(options, text):
    integration = verl.on_cpu()
    with pytest.raises(ValueError, match=text):
        integration.LanguageModelEngine(*verl.configs(**options))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("ring", "SEQPAR_VERL must be a JSON object such as"),
        ('["ring"]', "SEQPAR_VERL must be a JSON object such as"),
        ('{"balance": "wlb"}', "balance must be like"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(settings, text):
    integration = verl.on_cpu(settings)
    with pytest.raises(ValueError, match=text):
        integration.Settings.read()


def test_partitions_are_balanced_by_the_plan():
    integration = verl.on_cpu()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9000, (60,), generator=generator).tolist()
    options = {"cluster": "1x2-h100", "model": "llama-8b"}
    for count in (1, 7, 60):
        found = integration.balanced_partitions(lengths, count, **options)
        assert len(found) == count and all(found)
        assert sorted(itertools.chain(*found)) == list(range(60))
        assert all(x == sorted(x) for x in found)
    work = [
        sum(lengths[i] ** 2 + 24576 * lengths[i] for i in x)
        for x in integration.balanced_partitions(lengths, 7, **options)
    ]
    assert max(work) < 1.1 * sum(work) / 7
    with pytest.raises(ValueError, match=r"partitions must be at most 60, .*, got 61"):
        integration.balanced_partitions(lengths, 61, **options)
    with pytest.raises(ValueError, match="cluster must have the 4 ranks of ulysses_sequence"):
        integration.serve_partitions(4, **options)


@pytest.mark.parametrize("length", [1, 9, 24576, 10**6])
def test_lengths_are_those_of_verls_workloads(length):
    workload = length**2 + 24576 * length
    assert verl.on_cpu().length_of_workload(workload) == length


def test_the_entry_point_says_why_engines_are_not_registered(monkeypatch, caplog):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry = project["entry-points"]["verl.plugins"]["seqpar"]
    monkeypatch.setitem(sys.modules, "seqpar.integrations.verl", None)  # as if verl were missing

    def load():
        sys.modules.pop(entry, None)
        return importlib.import_module(entry)

    monkeypatch.delenv("VERL_ENGINE_DEVICE", raising=False)
    load()
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "seqpar")
    with pytest.raises(ImportError):
        load()
    assert "seqpar's engines for verl cannot be registered" in caplog.text
