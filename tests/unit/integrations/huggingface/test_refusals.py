"""What stays silent when attention is swapped in by hand: it is right here, or refused by name."""

import copy
import re
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers
import transformers.masking_utils as utils
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.attention.masks import read_mask
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

TINY_BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}
TINY_MAMBA = {"state_size": 4, "num_heads": 4, "expand": 1}


@pytest.fixture(scope="module")
def llama():
    return hf.tiny("LlamaForCausalLM")


def refused_model(name, **options):
    model = hf.tiny(name, **options)
    return hf.refusal(lambda comm: huggingface.enable(model, comm))


MODELS = {
    "attention of its own": ("DebertaForMaskedLM", {}, "0 of 2 .*layer.0.*DebertaAttention"),
    "recurrent": ("MambaForCausalLM", TINY_MAMBA, r"backbone.layers.0 \(MambaBlock\) mixes tokens"),
    "recurrent beside attention": (
        "RecurrentGemmaForCausalLM",
        {},
        r"RecurrentGemma.* mixes tokens",
    ),
    "convolutions": (
        "ZayaForCausalLM",
        {"num_experts_per_tok": 1},
        r"self_attn.qkv_proj.conv_qk_depthwise \(Conv1d\) mixes tokens",
    ),
    "neighbouring tokens": (
        "MobileBertForMaskedLM",
        {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        "trigram_input is set",
    ),
    "counted tokens": ("EsmForMaskedLM", {"token_dropout": True}, "token_dropout is set"),
    "full experts": (
        "SwitchTransformersForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "num_experts": 2},
        "expert_capacity is set",
    ),
    "a pooler": ("BertModel", {}, "pooler takes one token .*add_pooling_layer=False"),
    "two answers a sequence": ("LlamaForQuestionAnswering", {}, "head for each token"),
    "dropped layers": (
        "OPTForCausalLM",
        {"layerdrop": 0.1, "ffn_dim": 32, "word_embed_proj_dim": 32},
        "layerdrop 0.1",
    ),
    "a routers' loss": (
        "DogeForCausalLM",
        {"output_router_logits": True, "is_moe": True, "num_experts": 4},
        "output_router_logits is set, and DogeForCausalLM computes a router loss",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_unsupported_models_are_refused_on_enable(case):
    name, options, reason = MODELS[case]
    text = refused_model(name, **options)
    assert re.search(reason, text), text


def test_dropout_is_refused_where_it_would_run():
    model = hf.tiny("LlamaForCausalLM", attention_dropout=0.1).eval()

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        batch = sp.shard(hf.batch())
        assert sp.model(**batch).loss.isfinite()
        sp.model.train()(**batch)

    assert "model.layers.0.self_attn: dropout is 0.1" in hf.refusal(run)


def test_layerdrop_is_refused_where_layers_would_be_skipped():
    options = {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
    model = hf.tiny("OPTForCausalLM", layerdrop=1.0, **options).eval()

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        batch = sp.shard(hf.batch())
        assert sp.model(**batch).loss.isfinite()
        sp.model.train()(**batch)

    text = hf.refusal(run)
    assert text.startswith("layerdrop must be 0 in training: model.decoder has layerdrop 1.0"), text


def test_a_models_own_documents_are_refused():
    """transformers separates documents of positions in two parts, and ESMC chains in one."""
    chains = utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="got a mask that reads a different tensor"):
        read_mask(utils.and_masks(utils.bidirectional_mask_function, chains))
    positions = torch.tensor([[0, 1, 0, 1]])
    both = utils.packed_sequence_compatibility_function(
        utils.causal_mask_function, positions, torch.tensor([[0, 0, 1, 1]])
    )
    assert read_mask(both).causal


def mean_loss(logits, labels, vocab_size, **_):
    return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


@pytest.mark.parametrize("function", [mean_loss, ForMaskedLMLoss])
@pytest.mark.parametrize("ranks", [{0, 1}, {1}])
def test_another_loss_function_is_refused(llama, function, ranks):
    """Where there are labels, also if only one rank has set it."""

    def run(comm):
        model = copy.deepcopy(llama)
        if comm.rank in ranks:
            model.loss_function = function
        sp = huggingface.enable(model, comm)
        batch = hf.batch()
        model(**sp.shard({name: x for name, x in batch.items() if name != "labels"}))
        model(**sp.shard(batch))

    expected = f"the model's default, ForCausalLMLoss, got {function.__name__}"
    text = hf.refusal(run)
    assert text.startswith(f"loss_function must be {expected}") and "sp.total" in text, text


def test_labels_of_losses_with_terms_are_refused():
    model = hf.tiny("BambaForCausalLM", **TINY_BAMBA, z_loss_coefficient=0.5)

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        batch = hf.batch()
        sp.model(**sp.shard({name: x for name, x in batch.items() if name != "labels"}))
        sp.model(**sp.shard(batch))

    expected = "labels must be None: z_loss_coefficient of the model's config is 0.5, which adds"
    assert hf.refusal(run).startswith(expected)


def test_a_router_loss_of_unknown_code_is_refused(llama):
    def with_router_loss(model, args, outputs):
        return MoeCausalLMOutputWithPast(**outputs, aux_loss=outputs.logits.mean())

    def run(comm):
        model = copy.deepcopy(llama)
        model.register_forward_hook(with_router_loss)
        sp = huggingface.enable(model, comm)
        model(**sp.shard(hf.batch()))

    expected = "LlamaForCausalLM computes a router loss that seqpar does not know"
    assert expected in hf.refusal(run)


def test_labels_and_the_models_own_loss_are_refused(llama):
    def run(comm):
        around = torch.nn.ModuleDict({"inner": copy.deepcopy(llama)})
        around.forward = lambda **local: {
            "logits": (logits := around.inner(**local).logits),
            "loss": logits.square().mean(),
        }
        sp = huggingface.enable(around, comm)
        around(**sp.shard({"input_ids": hf.batch()["input_ids"]}))
        around(**sp.shard(hf.batch()))

    expected = "labels must be None: the model returned a loss of its own"
    assert hf.refusal(run).startswith(expected)


def adapted(model, **settings):
    """A model in a module with a config of an adapter, as PEFT's are."""
    around = torch.nn.ModuleDict({"inner": copy.deepcopy(model)})
    around.forward = lambda **local: around.inner(**local)
    around.peft_config = {"default": SimpleNamespace(**settings)}
    return around


def test_penalties_of_adapters_are_refused_with_labels(llama):
    def run(comm):
        model = adapted(llama, orth_reg_weight=0.5)
        sp = huggingface.enable(model, comm)
        model(**sp.shard({"input_ids": hf.batch()["input_ids"]}))
        model(**sp.shard(hf.batch()))

    text = hf.refusal(run)
    assert text.startswith("labels must be None: adapter default: PEFT adds a penalty"), text


def test_adapters_that_search_for_tokens_are_refused(llama):
    model = adapted(llama, alora_invocation_tokens=[5])
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))
    assert "adapter default: PEFT finds its alora_invocation_tokens" in text


ADDING = {  # a method of PEFT's that adds tokens, keys or a model -> its config's properties
    "PROMPT_TUNING": {"is_prompt_learning": True},
    "PREFIX_TUNING": {"is_prompt_learning": True},
    "ADAPTION_PROMPT": {"is_adaption_prompt": True},
    "SHADOW": {},
}
OTHER_PROPERTIES = {"is_prompt_learning": False, "is_adaption_prompt": False}


@few_rows()
@pytest.mark.parametrize("kind", ADDING)
@pytest.mark.parametrize("order", ["around first", "enabled first", "only around generate"])
def test_adapters_that_add_tokens_or_attention_are_refused(llama, kind, order):
    """By the same reason whether PEFT is put around the model before `enable` or afterwards."""
    settings = OTHER_PROPERTIES | ADDING[kind] | {"peft_type": SimpleNamespace(value=kind)}

    def run(comm):
        model = adapted(llama, **settings)
        inner = model["inner"].eval()
        if order == "around first":
            huggingface.enable(model, comm)
        sp = huggingface.enable(inner, comm)
        if order == "enabled first":
            model(**sp.shard(hf.batch()))
        inner.prepare_inputs_for_generation = MethodType(type(inner).forward, model)
        inner.generate(input_ids=hf.batch()["input_ids"], max_new_tokens=2)

    text = hf.refusal(run)
    assert f"adapter default: PEFT's {kind} adds " in text and "such as LoRA" in text, text


def test_adapters_that_bypass_the_models_call_are_refused(llama):
    """PEFT calls the `forward` of a model with adaption prompts, and not the model."""

    def run(comm):
        model = adapted(llama, is_adaption_prompt=True, peft_type="ADAPTION_PROMPT")
        inner = model["inner"]
        model.forward = lambda **local: inner.forward(**local)
        sp = huggingface.enable(inner, comm)
        batch = sp.shard(hf.batch())
        batch.pop("seqpar")
        model(**batch)

    assert "adapter default: PEFT's ADAPTION_PROMPT adds attention" in hf.refusal(run)


def test_adapters_that_change_weights_are_exact(llama):
    expected = llama(**hf.batch()).loss

    def run(comm):
        model = adapted(llama, **OTHER_PROPERTIES, peft_type="LORA")
        sp = huggingface.enable(model, comm)
        torch.testing.assert_close(model(**sp.shard(hf.batch())).loss, expected)

    virtual(2, run)


ANSWERS = {  # class -> an output that has one answer for each sequence
    "CLIPTextModel": "pooler_output is (1, 32)",
    "GPT2DoubleHeadsModel": "mc_logits is (1,)",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_outputs_for_whole_sequences_are_refused(name):
    model = hf.tiny(name).eval()
    ids = hf.batch()["input_ids"]

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        sp.model(**sp.shard({"input_ids": ids}))

    text = hf.refusal(run)
    assert text.startswith("model must return values for each token") and ANSWERS[name] in text


def call(change, model, of="padded"):
    """What ranks are told that call the model with a sharded batch after a change to it."""

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        sp.model(**change(dict(sp.shard(hf.batch(of)))))

    return hf.refusal(run)


CALLS = {
    "states of another model": (
        lambda x: x | {"encoder_hidden_states": torch.zeros(1, 4, 32)},
        "encoder_hidden_states must not be given",
    ),
    "not sharded": (lambda x: hf.batch(), "what shard returned"),
    "positions forgotten": (lambda x: x | {"position_ids": None}, "position_ids must be those"),
    "labels of the whole batch": (lambda x: x | {"labels": hf.batch()["labels"]}, "through shard"),
    "tokens of the whole batch": (
        lambda x: x | {"input_ids": hf.batch()["input_ids"]},
        "input_ids",
    ),
    "a mask of padding": (lambda x: x | {"attention_mask": x["input_ids"]}, "attention_mask must"),
    "a bias": (
        lambda x: x | {"position_bias": torch.ones(1)},
        "model.layers.0.self_attn: position_bias is given",
    ),
    "weights asked for": (lambda x: x | {"output_attentions": True}, "output_attentions"),
    "a cache": (lambda x: x | {"use_cache": True}, "use_cache"),
    "a tuple asked for": (lambda x: x | {"return_dict": False}, "return_dict"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_would_be_wrong_is_refused(llama, case):
    change, reason = CALLS[case]
    assert reason in call(change, llama)


def test_labels_that_shard_has_not_seen_are_refused(llama):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        batch = sp.shard({"input_ids": hf.batch()["input_ids"]})
        sp.model(**batch, labels=batch["input_ids"])

    assert "labels must go through shard" in hf.refusal(run)


def test_values_of_whole_rows_are_refused():
    model = hf.tiny("XmodForMaskedLM", languages=["en_XX", "de_DE"]).eval()
    of = hf.batch()
    first = {name: x[:1] for name, x in of.items()} | {"lang_ids": torch.tensor([1])}
    expected = model(**first).loss

    def run(comm):
        sp = huggingface.enable(copy.deepcopy(model), comm)
        torch.testing.assert_close(sp.model(**sp.shard(first)).loss, expected)
        sp.shard(of | {"lang_ids": torch.tensor([0, 1])})

    assert hf.refusal(run).startswith("lang_ids must not have a value for each row, got (2,)")


@pytest.mark.parametrize("where", ["shard", "model", "layer"])
def test_a_fault_on_one_rank_raises_on_all(llama, where):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        of = hf.batch()
        if where == "shard" and comm.rank == 1:
            of = hf.with_hole(of)
        batch = sp.shard(of)
        if where == "model" and comm.rank == 1:
            batch["output_attentions"] = True
        if where == "layer" and comm.rank == 1:
            layer = sp.model.model.layers[1].self_attn
            layer.register_forward_pre_hook(
                lambda x, args, kwargs: (args, kwargs | {"attention_mask": torch.ones(1, 1, 4, 4)}),
                with_kwargs=True,
            )
        sp.model(**batch)

    expected = {
        "shard": "padding only on the left or the right, got some between tokens of row 0",
        "model": "output_attentions must not be given",
        "layer": "model.layers.1.self_attn: its mask is a tensor (1, 1, 4, 4)",
    }
    assert expected[where] in hf.refusal(run)


def test_options_that_do_not_exist_are_refused(llama):
    for options in ({"windows": 3}, {"partial_dtype": "bf16"}):
        with pytest.raises(TypeError, match="is not an option of 'ring'"):
            virtual(1, lambda comm, given=options: huggingface.enable(llama, comm, **given))
    for arguments, reason in (
        (("quick",), "name must be one of"),
        (("ring", {"layout": "spiral"}), "layout must be"),
    ):
        name, options = (*arguments, {})[:2]
        with pytest.raises(ValueError, match=reason):
            virtual(1, lambda comm, n=name, o=options: huggingface.enable(llama, comm, n, **o))
    with pytest.raises(ValueError, match="PreTrainedModel, got Linear"):
        virtual(1, lambda comm: huggingface.enable(torch.nn.Linear(2, 2), comm))


def test_enabling_twice_fails_and_copies_are_not_enabled(llama):
    def run(comm):
        model = copy.deepcopy(llama)
        sp = huggingface.enable(model, comm)
        with pytest.raises(ValueError, match="enabled twice"):
            huggingface.enable(model, comm)
        with pytest.raises(ValueError, match="must be called with what shard returned"):
            type(model).generate(model, input_ids=hf.batch()["input_ids"], max_new_tokens=2)
        copied = copy.deepcopy(model)
        with pytest.raises(ValueError, match="is a copy of one that is enabled"):
            copied(**sp.shard(hf.batch()))
        with pytest.raises(ValueError, match="model is a copy of one that is enabled"):
            huggingface.enable(copied, comm)

    virtual(2, run)


def test_layers_that_were_passed_by_are_named(llama):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        layers = sp.model.model.layers
        layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        sp.model(**sp.shard(hf.batch()))

    assert "layers model.layers.1.self_attn were not reached" in hf.refusal(run)


def test_outputs_of_unknown_order_are_refused(llama):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(llama), comm)
        batch = sp.shard(hf.batch())
        logits = sp.model(**batch).logits.float() * 2
        assert sp.unshard(logits, batch).shape == (2, 22, hf.VOCABULARY)
        with pytest.raises(ValueError, match="pass the sharded batch too"):
            sp.unshard(logits)

    virtual(2, run)


EXACT = {
    "positions jump, which transformers takes for packing": ("Qwen3ForCausalLM", {}, "whole"),
    "keyword arguments dropped": ("NemotronForCausalLM", {}, "packed"),
    "and here": ("StableLmForCausalLM", {}, "packed"),
    "chunks": ("Llama4ForCausalLM", {"attention_chunk_size": 5, "num_local_experts": 2}, "packed"),
    "frequencies of the longest position": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
        "left",
    ),
}


@pytest.mark.parametrize("case", EXACT)
def test_what_goes_wrong_by_hand_is_right(case):
    name, options, kind = EXACT[case]
    hf.compare(hf.tiny(name, **options), hf.batch(kind), 2)


def test_random_positions_of_patches_are_refused_in_training(llama):
    """DINOv3 scales them by default, and another tower's dropout has other names."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    patches = {"num_attention_heads": 4, "image_size": 32, "patch_size": 16}
    tower = transformers.DINOv3ViTConfig(**sizes, **patches)
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=llama.config, image_token_index=63, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).train()
    text = hf.refusal(lambda comm: huggingface.enable(copy.deepcopy(model), comm))
    assert "has pos_embed_rescale, and would draw different numbers on each rank" in text, text
    model.model.vision_tower.eval()
    virtual(2, lambda comm: huggingface.enable(copy.deepcopy(model), comm))
