"""TRL's GRPO and RLOO on real ranks: completions, rewards and steps are those of one process."""

import contextlib
import importlib.util
import os

import pytest
import torch

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import device_mesh, hide_from_collector
from tests.support.trl import EXPERTS, assert_trained_alike, logged, lora, tokenizer, with_adapters

# before trl is imported
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),  # those of trl, transformers and accelerate
]


def imported(group):
    import trl

    return trl.GRPOTrainer.__name__, trl.RLOOTrainer.__name__


@pytest.fixture(scope="module")
def ready(pool):
    """The pool, of which all ranks have imported what they need."""
    pool(4, imported)
    pool(4, hide_from_collector)
    return pool


def reward(completions, **_):
    """Many different tokens are good, and large ones."""
    tokens = [[int(x) for x in text.split()] for text in completions]
    return [len({*ids}) + sum(ids) / 100 for ids in tokens]


def random_reward(completions, **_):
    """One that differs between ranks, as a judge's answers may."""
    return [float(x) for x in torch.rand(len(completions)) + os.getpid() % 7]


def train(group, folder, name, rows, options, ranks=1, function=reward, adapters=None):
    """(what was logged in each step, the weights).

    `adapters` are "the model's", or "TRL's", which TRL adds to the enabled model.
    """
    import transformers
    import trl
    from datasets import Dataset

    base, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    if adapters in ("the model's", "dropped"):
        model = with_adapters(model, dropout=0.3 if adapters == "dropped" else 0.0)
    if group is not None:
        hf.launched(group)
        mesh = device_mesh(group.size() // ranks, ranks, names=("dp", "sp"))
        huggingface.enable(model, mesh["sp"])
        base = huggingface.trainer(base)
    arguments = config(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        num_train_epochs=2,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",  # AdamW would make much of gradients that are rounding alone
        learning_rate=0.3,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **options,
    )
    texts = [" ".join(str(3 + (7 * i + j) % 61) for j in range(5 + i)) for i in range(4)]
    with contextlib.redirect_stdout(None):
        trainer = base(
            model=model,
            reward_funcs=function,
            args=arguments,
            processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            peft_config=lora() if adapters == "TRL's" else None,
        )
        trainer.train()
    return logged(trainer), {key: x.detach().clone() for key, x in model.named_parameters()}


CASES = {
    "GRPO": ("GRPO", {}),
    "GRPO with a reference": (
        "GRPO",
        {"beta": 0.1, "loss_type": "grpo", "top_entropy_quantile": 0.5},
    ),
    "GRPO of old completions": ("GRPO", {"num_iterations": 2, "scale_rewards": "batch"}),
    "RLOO": ("RLOO", {"beta": 0.05}),
    "GRPO, experts": ("GRPO", {}, "Mixtral"),
    "RLOO, experts": ("RLOO", {"router_aux_loss_coef": 0.3}, "Mixtral"),
}


@pytest.mark.composes(
    "Trainer and TRL",
    "`huggingface.trainer(GRPOTrainer)` and RLOO: all ranks of a group generate together",
    context=4,
    equal="metrics and weights",
)
@pytest.mark.parametrize("case", CASES)
def test_two_epochs_are_those_of_one_process(ready, tmp_path, case):
    name, options, *family = CASES[case]
    hf.tiny(f"{[*family, 'Llama'][0]}ForCausalLM", **EXPERTS).save_pretrained(tmp_path / "model")
    expected = train(None, str(tmp_path), name, 4, options)
    for found in ready(4, train, str(tmp_path), name, 4, options, 4):
        assert_trained_alike(found, expected)


@pytest.mark.parametrize("adapters", ["the model's", "TRL's"])
@pytest.mark.parametrize("case", ["GRPO", "RLOO"])
def test_adapters_are_trained_as_on_one_process(ready, tmp_path, case, adapters):
    """The reference is a copy of the model's adapters, or the model without TRL's adapters."""
    pytest.importorskip("peft")
    hf.tiny("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    given = str(tmp_path), case, 4, {"beta": 0.1}
    expected = train(None, *given, 1, reward, adapters)
    assert max(row.get("kl", 0) for row in expected[0]) > 1e-4
    for found in ready(4, train, *given, 4, reward, adapters):
        assert_trained_alike(found, expected)


def test_groups_agree_on_rewards_that_differ(ready, tmp_path):
    """Two groups of two ranks train on their first ranks' rewards, and keep equal weights."""
    hf.tiny("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    found = ready(4, train, str(tmp_path), "GRPO", 4, {}, 2, random_reward)
    for steps, weights in found[1:]:
        assert steps == found[0][0]
        for key, x in found[0][1].items():
            assert torch.equal(weights[key], x), key


def refusals(group, folder):
    """What is said of an enabled reward model, of too few completions, and of dropout."""
    hf.launched(group)
    judge = hf.tiny("LlamaForSequenceClassification", id2label={0: "reward"})
    judge.config._name_or_path = f"{folder}/model"
    huggingface.enable(judge, group)
    return [
        hf.refused(lambda: train(group, folder, "GRPO", 4, {}, 4, judge)),
        hf.refused(lambda: train(group, folder, "GRPO", 1, {}, 4)),
        hf.refused(lambda: train(group, folder, "GRPO", 4, {}, 4, reward, "dropped")),
    ]


def test_what_cannot_be_trained_is_refused(ready, tmp_path):
    hf.tiny("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    pytest.importorskip("peft")
    for judge, rows, dropout in ready(4, refusals, str(tmp_path)):
        assert judge.startswith("reward_funcs must not be enabled")
        assert "must give all groups together a multiple of the 4 completions of a prompt" in rows
        assert dropout.startswith("disable_dropout must be True") and "lora_dropout" in dropout
