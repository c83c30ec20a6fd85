"""Models of transformers over virtual ranks: what one process computes, or a refusal by name."""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
import transformers

from seqpar import Layout
from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.generation import SHARED_GEMMA4, TEMPERATURES
from tests.support.ranks import virtual

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SINKS = {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "llama, padded on the left": ("LlamaForCausalLM", {}, "left"),
    "mistral, with windows": ("MistralForCausalLM", {"sliding_window": 5}, "padded"),
    "qwen3, packed": ("Qwen3ForCausalLM", {}, "packed"),
    "gemma2, with caps": (
        "Gemma2ForCausalLM",
        {"sliding_window": 4, "attn_logit_softcapping": 2.0},
        "packed",
    ),
    "gpt-oss, with sinks": ("GptOssForCausalLM", SINKS, "packed"),
    "llama4, with temperatures by columns": ("Llama4ForCausalLM", TEMPERATURES, "left"),
    "llama4, with temperatures, packed": ("Llama4ForCausalLM", TEMPERATURES, "packed"),
    "bert, an encoder": ("BertForMaskedLM", NO_DROPOUT, "padded"),
    "modernbert, with windows to both sides": (
        "ModernBertForMaskedLM",
        {"local_attention": 6},
        "padded",
    ),
    "modernbert, with a setting for flash-attn": (
        "ModernBertForMaskedLM",
        {"deterministic_flash_attn": True},
        "padded",
    ),
    "bart, with cross attention": ("BartForConditionalGeneration", hf.BART, "padded"),
    "m2m100, with positions by a formula": (
        "M2M100ForConditionalGeneration",
        hf.BART
        | dict.fromkeys(["encoder_layerdrop", "decoder_layerdrop", "attention_dropout"], 0.0),
        "padded",
    ),
}


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


@pytest.mark.parametrize("case", CASES)
def test_a_model_computes_what_one_process_does(case):
    name, options, kind = CASES[case]
    hf.compare(hf.tiny(name, **options), hf.batch(kind), 2)


def test_layers_that_share_keys_compute_the_same():
    """In float64: float32 rounds gradients of this model by up to 9e-5."""
    model = hf.tiny("Gemma4ForCausalLM", **SHARED_GEMMA4).double()
    hf.compare(model, hf.batch("left"), 2)


@pytest.mark.parametrize("asked", ["config", "call"])
def test_router_balancing_loss_covers_all_ranks_tokens(asked):
    of = hf.batch("left")
    by_config = asked == "config"
    options = {"num_local_experts": 4, "router_aux_loss_coef": 1.0}
    model = hf.tiny("MixtralForCausalLM", output_router_logits=by_config, **options)
    asked = {} if by_config else {"output_router_logits": True}
    alone = model(**of, **asked)
    expected = hf.unmodified(model, of | asked)
    assert alone.loss > 4 + alone.aux_loss > 5

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        batch = sp.shard(of)
        outputs = own(**batch, **asked)
        outputs.loss.backward()
        sp.average_gradients()
        whole = sp.unshard(outputs)
        torch.testing.assert_close(outputs.aux_loss, alone.aux_loss)
        kept = hf.real(of).flatten()
        for found, logits in zip(whole.router_logits, alone.router_logits, strict=True):
            torch.testing.assert_close(found[kept], logits[kept])
        del batch["labels"]
        torch.testing.assert_close(own(**batch, **asked).aux_loss, alone.aux_loss)
        return outputs.loss.detach(), whole.logits.detach(), hf.gradients(own)

    hf.assert_same(virtual(3, run), expected, hf.real(of))


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather", "token_ring", "disaggregated"])
def test_every_strategy_runs_it(llama, strategy):
    hf.compare(llama, hf.batch("padded"), 2, strategy)


@pytest.mark.parametrize("kind", ["striped", "contiguous"])
def test_any_kind_of_layout_runs_it(llama, kind):
    hf.compare(llama, hf.batch("packed"), 3, "ring", None, kind)


def test_a_layout_of_the_users_own_runs_it(llama):
    spans = [[(0, 0, 4), (2, 3, 12)], [(0, 4, 9), (1, 0, 1), (2, 0, 3)]]
    cu_seqlens = [0, 9, 10, 22]
    hf.compare(llama, hf.batch("packed"), 2, "ring", Layout.from_spans(spans, cu_seqlens))


