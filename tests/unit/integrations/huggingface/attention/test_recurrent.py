"""Recurrent layers of models: what one process computes, whatever surrounds them."""

import copy
import functools
import importlib
import inspect

import pytest
import torch

from seqpar import Layout, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.attention.recurrent import PatchedRecurrence, _nothing
from seqpar.integrations.huggingface.model.code import check_forward, with_globals
from seqpar.integrations.huggingface.model.layers import _RECURRENT, CALLED, kind_of
from seqpar.linear.maps.backends import fla
from tests.support import generation
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.unit.integrations.huggingface.test_families import build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
CASES = {  # by kind of recurrence
    "gated_delta": "causal/qwen3_next",
    "kda": "causal/kimi_linear",
    "scalar_decay": "causal/bamba",
    "constant_decay": "causal/minimax",
    "convolution": "causal/lfm2_moe",
}


@pytest.fixture(scope="module")
def models():
    return {kind: build(family) for kind, family in CASES.items()}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.exhaustive] * (x == "kda")) for x in CASES]
)
def test_a_model_computes_what_one_process_does(models, kind):
    ranks, batch = (4, "packed") if kind == "gated_delta" else (2, "padded")
    hf.compare(models[kind], hf.batch(batch), ranks)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "spans"])
def test_on_other_layouts(models, layout):
    """Also where a rank has one token, and documents lie on some of the ranks."""
    model, of = models["gated_delta"], hf.batch("packed")
    expected = hf.unmodified(model, of)
    given, kind = None, layout
    if layout == "spans":
        spans = [[(0, 0, 4), (2, 2, 12)], [(1, 0, 1)], [(0, 4, 9), (2, 0, 2)]]
        given, kind = Layout.from_spans(spans, [0, 9, 10, 22]), "zigzag"
    results = virtual(3, lambda comm: hf.on_rank(comm, model, of, layout=given, kind=kind))
    hf.assert_same(results, expected, hf.real(of))


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_recomputed_layers_keep_their_documents(models, reentrant):
    """Two calls, and then two backwards: a layer is recomputed with the batch of its own call."""
    model, first, second = models["gated_delta"], hf.batch("packed"), hf.batch("padded")
    expected = [hf.unmodified(model, of) for of in (first, second)]

    def run(comm):
        own = copy.deepcopy(model)
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        sp, found = huggingface.enable(own, comm), []
        outputs = [own(**sp.shard(of)) for of in (first, second)]
        for output in outputs:
            own.zero_grad()
            output.loss.backward()
            sp.average_gradients()
            found.append((output.loss.detach(), sp.unshard(output).logits, hf.gradients(own)))
            found[-1] = copy.deepcopy([x.detach() for x in found[-1][:2]]), dict(found[-1][2])
        return found

    for i, of in enumerate((first, second)):
        results = [(*found[i][0], found[i][1]) for found in virtual(2, run)]
        hf.assert_same(results, expected[i], hf.real(of))


def test_disable_gives_every_bit_back(models):
    """And neither the classes nor their files change while another model is enabled."""
    model, of = models["scalar_decay"], hf.batch("padded")
    before = hf.unmodified(model, of)

    def run(comm):
        own, other = copy.deepcopy(model), copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        beside = hf.unmodified(other, of)
        sp.disable()
        assert not any("forward" in vars(x) for x in own.modules())
        return beside, hf.unmodified(own, of)

    for found in virtual(2, run)[0]:
        assert torch.equal(found[0], before[0]) and torch.equal(found[1], before[1])
        assert all(torch.equal(found[2][name], x) for name, x in before[2].items())


def test_the_report_counts_recurrent_layers(models):
    of = hf.batch("packed")

    def run(comm):
        model = copy.deepcopy(models["gated_delta"])
        sp = huggingface.enable(model, comm)
        model(**sp.shard(of)).loss.backward()
        return sp.report()

    for report in virtual(2, run):
        recurrent, softmax = report.layers
        assert recurrent.name == "model.layers.0.linear_attn" and softmax.calls == 1
        assert recurrent.calls == 1 and recurrent.forward_bytes and recurrent.backward_bytes


def test_make_linear_numbers_layers_as_the_report_does(models):
    def run(comm):
        sp = huggingface.enable(copy.deepcopy(models["gated_delta"]), comm)
        with pytest.raises(ValueError, match=r"layers must be names or numbers of .*, got 0"):
            sp.make_linear([0])
        sp.make_linear([1])
        return [layer.linear is not None for layer in sp.layers.values()]

    assert virtual(1, run) == [[False, True]]


