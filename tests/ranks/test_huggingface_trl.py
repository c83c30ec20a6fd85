"""TRL's trainers for rewards, preferences and distillation on real ranks: those of one process."""

import contextlib
import copy
import importlib.util
import os
import random
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.memory import blocks
from seqpar.integrations.huggingface.train.over_ranks import sessions_of
from tests.support import huggingface as hf
from tests.support.ranks import device_mesh, hide_from_collector
from tests.support.trl import EXPERTS, assert_trained_alike, curve, logged, lora, tokenizer

# before trl is imported
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),  # those of trl, transformers and accelerate
]
EXPERIMENTAL = {x: f"trl.experimental.{x.lower()}" for x in ("ORPO", "CPO", "GKD")}
NAMES = "Reward", "DPO", "KTO", "ORPO", "CPO", "GKD", "GRPO", "RLOO"


def kind_of(name):
    module = importlib.import_module(EXPERIMENTAL.get(name, "trl"))
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def imported(group):
    return [kind_of(name)[0].__name__ for name in NAMES]


@pytest.fixture(scope="module")
def ready(pool):
    """The pool, of which all ranks have imported what they need."""
    pool(4, imported)
    pool(4, hide_from_collector)
    return pool


def words(count, generator):
    return " ".join(
        map(str, torch.randint(3, hf.VOCABULARY, (count,), generator=generator).tolist())
    )


