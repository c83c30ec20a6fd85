"""transformers with the hooks with which accelerate replaces masks under context parallelism."""

import pytest
import torch
from torch import nn

from seqpar import parity

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(1, 41).view(2, 20)
PACKED = torch.cat([torch.arange(12), torch.arange(8)]).expand(2, -1)


def step(folder, attach, window=None, **inputs):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).train()
    attach(model)
    with parity.record(folder, model):
        model(input_ids=IDS, labels=IDS, use_cache=False, **inputs).loss.backward()
    return folder


def hooks_of_accelerate(model):
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model)


def hooks_of_earlier_versions(model):
    """What accelerate did before it refused windows (accelerate#4177)."""

    def drop_mask(_, arguments, options):
        return arguments, options | {"attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(drop_mask, with_kwargs=True)


def unchanged(model):
    assert isinstance(model, nn.Module)


@pytest.mark.parametrize(
    ("attach", "options", "expected"),
    [
        (hooks_of_accelerate, {}, None),
        (
            hooks_of_accelerate,
            {"position_ids": PACKED},
            "Documents leak into each other: in model.layers.0.self_attn",
        ),
        (
            hooks_of_earlier_versions,
            {"window": 7},
            "A window is missing: in model.layers.0.self_attn.o_proj, the tokens from position 7",
        ),
    ],
)
def test_a_mask_that_hooks_replace_is_found(tmp_path, attach, options, expected):
    step(tmp_path / "a", unchanged, **options)
    report = parity.compare(tmp_path / "a", step(tmp_path / "b", attach, **options))
    if expected is None:
        assert report.first is None, str(report)
    else:
        assert report.diagnosis is not None and report.diagnosis.startswith(expected), str(report)
