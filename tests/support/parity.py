"""A plain transformer on ranks that share its sequences, with faults that people often make.

Nothing here calls seqpar's attention. Keys and values travel around a ring that is written by hand.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqpar import parity
from tests.support.ranks import device_mesh

WIDTH, HEADS, VOCABULARY = 16, 2, 31


@dataclasses.dataclass(frozen=True)
class Run:
    """How some ranks run one step of the model.

    `cp` ranks share each sequence, and all ranks average their gradients. `fault` names what the
    run does wrong; it is empty for a correct run.
    """

    cp: int = 1
    fault: str = ""
    order: str = "contiguous"
    tokens: int = 48
    rows: int = 2
    documents: tuple = ()  # positions in each row where documents begin, without 0
    window: int = 10**6
    padded: int = 0  # the number of tokens of padding at the left of the last row
    causal: bool = True
    unlabelled: int = 0  # tokens at the start of each row that have no label, such as a prompt
    dtype: torch.dtype = torch.float32
    experts: int = 0
    dropout: float = 0.0
    tied: bool = False
    optimizer: str = "SGD"
    wrapper: str = ""  # DDP or FSDP2, which average the gradients; or none
    seed: int = 0
    states: bool = True  # whether `record` is told the order of tokens

    def positions(self, rank):
        """Return the positions in the whole sequence of a rank's tokens."""
        every = torch.arange(self.tokens)
        if self.order == "head_tail":
            chunks = every.chunk(2 * self.cp)
            return torch.cat([chunks[rank], chunks[2 * self.cp - 1 - rank]])
        return every[rank :: self.cp] if self.order == "striped" else every.chunk(self.cp)[rank]


class Ring(torch.autograd.Function):
    """Send each rank's tokens around the ring; return the tokens of all ranks in sequence order.

    Backward adds up the gradients of all ranks, unless it is faulty.
    """

    @staticmethod
    def forward(ctx, x, group, faulty):
        ctx.group, ctx.faulty = group, faulty
        members, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        ranks = len(members)
        parts = {rank: x.contiguous()}
        for hop in range(1, ranks):
            moving, arriving = parts[(rank - hop + 1) % ranks], torch.empty_like(x)
            sent = dist.isend(moving, members[(rank + 1) % ranks], group)
            dist.recv(arriving, members[(rank - 1) % ranks], group)
            sent.wait()
            parts[(rank - hop) % ranks] = arriving
        return torch.cat([parts[i] for i in range(ranks)], 1)

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.faulty:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        parts = gradient.chunk(dist.get_world_size(ctx.group), 1)
        return parts[dist.get_rank(ctx.group)], None, None


class Rotary(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.counts = run.fault == "counted positions"

    def forward(self, position_ids, dtype):
        if self.counts:  # a fault: positions are counted from 0 on each rank
            position_ids = torch.arange(position_ids.shape[1]).expand_as(position_ids)
        angles = position_ids[..., None] / 50.0 ** (torch.arange(WIDTH // HEADS // 2) / 4)
        return torch.cat([angles, angles], -1).cos().to(dtype), angles.sin().to(dtype)


class Attention(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.qkv, self.out, self.run = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), run

    def forward(self, x, rotary, mask, group):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        cos, sin = (part[:, :, None] for part in rotary)
        q, k = (self.rotate(part, cos, sin) for part in (q, k))
        if group is not None and self.run.fault != "own keys":
            faulty = self.run.fault == "own gradients"
            k, v = (Ring.apply(part, group, faulty) for part in (k, v))
        if self.run.fault == "own keys" and group is not None:
            own = slice(dist.get_rank(group) * q.shape[1], (dist.get_rank(group) + 1) * q.shape[1])
            mask = mask[:, :, own]
        scale = q.shape[-1] ** -0.5 * (1.1 if self.run.fault == "scale" else 1)
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
        weights = scores.masked_fill(~mask[:, None], -1e4).softmax(-1).to(v.dtype)
        weights = weights * mask[:, None]
        return self.out(torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2))

    @staticmethod
    def rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second * sin, first * sin], -1)


class Mlp(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.up, self.down, self.run = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), run
        self.dropout = nn.Dropout(run.dropout)

    def forward(self, x):
        x = self.dropout(self.down(F.silu(self.up(x))))
        faulty = self.run.fault == "one rank" and dist.is_initialized() and dist.get_rank() == 2
        return x * 1.01 if faulty else x


class Router(nn.Linear):
    faulty = False

    def forward(self, x):
        scores = super().forward(x)  # a fault: of two experts that tie, the second is chosen
        return scores - 2e-7 * F.one_hot(scores.argmax(-1), scores.shape[-1]) * self.faulty


class Experts(nn.Module):
    """Sends each token to its best expert. An expert is a matrix."""

    def __init__(self, run):
        super().__init__()
        self.router, self.run = Router(WIDTH, run.experts), run
        self.router.faulty = run.fault == "routing"
        self.weights = nn.Parameter(torch.randn(run.experts, WIDTH, WIDTH) / 4)

    def forward(self, x):
        scores = self.router(x)
        share, chosen = scores.softmax(-1).max(-1)
        if self.run.fault == "wrong experts":
            chosen = (chosen + 1) % self.run.experts
        return torch.einsum("bsc,bscd->bsd", x, self.weights[chosen]) * share[..., None]


