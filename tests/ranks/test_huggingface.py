"""Models of transformers on real ranks: what one process trains, whatever averages gradients."""

import re
import tempfile
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.comm.faults import heartbeat
from seqpar.integrations import huggingface
from tests.kernels.test_trainer_fsdp import CASES as FSDP
from tests.kernels.test_trainer_fsdp import train as train_with_fsdp
from tests.support import huggingface as hf
from tests.support import images
from tests.support.examples import example
from tests.support.generation import CASES, MORE, generated, prompts
from tests.support.ranks import device_mesh, hide_from_collector
from tests.support.servers import connect
from tests.support.tiers import few_rows
from tests.unit.integrations.huggingface.test_token_mixing import around_mlp

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own


def imported(group):
    return transformers.Trainer.__name__


@pytest.fixture(scope="module")
def ready(pool):
    """The pool, of which all ranks have imported what they need."""
    pool(4, imported)
    pool(4, hide_from_collector)
    return pool


def wrapped(model, group, how, before):
    """(sp, the module to call) of a model that is enabled before it is wrapped, or afterwards."""
    sp = huggingface.enable(model, group) if before else None
    outer = model
    if how == "DDP":
        outer = DistributedDataParallel(model, process_group=group)
    elif how == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        outer = fully_shard(model, mesh=mesh)
    return sp or huggingface.enable(outer, group), outer


def on_rank(group, how, before):
    """Loss, logits and gradients of a rank after one step of two batches."""
    model = hf.tiny("LlamaForCausalLM")
    sp, outer = wrapped(model, group, how, before)
    outputs = outer(**sp.shard(hf.batch("padded")), output_hidden_states=True)
    outputs.loss.backward()
    sp.average_gradients()
    logits = sp.unshard(outputs.logits).detach()
    assert [x.shape for x in sp.unshard(outputs).hidden_states] == [(2, 22, 32)] * 3
    found = {
        name: x.full_tensor() if how == "FSDP2" else x for name, x in hf.gradients(model).items()
    }
    sp.disable()
    return outputs.loss.detach(), logits, found


@pytest.mark.composes(
    "transformers",
    "wrap the model in DDP or FSDP2 before or after `enable`; without a wrapper, call "
    "`sp.average_gradients()`",
    context=2,
    FSDP=2,
    equal="loss, logits and gradients",
)
@pytest.mark.exhaustive
def test_gradients_are_right_under_ddp_fsdp2_and_neither(ready):
    model, of = hf.tiny("LlamaForCausalLM"), hf.batch("padded")
    expected = hf.unmodified(model, of)
    for how in ("none", "DDP", "FSDP2"):
        for before in (True, False):
            results = ready(2, on_rank, how, before)
            hf.assert_same(results, expected, hf.real(of))


PLAN = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"}
PLAN |= {f"mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
PLAN |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}


def with_divided_heads(group, how, before):
    """Loss, logits and gradients of a rank of two that divide heads, and two that divide tokens."""
    model, mesh = hf.tiny("LlamaForCausalLM"), device_mesh(2, 2, names=("sp", "tp"))
    sp = huggingface.enable(model, mesh["sp"]) if before else None
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        if how == "FSDP2":
            fully_shard(layer, mesh=mesh["sp"])
    if how == "FSDP2":
        fully_shard(model, mesh=mesh["sp"])
    sp = sp or huggingface.enable(model, mesh["sp"])
    outputs = model(**sp.shard(hf.batch("padded")))
    outputs.loss.backward()
    sp.average_gradients()
    found = {
        name: x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in hf.gradients(model).items()
    }
    return outputs.loss.detach(), sp.unshard(outputs.logits).detach(), found


@pytest.mark.composes(
    "transformers",
    "`parallelize_module` on the layers before FSDP2, and before or after `enable`; "
    "`enable` takes the ranks of context",
    case="none",
    context=2,
    tensor=2,
    equal="loss, logits and gradients",
)
@pytest.mark.composes(
    "transformers",
    "the same, with FSDP2 over context",
    case="FSDP2",
    context=2,
    tensor=2,
    FSDP=2,
    equal="loss, logits and gradients",
)
@few_rows()
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["none", "FSDP2"])
def test_divided_heads_have_the_gradients_of_one_process(ready, how, before):
    of = hf.batch("padded")
    expected = hf.unmodified(hf.tiny("LlamaForCausalLM"), of)
    hf.assert_same(ready(4, with_divided_heads, how, before), expected, hf.real(of))


