"""TRL's SFTTrainer on real ranks: what one process trains, logs, evaluates, saves and resumes."""

import contextlib
import importlib.util
import os
from unittest import mock

import pytest
import torch

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.memory import blocks
from tests.support import huggingface as hf
from tests.support.ranks import device_mesh, hide_from_collector
from tests.support.trl import EXPERTS, curve, lora, tokenizer, with_adapters

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # before trl is imported
if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),  # those of trl, transformers and accelerate
]

LOGGED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss", "grad_norm")
PACKED = {"packing": True, "max_length": 24}
KINDS = {
    "bfd": PACKED | {"packing_strategy": "bfd"},
    "bfd, split": PACKED | {"packing_strategy": "bfd_split", "max_length": 16},
    "wrapped": PACKED | {"packing_strategy": "wrapped"},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded": {"pad_to_multiple_of": 8},
    "dft": PACKED | {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
}
ROUTERS = {"num_train_epochs": 2, "max_steps": -1, "router_aux_loss_coef": 0.5}


def imported(group):
    import trl

    return trl.SFTTrainer.__name__


@pytest.fixture(scope="module")
def ready(pool):
    """The pool, of which all ranks have imported what they need."""
    pool(4, imported)
    pool(4, hide_from_collector)
    return pool


def dataset(count, lengths):
    """Samples of some lengths, of which the first third is a prompt."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(3)
    sizes = [lengths[i % len(lengths)] for i in range(count)]
    ids = [torch.randint(3, hf.VOCABULARY, (n,), generator=generator).tolist() for n in sizes]
    masks = [[int(3 * i >= n) for i in range(n)] for n in sizes]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": masks})


def correct(prediction):
    labels, chosen = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
    return {"correct": int(((labels == chosen) & (labels != -100)).sum())}


def train(
    base,
    folder,
    rows,
    options,
    metrics=None,
    resume=False,
    groups=2,
    samples=(60, 4),
    family="Llama",
    adapters=None,
    weights=None,
    memory=None,
):
    """(what was logged, the evaluation, the weights) of three steps.

    `adapters` are "the model's", "dropped", which are the model's with dropout, or "TRL's", which
    TRL adds to the enabled model.
    """
    import trl

    model = hf.tiny(f"{family}ForCausalLM", **EXPERTS)
    if adapters in ("the model's", "dropped"):
        model = with_adapters(model, dropout=0.3 if adapters == "dropped" else 0.0)
    if weights is not None:
        model.load_state_dict(weights)
    if base is not trl.SFTTrainer:
        mesh = device_mesh(groups, 4 // groups, names=("dp", "sp"))
        with mock.patch.object(blocks, "CHUNK", 5):  # tokens of a tile of `memory`
            sp = huggingface.enable(model, mesh["sp"], memory=memory)
    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "optim": "sgd",  # AdamW would make much of gradients that are rounding alone
        "learning_rate": 0.3,
        "report_to": [],
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "non_padding",
        "seed": 0,
    }
    arguments = trl.SFTConfig(**settings | options)
    with contextlib.redirect_stdout(None):
        trainer = base(
            model=model,
            args=arguments,
            processing_class=tokenizer(),
            train_dataset=dataset(samples[0], (9, 14, 3, 20)),
            eval_dataset=dataset(samples[1], (12, 9, 5)),
            compute_metrics=metrics,
            peft_config=lora() if adapters == "TRL's" else None,
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        found = trainer.evaluate()
    if memory and base is not trl.SFTTrainer:
        saved = {x.part: x.saved_bytes for x in sp.report().memory}
        assert saved["checkpoints"] and saved.get("tiles", 1)
    steps = [x for x in trainer.state.log_history if "loss" in x]
    logged = [[x[name] for name in LOGGED if name in x] for x in steps]
    seen = [trainer.state.num_input_tokens_seen, trainer.state.total_flos]
    seen = seen[: 1 + trainer.padding_free]  # FLOPs are those of padding too
    names = [*LOGGED, *["correct"] * (metrics is not None)]
    evaluated = [found[f"eval_{name}"] for name in names if f"eval_{name}" in found]
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    return [*logged, seen, evaluated], weights


def on_rank(group, folder, *arguments):
    import trl

    hf.launched(group)
    return train(huggingface.trainer(trl.SFTTrainer), folder, *arguments)


def assert_trained_alike(found, expected):
    for row, other in zip(found[0], expected[0], strict=True):
        assert row == pytest.approx(other, rel=2e-5, abs=2e-5)
    for name, x in expected[1].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.composes(
    "Trainer and TRL",
    "`huggingface.trainer(SFTTrainer)`, with packing and without padding",
    data=2,
    context=2,
    equal="losses, metrics and weights",
)
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_logs_and_evaluates_as_one_process(ready, tmp_path, kind):
    """On two groups at once, with rows of half as many samples."""
    import trl

    options = KINDS[kind]
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 4, options)
    for found in ready(4, on_rank, str(tmp_path / "ranks"), 2, options):
        assert_trained_alike(found, expected)


@pytest.mark.composes(
    "Trainer and TRL",
    '`huggingface.trainer(SFTTrainer)` with `memory="lean"`',
    data=2,
    context=2,
    equal="losses, norms of gradients, metrics and weights",
)
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kind", ["bfd", "padded", "label smoothing"])
def test_lean_training_is_that_of_one_process(ready, tmp_path, kind, checkpointing):
    """With TRL's option for checkpoints, which `memory` replaces by its own, or without it."""
    import trl

    options = KINDS[kind] | {"gradient_checkpointing": checkpointing}
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 4, options)
    given = 2, options, None, False, 2, (60, 4), "Llama", None, None, "lean"
    for found in ready(4, on_rank, str(tmp_path / "ranks"), *given):
        assert_trained_alike(found, expected)


