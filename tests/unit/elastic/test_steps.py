"""What `steps` refuses, and what its checkpoints keep."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from seqpar.elastic.steps import _Checkpoint, steps
from tests.support.fakes import fake_group


def states(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_checkpoint_keeps_models_and_optimizers(tmp_path):
    before, after, path = states(0), states(1), tmp_path / "checkpoint"
    kept = _Checkpoint.of(7, before)
    expected = before["model"].weight.clone()
    kept.write(path)
    with torch.no_grad():
        before["model"].weight.zero_()  # a checkpoint is a copy
    found = _Checkpoint.read(path)
    found.restore(after)
    assert found.finished == 7 and torch.equal(after["model"].weight, expected)
    for name, value in before["optimizer"].state_dict()["state"][0].items():
        assert torch.equal(after["optimizer"].state_dict()["state"][0][name], value)


def test_without_a_file_training_begins_at_zero(tmp_path):
    assert _Checkpoint.read(None) == _Checkpoint.read(tmp_path / "none") == _Checkpoint()


def test_states_that_cannot_be_read_are_refused():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
    with pytest.raises(ValueError, match=r"^states must have only tensors and plain values"):
        _Checkpoint.of(1, {"optimizer": optimizer}).check()


def test_an_unwritable_file_is_a_warning(tmp_path, caplog):
    _Checkpoint.of(1, states(0)).write(tmp_path / "no folder" / "checkpoint")
    assert "the checkpoint after 1 steps was not written" in caplog.text


def test_sharded_states_are_refused():
    with fake_group(rank=0, ranks=2):
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Linear(4, 4)
        x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
        model.weight = torch.nn.Parameter(x)
        with pytest.raises(ValueError, match=r"^states\['model'\] must not have DTensors"):
            _Checkpoint.of(1, {"model": model})


def test_steps_need_a_launcher_and_a_positive_interval(monkeypatch):
    monkeypatch.delenv("SEQPAR_ELASTIC", raising=False)
    with pytest.raises(ValueError, match=r"^every must be at least 1, got 0"):
        next(steps(None, 3, every=0))
    with pytest.raises(ValueError, match=r"^steps needs a launcher"):
        next(steps(None, 3))