def dataset(count, name):
    """Prompts, with the completions that a trainer takes, which have other lengths."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        prompt, *answers = (words(n, generator) + " " for n in (4 + i % 5, 3 + i % 7, 9 - i % 6))
        if name == "KTO":
            rows.append({"prompt": prompt, "completion": answers[i % 2], "label": bool(i % 3)})
        elif name == "GKD":
            ids, completion = ([int(x) for x in text.split()] for text in (prompt, answers[i % 2]))
            mask = [0] * len(ids) + [1] * len(completion)
            rows.append({"prompt": prompt, "input_ids": ids + completion, "completion_mask": mask})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return Dataset.from_list(rows)


def folders(tmp_path, name):
    """Folders with the datasets, for one process and for ranks, which all read the same files."""
    made = [tmp_path / "alone", tmp_path / "ranks"]
    for folder in made:
        dataset(8, name).save_to_disk(folder / "train")
        dataset(4, name).save_to_disk(folder / "eval")
    return map(str, made)


# The argument for a second model, of trainers that have one.
SECOND = {"DPO": "ref_model", "KTO": "ref_model", "GKD": "teacher_model"}


RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def models(name, family="Llama"):
    """The model, and the reference model or the teacher."""
    if name == "Reward":
        return hf.tiny("LlamaForSequenceClassification", id2label={0: "reward"}), None
    asked = name in ("ORPO", "CPO")  # TRL's other trainers ask for router logits in each call
    options = RECURRENT if family == "Qwen3Next" else EXPERTS
    model = hf.tiny(f"{family}ForCausalLM", output_router_logits=asked, **options)
    reference = copy.deepcopy(model) if name in SECOND else None
    if reference is not None:
        # As in the config of many mixtures of experts. TRL does not ask references for these.
        reference.config.output_router_logits = family == "Mixtral"
        with torch.no_grad():
            for i, x in enumerate(reference.parameters()):
                x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)), alpha=0.05)
    return model, reference


def settings(folder, rows, options):
    common = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "num_train_epochs": 2,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",  # AdamW would make much of gradients that are rounding alone
        "learning_rate": 0.3,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    return common | options


def refuse_kept_logits(teacher, student):
    """Let the student's forward fail while the teacher's logits of whole batches are in memory."""
    kept = []
    teacher.register_forward_hook(lambda *call: kept.append(weakref.ref(call[-1].logits)))

    def check(*call):
        assert kept and not any(x() is not None for x in kept)

    student.register_forward_pre_hook(check)


def train(
    group,
    folder,
    name,
    rows,
    options,
    ranks=1,
    family="Llama",
    second="enabled",
    adapters=False,
    memory=None,
    callbacks=(),
):
    """(what was logged in each step and in an evaluation, the weights).

    `second` says whether the reference model or teacher is "enabled", "whole", "differing" between
    ranks, "loaded" by TRL from a folder, the model "itself", or None.
    """
    base, config = kind_of(name)
    model, reference = models(name, family)
    reference = None if second is None else reference
    if group is not None:
        hf.launched(group)
        mesh = device_mesh(group.size() // ranks, ranks, names=("dp", "sp"))
        with mock.patch.object(blocks, "CHUNK", 5):  # tokens of a tile of `memory`
            sp = huggingface.enable(model, mesh["sp"], memory=memory)
        if reference is not None and second == "enabled":
            huggingface.enable(reference, mesh["sp"], "ulysses")
        base = huggingface.trainer(base)
        if second == "differing":
            with torch.no_grad():
                reference.lm_head.weight.mul_(1 + group.rank())
        if name == "GKD" and second == "whole":
            refuse_kept_logits(reference, model)
    reference = {"loaded": f"{Path(folder).parent}/teacher", "itself": model}.get(second, reference)
    from datasets import load_from_disk

    arguments = config(**settings(folder, rows, options))
    given = {} if reference is None else {SECOND[name]: reference}
    with contextlib.redirect_stdout(None):
        trainer = base(
            model=model,
            args=arguments,
            processing_class=tokenizer(),
            train_dataset=load_from_disk(f"{folder}/train"),
            eval_dataset=load_from_disk(f"{folder}/eval"),
            callbacks=[kind() for kind in callbacks],
            **given,
            **({"peft_config": lora()} if adapters else {}),
        )
        if second == "loaded":
            assert bool(sessions_of(trainer.teacher_model)) == (group is not None)
        trainer.train()
        trainer.evaluate()
    if memory is not None:
        assert any(x.saved_bytes for x in sp.report().memory if x.part == "tiles")
    return logged(trainer), {key: x.detach().clone() for key, x in model.named_parameters()}


CASES = {
    "reward": ("Reward", {"center_rewards_coefficient": 0.01}),
    "DPO": ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "DPO, precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    "DPO, weighted": ("DPO", {"use_weighting": True, "loss_type": "ipo"}),
    "KTO": ("KTO", {}),
    "ORPO": ("ORPO", {}),
    "CPO": ("CPO", {}),
    "CPO, SimPO": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.5}),
    "GKD": ("GKD", {"lmbda": 0.0}),
    "GKD, generated": ("GKD", {"lmbda": 0.5, "beta": 0.1, "max_new_tokens": 8}),
    "GKD, of the teacher": (
        "GKD",
        {"lmbda": 0.0, "seq_kd": True, "beta": 1.0, "max_new_tokens": 8},
    ),
    "DPO, experts": ("DPO", {"router_aux_loss_coef": 0.3}, "Mixtral"),
    "KTO, experts": ("KTO", {}, "Mixtral"),
    "ORPO, experts": ("ORPO", {}, "Mixtral"),
    "CPO, experts": ("CPO", {}, "Mixtral"),
    "GKD, experts": ("GKD", {"lmbda": 0.0}, "Mixtral"),
}
# The logits of ORPO and CPO are means over padding too, which ranks do not compute.
OF_PADDING = [f"{x}logits/{y}" for x in ("", "eval_") for y in ("chosen", "rejected")]
LEFT_OUT = {"ORPO": OF_PADDING, "CPO": OF_PADDING}
# FLOPs of padding depend on a batch's rows. Over processes, TRL weighs the tokens of all batches
# alike, and not the mean of each batch.
OF_BATCHES = ["total_flos", "eval_entropy", "eval_mean_token_accuracy"]
OF_BATCHES += ["eval_logits/chosen", "eval_logits/rejected"]
# TRL averages these over the tokens of the batches of all groups, and then over batches.
OF_TOKENS = ["entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected"]


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_are_those_of_one_process(ready, tmp_path, case):
    name, options, *family = CASES[case]
    alone, ranks = folders(tmp_path, name)
    expected = train(None, alone, name, 4, options, 1, *family)
    logs = bool(family) and name in ("DPO", "KTO")
    assert logs == any("aux_loss" in row for row in expected[0])
    for found in ready(4, train, ranks, name, 4, options, 4, *family):
        assert_trained_alike(found, expected, LEFT_OUT.get(name, ()))


@pytest.mark.composes(
    "Trainer and TRL",
    "`huggingface.trainer(DPOTrainer)` and GKD, with a reference model or a teacher",
    data=2,
    context=2,
    equal="losses, metrics and weights",
)
@pytest.mark.parametrize("name", ["DPO", "GKD"])
@pytest.mark.parametrize("second", ["enabled", "whole"])
def test_groups_train_as_processes(ready, tmp_path, name, second):
    """Two groups of two ranks, with rows of half as many samples; the reference enabled or not."""
    alone, ranks = folders(tmp_path, name)
    options = {"lmbda": 0.0} if name == "GKD" else {}
    expected = train(None, alone, name, 4, options)
    for found in ready(4, train, ranks, name, 2, options, 2, "Llama", second):
        assert_trained_alike(found, expected, OF_BATCHES)


@pytest.mark.composes(
    "Trainer and TRL",
    "`router_aux_loss_coef` of DPO and SFT: each group's own router loss",
    data=2,
    context=2,
    equal="losses, metrics and weights",
)
def test_router_losses_of_groups_are_those_of_batches(ready, tmp_path):
    """In one process, a step has the batches of both groups as batches of its accumulation."""
    alone, ranks = folders(tmp_path, "DPO")
    options = {"router_aux_loss_coef": 0.3}
    expected = train(
        None, alone, "DPO", 2, options | {"gradient_accumulation_steps": 4}, 1, "Mixtral"
    )
    assert any("aux_loss" in row for row in expected[0])
    for found in ready(4, train, ranks, "DPO", 2, options, 2, "Mixtral"):
        assert_trained_alike(found, expected, OF_BATCHES + OF_TOKENS)


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_adapters_train_with_a_precomputed_reference(ready, tmp_path, name):
    """The reference is the model without the adapters that TRL adds to the enabled model."""
    pytest.importorskip("peft")
    alone, ranks = folders(tmp_path, name)
    given = name, 4, {"precompute_ref_log_probs": True}
    expected = train(None, alone, *given, 1, "Llama", None, True)
    for found in ready(4, train, ranks, *given, 4, "Llama", None, True):
        assert_trained_alike(found, expected)


@pytest.mark.parametrize(("name", "second"), [("DPO", "enabled"), ("KTO", "whole")])
def test_adapters_train_with_a_reference_model(ready, tmp_path, name, second):
    """TRL adds adapters to the enabled model, and the reference has other weights."""
    pytest.importorskip("peft")
    alone, ranks = folders(tmp_path, name)
    expected = train(None, alone, name, 4, {}, 1, "Llama", "whole", True)
    assert any("lora" in key for key in expected[1])
    for found in ready(4, train, ranks, name, 4, {}, 4, "Llama", second, True):
        assert_trained_alike(found, expected)


class DrawsOnRank0(TrainerCallback):
    def on_step_begin(self, args, *others, **named):
        if args.process_index == 0:
            random.random()


def test_ranks_agree_when_to_generate(ready, tmp_path):
    """GKD draws from Python's generator whether the student generates a batch."""
    alone, ranks = folders(tmp_path, "GKD")
    options = {"lmbda": 0.5, "max_new_tokens": 8, "num_train_epochs": 4}
    given = "Llama", "enabled", False, None, (DrawsOnRank0,)
    expected = train(None, alone, "GKD", 4, options, 1, *given)
    for found in ready(4, train, ranks, "GKD", 4, options, 4, *given):
        assert_trained_alike(found, expected)