def test_gradients_of_several_batches_add_up(llama):
    model = copy.deepcopy(llama)
    batches = hf.batch("padded"), hf.batch("packed")
    for of in batches:
        hf.alone(model, of)[0].backward()
    expected = hf.gradients(model)

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        for of in batches:
            own(**sp.shard(of)).loss.backward()
        sp.average_gradients()
        return hf.gradients(own)

    for found in virtual(2, run):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_checkpointed_model_recomputes_the_same(llama):
    """Two forwards before their backwards: each recomputation needs its own batch's layout."""
    model = copy.deepcopy(llama)
    batches = hf.batch("padded"), hf.batch("packed")
    sum(hf.alone(model, of)[0] for of in batches).backward()
    expected = hf.gradients(model)

    def run(comm):
        own = copy.deepcopy(llama)
        sp = huggingface.enable(own, comm)
        own.activation_checkpointing_enable()
        sum(own(**sp.shard(of)).loss for of in batches).backward()
        sp.average_gradients()
        return hf.gradients(own), sp.report()

    for found, report in virtual(2, run):
        assert [layer.calls for layer in report.layers] == [4, 4]  # two calls, each done twice
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_models_of_one_config_have_separate_strategies(llama):
    config = copy.deepcopy(llama.config)
    torch.manual_seed(1)
    models = [type(llama)(config) for _ in range(3)]
    of = hf.batch()
    expected = [model(**of).loss for model in models]

    def run(comm):
        first, second, third = (copy.deepcopy(model) for model in models)
        first.config = second.config = third.config = copy.deepcopy(config)
        for model in (first, second, third):
            for x in model.modules():
                if hasattr(x, "config"):
                    x.config = first.config
        sps = huggingface.enable(first, comm, "ring"), huggingface.enable(second, comm, "ulysses")
        losses = [
            model(**sp.shard(of)).loss for model, sp in zip((first, second), sps, strict=True)
        ]
        return [*losses, third(**of).loss], [sp.report().bytes for sp in sps]

    for losses, sent in virtual(2, run):
        torch.testing.assert_close(losses, expected)
        assert 0 < sent[0] != sent[1] > 0


def gradients_of_shared_head(models, comm=None):
    """Gradients of three terms: the target's loss, the draft's loss, and one after the call."""
    of = hf.batch("whole")
    target, draft = copy.deepcopy(models)
    draft.lm_head = target.lm_head
    batches, total, sps = [of, of], torch.Tensor.sum, []
    if comm is not None:
        sps = [huggingface.enable(model, comm) for model in (target, draft)]
        batches, total = [sp.shard(of) for sp in sps], sps[1].total
    outputs = [
        model(**batch, output_hidden_states=True)
        for model, batch in zip((target, draft), batches, strict=True)
    ]
    term = total(draft.lm_head(outputs[1].hidden_states[-1]).square().sum())
    (outputs[0].loss + outputs[1].loss + term).backward()
    for sp in sps:
        sp.average_gradients()
    return hf.gradients(target), hf.gradients(draft)


