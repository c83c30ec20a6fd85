"""One rank is recorded for all whose programs are equal but for their peers."""

import dataclasses

import pytest
import torch

from seqpar import Layout
from seqpar.balance import Model
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.recording.program import Compute, SoftmaxCompute
from seqpar.simulate.steps import recorded_layers
from seqpar.simulate.steps.recorded_layers import Attending, ranks_alike
from tests.support.tiers import few_rows
from tests.unit.simulate.steps.test_training_step import MODEL

EVEN = Layout.zigzag([0, 5000, 9000, 8 * 2048], 8)
UNEVEN = Layout.contiguous([0, 5001, 9000, 8 * 2048 - 3], 8)
ROWS = Layout.from_spans([[(i // 2, i % 2 * 64, i % 2 * 64 + 64)] for i in range(8)],
                         [0, 128, 256, 384, 512])  # fmt: skip


def plain(action):
    """Return an action as values that can be compared."""
    if isinstance(action, Compute) and isinstance(action.work, SoftmaxCompute):
        tasks = action.work.tasks
        arrays = [getattr(tasks, x.name).tolist() for x in dataclasses.fields(tasks)]
        return arrays, action.work[1:], action.what, action.step, action.area
    return repr(action)


@few_rows()
@pytest.mark.parametrize("layout", [EVEN, ROWS], ids=["packed", "whole documents"])
@pytest.mark.parametrize(
    ("strategy", "mesh", "alike"),
    [("ulysses", None, 4), ("usp", (4, 2), 2), ("usp", (2, 4), 4), ("ring", None, 1)],
)
@pytest.mark.parametrize("ordered", [True, False])
def test_shared_programs_equal_recorded_ones(monkeypatch, layout, strategy, mesh, alike, ordered):
    model = MODEL
    ranks = layout.ranks
    if strategy == "ulysses":  # of 4 KV heads
        model = dataclasses.replace(MODEL, heads=8, kv_heads=8)
        alike = 8
    attending = Attending(model, model.layers[0], torch.bfloat16, "all_gather")
    candidate = Candidate(strategy, mesh)
    arguments = candidate, layout, attending, True, ordered, tuple(range(ranks))
    assert ranks_alike(candidate, layout, model) == alike
    shared = recorded_layers.record_attention(*arguments)
    monkeypatch.setattr(recorded_layers, "ranks_alike", lambda *_: 1)
    for one, other in zip(shared, recorded_layers.record_attention(*arguments), strict=True):
        assert [*map(plain, one.actions)] == [*map(plain, other.actions)]
        assert one.peak_bytes == other.peak_bytes and one.sent_bytes == other.sent_bytes


@pytest.mark.parametrize(
    ("strategy", "mesh", "layout", "model"),
    [
        ("ulysses", None, UNEVEN, dataclasses.replace(MODEL, kv_heads=8)),
        ("ulysses", None, EVEN, MODEL),  # 4 KV heads on 8 ranks
        ("usp", (4, 2), UNEVEN, MODEL),
        ("mesh", (4, 2), EVEN, MODEL),
        ("all_gather", None, EVEN, Model.preset("llama-8b")),
    ],
)
def test_unequal_ranks_are_recorded_apart(strategy, mesh, layout, model):
    assert ranks_alike(Candidate(strategy, mesh), layout, model) == 1