def test_gkd_with_experts_and_lean_memory(ready, tmp_path):
    alone, ranks = folders(tmp_path, "GKD")
    given = "GKD", 4, {"lmbda": 0.5, "max_new_tokens": 8}
    expected = train(None, alone, *given, 1, "Mixtral")
    lean = "Mixtral", "enabled", False, "lean"
    for found in ready(4, train, ranks, *given, 4, *lean):
        assert_trained_alike(found, expected)


@pytest.mark.parametrize("second", ["loaded", "whole"])
def test_teachers_that_trl_loads_or_that_are_whole_generate(ready, tmp_path, second):
    alone, ranks = folders(tmp_path, "GKD")
    models("GKD")[1].save_pretrained(tmp_path / "teacher")
    given = "GKD", 4, {"lmbda": 0.0, "seq_kd": True, "max_new_tokens": 8}
    expected = train(None, alone, *given)
    for found in ready(4, train, ranks, *given, 4, "Llama", second):
        assert_trained_alike(found, expected)


def test_ranks_train_on_the_first_ranks_completions(ready, tmp_path):
    """The teachers, which are not enabled, generate completions that differ between ranks."""
    _, ranks = folders(tmp_path, "GKD")
    given = "GKD", 4, {"lmbda": 0.0, "seq_kd": True, "max_new_tokens": 8}, 4, "Llama", "differing"
    first, *others = ready(4, train, ranks, *given)
    for steps, weights in others:
        assert steps == first[0]
        assert all(torch.equal(weights[key], x) for key, x in first[1].items())


