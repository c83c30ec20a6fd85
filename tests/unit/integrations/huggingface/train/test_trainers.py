"""Which trainers a model that runs over ranks can have: the others are refused when made."""

import importlib
import inspect
import os
import pkgutil

import pytest

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.train.over_ranks import OverRanks
from seqpar.integrations.huggingface.train.preferences import OverRanksPreferences

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # before trl is imported
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of trl and what it imports


def trainers_in(module):
    return {
        kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, transformers.Trainer) and name[0] != "_"
    }


def trainers():
    """Each trainer class of TRL whose module can be imported, experimental ones too."""
    found = {getattr(trl, name) for name in dir(trl) if name.endswith("Trainer")}
    experimental = importlib.import_module("trl.experimental")
    for module in pkgutil.walk_packages(experimental.__path__, "trl.experimental."):
        try:
            found |= trainers_in(importlib.import_module(module.name))
        except Exception:  # what it needs is not installed
            continue
    return found - {transformers.Trainer}


ACCEPTED = {"SFT", "Reward", "DPO", "KTO", "ORPO", "CPO", "GRPO", "RLOO", "GKD"}


def test_trls_other_trainers_are_refused():
    kinds = trainers()
    names = {kind.__name__ for kind in kinds}
    assert {f"{name}Trainer" for name in ACCEPTED} | {"DistillationTrainer"} <= names
    for kind in kinds:
        for base in (kind, type("Mine", (kind,), {})):
            if kind.__name__.removesuffix("Trainer") in ACCEPTED:
                assert issubclass(huggingface.trainer(base), kind)
                continue
            with pytest.raises(ValueError, match="base must be") as refused:
                huggingface.trainer(base)
            told = str(refused.value)
            assert kind.__name__ in told and "SFTTrainer" in told and "sp.total" in told


@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer"])
def test_transformers_trainers_are_accepted(name):
    kind = getattr(transformers, name)
    for base in (kind, type("Mine", (kind,), {})):
        made = huggingface.trainer(base)
        assert issubclass(made, base) and made.__name__ == base.__name__


def test_an_sft_trainer_keeps_a_collators_columns():
    trainer = object.__new__(huggingface.trainer(trl.SFTTrainer))
    vars(trainer).update(_signature_columns=None, _is_vision_dataset=False)
    trainer.data_collator = huggingface.Collator()
    trainer._set_signature_columns_if_needed()
    assert {"completion_mask", "assistant_masks", "attention_mask"} < {*trainer._signature_columns}


def test_what_is_no_trainer_is_a_type_error():
    for base in (dict, transformers.Trainer.train, None):
        with pytest.raises(TypeError, match=r"base must be transformers\.Trainer"):
            huggingface.trainer(base)


def test_adapters_switched_off_as_reference_are_refused(monkeypatch):
    """TRL sets no reference model for a model with PEFT's adapters."""
    of_trl = {"ref_model": None, "precompute_ref_logps": False}
    monkeypatch.setattr(OverRanks, "__init__", lambda trainer: vars(trainer).update(of_trl))
    with pytest.raises(ValueError, match=r"^ref_model must not be None"):
        OverRanksPreferences()
