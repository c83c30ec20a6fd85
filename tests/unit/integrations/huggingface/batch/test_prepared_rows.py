"""A step on a row of a collator that prepares layouts builds no attention tables."""

import copy
import pickle

import pytest
import torch

from seqpar.attention import rehearsal
from seqpar.integrations import huggingface
from seqpar.linear import linear_operator
from seqpar.linear.linear_strategy import LinearStrategy
from seqpar.softmax import softmax_operator
from seqpar.softmax.strategy import Strategy
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.unit.integrations.huggingface.test_families import build

SAMPLES = [{"input_ids": x.tolist()} for x in torch.arange(3, 25).split(hf.LENGTHS)]
FEW = SAMPLES[:1]
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture
def builders(monkeypatch):
    """The ranks that built tables so far, one entry for each kind of call.

    On a GPU a call asks for its tables before it begins. Here it also does so on a CPU.
    """
    found = []

    def noted(rehearse):
        def run(strategy, comm, call, backward):
            found.append(call.rank)
            rehearse(strategy, comm, call, backward)

        return run

    for kind in (Strategy, LinearStrategy):
        monkeypatch.setattr(kind, "rehearse", noted(kind.rehearse))
    for of in (softmax_operator, linear_operator):
        monkeypatch.setattr(of, "upload_tables", rehearsal.tables_of)
    return found


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("LlamaForCausalLM", {}, 1),
        ("Gemma2ForCausalLM", WINDOWS, 2),
        ("causal/qwen3_next", {}, 2),  # gated delta rule, and softmax attention
        pytest.param("causal/minimax", {}, 2, marks=pytest.mark.exhaustive),
        pytest.param("GptOssForCausalLM", WINDOWS, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_builds_no_tables(name, options, kinds, builders):
    model = build(name) if "/" in name else hf.tiny(name, **options)
    row = huggingface.Collator()(SAMPLES)

    def on_rank(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        prepare = sp.preparation(huggingface.Collator()(FEW))
        assert len(prepare.calls) == kinds and own.training
        collator = huggingface.Collator(prepare=pickle.loads(pickle.dumps(prepare)))
        prepared = pickle.loads(pickle.dumps(collator(SAMPLES)))
        steps = []
        for of in (prepared, row):
            before = builders.count(comm.rank)
            own.zero_grad()
            outputs = own(**sp.shard(of))
            outputs.loss.backward()
            sp.average_gradients()
            built = builders.count(comm.rank) - before
            steps.append((built, outputs.loss.detach(), hf.gradients(own)))
        return steps

    for (built, *prepared), (_, *plain) in virtual(2, on_rank):
        assert built == 0
        torch.testing.assert_close(prepared, plain, rtol=0, atol=0)


def test_layers_made_linear_are_prepared(builders):
    def on_rank(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        sp.make_linear([0])
        prepare = sp.preparation(huggingface.Collator()(FEW))
        row = huggingface.Collator(prepare=prepare)(SAMPLES)
        before = builders.count(comm.rank)
        sp.model(**sp.shard(row)).loss.backward()
        return len(prepare.calls), builders.count(comm.rank) - before

    assert virtual(2, on_rank) == [(2, 0)] * 2


def test_unprepared_steps_build_tables(builders):
    def on_rank(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        others = [{"input_ids": [5] * 17}, {"input_ids": [6] * 14}]  # of no other test
        sp.model(**sp.shard(huggingface.Collator()(others)))

    virtual(2, on_rank)
    assert sorted(builders) == [0, 1]


def test_later_dtypes_and_devices_can_be_given():
    def on_rank(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        later = {"dtype": torch.bfloat16, "device": "meta"}
        (call,) = sp.preparation(huggingface.Collator()(FEW), **later).calls
        return call.shape.dtype, call.device

    assert virtual(1, on_rank) == [(torch.bfloat16, torch.device("meta"))]


@pytest.mark.parametrize("autocast", [False, True])
def test_recurrent_layers_are_prepared_in_their_dtype(builders, autocast):
    """They compute in fp32, but under autocast in its dtype; the run need not be under autocast."""
    model, dtype = build("causal/qwen3_next"), torch.bfloat16 if autocast else torch.float32

    def on_rank(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        prepare = sp.preparation(huggingface.Collator()(FEW), dtype=dtype)
        row = huggingface.Collator(prepare=prepare)(SAMPLES)
        before = builders.count(comm.rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = sp.model(**sp.shard(row)).loss
        loss.backward()
        return builders.count(comm.rank) - before

    assert virtual(2, on_rank) == [0, 0]


@pytest.mark.exhaustive
def test_a_compiled_model_is_prepared():
    def on_rank(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        sp.compile(backend="eager")
        row = huggingface.Collator()(FEW)
        with torch.no_grad():
            sp.model(**sp.shard(row))
        return len(sp.preparation(row).calls)

    assert virtual(1, on_rank) == [1]


def test_other_documents_than_the_layouts_are_refused():
    def on_rank(comm):
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm)
        prepare = sp.preparation(huggingface.Collator()(FEW))
        row = huggingface.Collator()(SAMPLES) | {"layout": prepare([0, 22])}
        with pytest.raises(ValueError, match="layout must have the batch's documents"):
            sp.shard(row)

    virtual(2, on_rank)


def test_a_wrong_preparation_is_refused():
    with pytest.raises(ValueError, match=r"prepare must be a result of sp\.preparation, got "):
        huggingface.Collator(prepare=len)

    def on_rank(comm):
        sp = huggingface.enable(hf.tiny("BartForConditionalGeneration", **hf.BART), comm)
        with pytest.raises(ValueError, match="model must have no encoder"):
            sp.preparation({"input_ids": torch.ones(1, 8, dtype=torch.long)})
        chunks = {"attention_chunk_size": 5, "num_local_experts": 2}
        sp = huggingface.enable(hf.tiny("Llama4ForCausalLM", **chunks), comm)
        with pytest.raises(ValueError, match="tables depend only on documents"):
            sp.preparation(huggingface.Collator()(FEW))
        sp = huggingface.enable(hf.tiny("LlamaForCausalLM"), comm, strategy="auto")
        with pytest.raises(ValueError, match="a module whose messages depend only on the layout"):
            sp.preparation(huggingface.Collator()(FEW))

    virtual(1, on_rank)