def refusals_at_set_up(group, folder):
    """What is said of tiled router losses, of generation in evaluation, and of the teacher."""
    lean = 4, "Mixtral", "enabled", False, "lean"
    found = [hf.refused(lambda x=x: train(group, folder, x, 4, {}, *lean)) for x in ("DPO", "KTO")]
    for name in "CPO", "ORPO":
        module = importlib.import_module(kind_of(name)[0].__module__)
        with mock.patch.object(module, "is_wandb_available", return_value=True):
            options = {"generate_during_eval": True}
            found.append(hf.refused(lambda x=name, y=options: train(group, folder, x, 4, y, 4)))
    for lmbda, second, family in ((0.5, "itself", "Llama"), (0.5, "whole", "Qwen3Next")):
        call = group, folder, "GKD", 4, {"lmbda": lmbda}, 4, family, second
        found.append(hf.refused(lambda x=call: train(*x)))
    call = group, folder, "GKD", 4, {"lmbda": 0.0, "seq_kd": True}, 4, "Qwen3Next", "enabled"
    found.append(hf.refused(lambda: train(*call)))
    return found


def test_what_cannot_be_trained_is_refused_at_set_up(ready, tmp_path):
    _, ranks = folders(tmp_path, "DPO")
    cache = "model must have no recurrent layers for a cache"
    expected = [
        *['router_aux_loss_coef must be 0 with memory\'s "tiles"'] * 2,
        *["generate_during_eval must not be set for an enabled model"] * 2,
        "teacher_model must not share parameters with the model",
        f"lmbda must be 0 for this model: {cache}",
        f"seq_kd must be False for this enabled teacher_model: {cache}",
    ]
    for texts in ready(4, refusals_at_set_up, ranks):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), (text, start)


def refusal_of_adapters(group, folder, name):
    return hf.refused(lambda: train(group, folder, name, 4, {}, 4, "Llama", None, True))


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_adapters_as_the_reference_are_refused(ready, tmp_path, name):
    pytest.importorskip("peft")
    _, ranks = folders(tmp_path, name)
    for text in ready(4, refusal_of_adapters, ranks, name):
        assert text.startswith("ref_model must not be None for an enabled model with adapters")


def test_the_examples_losses_are_those_of_one_process(ready, tmp_path):
    expected = curve(None, "huggingface_dpo", 3, str(tmp_path / "alone"))
    for found in ready(4, curve, "huggingface_dpo", 3, str(tmp_path / "ranks")):
        assert len(found) == 3 and found == pytest.approx(expected, abs=2e-5)


def refusals(group, folder):
    """What is said of a reference and of a teacher on other ranks, and of Liger's kernels."""
    hf.launched(group)
    mesh = device_mesh(2, 2, names=("dp", "sp"))
    model, second = models("DPO")
    huggingface.enable(second, group)
    huggingface.enable(model, mesh["sp"])

    def make(name, options):
        base, config = kind_of(name)
        return huggingface.trainer(base)(
            model=model,
            args=config(**settings(folder, 2, options)),
            processing_class=tokenizer(),
            train_dataset=dataset(4, name),
            **{SECOND[name]: second},
        )

    calls = [("DPO", {}), ("GKD", {}), ("DPO", {"use_liger_kernel": True})]
    return [hf.refused(lambda call=call: make(*call)) for call in calls]


@pytest.mark.composes(
    "Trainer and TRL",
    "enable the reference model on the same ranks as the model",
    data=2,
    context=2,
    refused="ref_model must be enabled on the model's ranks",
)
def test_other_ranks_and_liger_are_refused(ready, tmp_path):
    for reference, teacher, liger in ready(4, refusals, str(tmp_path)):
        assert reference.startswith("ref_model must be enabled on the model's ranks")
        assert teacher.startswith("teacher_model must be enabled on the model's ranks")
        assert liger.startswith("use_liger_kernel must not be set for an enabled model")