@pytest.mark.composes(
    "transformers",
    "pass a process group or a mesh to `enable`",
    servers=1,
    refused="group must be a process group",
)
def test_a_pool_of_servers_is_refused(tmp_path):
    refused = pytest.raises(ValueError, match="group must be a process group")
    with connect(f"ipc://{tmp_path}/0") as servers, refused:
        huggingface.enable(hf.tiny("LlamaForCausalLM"), servers, "disaggregated")


def without_mean(group, module, x):
    """The tokens without the mean of all ranks' tokens, which the module sums itself."""
    total = x.detach().mean((0, 1))
    dist.all_reduce(total, group=group)
    return x - total / group.size()


USERS_CODE = {
    "by token": lambda _, module, x: 2 * x,
    "mixes tokens": lambda _, module, x: x.cumsum(1),
    "sends": without_mean,
}


def with_users_code(group, how, case):
    """The loss of a model in which there is code of a user's, or what is said of the code."""
    model = around_mlp(partial(USERS_CODE[case], group))(hf.tiny("LlamaForCausalLM"))
    sp, outer = wrapped(model, group, how, True)
    losses = []

    def run():
        for _ in range(2):
            loss = outer(**sp.shard(hf.batch("whole"))).loss
            loss.backward()
            losses.append(float(loss))

    told = hf.refused(run)
    return losses if told is None else told


@pytest.mark.parametrize("how", ["none", "DDP", "FSDP2"])
def test_users_code_is_checked_under_averaging(ready, how):
    alone = around_mlp(lambda _, x: 2 * x)(hf.tiny("LlamaForCausalLM"))
    expected = float(alone(**hf.batch("whole")).loss)
    for losses in ready(2, with_users_code, how, "by token"):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)
    for told in ready(2, with_users_code, how, "mixes tokens"):
        assert "model.layers.0.mlp (Around) mixes tokens" in told
    for losses in ready(2, with_users_code, how, "sends"):
        assert losses[0] == pytest.approx(losses[1])


def gemma():
    return images.build("gemma3", mm_tokens_per_image=4)


def on_rank_of_images(group, how):
    """The same of a model of text with images."""
    model = gemma()
    outer = model
    if how == "DDP":
        unused = {"find_unused_parameters": True}  # of its tower, also in one process
        outer = DistributedDataParallel(model, process_group=group, **unused)
    elif how == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh)
        outer = fully_shard(model, mesh=mesh)
    sp = huggingface.enable(outer, group)
    outputs = outer(**sp.shard(images.batch("left", "types", 4)))
    outputs.loss.backward()
    sp.average_gradients()
    found = {
        name: x.full_tensor() if how == "FSDP2" else x for name, x in hf.gradients(model).items()
    }
    return outputs.loss.detach(), sp.unshard(outputs.logits).detach(), found


@pytest.mark.composes(
    "transformers",
    "models with images, under DDP and FSDP2",
    context=2,
    FSDP=2,
    equal="loss, logits and gradients",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["none", "DDP", "FSDP2"])
def test_image_model_gradients_are_right_under_averaging(ready, how):
    of = images.batch("left", "types", 4)
    results = ready(2, on_rank_of_images, how)
    hf.assert_same(results, hf.unmodified(gemma(), of), hf.real(of))


def on_mesh(group):
    model = hf.tiny("LlamaForCausalLM")
    mesh = device_mesh(2, 2, names=("outer", "inner"))
    return hf.on_rank(mesh, model, hf.batch("packed"), "usp")


@pytest.mark.composes(
    "transformers",
    "USP on a mesh of two dimensions",
    context=4,
    equal="loss, logits and gradients",
)
def test_a_mesh_runs_usp(ready):
    expected = hf.unmodified(hf.tiny("LlamaForCausalLM"), hf.batch("packed"))
    hf.assert_same(ready(4, on_mesh), expected, hf.real(hf.batch("packed")))


def linear_on_mesh(group):
    mesh, found = device_mesh(2, 2, names=("outer", "inner")), []
    for ranks, strategy in ((group, "ring"), (mesh, "usp")):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), ranks, strategy)
        sp.make_linear([1])
        loss = sp.model(**sp.shard(hf.batch("packed"))).loss
        loss.backward()
        found.append((loss.detach(), sp.report().layers[1]))
    return found


