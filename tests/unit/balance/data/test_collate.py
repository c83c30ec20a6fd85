"""collate: what a rank reads is its part of what one process would read."""

from functools import partial

import numpy as np
import pytest
import torch

import seqpar
from seqpar import balance

LENGTHS = np.array([700, 30, 1, 260, 0, 90, 15, 1400])
MODEL = balance.Model.preset("llama-8b")
CLUSTER = balance.Cluster.preset("1x8-h100")
PLAN = balance.plan(LENGTHS, CLUSTER, MODEL, capacity=200, method="bytescale")
RANKS = range(8)


def ids_of(document):
    return torch.arange(LENGTHS[document]) + 10_000 * document


def full(document):
    ids = ids_of(document)
    return {
        "input_ids": ids.tolist(),
        "times": ids.numpy().astype(np.float32) / 2,
        "images": ids[:, None].repeat(1, 3),
        "source": f"document {document}",
        "weight": 0.5 * document,
    }


class Dataset:
    def __init__(self, make):
        self.make, self.read = make, []

    def __getitem__(self, index):
        self.read.append(index)
        return self.make(index)


def packed(batch, make):
    return torch.cat([torch.as_tensor(make(int(i))) for i in batch.documents])


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray, list, dict])
def test_ranks_read_what_one_process_would_shard(kind):
    make = {
        torch.Tensor: ids_of,
        np.ndarray: lambda i: ids_of(i).numpy().astype(np.uint32),
        list: lambda i: ids_of(i).tolist(),
        dict: full,
    }[kind]
    assert len(PLAN.micro_batches) > 1
    total = sum(int((batch.lengths - 1).sum()) for batch in PLAN.micro_batches)
    for rank in RANKS:
        dataset = Dataset(make)
        local = balance.collate(PLAN, dataset, rank)
        needed = set()
        for batch, got in zip(PLAN.micro_batches, local, strict=True):
            ids, layout = packed(batch, ids_of), batch.layout
            labels = seqpar.shift_labels(ids, layout.cu_seqlens)
            assert torch.equal(got["input_ids"], layout.shard(ids, rank))
            assert torch.equal(got["labels"], layout.shard(labels, rank))
            assert torch.equal(got["position_ids"], layout.position_ids(rank))
            assert got["layout"] is layout
            assert got["loss_weight"] == 1 / total
            held = {span.document for span in layout.spans(rank)}
            documents = [int(batch.documents[i]) for i in sorted(held)]
            assert got["documents"].tolist() == documents
            needed |= set(documents) or {int(batch.documents[0])}
            if kind is dict:
                assert torch.equal(got["times"], layout.shard(ids.float() / 2, rank))
                assert torch.equal(got["images"], layout.shard(ids[:, None].repeat(1, 3), rank))
                assert got["source"] == [f"document {i}" for i in documents]
                assert got["weight"] == [0.5 * i for i in documents]
        assert set(dataset.read) == needed


def test_masked_labels_are_shifted_and_need_their_count():
    def make(document):
        ids = ids_of(document)
        return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}

    with pytest.raises(ValueError, match="pass label_tokens, the number of labels"):
        balance.collate(PLAN, Dataset(make), 0)
    for rank in RANKS:
        for batch, got in zip(
            PLAN.micro_batches,
            balance.collate(PLAN, Dataset(make), rank, label_tokens=50),
            strict=True,
        ):
            labels = packed(batch, lambda i: make(i)["labels"])
            expected = seqpar.shift_labels(labels, batch.layout.cu_seqlens)
            assert torch.equal(got["labels"], batch.layout.shard(expected, rank))
            assert got["loss_weight"] == 1 / 50


@pytest.mark.parametrize("workers", [0, 1])
def test_each_steps_weight_counts_its_own_labels(workers):
    def labels_of(document):
        return ids_of(document).masked_fill(ids_of(document) % 3 == 0, -100)

    dataset = Dataset(lambda i: {"input_ids": ids_of(i), "labels": labels_of(i)})
    counts = np.array([int((labels_of(i)[1:] >= 0).sum()) for i in range(len(LENGTHS))])
    planner = partial(balance.plan, cluster=CLUSTER, model=MODEL, capacity=200)
    batches = balance.Batches(LENGTHS, planner, tokens=1600, workers=workers)
    totals = []
    for plan, local in batches.read(dataset, 2, label_tokens=counts):
        totals.append(counts[np.concatenate([x.documents for x in plan.micro_batches])].sum())
        ranks = [balance.collate(plan, dataset, rank, label_tokens=1) for rank in RANKS]
        assert totals[-1] == sum(int((x["labels"] >= 0).sum()) for rank in ranks for x in rank)
        assert {x["loss_weight"] for x in local} == {1 / totals[-1]}
    assert len(set(totals)) > 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (50, r"must be \(documents,\), one number of labels per document, got 50"),
        ([50], r"must be \(8,\), as lengths is, got \(1,\)"),
        ([-1] * 8, "must not be negative"),
        ("many", "must be a 1-D sequence of integers"),
    ],
)
def test_label_counts_of_steps_must_be_per_document(wrong, told):
    batches = balance.Batches(LENGTHS, lambda lengths: None, workers=0)
    with pytest.raises(ValueError, match=f"label_tokens {told}"):
        batches.read(Dataset(ids_of), 0, label_tokens=wrong)


