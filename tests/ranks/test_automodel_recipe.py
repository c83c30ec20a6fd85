"""A step of Automodel's own recipe, on the real package: one process's loss and gradients."""

import copy
import types

import pytest
import torch

from tests.support import automodel
from tests.support import huggingface as hf
from tests.support.ranks import device_mesh

pytest.importorskip(
    "nemo_automodel.recipes.llm.train_ft",
    reason="nemo-automodel is not installed",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # Automodel's own
LENGTHS = (9, 1, 11)


def packed():
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, hf.VOCABULARY, (2, 1, sum(LENGTHS)), generator=generator)
    labels[0, 4] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "seq_lens": torch.tensor([LENGTHS]),
        "seq_lens_padded": torch.tensor([LENGTHS]),
        "qkv_format": "thd",
    }


def build():
    """Automodel's own Llama."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from transformers import LlamaConfig

    torch.manual_seed(0)
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False)
    model = LlamaForCausalLM(LlamaConfig(**hf.SIZES), backend=backend).float()
    model.supports = types.SimpleNamespace(mtp_enabled=False)
    return model.train()


def step(model, mesh, batch, count):
    """Run the recipe's forward and backward of one batch; return the loss of this rank."""
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction as R

    ranks = 1 if mesh is None else mesh["cp"].size()
    recipe = types.SimpleNamespace(
        dist_env=types.SimpleNamespace(device=torch.device("cpu")),
        loss_fn=MaskedCrossEntropy(),
        pp_enabled=False,
        model_parts=[model],
        device_mesh=mesh,
        tokenizer=None,
        domain_mixture=None,
        te_fp8=None,
        distributed_config=None,
        _get_cp_group_size=lambda: ranks,
        _get_dp_group_size=lambda include_cp=False: 1,
    )
    losses = []
    R._forward_backward_step(
        recipe, 0, dict(batch), loss_buffer=losses, num_label_tokens=count, num_batches=1
    )
    return losses[0]


def alone(model):
    """The loss and the gradients of the recipe's steps with each document by itself."""
    model, batch = copy.deepcopy(model), packed()
    count, total = int((batch["labels"] != -100).sum()), 0.0
    for part in torch.arange(sum(LENGTHS)).split(LENGTHS):
        document = {x: batch[x][:, part] for x in ("input_ids", "labels", "position_ids")}
        total += float(step(model, None, document, count))
    return total, hf.gradients(model)


def on_rank(group):
    """The losses, and the largest difference of a gradient from one process."""
    _, integration = automodel.contract()
    model = build()
    mesh = device_mesh(2, 2, names=("dp", "cp"))
    expected, gradients = alone(model)
    batch = packed()
    integration.enable(model, mesh, "ring")
    loss = step(model, mesh, batch, int((batch["labels"] != -100).sum()))
    torch.distributed.all_reduce(loss, group=mesh["cp"].get_group())
    worst = 0.0
    for name, p in model.named_parameters():
        torch.distributed.all_reduce(p.grad, group=mesh["cp"].get_group())
        scale = gradients[name].abs().max()
        worst = max(worst, float((p.grad - gradients[name]).abs().max() / scale))
    return float(loss), expected, worst


@pytest.mark.exhaustive
def test_a_step_of_the_recipe_with_automodels_own_llama(pool):
    for loss, expected, worst in pool(4, on_rank):
        assert loss == pytest.approx(expected, rel=1e-6) and worst < 2e-5
