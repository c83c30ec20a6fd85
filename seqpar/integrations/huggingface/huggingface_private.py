"""The private names of transformers, accelerate and TRL that seqpar uses, each with a reason.

If a library renames such a name, the first use raises a RuntimeError.
"""

from __future__ import annotations

from typing import Any

from seqpar.core.private_names import PrivateNames, Use

TRANSFORMERS = PrivateNames(
    "transformers",
    names={
        "transformers.PreTrainedConfig._attn_implementation": Use(
            "5.0", "to know and to name the attention that a model calls"
        ),
    },
    attributes={
        "_attn_implementation_internal": Use(
            "5.0", "where a config keeps the name, which copies of the config keep apart"
        ),
        "_experts_implementation_internal": Use("5.0", "the same for a model's experts"),
        "_loss_function": Use(
            "5.0",
            "to refuse a model whose user has set another loss",
            named_in="transformers.PreTrainedModel.loss_function.fset",
        ),
    },
)
CHECKPOINTED = PrivateNames(
    "transformers",
    names={
        "transformers.PreTrainedModel._set_gradient_checkpointing": Use(
            "5.0", "to know that blocks call the function below"
        ),
    },
    attributes={
        "gradient_checkpointing": Use("5.0", "whether a block calls the function below"),
        "_gradient_checkpointing_func": Use(
            "5.0",
            "the function by which a block is checkpointed",
            named_in="transformers.PreTrainedModel._set_gradient_checkpointing",
        ),
    },
)
TRAINER = PrivateNames(
    "transformers",
    names={
        "transformers.Trainer._get_dataloader": Use(
            "5.0", "it is overridden to know loaders for evaluation"
        ),
        "transformers.Trainer._get_num_items_in_batch": Use(
            "5.0", "it is overridden to count the labels of all ranks"
        ),
        "transformers.Trainer._prepare_context_parallel_inputs": Use(
            "5.0", "it is overridden, because it would cut batches for torch's own attention"
        ),
        "transformers.Trainer._set_signature_columns_if_needed": Use(
            "5.0", "it is overridden to keep columns that a `Collator` reads"
        ),
    },
    attributes={
        "_loss_shifts_labels": Use("5.23", "to count the labels that transformers counts"),
        "_signature_columns": Use("5.0", "the columns that a Trainer keeps"),
    },
)
ACCELERATE = PrivateNames(
    "accelerate",
    names={},
    attributes={
        "_dataloaders": Use("1.0", "the list of prepared loaders, whose state is saved"),
        "_is_accelerate_prepared": Use(
            "1.0",
            "to prepare each loader once, and a model again that was only evaluated",
            named_in="accelerate.Accelerator.prepare_data_loader",
        ),
    },
)
TRL = PrivateNames(
    "trl",
    names={},
    attributes={
        "_is_vlm": Use(
            "1.16", "to refuse completions with images", named_in="trl.GRPOTrainer.__init__"
        ),
        "_metrics": Use("1.16", "the metrics that an SFTTrainer logs"),
        "_total_train_tokens": Use("1.16", "the number of tokens among these metrics"),
    },
)


def attention_of(config: Any) -> str | None:
    TRANSFORMERS.get("transformers.PreTrainedConfig._attn_implementation")
    return getattr(config, "_attn_implementation", None)


def set_attention(config: Any, name: str) -> None:
    """Set the name of the attention function in a config that transformers' own method leaves
    unchanged.
    """
    TRANSFORMERS.get("transformers.PreTrainedConfig._attn_implementation")
    config._attn_implementation = name


def kept_implementations(config: Any) -> set[str]:
    names = {"_attn_implementation_internal", "_experts_implementation_internal"}
    for name in names:
        TRANSFORMERS.read(config, name)
    return names


def is_prepared(x: Any) -> bool:
    return bool(ACCELERATE.read_if_set(x, "_is_accelerate_prepared", False))


def forget_prepared(model: Any) -> None:
    model._is_accelerate_prepared = False
