"""An enabled model is compared with the same model on one rank, as the guide says."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqpar import Layout, parity

pytest.importorskip("transformers")

from seqpar.integrations import huggingface
from tests.support import huggingface as hf


def documents(kind):
    """The document borders of a batch without its padding."""
    of = hf.batch(kind)
    if kind == "packed":
        return np.r_[0, np.cumsum(hf.LENGTHS)]
    lengths = of.get("attention_mask", torch.ones_like(of["input_ids"])).sum(1)
    return np.r_[0, lengths.cumsum(0).numpy()]


def one_rank(folder, kind):
    model = hf.tiny("LlamaForCausalLM")
    with parity.record(folder, model):
        # With a cache, transformers lets documents attend to each other.
        model(**hf.batch(kind), use_cache=False).loss.backward()


def enabled(group, folder, kind, averages, wrapper=""):
    model = hf.tiny("LlamaForCausalLM")
    network = model
    if wrapper == "DDP":
        network = DistributedDataParallel(model, process_group=group)
    elif wrapper == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        network = fully_shard(model, mesh=mesh)
    elif wrapper == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif wrapper == "compile":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    sp = huggingface.enable(network, group, "ring")
    layout = Layout.zigzag(documents(kind), group.size(), equal=True)
    part = sp.shard(hf.batch(kind), layout)
    with parity.record(folder, network, group, layout=layout):
        network(**part).loss.backward()
        if averages:
            sp.average_gradients()
    sp.disable()


@pytest.mark.filterwarnings("ignore")  # transformers' and Dynamo's own
@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("padded", ""),
        ("packed", ""),
        ("padded", "DDP"),
        ("packed", "FSDP2"),
        ("padded", "checkpointing"),
        ("packed", "compile"),
    ],
)
def test_an_enabled_model_agrees_with_one_rank(pool, tmp_path, kind, wrapper):
    one_rank(tmp_path / "one", kind)
    pool(2, enabled, tmp_path / "two", kind, True, wrapper)
    report = parity.compare(tmp_path / "one", tmp_path / "two")
    assert report.first is None, str(report)
    assert {"output", "loss", "gradient of output", "gradient"} <= {
        x.stage for x in report.findings
    }


def test_gradients_that_are_not_averaged_are_named(pool, tmp_path):
    one_rank(tmp_path / "one", "padded")
    pool(2, enabled, tmp_path / "two", "padded", False)
    report = parity.compare(tmp_path / "one", tmp_path / "two")
    assert report.first.stage == "gradient"
    assert report.diagnosis.startswith("Gradients are those of a rank's tokens only"), str(report)
