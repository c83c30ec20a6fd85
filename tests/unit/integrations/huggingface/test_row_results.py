"""Heads with one result for each row: results, losses and gradients are those of one process."""

import copy

import pytest
import torch

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.support.tiers import exhaustive_pairs


def classifier(labels, **options):
    classes = {i: str(i) for i in range(labels)}
    return hf.tiny("LlamaForSequenceClassification", id2label=classes, **options)


def rows(kind, labels, ends=False):
    """A batch whose padding has the token of padding, which may also end a row's real tokens."""
    of = hf.batch(kind, rows=3)
    real = hf.real(of)
    of["input_ids"] = of["input_ids"].masked_fill(~real, hf.SIZES["pad_token_id"])
    if ends:
        of["input_ids"][0, -1] = hf.SIZES["pad_token_id"]
    return of | {"labels": labels[: len(real)]}


LABELS = {  # numbers of labels of a model, and the labels of three rows
    "classes": (4, torch.tensor([1, 3, 0])),
    "reward": (1, torch.tensor([0.5, -1.0, 2.0])),
    "several": (4, torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]])),
}


def assert_alike(ranks, model, of, strategy="ring"):
    expected = hf.unmodified(model, of)

    def run(comm):
        return hf.on_rank(comm, model, of, strategy)

    everything = torch.ones(expected[1].shape[:1], dtype=torch.bool)
    hf.assert_same(virtual(ranks, run), expected, everything)


@pytest.mark.parametrize(
    ("kind", "labels", "ranks"),
    [
        ("padded", "classes", 2),
        ("left", "reward", 3),
        *exhaustive_pairs(["whole", "padded", "left", "sides"], [*LABELS], [2, 4]),
    ],
)
def test_results_of_rows_are_those_of_one_process(kind, labels, ranks):
    count, given = LABELS[labels]
    assert_alike(ranks, classifier(count), rows(kind, given))


def test_the_last_token_other_than_paddings_answers():
    """As in transformers, also if a row's last real token is the token of padding."""
    assert_alike(2, classifier(4), rows("whole", LABELS["classes"][1], ends=True))


def test_a_packed_row_has_the_result_of_its_last_document():
    model, (_, labels) = classifier(4).eval(), LABELS["classes"]
    of = rows("packed", labels)
    last = of["input_ids"][:, -hf.LENGTHS[-1] :]
    expected = model(input_ids=last, labels=labels[:1])

    def run(comm):
        own = copy.deepcopy(model)
        outputs = own(**huggingface.enable(own, comm).shard(of))
        return outputs.loss, outputs.logits

    for loss, logits in virtual(3, run):
        torch.testing.assert_close(loss, expected.loss, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(logits, expected.logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("items", [12, torch.tensor(12)])
def test_labels_may_be_counted_over_several_batches(items):
    """As by a Trainer that accumulates gradients: three rows with four labels each, four times."""
    model, of = classifier(4), rows("padded", LABELS["several"][1])
    expected = hf.unmodified(model, of)[0]

    def run(comm):
        own = copy.deepcopy(model)
        part = huggingface.enable(own, comm).shard(of)
        return own(**part, num_items_in_batch=items).loss.detach()

    for loss in virtual(2, run):
        torch.testing.assert_close(loss, expected, rtol=2e-5, atol=2e-5)


def own_loss(comm, model, of, divided=True):
    """The gradients of a loss that each rank makes of all rows."""
    model = copy.deepcopy(model)
    sp = huggingface.enable(model, comm)
    part = sp.shard({name: x for name, x in of.items() if name != "labels"})
    loss = model(**part).logits.square().mean()
    (sp.total(loss / comm.size) if divided else loss).backward()
    sp.average_gradients()
    return hf.gradients(model)


def test_a_loss_of_all_rows_is_divided_by_the_ranks():
    model, of = classifier(4), rows("padded", LABELS["classes"][1])
    alone = copy.deepcopy(model)
    alone(
        input_ids=of["input_ids"], attention_mask=of["attention_mask"]
    ).logits.square().mean().backward()
    for found in virtual(2, lambda comm: own_loss(comm, model, of)):
        for name, gradient in hf.gradients(alone).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-5)
    told = hf.refusal(lambda comm: own_loss(comm, model, of, divided=False))
    assert "loss must be the model's own" in told


def sharded(change, **options):
    def run(comm):
        sp = huggingface.enable(classifier(4, **options), comm)
        sp.shard(change(rows("padded", LABELS["classes"][1])))

    return run


def hidden(of):
    return of | {"attention_mask": of["attention_mask"] * (torch.arange(22) < 12)}


REFUSED = {
    "labels must be (3,) or (3, labels), a label for each row": sharded(
        lambda of: of | {"labels": of["input_ids"]} | {"labels": torch.zeros(2)}
    ),
    "shift_labels must be None": sharded(lambda of: of | {"shift_labels": of["input_ids"]}),
    "attention_mask must cover the last token of each row": sharded(hidden),
    "pad_token_id of the model's config must be set": sharded(lambda of: of, pad_token_id=None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_rows_without_a_result_are_refused(reason):
    assert reason in hf.refusal(REFUSED[reason])
