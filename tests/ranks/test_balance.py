"""A step's gradients are one process's, however unequally the ranks share its micro-batches."""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F

import seqpar
from seqpar import balance

LENGTHS = (60, 44, 8, 50, 30)
HEADS, DIM, VOCABULARY = 2, 8, 16
MODEL = balance.Model.preset("llama-8b")


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = (VOCABULARY, 3 * HEADS * DIM), (HEADS * DIM, VOCABULARY)
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def loss_of(embedding, head, ids, labels, attend):
    q, k, v = embedding[ids].unflatten(1, (3, HEADS, DIM)).unbind(1)
    return F.cross_entropy(attend(q, k, v).flatten(1) @ head, labels, reduction="sum")


def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def plan():
    """Two micro-batches, and the last of three ranks has tokens in the first one only."""
    cluster = balance.Cluster.preset("1x3-h100")
    parts = [
        balance.plan(LENGTHS[a:b], cluster, MODEL, capacity=64, method="wlb")
        for a, b in ((0, 3), (3, 5))
    ]
    first, second = (x for part in parts for x in part.micro_batches)
    second = dataclasses.replace(second, documents=second.documents + 3)
    return dataclasses.replace(parts[0], micro_batches=(first, second))


def on_ranks(group):
    """Return a rank's numbers of tokens, and what all ranks' losses and gradients sum to."""
    attention = seqpar.RingAttention(group)
    weights, total = parameters(), torch.zeros((), dtype=torch.float64)
    micro_batches = balance.collate(plan(), documents(), dist.get_rank(group))
    for local in micro_batches:

        def attend(q, k, v, layout=local["layout"]):
            return attention(q, k, v, layout, causal=True)

        loss = loss_of(*weights, local["input_ids"], local["labels"], attend)
        (loss * local["loss_weight"]).backward()
        total += loss.detach() * local["loss_weight"]
    found = [total, *(x.grad for x in weights)]
    for x in found:
        dist.all_reduce(x, group=group)
    return [len(local["input_ids"]) for local in micro_batches], found


def test_a_rank_may_have_fewer_micro_batches(pool):
    weights, losses = parameters(), []
    for ids in documents():

        def attend(*heads):
            heads = (x.transpose(0, 1) for x in heads)
            return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)

        labels = torch.cat([ids[1:], torch.tensor([-100])])
        losses.append(loss_of(*weights, ids, labels, attend))
    expected = sum(losses) / sum(n - 1 for n in LENGTHS)
    expected.backward()
    answers = pool(3, on_ranks)
    assert [tokens for tokens, _ in answers] == [[60, 50], [44, 30], [8, 0]]
    for _, found in answers:
        for x, y in zip(found, [expected, *(x.grad for x in weights)], strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-10, atol=1e-12)
