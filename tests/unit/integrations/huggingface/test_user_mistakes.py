"""The mistakes that users make with models of transformers, each with what it raises."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

from seqpar import Layout
from seqpar.integrations import huggingface
from tests.support import huggingface as hf

MAMBA = {"state_size": 4, "num_heads": 4, "expand": 1}


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


def with_other_tokens(comm, model):
    of = hf.batch()
    huggingface.enable(model, comm).shard(of | {"input_ids": of["input_ids"] + comm.rank})


def with_one_document(comm, model):
    huggingface.enable(model, comm).shard(hf.batch("packed"), Layout.zigzag(22, comm.size))


def with_numbers_as_mask(comm, model):
    numbers = torch.arange(44).view(2, 22)
    huggingface.enable(model, comm).shard(hf.batch() | {"attention_mask": numbers})


def of_a_copy(comm, model):
    sp = huggingface.enable(model, comm)
    copy.deepcopy(model)(**sp.shard(hf.batch()))


def in_another_model(comm, model):
    hf.tiny("LlamaForCausalLM")(**huggingface.enable(model, comm).shard(hf.batch()))


def in_a_model_of_another_kind(comm, model):
    other = hf.tiny("MistralForCausalLM")
    huggingface.enable(other, comm)
    other(**huggingface.enable(model, comm).shard(hf.batch()))


def pickled(comm, model):
    huggingface.enable(model, comm)
    pickle.dumps(model)


def batch_pickled(comm, model):
    pickle.dumps(huggingface.enable(model, comm).shard(hf.batch()))


class Sharded(torch.utils.data.Dataset):
    def __init__(self, sp):
        self._sp = sp

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self._sp.shard(hf.batch())


def in_a_worker(comm, model, **options):
    sp = huggingface.enable(model, comm, **options)
    options = {"num_workers": 1, "batch_size": None, "multiprocessing_context": "fork"}
    next(iter(torch.utils.data.DataLoader(Sharded(sp), timeout=30, **options)))


def called(change):
    def run(comm, model):
        model(**change(dict(huggingface.enable(model, comm).shard(hf.batch()))))

    return run


def enabled(name, **options):
    return lambda comm, model: huggingface.enable(hf.tiny(name, **options), comm)


def with_dropout(comm, model):
    model = hf.tiny("LlamaForCausalLM", attention_dropout=0.1)
    model(**huggingface.enable(model, comm).shard(hf.batch()))


def scaled_by_rank(comm, model):
    loss = model(**huggingface.enable(model, comm).shard(hf.batch())).loss
    (loss * (1 + comm.rank)).backward()


def switched(comm, model):
    sp = huggingface.enable(model, comm)
    model.set_attn_implementation("sdpa")
    model(**sp.shard(hf.batch()))


def summed(comm, model):
    own = model.model.norm.forward
    model.model.norm.forward = lambda x: own(x).cumsum(1)
    model(**huggingface.enable(model, comm).shard(hf.batch()))


MISTAKES = {  # the guide's table of what users see
    "the model must be called with what shard returned": called(lambda x: hf.batch()),
    "position_ids must be those that shard returned": called(lambda x: x | {"position_ids": None}),
    "labels must go through shard": lambda comm, model: model(
        **(x := huggingface.enable(model, comm).shard({"input_ids": hf.batch()["input_ids"]})),
        labels=x["input_ids"],
    ),
    "layout must have the batch's documents": with_one_document,
    "attention_mask must be 1 for tokens and 0 for padding": with_numbers_as_mask,
    "batch['input_ids'] must be the same on all ranks": with_other_tokens,
    "0 of 32 attention layers can be reached": enabled("DebertaForMaskedLM"),
    "the model's attention must be seqpar's": switched,
    "dropout is 0.1, which attention over ranks": with_dropout,
    "mixes tokens along the sequence": enabled("MambaForCausalLM", **MAMBA),
    "model.norm (LlamaRMSNorm) mixes tokens, and each rank would mix its own": summed,
    "model must be enabled by seqpar for a sharded batch": in_another_model,
    "the batch must not be sharded for a model of transformers": in_a_model_of_another_kind,
    "loss must be multiplied by the same number on all ranks": scaled_by_rank,
    "model cannot be pickled while seqpar runs it": pickled,
    "a sharded batch cannot be pickled": batch_pickled,
    "in the process that enabled the model": in_a_worker,
    "is a copy of one that is enabled": of_a_copy,
}


def test_the_guide_lists_mistakes_with_their_errors():
    guide = (Path(__file__).parents[4] / "docs/guides/huggingface.md").read_text()
    table = guide.partition("## Troubleshooting")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    for row, seen in zip(shown, MISTAKES, strict=True):  # "…" stands for what differs
        assert re.fullmatch(".*".join(map(re.escape, row.split("…"))), seen), row


@pytest.mark.filterwarnings("ignore")  # of processes that are forked in threads
@pytest.mark.parametrize("seen", MISTAKES)
def test_a_mistake_is_answered_as_the_guide_says(llama, seen):
    text = hf.refusal(lambda comm: MISTAKES[seen](comm, copy.deepcopy(llama)))
    expected = re.escape(seen).replace("32", r"\d+")
    assert re.search(expected, text), text


@pytest.mark.filterwarnings("ignore")
def test_a_worker_is_refused_without_check_ranks(llama):
    """Otherwise the worker could not send the batch, which cannot be pickled."""
    text = hf.refusal(lambda comm: in_a_worker(comm, copy.deepcopy(llama), check_ranks=False))
    assert "must be called in the process that enabled the model" in text
