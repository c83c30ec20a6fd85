# torchrun --nproc-per-node 2 examples/swap_in.py (no GPU needed)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange

import seqpar


class Block(torch.nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(dim) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, dim)
        )
        self.heads = heads

    def forward(self, x):  # (batch, tokens, dim)
        qkv = self.qkv(self.norms[0](x))
        q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(rearrange(out, "b h t d -> b t (h d)"))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, vocabulary=64, dim=64, heads=4, layers=2, length=256):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, dim)
        self.places = torch.nn.Embedding(length, dim)
        self.blocks = torch.nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.head = torch.nn.Linear(dim, vocabulary)

    def forward(self, ids, positions):  # (batch, tokens) and (tokens,)
        return self.head(self.blocks(self.tokens(ids) + self.places(positions)))


def loss_of(model, ids, positions, labels, count):
    logits = model(ids, positions).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count


device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.device_count() > 1 else None
if device:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device else "gloo", device_id=device)
torch.manual_seed(0)  # the same model and batch on every rank
torch.set_default_device(device)
model, ids, positions = Model(), torch.randint(64, (2, 256)), torch.arange(256)
labels = seqpar.shift_labels(ids, 256)
batch = [ids, positions, labels]
loss_of(model, *batch, 2 * 255).backward()
expected = [p.grad for p in model.parameters()]
model.zero_grad(set_to_none=True)

layout = seqpar.Layout.zigzag(256, dist.get_world_size())
sharded = {"buffers": batch, "buffer_seq_dims": [1, 0, 1]}
with seqpar.context_parallel(dist.group.WORLD, layout, "ring", **sharded):  # the one line
    loss_of(model, *batch, 2 * 255).backward()

for p in model.parameters():
    dist.all_reduce(p.grad)
error = max((p.grad - q).abs().max() for p, q in zip(model.parameters(), expected, strict=True))
print(f"rank {dist.get_rank()}: {layout.tokens_on(dist.get_rank())} of 256 tokens, {error=:.1e}")
assert error < 1e-5
dist.barrier()
dist.destroy_process_group()
