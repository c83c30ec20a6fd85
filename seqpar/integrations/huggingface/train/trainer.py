"""Trainers of transformers and TRL, for models that run over ranks."""

from __future__ import annotations

from seqpar.integrations.huggingface.huggingface_private import TRAINER
from seqpar.integrations.huggingface.session import require
from seqpar.integrations.huggingface.train.distillation import OverRanksGKD
from seqpar.integrations.huggingface.train.over_ranks import OverRanks
from seqpar.integrations.huggingface.train.policies import OverRanksPolicy
from seqpar.integrations.huggingface.train.preferences import OverRanksPreferences
from seqpar.integrations.huggingface.train.sft import OverRanksSFT

_OF_TRL: dict[str, type[OverRanks]] = {
    "SFTTrainer": OverRanksSFT,
    "RewardTrainer": OverRanksPreferences,
    "DPOTrainer": OverRanksPreferences,
    "KTOTrainer": OverRanksPreferences,
    "ORPOTrainer": OverRanksPreferences,
    "CPOTrainer": OverRanksPreferences,
    "GRPOTrainer": OverRanksPolicy,
    "RLOOTrainer": OverRanksPolicy,
    "GKDTrainer": OverRanksGKD,
}


def trainer(base: type) -> type:
    """Return a subclass of a Trainer for enabled models, whose ranks share each sequence.

    All ranks of a group read the same batches, and different groups read different batches. With
    one group, batches, losses, metrics, predictions and checkpoints are the same as on a single
    process. With several groups, training uses the batches of a training in which each group is a
    single process. Evaluation and predictions are still the same as on a single process. If several
    groups train on a streamed dataset with several workers, the workers only read samples, and the
    training process collates them.

    Methods of your own subclass stay in effect, and run before seqpar's methods. If your own
    `compute_loss` calls the model, an error is raised. Enable the model before you make the
    trainer.

    Args:
        base: one of these, or your subclass:

            * `transformers.Trainer`, with the extra `hf`;
            * `transformers.Seq2SeqTrainer`, with the extra `hf`, without `predict_with_generate`;
            * `trl.SFTTrainer` with its packing, with the extra `trl`;
            * TRL's `RewardTrainer`, `DPOTrainer`, `KTOTrainer`, `ORPOTrainer`, `CPOTrainer`,
              `GRPOTrainer`, `RLOOTrainer` and `GKDTrainer`, with the extra `trl`. A reference model
              or a teacher can be enabled on the same ranks, or not be enabled.

            TRL's other trainers are refused. In place of `DistillationTrainer`, use `GKDTrainer`
            with `beta=1.0`, `lmbda=1` and `temperature=1`. The default of `beta` is 0.5 in
            `GKDTrainer` and 1.0 in `DistillationTrainer`. `GKDTrainer` divides by the number of
            labels in the dataset, so the scale of its loss can differ from the scale in
            `DistillationTrainer`. For all other trainers, write the training loop yourself with
            `sp.shard` and `sp.total`.

    Raises:
        TypeError: if `base` is not a Trainer.
        ValueError: if `base` is, or is derived from, another trainer of TRL.
        ImportError: if transformers or accelerate is not installed.
    """
    for package in ("transformers", "accelerate"):
        require(package, "huggingface.trainer")
    from transformers import Trainer

    TRAINER.check()
    if not (isinstance(base, type) and issubclass(base, Trainer)):
        raise TypeError(f"base must be transformers.Trainer or a subclass of it, got {base!r}")
    of_trl = [kind for kind in base.__mro__ if kind.__module__.split(".")[0] == "trl"]
    known = next((kind for kind in of_trl if kind.__name__ in _OF_TRL), None)
    others = [kind for kind in of_trl if kind not in (known.__mro__ if known else ())]
    unknown = [kind for kind in others if kind.__name__[0] != "_"]
    if unknown:
        listed = ", ".join(f"trl's {name}" for name in _OF_TRL)
        expected = f"transformers.Trainer, transformers.Seq2SeqTrainer, {listed} or a subclass"
        way_out = "for its loss write a loop with sp.shard and sp.total, as in the guide's GRPO"
        raise ValueError(f"base must be {expected}, got TRL's {unknown[0].__name__}: {way_out}")
    made: type = type("Trainer", (OverRanks, Trainer), {"__doc__": Trainer.__doc__})
    if known is not None:
        made = type(known.__name__, (_OF_TRL[known.__name__], known, made), {})
    bases = (made,) if base in (Trainer, known) else (base, made)
    return type(base.__name__, bases, {"__doc__": base.__doc__})
