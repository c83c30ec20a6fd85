# torchrun --nproc-per-node 2 examples/megatron_gpt.py (no GPU needed)
"""Train Megatron-Core's GPT on packed documents, whose tokens are divided among ranks.

4 processes form two context-parallel groups, or one group with --context 4. It needs megatron-core.
"""

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.nn.parallel import DistributedDataParallel

from seqpar.integrations import megatron

STEPS = 4
ROWS = 4  # of a batch, over all ranks of data parallelism
DOCUMENTS = [0, 11, 50, 64]  # where the documents of a row begin, and where the last one ends
TOKENS = DOCUMENTS[-1]


def make_model(context, strategy):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        context_parallel_size=context,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = megatron.sequence_parallel(get_gpt_layer_local_spec(), strategy)
    torch.manual_seed(0)  # the same weights on every rank
    return GPTModel(config, spec, 64, TOKENS, position_embedding_type="learned_absolute")


def batch(row, group):
    """Return this rank's tokens of a row; each token id is one more than the one before, mod 64."""
    ids = (torch.arange(TOKENS) + 7 * row)[None] % 64
    starts, stops = torch.tensor(DOCUMENTS[:-1]), torch.tensor(DOCUMENTS[1:])
    positions = torch.arange(TOKENS) - torch.repeat_interleave(starts, stops - starts)
    loss_mask = torch.ones(1, TOKENS)
    loss_mask[:, stops - 1] = 0  # the last token of a document predicts nothing
    row = {"tokens": ids, "labels": (ids + 1) % 64, "loss_mask": loss_mask}
    row["position_ids"] = positions[None]
    return get_batch_on_this_cp_rank(row, is_hybrid_cp=False, cp_group=group)


def train(context, strategy="ring"):
    """Train with this number of ranks for each row. Returns each step's loss."""
    parallel_state.initialize_model_parallel(context_parallel_size=context)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = make_model(context, strategy).to(device)
    model = DistributedDataParallel(model, process_group=everyone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32)
    count = ROWS * (TOKENS - len(DOCUMENTS) + 1)
    replica, replicas = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for i in range(replica, ROWS, replicas):
            row = batch(ROWS * step + i, parallel_state.get_context_parallel_group())
            row = {name: x.to(device) for name, x in row.items()}
            packed = PackedSeqParams(
                qkv_format="sbhd",  # Megatron deals rows, so documents may have any length
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=TOKENS,
                max_seqlen_kv=TOKENS,
            )
            loss = model(
                row["tokens"],
                row["position_ids"],
                None,
                labels=row["labels"],
                packed_seq_params=packed,
            )
            loss = (loss * row["loss_mask"]).sum() / count
            (loss * everyone.size()).backward()  # DDP averages over all ranks
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=everyone)
        losses.append(total.item())
    parallel_state.destroy_model_parallel()
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=2, help="ranks that share a row")
    parser.add_argument("--strategy", default="ring")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(dist.get_node_local_rank()))
    dist.init_process_group()
    losses = train(arguments.context, arguments.strategy)
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