MISTAKES = {
    "a copy": (
        lambda sp, model: copy.deepcopy(model.model.layers[0])(torch.zeros(1, 11, 32), None),
        "copy the model before you enable it",
    ),
    "a layer alone": (
        lambda sp, model: model.model.layers[0](torch.zeros(1, 11, 32), None),
        "it was called outside of the model",
    ),
    "the model's body": (
        lambda sp, model: model.model(input_ids=torch.zeros(1, 11, dtype=torch.long)),
        "the model must be called itself while it is enabled",
    ),
    "a cache": (
        lambda sp, model: sp.cache(),
        "no recurrent layers for a cache, got model.layers.0.linear_attn",
    ),
    "generate": (
        lambda sp, model: model.eval().generate(**generation.prompts((0, 7)), max_new_tokens=2),
        "no recurrent layers for a cache, got model.layers.0.linear_attn",
    ),
    "linear": (lambda sp, model: sp.make_linear(["model.layers.0.linear_attn"]), "layers must be"),
    "enabled again": (lambda sp, model: huggingface.enable(model, sp.comm), "enabled twice"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(models, mistake):
    run, reason = MISTAKES[mistake]

    def on_rank(comm):
        model = copy.deepcopy(models["gated_delta"])
        run(huggingface.enable(model, comm), model)

    assert reason in hf.refusal(on_rank)


def test_a_forward_that_was_replaced_is_refused(models):
    def on_rank(comm):
        model = copy.deepcopy(models["gated_delta"])
        model.model.layers[0].linear_attn.forward = lambda *args, **kwargs: None
        try:
            huggingface.enable(model, comm)
        finally:  # the model is as it was
            del model.model.layers[0].linear_attn.forward
            huggingface.enable(model, comm).disable()

    assert "model must have the forwards of its classes" in hf.refusal(on_rank)


def test_other_kinds_are_refused():
    text = hf.refusal(lambda comm: huggingface.enable(build("causal/jamba"), comm))
    assert "mixes tokens along the sequence" in text


FILES = """bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe lfm3 mamba2 minimax nemotron_h
olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next zamba2"""


def test_each_listed_class_calls_the_replaced_function():
    found = set()
    for name in FILES.split():
        file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        classes = {x for x in vars(file).values() if isinstance(x, type) and kind_of(x)}
        for kind in classes:
            code = inspect.unwrap(kind.forward).__code__
            assert {*CALLED[kind_of(kind)]} <= {*code.co_names}
        found |= {kind.__name__ for kind in classes}
    assert found == set(_RECURRENT) and set(_RECURRENT.values()) == set(CALLED)


def test_functions_with_other_globals_keep_their_decorators():
    def doubled(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return 2 * function(*args, **kwargs)

        return wrapper

    @doubled
    def reads(x=1, *, y=2):
        return len(CASES) + x + y

    other = with_globals(reads, {"CASES": [0]})
    assert (reads(), other(), other(2, y=3)) == (16, 8, 12)
    assert other.__name__ == "reads" and other.__wrapped__(1) == 4


def test_decorators_that_copies_would_lose_are_refused():
    """Or each rank would compute its tokens alone, silently."""
    held = {}

    def aside(function):
        held["forward"] = function

        @functools.wraps(function)
        def wrapper(self):
            return held["forward"](self)

        return wrapper

    class Layer(torch.nn.Module):
        @aside
        def forward(self):
            return CASES

    with pytest.raises(
        ValueError, match="a Layer's forward does not hold the forward in a closure"
    ):
        check_forward(Layer(), ["CASES"])


def test_unknown_activations_are_refused_on_enable(models):
    def on_rank(comm):
        model = copy.deepcopy(models["gated_delta"])
        model.model.layers[0].linear_attn.activation = "gelu"
        huggingface.enable(model, comm)

    expected = "SiLU after its short convolutions: a Qwen3NextGatedDeltaNet has 'gelu'"
    assert expected in hf.refusal(on_rank)


def test_constant_decays_are_reread_after_writes(models):
    """To read them, as a call's check does, makes the host wait for a GPU."""
    layers = (x for x in models["constant_decay"].modules() if kind_of(type(x)))
    layer = copy.deepcopy(next(layers))
    recurrence = PatchedRecurrence(layer, "constant_decay", Comm("one", 0, 1), None)
    found = recurrence.log_decay(layer.slope_rate)
    assert torch.equal(found, -layer.slope_rate.flatten()) and found.device.type == "cpu"
    assert recurrence.log_decay(layer.slope_rate) is found
    layer.slope_rate.mul_(2)
    assert torch.equal(recurrence.log_decay(layer.slope_rate), 2 * found)
    layer.double()
    assert recurrence.log_decay(layer.slope_rate).dtype == torch.float64


@pytest.mark.parametrize("kind", ["convolution", "gated_delta", "scalar_decay"])
def test_unknown_code_in_a_layer_is_refused(models, kind):
    """A gate or a state, say, which another release of transformers may give."""
    layer = next(x for x in models[kind].modules() if kind_of(type(x)))
    recurrence = PatchedRecurrence(layer, kind, Comm("one", 0, 1), None)
    x = torch.zeros(1, 3, 2, 4)
    for name, function in recurrence.functions().items():
        if function is not _nothing:
            operands = [x] * (2 if name == "causal_conv1d_fn" else 5)
            with pytest.raises(ValueError, match="z is given, which seqpar does not support"):
                function(*operands, z=x, initial_state=None)


@pytest.mark.parametrize("kind", ["gated_delta", "scalar_decay"])
def test_kernels_get_half_precision(models, kind, monkeypatch):
    """As in the models' own code, where fla-core computes; plain PyTorch computes in fp32."""
    model, of, called = copy.deepcopy(models[kind]).bfloat16(), hf.batch("packed"), []

    def losses(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        for layer in sp.layers.values():
            if layer.recurrence is not None:
                layer.recurrence.attention.register_forward_pre_hook(
                    lambda _, args: called.append({x.dtype for x in args[:3]})
                )
        loss = own(**sp.shard(of)).loss
        loss.backward()
        return loss.item()

    exact = virtual(1, losses)[0]
    assert called and all(x == {torch.float32} for x in called)
    called.clear()
    monkeypatch.setattr(fla, "refusal", lambda q, v: None)
    half = virtual(1, losses)[0]
    assert called and all(x == {torch.bfloat16} for x in called)
    assert abs(half - exact) < 2**-8 * exact  # bf16 has 8 bits
    called.clear()
    with use_backend("reference"):
        assert virtual(1, losses)[0] == pytest.approx(exact, rel=1e-5)
    assert called and all(x == {torch.float32} for x in called)