@pytest.mark.parametrize("adapters", ["the model's", "TRL's"])
def test_adapters_are_trained_as_on_one_process(ready, tmp_path, adapters):
    import trl

    pytest.importorskip("peft")
    given = KINDS["bfd"], None, False, 2, (60, 4), "Llama", adapters
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 4, *given)
    assert any("lora" in name for name in expected[1])
    for found in ready(4, on_rank, str(tmp_path / "ranks"), 2, *given):
        assert_trained_alike(found, expected)


def test_it_saves_and_resumes_with_metrics(ready, tmp_path):
    import trl

    for resume in (False, True):
        options = 4, KINDS["bfd"], correct, resume
        expected = train(trl.SFTTrainer, str(tmp_path / "alone"), *options)
        for found in ready(4, on_rank, str(tmp_path / "ranks"), 2, *options[1:]):
            assert_trained_alike(found, expected)


@pytest.mark.parametrize("kind", ["bfd", "padding-free", "padded", "label smoothing"])
def test_router_losses_of_two_epochs_are_those_of_one_process(ready, tmp_path, kind):
    import trl

    options = KINDS[kind] | ROUTERS
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 4, options, family="Mixtral")
    assert len(expected[0][0]) == len(LOGGED)
    given = 4, options, None, False, 1, (60, 4), "Mixtral"
    for found in ready(4, on_rank, str(tmp_path / "ranks"), *given):
        assert_trained_alike(found, expected)


def test_router_losses_of_groups_are_those_of_batches(ready, tmp_path):
    """In one process, a step has the batches of both groups as batches of its accumulation."""
    import trl

    options = KINDS["bfd"] | {"router_aux_loss_coef": 0.5}
    given = None, False, 2, (60, 4), "Mixtral"
    alone = options | {"gradient_accumulation_steps": 4}
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 2, alone, *given)
    found = ready(4, on_rank, str(tmp_path / "ranks"), 2, options, *given)
    for steps, _ in (expected, *found):
        for step in steps[:3]:
            del step[1:3]  # TRL averages entropy and accuracy over batches, not over tokens
            assert len(step) == 4
    for x in found:
        assert_trained_alike(x, expected)


def test_dropout_of_adapters_keeps_weights_equal(ready, tmp_path):
    """Each rank drops elements of its own tokens. In evaluation, none are dropped."""
    pytest.importorskip("peft")
    given = KINDS["bfd"], None, False, 2, (60, 4), "Llama"
    plain, *_ = ready(4, on_rank, str(tmp_path / "plain"), 2, *given, "the model's")
    found = ready(4, on_rank, str(tmp_path / "ranks"), 2, *given, "dropped")
    again = ready(4, on_rank, str(tmp_path / "again"), 2, *given, "dropped")
    for x, y in zip(found, again, strict=True):
        assert x[0] == y[0] == found[0][0]
        assert all(torch.equal(x[1][name], value) for name, value in found[0][1].items())
    assert abs(found[0][0][0][0] - plain[0][0][0]) > 1e-4  # the first loss
    import trl

    untrained = KINDS["bfd"] | {"learning_rate": 0.0}
    alone = str(tmp_path / "alone"), 4, untrained, *given[1:], "dropped", found[0][1]
    *_, evaluated = train(trl.SFTTrainer, *alone)[0]
    assert found[0][0][-1] == pytest.approx(evaluated, rel=2e-5, abs=2e-5)


def test_router_losses_with_lean_parts_are_those_of_one_process(ready, tmp_path):
    import trl

    options, parts = KINDS["bfd"] | ROUTERS, ["loss", "checkpoints", "offload"]
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 4, options, family="Mixtral")
    given = 4, options, None, False, 1, (60, 4), "Mixtral", None, None, parts
    for found in ready(4, on_rank, str(tmp_path / "ranks"), *given):
        assert_trained_alike(found, expected)


def refusal(group, folder):
    try:
        on_rank(group, folder, 2, ROUTERS, None, False, 2, (60, 4), "Mixtral", None, None, "lean")
    except ValueError as error:
        return str(error)


def test_tiles_with_router_losses_are_refused_before_training(ready, tmp_path):
    for found in ready(4, refusal, str(tmp_path)):
        assert found.startswith('router_aux_loss_coef must be 0 with memory\'s "tiles": ')


@pytest.mark.parametrize("groups", [1, 2])
def test_short_last_batches_are_those_of_one_process(ready, tmp_path, groups):
    """Two groups evaluate, after a training on whole batches."""
    import trl

    options = {"per_device_eval_batch_size": 4, "gradient_accumulation_steps": 1}
    samples = (10, 10) if groups == 1 else (24, 10)
    expected = train(trl.SFTTrainer, str(tmp_path / "alone"), 4, options, samples=samples)
    given = 4 // groups, options, None, False, groups, samples
    for found in ready(4, on_rank, str(tmp_path / "ranks"), *given):
        assert_trained_alike(found, expected)


def test_the_examples_loss_curve_is_that_of_one_process(ready, tmp_path):
    expected = curve(None, "huggingface_sft", 4, str(tmp_path / "alone"))
    for found in ready(4, curve, "huggingface_sft", 4, str(tmp_path / "ranks")):
        assert len(found) == 4 and found == pytest.approx(expected, abs=2e-5)