def test_per_token_entries_can_be_named():
    """A vector that a document happens to be as long as is else cut like its tokens."""

    def make(document):
        ids = ids_of(document)
        return {"input_ids": ids, "times": ids / 2, "vector": torch.arange(260)}

    cut = whole = 0
    for rank in RANKS:
        for batch, got in zip(
            PLAN.micro_batches,
            balance.collate(PLAN, Dataset(make), rank, per_token=["times"]),
            strict=True,
        ):
            times = packed(batch, lambda i: ids_of(i) / 2)
            assert torch.equal(got["times"], batch.layout.shard(times, rank))
            assert [x.tolist() for x in got["vector"]] == [[*range(260)]] * len(got["documents"])
            whole += len(got["vector"])
        cut += sum(torch.is_tensor(x["vector"]) for x in balance.collate(PLAN, Dataset(make), rank))
    assert whole and cut
    for wrong in ("times", ["vector"], ["other"]):
        with pytest.raises(ValueError, match="per_token"):
            balance.collate(PLAN, Dataset(make), 0, per_token=wrong)


def test_micro_batches_that_were_added_have_all_keys():
    planner = partial(balance.plan, cluster=CLUSTER, model=MODEL, capacity=200)
    batches = balance.Batches(LENGTHS, planner, tokens=1600, workers=0, micro_batches=4)
    dataset, (step, *_) = Dataset(full), batches.read(Dataset(full), rank=2)
    first, *_, last = balance.collate(step.plan, dataset, 2)
    assert last.keys() == first.keys() and last["input_ids"].shape == (0,)
    assert last["images"].shape == (0, 3) and last["source"] == [] and last["times"].numel() == 0
    assert last["layout"].tokens == 0 and last["loss_weight"] == first["loss_weight"]


def test_a_rank_without_documents_has_all_keys():
    plan = balance.plan([5, 6], CLUSTER, MODEL, capacity=200, method="wlb")
    dataset = Dataset(lambda i: {"input_ids": list(range(5 + i)), "times": np.ones((5 + i, 2))})
    (got,) = balance.collate(plan, dataset, 7)
    assert got["input_ids"].tolist() == got["labels"].tolist() == []
    assert got["times"].shape == (0, 2)
    assert got["documents"].tolist() == []


def test_batches_read_what_collate_makes_of_their_plans():
    planner = partial(balance.plan, cluster=CLUSTER, model=MODEL, capacity=200)
    batches = balance.Batches(LENGTHS, planner, tokens=1600)
    steps = list(batches.read(Dataset(full), rank=3))
    assert len(steps) > 1
    for plan, local in steps:
        again = balance.collate(plan, Dataset(full), 3)
        for one, two in zip(local, again, strict=True):
            assert one["layout"] == two["layout"]
            assert torch.equal(one["input_ids"], two["input_ids"])
            assert one["source"] == two["source"]


WRONG = [
    (lambda i: ids_of(i)[:-1], r"input_ids of document \d must be \(\d+,\) integers"),
    (lambda i: ids_of(i).float(), "input_ids of document"),
    (lambda i: {"text": "x"}, r"must have input_ids, got \['text'\]"),
    (lambda i: {"input_ids": ids_of(i), "layout": 3}, "must not have layout, which collate makes"),
    (lambda i: {"input_ids": ids_of(i), "labels": ids_of(i)[1:]}, "labels of document"),
    (lambda i: {"input_ids": ids_of(i), str(i): 3}, "must give all documents the same keys"),
]


@pytest.mark.parametrize(("make", "said"), WRONG)
def test_documents_that_are_not_as_planned_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        [balance.collate(PLAN, Dataset(make), rank) for rank in RANKS]


def test_a_rank_outside_the_plan_is_refused():
    with pytest.raises(ValueError, match="rank must be at most 7"):
        balance.collate(PLAN, Dataset(ids_of), 8)


def test_arguments_of_the_wrong_kind_are_named():
    with pytest.raises(ValueError, match=r"plan must be a balance\.Plan, got None"):
        balance.collate(None, Dataset(ids_of), 0)
    with pytest.raises(ValueError, match="per_token must be a collection of keys, got 5"):
        balance.collate(PLAN, Dataset(ids_of), 0, per_token=5)
