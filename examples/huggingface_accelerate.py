# torchrun --nproc-per-node 2 examples/huggingface_accelerate.py (no GPU needed)
"""Train with accelerate. The tokens of each sample are divided among the ranks of a group.

Different groups read different batches. 4 processes form two groups, or one group with --ranks 4.
"""

import argparse
import contextlib
import itertools

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import init_device_mesh

from seqpar.integrations import huggingface

STEPS = 4
ACCUMULATE = 2  # batches per step
BATCH = 4  # samples per batch of all groups


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


def samples():
    """Return samples of many lengths; each token id is one more than the previous one, mod 64."""
    lengths = [17 + 11 * i % 40 for i in range(STEPS * ACCUMULATE * BATCH)]
    return [{"input_ids": [(i + j) % 64 for j in range(n)]} for i, n in enumerate(lengths)]


def train(ranks):
    """Train on groups of this number of ranks. Returns each step's loss, and the model."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    groups = accelerator.num_processes // ranks
    shape = {"mesh_shape": (groups, ranks), "mesh_dim_names": ("dp", "sp")}
    mesh = init_device_mesh(accelerator.device.type, **shape)
    model = make_model()
    sp = huggingface.enable(model, mesh["sp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    collator = huggingface.Collator()
    loader = torch.utils.data.DataLoader(samples(), BATCH // groups, collate_fn=collator)
    loader = prepare_data_loader(  # accelerator.prepare would give each rank different batches
        loader,
        accelerator.device,
        num_processes=groups,
        process_index=mesh["dp"].get_local_rank(),
        put_on_device=True,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    batches, losses = iter(loader), []
    while step := list(itertools.islice(batches, ACCUMULATE)):
        labels = torch.tensor(sum(sp.count_labels(batch) for batch in step))
        labels = labels.to(accelerator.device)
        dist.all_reduce(labels, group=mesh["dp"].get_group())
        total = torch.zeros((), device=accelerator.device)
        for i, batch in enumerate(step):
            last = i + 1 == len(step)
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                loss = model(**sp.shard(batch), num_items_in_batch=labels).loss
                accelerator.backward(loss * groups)  # DDP averages over groups
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        losses.append(float(total))
    return losses, accelerator.unwrap_model(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks per group")
    losses, _ = train(parser.parse_args().ranks)
    print(f"rank {dist.get_rank()}: " + " ".join(f"{x:.4f}" for x in losses))
    dist.barrier()
    dist.destroy_process_group()
