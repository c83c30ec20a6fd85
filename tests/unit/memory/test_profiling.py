"""profile: who holds what in a step, on the meta device, compared with what a real step holds."""

import re

import pytest
import torch
import transformers
from torch import nn

from seqpar.integrations import huggingface
from seqpar.memory import profile, tiled
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.unit.memory.test_cross_entropy import Peak


class Model(nn.Module):
    """An embedding, an MLP and a loss."""

    def __init__(self, words=50, channels=8, width=64):
        super().__init__()
        self.embedding = nn.Embedding(words, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, width), nn.GELU(), nn.Linear(width, channels))
        self.register_buffer("scale", torch.ones(channels))

    def forward(self, ids):
        return (self.mlp(self.embedding(ids)) * self.scale).square().mean()


def real_peak(model, batch):
    """The most bytes that a real step holds, beside parameters and buffers."""
    with Peak() as watch:
        model(**batch).backward()
    return watch.peak


@pytest.mark.parametrize("tokens", [1000, 3000])
def test_the_peak_is_that_of_a_real_step(tokens):
    model, batch = Model(), {"ids": torch.arange(tokens) % 50}
    found = profile(model, batch)
    constant = sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    assert found.peak_bytes - constant == pytest.approx(real_peak(model, batch), rel=0.01)
    assert found.peak_bytes == max(found.timeline) == sum(x.bytes for x in found.held)
    assert found.by_kind()["parameters"] == sum(x.nbytes for x in model.parameters())
    assert found.by_kind()["buffers"] == 32


class ModelWithTuple(Model):
    """Returns the loss with the hidden states, as models of transformers do without a dict."""

    def forward(self, ids):
        hidden = self.mlp(self.embedding(ids))
        return (hidden * self.scale).square().mean(), hidden


def test_the_loss_may_be_the_first_of_a_tuple():
    model, ids = ModelWithTuple(), torch.arange(2000) % 50
    found = profile(model, {"ids": ids})
    constant = sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    with Peak() as watch:
        outputs = model(ids)
        outputs[0].backward()
    assert found.peak_bytes - constant == pytest.approx(watch.peak, rel=0.01)
    assert len(found.timeline) > found.backward_begins + 5


class ModelWithLogitsFirst(ModelWithTuple):
    def forward(self, ids):
        loss, hidden = super().forward(ids)
        return hidden, loss


def test_the_loss_of_a_tuple_is_the_tensor_without_dimensions():
    first, second = (
        profile(x(), {"ids": torch.arange(2000) % 50})
        for x in (ModelWithTuple, ModelWithLogitsFirst)
    )
    assert first.peak_bytes == second.peak_bytes


def test_the_bytes_per_token_are_those_by_which_the_peak_grows():
    few, many = (profile(Model(), {"ids": torch.zeros(n, dtype=torch.long)}) for n in (1000, 3000))
    growth = (many.peak_bytes - few.peak_bytes) / 2000
    assert few.bytes_per_token == pytest.approx(growth, rel=0.01)
    assert many.bytes_per_token == pytest.approx(growth, rel=0.01)


def test_the_model_and_its_gradients_stay_as_they_were():
    model, ids = Model(), torch.arange(40)
    before = dict(model.state_dict(keep_vars=True))
    hooks = [len(x._forward_hooks) for x in model.modules()]
    profile(model, {"ids": ids})
    after = model.state_dict(keep_vars=True)
    assert before.keys() == after.keys() and all(before[x] is after[x] for x in before)
    assert all(x.grad is None for x in model.parameters())
    assert hooks == [len(x._forward_hooks) for x in model.modules()]


def test_modules_and_gradients_are_named():
    found = profile(Model(), {"ids": torch.zeros(1000, dtype=torch.long)})
    largest = found.held[0]
    assert largest.module.startswith("mlp") and largest.grows and largest.bytes >= 1000 * 64 * 4
    assert {"embedding", "mlp.0", "mlp.2"} <= found.by_module().keys()
    text = str(found)
    assert re.match(r"peak [\d,]+ bytes for 1,000 tokens, [\d,]+ bytes per token\n", text)
    assert re.search(r"^mlp\S* +\w+ \(1000, 64\) +\w+ +[\d,]+$", text, re.MULTILINE)


def test_tiles_show_in_the_profile():
    plain, lean = Model(), Model()
    tiled(lean.mlp, 100)
    ids = torch.zeros(4000, dtype=torch.long)
    peaks = [profile(x, {"ids": ids}).peak_bytes for x in (plain, lean)]
    assert peaks[1] < 0.5 * peaks[0]


def test_an_enabled_model_on_one_rank_is_profiled():
    """Lean training of more tokens needs fewer bytes; attention is one operator."""
    config = transformers.Qwen3Config(**hf.SIZES | {"vocab_size": 3000})
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config).train()
    ids = torch.zeros(1, 5003, dtype=torch.long)

    def run(comm, memory):
        sp = huggingface.enable(model, comm, memory=memory)
        found = profile(model, sp.shard({"input_ids": ids, "labels": ids}))
        sp.disable()
        return found

    (plain,), (lean,) = (virtual(1, run, memory) for memory in (None, "lean"))
    logits = 5003 * 3000 * 4
    assert plain.peak_bytes > 2 * logits
    assert lean.bytes_per_token < 0.1 * plain.bytes_per_token
    assert lean.tokens == 5003


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "profile.png"
    profile(Model(), {"ids": torch.arange(40)}).save(path)
    assert path.read_bytes().startswith(b"\x89PNG")


class NeedsNumbers(Model):
    def forward(self, ids):
        return super().forward(ids) * (1 if self.scale.sum() > 0 else 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: profile(torch.relu, {}), "model must be a torch.nn.Module, got"),
        (lambda: profile(Model(), torch.zeros(3)), "batch must be a mapping, got Tensor"),
        (lambda: profile(Model(), {"x": torch.zeros(3)}), "batch must have a tensor of integers"),
        (
            lambda: profile(NeedsNumbers(), {"ids": torch.arange(40)}),
            "model must run on the meta device, but NeedsNumbers needs the numbers in a tensor",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