class Block(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(run)
        self.mlp = Experts(run) if run.experts else Mlp(run)

    def forward(self, x, rotary, mask, group):
        x = x + self.attention(self.norm1(x), rotary, mask, group)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, run, blocks=2):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(VOCABULARY, WIDTH), Rotary(run)
        self.blocks = nn.ModuleList(Block(run) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if run.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, position_ids, mask, group=None, attention_mask=None):
        x = self.embed(input_ids)
        rotary = self.rotary(position_ids, x.dtype)
        for block in self.blocks:
            x = block(x, rotary, mask, group)
        return self.head(self.norm(x))


def made(run):
    """Make the model, which is the same on every rank.

    The scores of experts 0 and 1 differ by 1e-7, so they tie within rounding.
    """
    torch.manual_seed(run.seed)
    model = Model(run).to(run.dtype)
    if run.experts:
        with torch.no_grad():
            for block in model.blocks:
                block.mlp.router.weight[1] = block.mlp.router.weight[0]
                block.mlp.router.bias[1] = block.mlp.router.bias[0] - 1e-7
    return model


def batch(run):
    """Return ids, labels, positions in documents, numbers of documents and real tokens of the
    batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (run.rows, run.tokens), generator=generator)
    documents = torch.zeros(run.tokens, dtype=torch.long)
    documents[list(run.documents)] = 1
    documents = documents.cumsum(0)
    starts = torch.tensor([0, *run.documents])[documents]
    position_ids = (torch.arange(run.tokens) - starts).expand(run.rows, -1)
    real = torch.ones(run.rows, run.tokens, dtype=torch.bool)
    real[-1, : run.padded] = False
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, : run.unlabelled] = -100
    labels[~real] = -100
    return ids, labels, position_ids, documents.expand(run.rows, -1), real


def whole_mask(run, documents, real):
    """Return (rows, tokens, tokens): which query sees which key."""
    distance = torch.arange(run.tokens)[:, None] - torch.arange(run.tokens)
    seen = (distance >= 0) if run.causal else torch.ones_like(distance, dtype=torch.bool)
    if run.fault != "window":
        seen = seen & (distance < run.window)
    mask = seen.expand(run.rows, -1, -1)
    if run.fault != "leak":
        mask = mask & (documents[:, :, None] == documents[:, None])
    return mask if run.fault == "padding" else mask & real[:, None]


def local_batch(run, rank, replica, replicas):
    """Return a rank's ids, labels, positions, mask and real tokens, and the labels of all ranks."""
    whole = batch(run)
    rows = slice(replica * run.rows // replicas, (replica + 1) * run.rows // replicas)
    mask = whole_mask(run, *whole[3:])[rows]
    ids, labels, position_ids, _, real = (x[rows] for x in whole)
    held = run.positions(rank)
    gathered = torch.cat([run.positions(x) for x in range(run.cp)])
    if run.fault == "shift":  # a fault: labels are shifted within the shard
        labels = torch.where(labels == -100, -100, labels)
        shifted = F.pad(ids[:, held][:, 1:], (0, 1), value=-100)
        local = torch.where(labels[:, held] == -100, -100, shifted)
    else:
        local = labels[:, held]
    positions = position_ids[:, held]
    if run.fault == "positions":
        positions = torch.arange(held.numel()).expand(len(ids), -1)
    return ids[:, held], local, positions, mask[:, held][:, :, gathered], real[:, held], whole[1]


def sharing(run, world_group, world):
    """Return this process's number in the group that shares its sequence, and the group."""
    if run.cp == 1:
        return 0, None
    rank = dist.get_rank()
    if world == run.cp:
        return rank, world_group
    mesh = device_mesh(world // run.cp, run.cp, names=("replicas", "cp"))
    return rank % run.cp, mesh.get_group("cp")


def step(world_group, folder, run, **options):
    """Record one step on this rank. The loss is the mean over all labels of all ranks."""
    world = 1 if world_group is None else dist.get_world_size(world_group)
    model = made(run)
    if run.fault == "weights":
        with torch.no_grad():
            model.blocks[1].mlp.up.weight[0, 0] += 0.01
    rank, group = sharing(run, world_group, world)
    replica = 0 if world == 1 else dist.get_rank() // run.cp
    local = local_batch(run, rank, replica, world // run.cp)
    ids, labels, positions, mask, real, all_labels = local
    network = wrapped(model, run.wrapper, world_group)
    optimizer = getattr(torch.optim, run.optimizer)(model.parameters(), lr=0.01)
    stated = {"layout": run.order} if run.cp > 1 and run.states else {}
    torch.manual_seed(100 * run.cp + rank if run.fault == "dropout" else 7)
    with parity.record(folder, network, group or world_group, **stated, **options):
        given = None if run.padded == 0 else real.long()
        logits = network(ids, positions, mask, group, attention_mask=given)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels if run.fault == "local divisor" else all_labels).ne(-100).sum()
        if run.fault == "divided twice":  # a fault: the number of labels is divided by cp
            count = count // run.cp
        loss = total / count
        if run.fault != "local divisor":
            loss = loss * world  # the mean over ranks is then the loss of the batch
        loss.backward()
        if world > 1 and not run.wrapper:
            average(model, run, world_group, world)
        optimizer.step()


def wrapped(model, wrapper, group):
    if wrapper == "DDP":
        return DistributedDataParallel(model, process_group=group)
    if wrapper == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def average(model, run, group, world):
    for name, x in model.named_parameters():
        if run.fault == "no average":
            return
        dist.all_reduce(x.grad, group=group)
        if run.fault == "sum":
            continue
        x.grad /= world / run.cp if run.fault == "times cp" else world
        if run.fault == "tied twice" and name == "embed.weight":
            x.grad *= 2
