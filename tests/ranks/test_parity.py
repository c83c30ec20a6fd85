"""Recordings of ranks are compared with one process: agreement, and faults by their names."""

import dataclasses

import pytest
import torch

from seqpar import parity
from tests.support.parity import Run, step


def compared(pool, folder, run, ranks=None):
    """The report on one process and on ranks."""
    step(None, folder / "one", dataclasses.replace(run, cp=1, fault=""))
    pool(ranks or run.cp, step, folder / "many", run)
    return parity.compare(folder / "one", folder / "many")


RIGHT = {
    "contiguous": Run(2),
    "head_tail": Run(2, order="head_tail", dtype=torch.float64),
    "striped": Run(4, order="striped"),
    "bf16": Run(2, order="head_tail", dtype=torch.bfloat16),
    "documents and a window": Run(2, documents=(7, 30), window=9),
    "padding": Run(2, padded=5, causal=False),
    "order found": Run(2, order="head_tail", states=False),
    "Adam": Run(2, optimizer="AdamW"),
    "prompt": Run(2, unlabelled=15),
    "experts and tied weights": Run(2, experts=4, tied=True),
    # Documents are not separated, but there is one only; each rank has as many labels as the other.
    "one document": Run(2, "leak", rows=1),
    "equal numbers of labels": Run(2, "local divisor", order="striped", unlabelled=15),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_run_on_ranks_agrees(pool, tmp_path, name):
    report = compared(pool, tmp_path, RIGHT[name])
    assert report.first is None and report.diagnosis is None, str(report)
    assert any(x.error > 0 for x in report.findings)  # rounding differs: something was compared


def test_replicas_with_other_rows_agree(pool, tmp_path):
    report = compared(pool, tmp_path, Run(2), ranks=4)
    assert report.first is None, str(report)


FAULTS = [
    (Run(2, "positions"), "input", "Positions differ from a rank border on: token 24"),
    (
        Run(2, "counted positions"),
        "output",
        "Positions differ from a rank border on: token 24, on rank 1, gets from rotary",
    ),
    (Run(2, "leak", documents=(7, 30)), "output", "Documents leak into each other"),
    (Run(2, "window", window=9), "output", "A window is missing"),
    (Run(2, "shift"), "label", "Labels are shifted within shards: token 23"),
    (Run(2, "shift", order="head_tail"), "label", "Labels are shifted within shards: token 11"),
    (Run(2, "local divisor", unlabelled=15), "loss", "The loss is divided by local tokens"),
    (
        Run(2, "local divisor", unlabelled=15, dtype=torch.bfloat16),
        "gradient of output",
        "The loss is divided by local tokens: each rank of many divides by its own number of labels"
        " (18, 46) instead of by 64.",
    ),
    (Run(2, "sum"), "gradient", "Gradients are scaled by the number of ranks: all are 2 times"),
    (Run(2, "no average"), "gradient", "Gradients are those of a rank's tokens only"),
    (Run(2, "own gradients"), "gradient of output", "Gradients of a rank's tokens only"),
    (
        Run(2, "own gradients", order="head_tail"),
        "gradient of output",
        "Gradients of a rank's tokens only",
    ),
    (Run(2, "own keys"), "output", "Tokens differ from a rank border on"),
    (Run(2, "scale", documents=(7, 30)), "output", "Attention differs: in blocks.0.attention.out"),
    (Run(2, "padding", padded=5), "output", "Padding is attended to"),
    (Run(2, "dropout", dropout=0.2), "output", "Dropout: blocks.0.mlp.dropout"),
    (Run(2, "tied twice", tied=True), "gradient", "A tied weight is counted twice"),
    (Run(2, "weights"), "weight before", "Different weights at the start: blocks.1.mlp.up.weight"),
    (Run(2, "routing", experts=4), "output", "MoE routing differs from rounding"),
    (Run(2, "wrong experts", experts=4), "output", None),
    (Run(4, "one rank"), "output", "Only one rank differs: all tokens of rank 2"),
]


@pytest.mark.parametrize(
    ("run", "stage", "expected"), FAULTS, ids=[f"{x.fault} {x.order}" for x, *_ in FAULTS]
)
def test_a_planted_fault_is_named(pool, tmp_path, run, stage, expected):
    """The first difference is where the fault is, and no other fault is named."""
    report = compared(pool, tmp_path, run)
    assert report.first is not None and report.first.stage == stage, str(report)
    if expected is None:
        assert report.diagnosis is None
    else:
        assert report.diagnosis is not None and report.diagnosis.startswith(expected), str(report)


@pytest.mark.parametrize("rows", [2, 1])
def test_a_factor_of_ranks_that_share_a_sequence_is_named(pool, tmp_path, rows):
    """2 replicas of 2 ranks each average over replicas only, after a loss that counts 4 ranks.

    If the batch has one row, the first replica has none.
    """
    report = compared(pool, tmp_path, Run(2, "times cp", rows=rows), ranks=4)
    expected = "Gradients are scaled by the number of ranks that share a sequence: all are 2 times"
    assert report.diagnosis is not None and report.diagnosis.startswith(expected), str(report)


PUBLIC = {
    # Attention that has no argument for borders gets a packed sequence; positions are right.
    "axolotl#3867": (
        Run(2, "leak", rows=1, documents=(5, 11, 24, 40)),
        "Documents leak into each other: in blocks.0.attention.out, every document but the first",
    ),
    # Ranks hold different labels, whose sum over ranks is divided once more by the ranks' number.
    "transformers#46775": (
        Run(2, "divided twice"),
        "The loss is scaled by the number of ranks that share a sequence: it is 2 times that of "
        "one, because it is divided by 47 instead of by 94. Gradients differ as a consequence.",
    ),
    # A window's mask is replaced by a causal one.
    "accelerate#4177": (
        Run(2, "window", window=9),
        "A window is missing: in blocks.0.attention.out, the tokens from position 9",
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_fault_in_a_ring_written_by_hand_is_named(pool, tmp_path, name):
    run, expected = PUBLIC[name]
    report = compared(pool, tmp_path, run, ranks=4 if run.rows == 2 else 2)
    assert report.diagnosis is not None and report.diagnosis.startswith(expected), str(report)
