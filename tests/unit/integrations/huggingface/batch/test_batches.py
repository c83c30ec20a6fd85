"""Batches of transformers: what becomes of them, and which are refused."""

import copy

import numpy as np
import pytest
import torch
import transformers

from seqpar import Layout
from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.train.groups import Groups
from tests.support import huggingface as hf
from tests.support.generation import SHARED
from tests.support.ranks import virtual


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


IDS = hf.batch()["input_ids"]
BATCHES = {
    "padding within": (lambda: hf.with_hole(hf.batch()), {}, "between tokens of row 0"),
    "document numbers as a mask": (
        lambda: hf.batch() | {"attention_mask": torch.arange(44).view(2, 22)},
        {},
        "attention_mask must be 1 for tokens and 0 for padding",
    ),
    "a mask of pairs": (
        lambda: hf.batch() | {"attention_mask": torch.ones(2, 1, 22, 22)},
        {},
        "attention_mask must be None or (2, 22)",
    ),
    "a layout of one document": (
        lambda: hf.batch("packed"),
        {"layout": Layout.zigzag(22, 2)},
        "documents, got documents of 22 tokens, and the batch has 9, 1, 12",
    ),
    "a layout of other ranks": (
        lambda: hf.batch("packed"),
        {"layout": Layout.zigzag([0, 9, 10, 22], 3)},
        "layout must be for 2 ranks",
    ),
    "no layout": (lambda: hf.batch(), {"layout": 3}, "layout must be a seqpar.Layout"),
    "documents that contradict": (
        lambda: hf.batch("packed") | {"cu_seq_lens_q": torch.tensor([0, 10, 22])},
        {},
        "position_ids restart at token 9",
    ),
    "documents of other lengths": (
        lambda: {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 10])},
        {},
        "cu_seq_lens_q must end",
    ),
    "documents of other lengths in cu_seq_lens_k alone": (
        lambda: {"input_ids": IDS[:1], "cu_seq_lens_k": torch.tensor([0, 10])},
        {},
        "cu_seq_lens_k must end",
    ),
    "documents that do not start at 0": (
        lambda: {"input_ids": IDS[:1], "cu_seq_lens_k": torch.tensor([1, 22])},
        {},
        "cu_seq_lens_k must start at 0",
    ),
    "labels of other tokens": (
        lambda: {"input_ids": IDS, "labels": IDS[:, 1:]},
        {},
        "labels must be (2, 22)",
    ),
    "padding alone": (
        lambda: {"input_ids": IDS, "attention_mask": IDS * 0},
        {},
        "batch must have tokens that are not padding",
    ),
    "no tokens": (dict, {}, "batch must have either input_ids"),
    "no batch": (lambda: IDS, {}, "batch must be a mapping"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_cut_is_refused(llama, case):
    make, options, reason = BATCHES[case]

    def run(comm):
        huggingface.enable(copy.deepcopy(llama), comm).shard(make(), **options)

    assert reason in hf.refusal(run)


def test_ranks_with_different_batches_are_refused(llama):
    def run(comm):
        of = hf.batch()
        of["input_ids"] = of["input_ids"] + comm.rank
        huggingface.enable(copy.deepcopy(llama), comm).shard(of)

    assert "batch['input_ids'] must be the same on all ranks" in hf.refusal(run)


def test_documents_follow_positions_despite_a_full_mask(llama):
    of = hf.batch("packed")
    expected = hf.unmodified(llama, of)
    ones = of | {"attention_mask": torch.ones_like(of["input_ids"])}
    cut = {name: x for name, x in of.items() if name != "position_ids"}
    cut |= {"cu_seq_lens_q": torch.tensor([0, 9, 10, 22]), "max_length_q": 12}
    for given in (ones, of | {"seq_idx": of["position_ids"]}):
        results = virtual(2, lambda comm, x=given: hf.on_rank(comm, llama, x))
        hf.assert_same(results, expected, hf.real(of))
    for found in virtual(2, lambda comm: hf.on_rank(comm, llama, cut)):
        torch.testing.assert_close(found[0], expected[0])


def test_unknown_keys_pass_and_position_planes_are_cut(llama):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        ids = hf.batch()["input_ids"]
        planes = torch.arange(22).expand(3, 2, 22)
        given = transformers.BatchEncoding(
            {"input_ids": ids, "names": ["a", "b"], "weights": ids * 0.5, "position_ids": planes}
        )
        batch = sp.shard(given)
        assert type(batch) is transformers.BatchEncoding
        assert batch["names"] == ["a", "b"] and "labels" not in batch
        assert torch.equal(batch["weights"], batch["input_ids"] * 0.5)
        assert batch["position_ids"].shape == (3, 1, batch["input_ids"].shape[1])
        whole = sp.unshard(batch["input_ids"], batch)
        assert torch.equal(whole, ids) and "seqpar" not in given

    virtual(2, run)


def test_a_sharded_batch_moves_to_a_device_whole(llama):
    """With the positions that layers read from its record; a dtype casts tensors only."""

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        local = transformers.BatchEncoding(sp.shard(hf.batch()))
        moved, record = transformers.BatchEncoding(dict(local)).to("meta"), local["seqpar"]
        same = {name: x.to("cpu", non_blocking=True) for name, x in local.items()}
        assert same["seqpar"] is record is record.to(torch.float64) is record.to(local["labels"])
        assert {x.device.type for x in moved.values() if torch.is_tensor(x)} == {"meta"}
        assert moved["seqpar"].main.position_ids.device.type == "meta"
        assert moved["seqpar"].digest() == record.digest()
        return sp.model(**same).loss.detach()

    expected = llama(**hf.batch()).loss.detach()
    for loss in virtual(2, run):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_layout_padding_is_a_token_of_the_batch(llama):
    """The embedding of a tokenizer's padding is 0, of which some norms have no gradient."""

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        of = hf.batch("left")  # 37 tokens
        of["input_ids"] = torch.arange(44).view(2, 22).flip(0)
        of["attention_mask"] = of["attention_mask"].flip(0)
        return sp.shard(of | {"weights": torch.ones(2, 22)})

    last = virtual(2, run)[1]
    assert last["input_ids"][0, -1] == 29 and last["position_ids"][0, -1] == 7
    assert last["labels"][0, -1] == -100 and last["weights"][0, -1] == 0


class Words:
    """A tokenizer, of one number a word."""

    def __call__(self, text, return_attention_mask):
        return {"input_ids": [len(word) for word in text.split()]}


def test_padding_cannot_make_gradients_nan():
    """Gemma3n divides by the size of an embedding: that of padding on the left is 0."""
    model = hf.tiny("Gemma3nForCausalLM", **SHARED)
    of = hf.batch("left")
    expected = hf.unmodified(model, of)  # where padding has other tokens
    zeroed = of | {"input_ids": of["input_ids"].masked_fill(of["attention_mask"] == 0, 0)}
    assert not all(x.isfinite().all() for x in hf.unmodified(model, zeroed)[2].values())
    results = virtual(2, lambda comm: hf.on_rank(comm, model, zeroed))
    hf.assert_same(results, expected, hf.real(of))


def test_samples_are_packed_into_one_row():
    collator = huggingface.Collator(Words(), max_length=3, cu_seqlens=True)
    samples = [
        {
            "input_ids": [5, 6, 7, 8],
            "attention_mask": [0, 1, 1, 1],
            "weights": [0.1, 0.2, 0.3, 0.4],
        },
        {"input_ids": [1, 2], "completion_mask": [0, 1], "weights": [0.5, 0.6]},
    ]
    with pytest.raises(ValueError, match="same keys, got some without \\['name'\\]"):
        collator([samples[0], samples[1] | {"name": "b"}])
    row = collator([x | {"name": name} for x, name in zip(samples, "ab", strict=True)])
    assert row["input_ids"].tolist() == [[6, 7, 8, 1, 2]]
    assert row["labels"].tolist() == [[-100, 7, 8, -100, 2]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 5] and row["max_length_q"] == 3
    torch.testing.assert_close(row["weights"], torch.tensor([[0.2, 0.3, 0.4, 0.5, 0.6]]))
    assert row["name"] == ["a", "b"]
    texts = huggingface.Collator(Words())([{"text": "a bb ccc"}, {"text": "dddd"}])
    assert texts["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert texts["labels"].tolist() == [[-100, 2, 3, -100]]


def test_values_keep_their_dtype_beside_empty_samples():
    values = {"input_ids": [[5, 6, 7], [], [8, 9]], "labels": [[5, 6, 7], [], [8, 9]]}
    values |= {"images": [[1, 2, 3], [], [4, 5]]}
    samples = [dict(zip(values, x, strict=True)) for x in zip(*values.values(), strict=True)]
    row = huggingface.Collator()(samples)
    assert {x.dtype for x in row.values()} == {torch.int64}
    assert row["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert row["images"].tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_values_of_fixed_length_are_not_cut(kind):
    """Even if a sample has that many tokens, or is cut to that many."""
    lengths, values = (3, 2, 4), [0.1, 0.2, 0.3]
    samples = [{"input_ids": [5] * n, "values": kind(values)} for n in lengths]
    for most in (2, 3):
        row = huggingface.Collator(max_length=most)(samples)
        assert [list(x) for x in row["values"]] == [list(kind(values))] * 3


def test_samples_may_lack_a_mask():
    """As rows of joined datasets do."""
    samples = [
        {"input_ids": [5, 6, 7], "completion_mask": None},
        {"input_ids": [8, 9], "completion_mask": [0, 1]},
    ]
    assert huggingface.Collator()(samples)["labels"].tolist() == [[-100, 6, 7, -100, 9]]


def test_values_of_numpy_are_packed():
    ids = np.arange(3)
    sample = {"input_ids": ids, "completion_mask": ids > 0, "weights": ids / 2, "names": "abc"}
    row = huggingface.Collator()([sample | {"text": "dropped"}] * 2)
    assert row.keys() == {"input_ids", "labels", "position_ids", "weights", "names"}
    assert row["labels"].tolist() == [[-100, 1, 2, -100, 1, 2]]
    assert row["weights"].tolist() == [[0, 0.5, 1, 0, 0.5, 1]]
    assert row["names"] == ["abc", "abc"]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([{"text": "a"}], "input_ids, or text if there is a tokenizer"),
        ([{"input_ids": []}], "must have tokens"),
        ([{"input_ids": [1], "labels": [1, 2]}], r"labels must be \(1,\)"),
        ([{"input_ids": [1], "attention_mask": [1, 1]}], r"attention_mask must be \(1,\), got"),
        ([{"input_ids": [1], "completion_mask": []}], r"completion_mask must be \(1,\), got"),
        ([{"input_ids": [[1]]}], r"input_ids must be \(tokens,\)"),
        ([], "must have tokens"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused(samples, reason):
    with pytest.raises(ValueError, match=reason):
        huggingface.Collator()(samples)


def test_packed_samples_train_like_separate_samples(llama):
    samples = [{"input_ids": x.tolist()} for x in torch.arange(3, 25).split(hf.LENGTHS)]
    of = huggingface.Collator(cu_seqlens=True)(samples)
    alone = {name: of[name] for name in ("input_ids", "labels", "position_ids")}
    expected = hf.unmodified(llama, alone)
    hf.assert_same(virtual(2, lambda comm: hf.on_rank(comm, llama, of)), expected, hf.real(of))


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (None, {}, "model must be enabled"),
        ({"compute_loss_func": print}, {}, "compute_loss_func must not be set"),
        ({}, {"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance' must not be set"),
    ],
)
def test_trainers_that_would_be_wrong_are_refused(llama, tmp_path, given, options, reason):
    options |= {"use_cpu": True, "report_to": [], "output_dir": str(tmp_path)}
    arguments = transformers.TrainingArguments(**options)
    model = copy.deepcopy(llama)

    def run(comm):
        sp = huggingface.enable(model, comm) if given is not None else None
        with pytest.raises(ValueError, match=reason):
            huggingface.trainer(transformers.Trainer)(model=model, args=arguments, **(given or {}))
        return sp

    virtual(1, run)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_trainer_keeps_the_columns_a_collator_reads(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Groups, "of", lambda comm, accelerator: Groups(accelerator, [0], 0))
    options = {"use_cpu": True, "report_to": [], "output_dir": str(tmp_path)}
    arguments = transformers.TrainingArguments(per_device_train_batch_size=2, **options)
    sample = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "unread": [1, 2, 3, 4]}
    samples = [sample, sample | {"text": "a bb"}]
    model = copy.deepcopy(llama)

    def run(comm):
        huggingface.enable(model, comm)
        made = huggingface.trainer(transformers.Trainer)(
            model=model, args=arguments, data_collator=huggingface.Collator()
        )
        (row,) = made.get_eval_dataloader(samples)
        assert row.keys() == {"input_ids", "labels", "position_ids"}
        assert row["labels"].tolist() == [[-100, -100, 7, 8] * 2]

    virtual(1, run)


def test_only_a_trainer_is_made_one_over_ranks():
    with pytest.raises(TypeError, match=r"base must be transformers\.Trainer"):
        huggingface.trainer(dict)
