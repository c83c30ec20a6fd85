"""Lean training of transformers models under DDP and FSDP2, on real ranks."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.memory import blocks, head
from tests.support import huggingface as hf

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def wrapped(model, group, how):
    if how == "DDP":
        return DistributedDataParallel(model, process_group=group)
    if how == "DDP, unused":
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if how == "FSDP2, head apart":
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@mock.patch.object(head, "CHUNK", 5)
@mock.patch.object(blocks, "CHUNK", 5)
def on_rank(group, how, before):
    """Loss and gradients of a rank, of a lean model enabled before it is wrapped or after."""
    model = hf.tiny("Qwen3ForCausalLM")
    sp = huggingface.enable(model, group, memory="lean") if before else None
    outer = wrapped(model, group, how)
    sp = sp or huggingface.enable(outer, group, memory="lean")
    loss = outer(**sp.shard(hf.batch("padded"))).loss
    loss.backward()
    sp.average_gradients()
    found = hf.gradients(model)
    if how.startswith("FSDP2"):
        found = {name: x.full_tensor() for name, x in found.items()}
    sp.disable()
    return loss.detach(), found


@pytest.mark.composes(
    "transformers",
    '`memory="lean"` under DDP and FSDP2',
    context=2,
    FSDP=2,
    equal="loss and gradients",
)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["DDP", "DDP, unused", "FSDP2", "FSDP2, head apart"])
def test_wrapped_lean_models_have_the_gradients_of_one_process(pool, how, before):
    loss, _, gradients = hf.unmodified(hf.tiny("Qwen3ForCausalLM"), hf.batch("padded"))
    for found in pool(2, on_rank, how, before):
        torch.testing.assert_close(found[0], loss, rtol=2e-5, atol=2e-5)
        assert found[1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            scale = max(float(gradient.abs().max()), 1e-3)
            torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=2e-5 * scale)
