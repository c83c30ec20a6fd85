"""What `steps` refuses, and what its checkpoints keep."""

import sys
import threading

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from seqpar.elastic.messages import Place
from seqpar.elastic.steps import _Checkpoint, steps
from tests.support.fakes import fake_group
from tests.support.ranks import VirtualComm, virtual


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


@pytest.mark.parametrize("kind", ["empty", "cut", "another program's"])
def test_a_damaged_file_is_named(tmp_path, kind):
    path = tmp_path / "checkpoint"
    _Checkpoint.of(7, states(0)).write(path)
    whole = path.read_bytes()
    if kind == "another program's":
        torch.save(states(0)["model"].state_dict(), path)
    else:
        path.write_bytes(whole[: len(whole) // 2] if kind == "cut" else b"")
    with pytest.raises(ValueError, match=r"^path must be a whole checkpoint .* move") as caught:
        _Checkpoint.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kept", [["model"], ["model", "optimizer", "scheduler"]])
def test_a_checkpoint_of_other_states_is_refused(kept):
    some = states(0) | {"scheduler": torch.nn.Linear(1, 1)}
    checkpoint = _Checkpoint.of(7, {name: some[name] for name in kept})
    with pytest.raises(ValueError, match=r"^build must return states named .* a different path$"):
        checkpoint.restore(states(1))


def test_a_new_file_is_on_disk_first(tmp_path, monkeypatch, caplog):
    path = tmp_path / "checkpoint"
    _Checkpoint.of(1, states(0)).write(path)

    def fail(number):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    _Checkpoint.of(2, states(0)).write(path)
    assert "the checkpoint after 2 steps was not written: no space left" in caplog.text
    assert _Checkpoint.read(path).finished == 1


def test_all_ranks_start_with_rank_0s_states(monkeypatch):
    """`build` makes other weights on each rank, as it does without a seed."""
    comms = {}
    module = sys.modules[steps.__module__]  # `seqpar.elastic.steps` is the function
    monkeypatch.setattr(module, "_rendezvous", lambda: Rendezvous(own.rank))
    monkeypatch.setattr(module, "join", lambda store, name, rank, *_: comms[rank])
    monkeypatch.setattr(module, "leave", lambda failed=False: None)
    monkeypatch.setattr(VirtualComm, "process_group", property(lambda comm: comm))
    own = threading.local()

    def build(comm):
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, comm.rank + 5)
        return {"model": model}, lambda number: model.weight.detach().clone()

    def run(comm):
        own.rank = comm.rank
        comms[comm.rank] = comm
        return list(steps(build, 2))

    for results in virtual(3, run):
        assert [number for number, _ in results] == [0, 1]
        assert all(torch.equal(weight, torch.full((2, 3), 5.0)) for _, weight in results)


class Rendezvous:
    """One of three processes, which form a group once."""

    def __init__(self, rank):
        self._places = [Place("", 1, rank, 3), Place("done")]

    def place(self, report):
        return self._places.pop(0)

    def regroups(self, report):
        return False

    def store(self, place):
        return None

    def close(self): ...


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
