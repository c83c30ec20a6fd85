# torchrun --nproc-per-node 2 examples/automodel_packed.py (no GPU needed; needs nemo-automodel)
"""Train on packed documents with NeMo Automodel's context parallelism and a strategy of seqpar.

This is the part of Automodel's recipe that computes a step, on a tiny model.
"""

import argparse

import torch
import torch.distributed as dist
import transformers
from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from seqpar.integrations import automodel

STEPS = 4
LENGTHS = (17, 1, 40, 29)  # tokens of each document: no multiples of the number of ranks


def make_model():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.set_seed(0)  # the same weights on every rank
    return transformers.LlamaForCausalLM(config)


def packed(step):
    """Return a packed batch as Automodel's collator makes it. Labels are shifted already."""
    ids = torch.cat([(torch.arange(n + 1) * (step + 1) + n) % 64 for n in LENGTHS])
    ends = torch.tensor(LENGTHS).cumsum(0) + torch.arange(1, len(LENGTHS) + 1) - 1
    kept = torch.ones(len(ids), dtype=torch.bool)
    kept[ends] = False  # the last token of a document is only a label
    return {
        "input_ids": ids[kept][None],
        "labels": ids[1:][kept[:-1]][None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "seq_lens": torch.tensor([LENGTHS]),
        "seq_lens_padded": torch.tensor([LENGTHS]),
        "qkv_format": "thd",
    }


def train(mesh, strategy):
    """Train on the ranks of the mesh's dimension "cp". Returns each step's loss."""
    ranks, group = mesh["cp"].size(), mesh["cp"].get_group()
    model = make_model()
    automodel.enable(model, mesh, strategy)
    fully_shard(model, mesh=mesh["cp"])  # Automodel's default; it averages gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(STEPS):
        batch = packed(step)
        count = (batch["labels"] != -100).sum()
        context, part = ContextParallelSharder(model, mesh, batch).shard(batch)
        labels = part.pop("labels")
        with context():
            logits = model(**part).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / count
            (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(float(total))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ring", help="as in seqpar.make_attention")
    strategy = parser.parse_args().strategy
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    losses = train(mesh, strategy)
    print(f"rank {dist.get_rank()}: " + " ".join(f"{x:.4f}" for x in losses))
    dist.destroy_process_group()