def test_layers_made_linear_compute_on_meshes(ready):
    for (loss, layer), (loss_of_mesh, layer_of_mesh) in ready(4, linear_on_mesh):
        torch.testing.assert_close(loss_of_mesh, loss)
        assert layer_of_mesh == layer and layer.forward_bytes and layer.backward_bytes


def on_other_ranks(group):
    """What a rank is told whose DDP averages over itself alone."""
    model = hf.tiny("LlamaForCausalLM")
    sp = huggingface.enable(model, group)
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    outer = DistributedDataParallel(model, process_group=alone)
    return hf.refused(lambda: outer(**sp.shard(hf.batch())))


@pytest.mark.composes(
    "transformers",
    "make DDP on a group that has all ranks of the attention's group",
    data=2,
    context=2,
    refused="DDP must average gradients over all ranks of the group",
)
def test_ddp_over_other_ranks_is_refused(ready):
    for told in ready(2, on_other_ranks):
        assert "DDP must average gradients over all ranks of the group" in told


def measured(group):
    from benchmarks.ranks import huggingface as benchmark

    return benchmark.timed(group, tokens=64, dim=64, rounds=2)


def test_the_enabling_benchmark_agrees_with_calls_by_hand(ready):
    for found in ready(2, measured):
        assert [len(seconds) for seconds in found.values()] == [2, 2, 2]


def samples(count, lengths):
    generator = torch.Generator().manual_seed(3)
    sizes = [lengths[i % len(lengths)] for i in range(count)]
    ids = [torch.randint(3, hf.VOCABULARY, (n,), generator=generator) for n in sizes]
    return [{"input_ids": x.tolist()} for x in ids]


def correct(prediction):
    """How many of the next tokens are right, and how many predictions there are."""
    labels, chosen = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
    return {"correct": int(((labels == chosen) & (labels != -100)).sum()), "rows": len(labels)}