def test_a_head_that_models_share_sums_once(llama):
    models = llama, hf.tiny("LlamaForCausalLM", num_hidden_layers=1)
    expected = gradients_of_shared_head(models)
    for found in virtual(2, lambda comm: gradients_of_shared_head(models, comm)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_loss_without_labels_is_zero(llama, items):
    of = hf.batch()
    of["labels"] = torch.full_like(of["labels"], -100)

    def run(comm):
        model = copy.deepcopy(llama)
        sp = huggingface.enable(model, comm)
        loss = model(**sp.shard(of), num_items_in_batch=items).loss
        loss.backward()
        sp.average_gradients()
        return loss.item(), max(float(x.abs().max()) for x in hf.gradients(model).values())

    assert virtual(2, run) == [(0.0, 0.0)] * 2


def test_disabling_restores_every_bit(llama):
    of = hf.batch()
    expected = llama(**of)

    def run(comm):
        model = copy.deepcopy(llama)
        configs = [x.config for x in model.modules() if hasattr(x, "config")]
        hooks = [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules()]
        sp = huggingface.enable(model, comm)
        model(**sp.shard(of)).loss.backward()
        model.config.use_cache = False  # which a user may do meanwhile
        sp.disable()
        sp.disable()
        after = [x.config for x in model.modules() if hasattr(x, "config")]
        assert all(a is b for a, b in zip(configs, after, strict=True))
        assert hooks == [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules()]
        assert not any(x._backward_hooks for x in model.parameters())
        assert model.config.use_cache is False
        return model(**of), model.config._attn_implementation

    for outputs, implementation in virtual(2, run):
        assert implementation == llama.config._attn_implementation
        assert torch.equal(outputs.loss, expected.loss)
        assert torch.equal(outputs.logits, expected.logits)


def test_the_report_has_every_layer_and_its_traffic(llama):
    def run(comm):
        model = copy.deepcopy(llama).requires_grad_(False)
        weight = model.model.embed_tokens.weight.requires_grad_()
        sp = huggingface.enable(model, comm, "ring", check_ranks=False)
        assert sp.report().calls == sp.report().bytes == 0
        batch = sp.shard({"input_ids": hf.batch()["input_ids"]})
        before = comm.sent_bytes
        sp.total(model(**batch).logits.sum()).backward()
        sent = comm.sent_bytes - before - 4  # its part of the loss
        sp.average_gradients()
        of_gradients = 4 * (weight.numel() + 1)  # of two ranks each sends all
        assert comm.sent_bytes - before - 4 - sent == of_gradients
        return sp.report(), sent

    for report, sent in virtual(2, run):
        names = [f"model.layers.{i}.self_attn" for i in range(2)]
        assert [layer.name for layer in report.layers] == names
        assert all(layer.calls == 1 and layer.ranks == 2 for layer in report.layers)
        assert all(layer.forward_bytes > 0 < layer.backward_bytes for layer in report.layers)
        assert report.bytes == sent
        assert all(name in str(report) for name in names)


def linear_attention(module, query, key, value, mask, scaling=None, **_):
    """The oracle, over whole rows: what transformers calls in the place of softmax attention."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = (query.relu() @ key.relu().transpose(-1, -2)).tril() * scaling
    return (scores @ value).transpose(1, 2), None


def test_softmax_layers_become_linear_ones(llama):
    transformers.AttentionInterface.register("linear-oracle", linear_attention)
    of = hf.batch("whole")
    alone = copy.deepcopy(llama)
    layer = alone.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "linear-oracle"
    expected = hf.unmodified(alone, of)

    def run(comm):
        model = copy.deepcopy(llama)
        sp = huggingface.enable(model, comm)
        with pytest.raises(ValueError, match="layers must be"):
            sp.make_linear([2])
        sp.make_linear(["model.layers.1.self_attn"], feature_map=torch.relu)
        outputs = model(**sp.shard(of))
        outputs.loss.backward()
        sp.average_gradients()
        return outputs.loss.detach(), sp.unshard(outputs).logits.detach(), hf.gradients(model)

    hf.assert_same(virtual(2, run), expected, hf.real(of))


def test_layers_with_windows_cannot_become_linear():
    model = hf.tiny("MistralForCausalLM", sliding_window=5)

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        sp.make_linear([0])
        sp.model(**sp.shard(hf.batch()))

    assert "model.layers.0.self_attn: it is linear and takes only a causal mask" in hf.refusal(run)


def test_windows_whose_mask_a_hook_took_away_are_refused():
    model = hf.tiny("MistralForCausalLM", sliding_window=5)

    def without_mask(module, args, kwargs):
        return args, kwargs | {"attention_mask": None}

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        layer = sp.model.model.layers[1].self_attn
        layer.register_forward_pre_hook(without_mask, with_kwargs=True)
        sp.model(**sp.shard(hf.batch()))

    assert "layers.1.self_attn: it has a window of 5 keys and no mask" in hf.refusal(run)


def test_saved_models_load_without_seqpar(llama, tmp_path):
    def run(comm):
        model = copy.deepcopy(llama)
        huggingface.enable(model, comm)
        model.save_pretrained(tmp_path)

    virtual(1, run)
    loaded = type(llama).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == llama.config._attn_implementation
    torch.testing.assert_close(loaded.state_dict(), llama.state_dict())


def test_transformers_is_imported_when_it_is_used():
    for file in Path(huggingface.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
            assert not re.search(r"\b(transformers|accelerate)\b", names), file
