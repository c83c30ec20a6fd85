"""Models with recurrent layers on real ranks: under DDP and FSDP2, and on a mesh."""

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import device_mesh
from tests.support.tiers import few_rows
from tests.unit.integrations.huggingface.test_families import build

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
FAMILY = "causal/qwen3_next"


def on_rank(group, how, before):
    """Loss, logits and gradients of a rank, of a model enabled before it is wrapped or after."""
    model = outer = build(FAMILY)
    sp = huggingface.enable(model, group) if before else None
    if how == "DDP":
        outer = DistributedDataParallel(model, process_group=group)
    elif how == "FSDP2":  # also of a recurrent layer alone, whose class is then another
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.model.layers[0].linear_attn, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        outer = fully_shard(model, mesh=mesh)
    sp = sp or huggingface.enable(outer, group)
    outputs = outer(**sp.shard(hf.batch("padded")))
    outputs.loss.backward()
    sp.average_gradients()
    found = {
        name: x.full_tensor() if how == "FSDP2" else x for name, x in hf.gradients(model).items()
    }
    return outputs.loss.detach(), sp.unshard(outputs.logits).detach(), found


@pytest.mark.composes(
    "transformers",
    "models with recurrent layers, under DDP and FSDP2",
    context=2,
    FSDP=2,
    equal="loss, logits and gradients",
)
@few_rows()
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["none", "DDP", "FSDP2"])
def test_gradients_are_right_whatever_averages_them(pool, how, before):
    of = hf.batch("padded")
    hf.assert_same(pool(2, on_rank, how, before), hf.unmodified(build(FAMILY), of), hf.real(of))


def on_mesh(group):
    mesh = device_mesh(2, 2, names=("outer", "inner"))
    return hf.on_rank(mesh, build(FAMILY), hf.batch("packed"), "usp")


def test_beside_attention_on_a_mesh(pool):
    of = hf.batch("packed")
    hf.assert_same(pool(4, on_mesh), hf.unmodified(build(FAMILY), of), hf.real(of))
