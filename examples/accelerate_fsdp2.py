# torchrun --nproc-per-node 4 examples/accelerate_fsdp2.py (4 GPUs: accelerate's FSDP2 needs them)
"""Train with accelerate's ParallelismConfig: 2 ranks share each sequence, and FSDP2 shards weights.

Other pairs of ranks read other batches. The weights are sharded over all ranks.
"""

import itertools

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig

from seqpar.integrations import accelerate, huggingface

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


def settings(ranks, groups):
    """Return the arguments of an Accelerator for groups of this number of ranks."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    sizes = ParallelismConfig(dp_shard_size=groups, cp_size=ranks)
    return {"parallelism_config": sizes, "fsdp_plugin": plugin}


def train(accelerator, strategy="ring"):
    """Train for some steps. Returns each step's loss, and the prepared model."""
    mesh = accelerate.sequence_mesh(accelerator)  # the one call that seqpar needs
    groups = accelerator.num_processes // mesh.size()
    model = make_model()
    sp = huggingface.enable(model, mesh, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    collator = huggingface.Collator()
    loader = torch.utils.data.DataLoader(samples(), BATCH // groups, collate_fn=collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, losses = iter(loader), []
    while step := list(itertools.islice(batches, ACCUMULATE)):
        labels = torch.tensor(sum(sp.count_labels(batch) for batch in step))
        labels = accelerator.reduce(labels.to(accelerator.device), "sum") // mesh.size()
        total = torch.zeros((), device=accelerator.device)
        for batch in step:
            loss = model(**sp.shard(batch), num_items_in_batch=labels).loss
            accelerator.backward(loss * groups)  # FSDP averages over groups
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "sum")) / mesh.size())
    return losses, model


if __name__ == "__main__":
    world = torch.cuda.device_count()
    losses, _ = train(Accelerator(**settings(ranks=2, groups=world // 2)))
    print(f"rank {dist.get_rank()}: " + " ".join(f"{x:.4f}" for x in losses))
    dist.barrier()
    dist.destroy_process_group()