def train(base, folder, rows, accumulate, resume=False, smoothing=0.0):
    """(losses by step, evaluation, weights) of a training of three steps."""
    model = hf.tiny("LlamaForCausalLM")
    if base is not transformers.Trainer:
        mesh = device_mesh(2, 2, names=("dp", "sp"))
        huggingface.enable(model, mesh["sp"])
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        save_steps=2,
        optim="sgd",  # AdamW would make much of gradients that are rounding alone
        learning_rate=0.3,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        include_num_input_tokens_seen="all",
        label_smoothing_factor=smoothing,
    )
    trainer = base(
        model=model,
        args=arguments,
        data_collator=huggingface.Collator(),
        train_dataset=samples(24, (9, 14, 3, 20)),
        eval_dataset=samples(3, (12,)),
        compute_metrics=correct,
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    losses = {x["step"]: x["loss"] for x in trainer.state.log_history if "loss" in x}
    metrics = trainer.evaluate()
    found = {name: metrics[f"eval_{name}"] for name in ("loss", "correct", "rows")}
    found |= {"tokens": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos}
    return losses, found, {name: x.detach().clone() for name, x in model.named_parameters()}


def on_rank_of_trainer(group, folder, *arguments):
    hf.launched(group)
    return train(huggingface.trainer(transformers.Trainer), folder, 2, 2, *arguments)


def assert_trained_alike(found, expected):
    losses, metrics, weights = expected
    assert found[0] == pytest.approx(losses, abs=2e-5)
    assert found[1] == pytest.approx(metrics, abs=2e-5)
    for name, x in weights.items():
        torch.testing.assert_close(found[2][name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.composes(
    "Trainer and TRL",
    "`huggingface.trainer(Trainer)`: each group of ranks reads its own batches",
    data=2,
    context=2,
    equal="losses, metrics and weights",
)
@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_trainer_trains_saves_and_resumes_as_one_process(ready, tmp_path, resume):
    """Rows of two packed samples, on two groups at once: as many steps of eight samples each."""
    expected = train(transformers.Trainer, str(tmp_path / "alone"), 1, 8)
    for again in range(1 + resume):
        for found in ready(4, on_rank_of_trainer, str(tmp_path / "ranks"), bool(again)):
            assert_trained_alike(found, expected)


@pytest.mark.exhaustive
def test_labels_are_smoothed_as_in_one_process(ready, tmp_path):
    options = False, 0.1
    expected = train(transformers.Trainer, str(tmp_path / "alone"), 1, 8, *options)
    for found in ready(4, on_rank_of_trainer, str(tmp_path / "ranks"), *options):
        assert_trained_alike(found, expected)


class Doubled(transformers.Trainer):
    """A trainer whose loss is twice that of its base, or that calls the model itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.args.run_name == "by itself":
            return model(**inputs).loss
        return 2 * super().compute_loss(model, inputs)


def with_overrides(group, folder):
    """(the loss of a subclass, what it is told that calls the model itself)."""
    hf.launched(group)
    model = hf.tiny("LlamaForCausalLM")
    huggingface.enable(model, group)
    kind = huggingface.trainer(Doubled)
    arguments = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    trainer = kind(model=model, args=arguments)
    assert kind.__name__ == "Doubled" and isinstance(trainer, Doubled)
    loss = float(trainer.compute_loss(model, hf.batch()))
    trainer.args.run_name = "by itself"
    try:
        trainer.compute_loss(model, hf.batch())
    except ValueError as refused:
        return loss, str(refused)


def test_a_subclass_keeps_what_it_overrides(ready, tmp_path):
    expected = 2 * float(hf.tiny("LlamaForCausalLM")(**hf.batch()).loss)
    for loss, told in ready(4, with_overrides, str(tmp_path)):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert "the model must be called with what shard returned" in told


def arguments_for(folder, kind=transformers.TrainingArguments, **options):
    """A trainer's arguments: batches of four samples, and each loss logged."""
    return kind(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",
        learning_rate=0.3,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )


class Penalised(transformers.Trainer):
    """A trainer whose loss has a penalty of the weights of the model that it is given."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given = {"return_outputs": True, "num_items_in_batch": num_items_in_batch}
        loss, outputs = super().compute_loss(model, inputs, **given)
        loss = loss + 0.01 * sum(x.square().sum() for x in model.parameters())
        return (loss, outputs) if return_outputs else loss


def penalised(group, folder):
    """(training's and evaluation's loss of GPT-2, what is said of noise in its embeddings)."""
    base, dropped = Penalised, ("attn_pdrop", "resid_pdrop", "embd_pdrop")
    model = hf.tiny("GPT2LMHeadModel", **dict.fromkeys(dropped, 0.0))
    if group is not None:
        hf.launched(group)
        huggingface.enable(model, group)
        base = huggingface.trainer(base)
    arguments = arguments_for(folder, max_steps=1)
    samples = labelled(4)
    given = {"train_dataset": samples, "eval_dataset": samples, "data_collator": padded}
    trainer = base(model=model, args=arguments, **given)
    losses = trainer.evaluate()["eval_loss"], trainer.train().training_loss
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    try:
        trainer.compute_loss(model.train(), padded(samples))
    except ValueError as refused:
        return losses, str(refused)
    return losses, ""


def test_a_subclass_reads_its_models_weights(ready, tmp_path):
    """Of a model for which transformers counts rows' first labels too."""
    expected, _ = penalised(None, str(tmp_path / "alone"))
    for losses, told in ready(4, penalised, str(tmp_path / "ranks")):
        assert losses == pytest.approx(expected, rel=2e-5)
        assert "neftune_noise_alpha must be None" in told


def unlabelled(features):
    return {name: x * 0 - 100 if name == "labels" else x for name, x in padded(features).items()}


def trained_without_labels(group, folder):
    """The losses of a step in which no label counts, without and with smoothed labels."""
    hf.launched(group)
    model = hf.tiny("LlamaForCausalLM")
    huggingface.enable(model, group)
    losses = []
    for smoothing in (0.0, 0.1):
        options = {"label_smoothing_factor": smoothing, "logging_nan_inf_filter": False}
        arguments = arguments_for(folder, max_steps=1, **options)
        given = {"train_dataset": labelled(4), "data_collator": unlabelled}
        kind = huggingface.trainer(transformers.Trainer)
        losses.append(kind(model=model, args=arguments, **given).train().training_loss)
    return losses


def test_a_step_without_labels_has_no_loss(ready, tmp_path):
    assert ready(4, trained_without_labels, str(tmp_path)) == [[0.0, 0.0]] * 4


def sampled(group, case, of_generate):
    """Tokens and logits that a rank with a seed of its own samples; whether its numbers go on."""
    name, options, padding, *_ = {**CASES, **MORE}[case]
    model, rank = hf.tiny(name, **options).eval(), dist.get_rank(group)
    sp = huggingface.enable(model, group, "token_ring")
    torch.manual_seed(rank)
    own = torch.rand(1)
    torch.manual_seed(rank)
    outputs = generated(model, prompts(padding), do_sample=True, **of_generate)
    assert sp.report().steps
    return outputs.sequences, outputs.logits, torch.equal(torch.rand(1), own)


SAMPLED = [
    ("llama, rows of three lengths", {"top_k": 20}, 2),
    *(
        pytest.param(case, of_generate, ranks, marks=pytest.mark.exhaustive)
        for case in ("llama, one row", "qwen3", "gemma3, layers with windows", "gpt-oss, sinks")
        for of_generate, ranks in (({}, 2), ({}, 4), ({"num_return_sequences": 3}, 2))
    ),
]


@pytest.mark.parametrize(("case", "of_generate", "ranks"), SAMPLED)
def test_ranks_sample_what_rank_0_would_alone(ready, case, of_generate, ranks):
    """Though their seeds differ; the others' own random numbers go on as if they had not."""
    name, options, padding, *_ = {**CASES, **MORE}[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.tiny(name, **options).eval()
        torch.manual_seed(0)
        expected = generated(model, prompts(padding), do_sample=True, **of_generate)
    assert len(expected.sequences[:, -6:].unique()) > 3
    results = ready(ranks, sampled, case, of_generate)
    for rank, (sequences, logits, goes_on) in enumerate(results):
        assert torch.equal(sequences, expected.sequences) and goes_on == (rank > 0)
        torch.testing.assert_close(logits, expected.logits, rtol=2e-5, atol=2e-5)


def generated_in(group, how, before):
    """Tokens of a rank whose model is wrapped; with DDP users call the model inside."""
    model = hf.tiny("LlamaForCausalLM").eval()
    sp, _ = wrapped(model, group, how, before)
    found = generated(model, prompts((0, 7))).sequences
    assert sp.report().steps
    return found


def test_models_in_ddp_and_fsdp2_generate(ready):
    """On all ranks of the world: under FSDP transformers asks these whether they are done."""
    expected = generated(hf.tiny("LlamaForCausalLM").eval(), prompts((0, 7))).sequences
    for how, before in (("DDP", False), ("FSDP2", True)):
        for found in ready(4, generated_in, how, before):
            assert torch.equal(found, expected)


def error_of_grpo(group, strategy):
    return example("huggingface_grpo").largest_error(group, strategy)


@pytest.mark.parametrize(
    "strategy", ["ring", pytest.param("ulysses", marks=pytest.mark.exhaustive)]
)
def test_grpo_matches_one_process(ready, strategy):
    assert max(ready(2, error_of_grpo, strategy)) < 1e-6


def with_accelerate(group, ranks):
    """(losses, weights) of accelerate's loop on groups of so many ranks."""
    hf.launched(group)
    losses, model = example("huggingface_accelerate").train(ranks)
    return losses, {name: x.detach().clone() for name, x in model.named_parameters()}


def by_hand():
    """The same of one process, whose steps are batches of all samples."""
    loop = example("huggingface_accelerate")
    model, samples, losses = loop.make_model(), loop.samples(), []
    rows = len(samples) // loop.STEPS
    for start in range(0, len(samples), rows):
        batch = huggingface.Collator()(samples[start : start + rows])
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad
                p.grad = None
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


@pytest.mark.composes(
    "transformers",
    "accelerate's loop with DDP: each group of ranks reads its own batches",
    case="2",
    data=2,
    context=2,
    equal="losses and weights",
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_accelerates_loop_trains_as_one_process(ready, ranks):
    """On two groups of two ranks, and on one of four."""
    losses, weights = by_hand()
    for found in ready(4, with_accelerate, ranks):
        assert found[0] == pytest.approx(losses, abs=2e-5)
        for name, x in weights.items():
            torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=1e-5)


def labelled(count, ragged=True):
    """Padded rows of samples with labels, which a collator of one's own makes."""
    generator = torch.Generator().manual_seed(5)
    sizes = [6 + (i * 5) % 9 if ragged else 12 for i in range(count)]
    return [torch.randint(3, hf.VOCABULARY, (n,), generator=generator) for n in sizes]


def padded(features):
    longest = max(len(x) for x in features)
    ids = torch.stack([torch.nn.functional.pad(x, (0, longest - len(x))) for x in features])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def partly_labelled(features):
    """`padded`, but without labels in batches whose first token is even."""
    batch = padded(features)
    if batch["input_ids"][0, 0] % 2 == 0:
        batch["labels"].fill_(-100)
    return batch


class Stream(torch.utils.data.IterableDataset):
    """Samples that nobody has counted."""

    def __init__(self, samples):
        self._samples = samples

    def __iter__(self):
        return iter(self._samples)


class Summed:
    """Metrics of batches: how many rows there were, and which tokens."""

    def __init__(self):
        self._rows = self._tokens = 0

    def __call__(self, prediction, compute_result=True):
        labels = torch.as_tensor(prediction.label_ids)
        self._rows += len(labels)
        self._tokens += int(labels[labels > 0].sum())
        found = {"rows": self._rows, "tokens": self._tokens}
        if prediction.losses is not None:
            losses = torch.as_tensor(prediction.losses)
            found["losses"] = float(losses.nansum())
            found["lost_losses"] = int(losses.isnan().sum())
        if compute_result:
            self._rows = self._tokens = 0
        return found


LAST_BATCHES = {  # (samples, options, kind of dataset)
    "remainder": (10, {"num_train_epochs": 2}, list),
    "accumulation": (11, {"num_train_epochs": 2, "gradient_accumulation_steps": 2}, list),
    "dropped": (11, {"num_train_epochs": 2, "dataloader_drop_last": True}, list),
    "one sample": (1, {"num_train_epochs": 1}, list),
    "stream": (10, {"max_steps": 4}, Stream),
    "batch metrics": (13, {"max_steps": 2, "batch_eval_metrics": True}, list),
    "losses": (9, {"max_steps": 2, "include_for_metrics": ["loss", "inputs"]}, list),
    "accumulated": (14, {"max_steps": 2, "eval_accumulation_steps": 1}, list),
    "during training": (10, {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}, list),
    "own mean": (10, {"max_steps": 2, "average_tokens_across_devices": False}, list),
    "unlabelled": (14, {"max_steps": 2, "include_for_metrics": ["loss"]}, list),
    "unlabelled, smoothed": (14, {"max_steps": 2, "label_smoothing_factor": 0.1}, list),
}
# Their options change nothing else.
OF_EVALUATION = (
    *("batch metrics", "losses", "accumulated"),
    *("unlabelled", "unlabelled, smoothed"),
)


def quick(case, cases):
    """A case that is exhaustive unless it is one of these."""
    return case if case in cases else pytest.param(case, marks=pytest.mark.exhaustive)


def with_last_batch(base, folder, case, trains=True, group=None):
    """(what was logged, predictions, labels, weights) where the last batch is short."""
    count, options, kind = LAST_BATCHES[case]
    model = hf.tiny("LlamaForCausalLM")
    if group is not None:
        huggingface.enable(model, group)
        base = huggingface.trainer(base)
    arguments = arguments_for(folder, **options)
    dataset = kind(labelled(count))
    trainer = base(
        model=model,
        args=arguments,
        data_collator=partly_labelled if case.startswith("unlabelled") else padded,
        train_dataset=dataset,
        eval_dataset={"all": dataset, "some": kind(labelled(5))},
        compute_metrics=Summed(),
    )
    if trains:
        trainer.train()
    trainer.evaluate()
    predicted = trainer.predict(dataset)
    logged = [
        {name: x for name, x in row.items() if name.endswith(("loss", "rows", "tokens", "losses"))}
        for row in trainer.state.log_history
    ]
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    return logged, predicted.predictions, predicted.label_ids, weights


def last_batch_on_ranks(group, folder, case, trains, ranks):
    hf.launched(group)
    mesh = device_mesh(group.size() // ranks, ranks, names=("dp", "sp"))
    base = transformers.Trainer
    return with_last_batch(base, folder, case, trains, mesh["sp"])


def assert_alike(found, expected):
    logged, predictions, labels, weights = expected
    assert len(found[0]) == len(logged)
    for row, other in zip(found[0], logged, strict=True):
        assert row == pytest.approx(other, rel=2e-5, abs=2e-5)
    assert (found[2] == labels).all()
    kept = labels != -100
    assert found[1].shape == predictions.shape
    assert abs(found[1][kept] - predictions[kept]).max() < 2e-4
    for name, x in weights.items():
        torch.testing.assert_close(found[3][name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", [quick(x, ("remainder", "unlabelled")) for x in LAST_BATCHES])
def test_one_group_trains_and_evaluates_short_last_batches(ready, tmp_path, case):
    """Its batches, losses, metrics, predictions and weights are one process's."""
    trains = case not in OF_EVALUATION
    expected = with_last_batch(transformers.Trainer, str(tmp_path / "alone"), case, trains)
    for found in ready(4, last_batch_on_ranks, str(tmp_path / "ranks"), case, trains, 4):
        assert_alike(found, expected)


@pytest.mark.parametrize("case", [quick(x, ("stream",)) for x in LAST_BATCHES])
def test_two_groups_evaluate_short_last_batches(ready, tmp_path, case):
    """Losses, metrics and predictions are one process's."""
    expected = with_last_batch(transformers.Trainer, str(tmp_path / "alone"), case, False)
    for found in ready(4, last_batch_on_ranks, str(tmp_path / "ranks"), case, False, 2):
        assert_alike(found, expected)


def trained_with_fsdp(group, folder, options):
    hf.launched(group)
    return train_with_fsdp(folder, group, use_cpu=True, **options)


def test_accelerate_makes_ddp_of_fsdp_on_a_cpu(ready, tmp_path):
    """So that only GPUs show a Trainer with FSDP. FSDP1 raises an error there."""
    _, expected = train_with_fsdp(str(tmp_path / "alone"), None, use_cpu=True)
    for kinds, losses in ready(4, trained_with_fsdp, str(tmp_path / "ranks"), FSDP["FSDP2"][0]):
        assert "DistributedDataParallel" in kinds and not any("FSDP" in kind for kind in kinds)
        assert losses == pytest.approx(expected, rel=1e-4)


def of_an_encoder(base, folder, group=None):
    """(losses, weights) of a model with an encoder, of which the last batch is short."""
    model = hf.tiny("BartForConditionalGeneration", **hf.BART)
    if group is not None:
        huggingface.enable(model, group)
        base = huggingface.trainer(base)
    arguments = arguments_for(folder, transformers.Seq2SeqTrainingArguments, num_train_epochs=1)
    samples = labelled(6)
    trainer = base(
        model=model,
        args=arguments,
        data_collator=padded,
        train_dataset=samples,
        eval_dataset=samples,
    )
    trainer.train()
    trainer.evaluate()
    rows = trainer.state.log_history
    losses = [row[name] for row in rows for name in ("loss", "eval_loss") if name in row]
    arguments.predict_with_generate = True
    told = ""
    try:
        base(model=model, args=arguments)
    except ValueError as refused:
        told = str(refused)
    return losses, told


def seq2seq_on_rank(group, folder):
    hf.launched(group)
    return of_an_encoder(transformers.Seq2SeqTrainer, folder, group)


@pytest.mark.exhaustive  # test_a_trainer_trains... holds the same code of decoders
def test_a_seq2seq_trainer_trains_and_evaluates(ready, tmp_path):
    expected, _ = of_an_encoder(transformers.Seq2SeqTrainer, str(tmp_path / "alone"))
    for losses, told in ready(4, seq2seq_on_rank, str(tmp_path / "ranks")):
        assert losses == pytest.approx(expected, abs=2e-5)
        assert "predict_with_generate must not be set" in told


def dispatched(group):
    """For (samples, rows): the batches that accelerate dispatches to this rank, and seqpar's."""
    import accelerate

    from seqpar.integrations.huggingface.train.groups import Groups

    hf.launched(group)
    found = {}
    for count, rows in ((5, 2), (8, 2), (9, 2), (13, 3), (14, 2), (15, 2)):
        accelerator = accelerate.Accelerator(cpu=True)
        if accelerator.num_processes != group.size():
            raise AssertionError(accelerator.num_processes)
        samples = [{"input_ids": torch.tensor([i])} for i in range(count)]

        def batches(accelerator=accelerator, samples=samples, rows=rows):
            loader = torch.utils.data.DataLoader(Stream(samples), batch_size=rows)
            return [x["input_ids"].flatten().tolist() for x in accelerator.prepare(loader)]

        expected = batches()
        Groups(accelerator, list(range(group.size())), dist.get_rank())
        found[count, rows] = batches(), expected
    return found


def test_groups_get_what_accelerate_dispatches(ready):
    """Of a dataset without a length; here each rank is a group."""
    for found in ready(4, dispatched):
        for case, (batches, expected) in found.items():
            assert batches == expected, case


def broken(*_):
    raise RuntimeError("text of a user")


class Breaking(transformers.LogitsProcessor):
    def __call__(self, ids, scores):
        return scores if dist.get_rank() else broken()


def broken_by(register):
    """A step of a model in which rank 0 has a hook that raises an error."""

    def run(group, model, sp):
        if group.rank() == 0:
            register(model)
        model(**sp.shard(hf.batch())).loss.backward()

    return run


def broken_around(group, model, sp):
    sp.disable()
    outer = torch.nn.Sequential()
    outer.model = model
    outer.forward = lambda **batch: model(**batch) if group.rank() else broken()
    sp = huggingface.enable(outer, group)
    outer(**sp.shard(hf.batch()))


def broken_in_generate(group, model, sp):
    ids = hf.batch()["input_ids"][:, :6]
    model.eval().generate(input_ids=ids, max_new_tokens=3, logits_processor=[Breaking()])


def broken_in_a_loss(group, model, sp):
    sp.total(torch.ones(1 + (group.rank() == 0)))


def broken_in_a_trainer(group, model, sp):
    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            return None if group.rank() else broken()

    kind = huggingface.trainer(transformers.Trainer)
    given = {"train_dataset": labelled(4), "data_collator": padded, "callbacks": [Callback()]}
    with tempfile.TemporaryDirectory() as folder:
        kind(model=model, args=arguments_for(folder, max_steps=1), **given).train()


def with_positions_of_zigzag(group, model, sp):
    """Positions jump, except on the last rank, and transformers makes masks of jumps."""
    sp.disable()
    layout = seqpar.Layout.zigzag(22, group.size())
    ids = layout.shard(hf.batch()["input_ids"][:1], group.rank(), 1)
    positions = layout.position_ids(group.rank())[None]
    with seqpar.context_parallel(group, layout):
        model(input_ids=ids, position_ids=positions, use_cache=False)


HALFWAY = {
    "a block": broken_by(lambda x: x.model.layers[1].register_forward_pre_hook(broken)),
    "behind attention": broken_by(lambda x: x.model.layers[1].mlp.register_forward_hook(broken)),
    "the model": broken_by(lambda x: x.register_forward_hook(broken)),
    "before the model": broken_by(lambda x: x.register_forward_pre_hook(broken, prepend=True)),
    "backward": broken_by(lambda x: x.model.layers[0].mlp.register_full_backward_hook(broken)),
    "around the model": broken_around,
    "generate": broken_in_generate,
    "a loss": broken_in_a_loss,
    "a trainer": broken_in_a_trainer,
    "context_parallel": with_positions_of_zigzag,
}


def error_of(group, case, check_ranks):
    """(the error's type, its text) of a rank."""
    hf.launched(group)
    apart = dist.new_group(timeout=timedelta(seconds=60))
    model = hf.tiny("LlamaForCausalLM")
    # Ranks learn of an error after five rounds of the heartbeat, which are 5 s by default.
    with mock.patch.object(heartbeat, "interval", return_value=0.5):
        sp = huggingface.enable(model, apart, check_ranks=check_ranks)
    try:
        HALFWAY[case](apart, model, sp)
    except Exception as error:
        return type(error), str(error)


# Without check_ranks, DDP's own messages are the first that wait for a trainer's rank.
CHECKED = [(x, True) for x in HALFWAY] + [(x, False) for x in HALFWAY if x != "a trainer"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "check_ranks"), CHECKED)
def test_an_error_of_one_rank_reaches_the_others(ready, case, check_ranks):
    (kind, text), *_, (other, said) = ready(4, error_of, case, check_ranks)
    assert issubclass(kind, RuntimeError | ValueError) and kind is not seqpar.PeerError
    assert other is seqpar.PeerError
    told = re.escape("its backward failed" if case == "backward" else text.partition(" (")[0])
    assert re.match(rf"rank \d raised an error, and did not send: {kind.__name__}: {told}", said)
    assert "Timed out" not in said  # as gloo says when the group's timeout ends a wait
