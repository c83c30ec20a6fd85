# torchrun --nproc-per-node 2 examples/quickstart.py (no GPU needed)
import torch
import torch.distributed as dist
import torch.nn.functional as F

import seqpar

device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.device_count() > 1 else None
if device:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device else "gloo", device_id=device)
group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same batch on every rank
q, k, v = torch.randn(3, 1024, 8, 64, device=device)  # (tokens, heads, head_dim) each
layout = seqpar.Layout.zigzag(1024, ranks)  # which tokens each rank holds
attn = seqpar.make_attention("ring", group)  # or "ulysses", "all_gather", "token_ring"

local = [layout.shard(x, rank) for x in (q, k, v)]  # (1024 / ranks, 8, 64)
out = layout.unshard(attn(*local, layout, causal=True), group)
heads_first = (x.transpose(0, 1) for x in (q, k, v))
expected = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)
print(f"rank {rank}: {len(local[0])} of 1024 tokens, error {(out - expected).abs().max():.1e}")
dist.barrier()
dist.destroy_process_group()
