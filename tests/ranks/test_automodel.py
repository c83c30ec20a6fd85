"""transformers models under Automodel's contract of sharders: one process's numbers."""

import contextlib
import copy
import dataclasses
import inspect
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from seqpar import Layout, parity
from tests.support import automodel
from tests.support import huggingface as hf
from tests.support.examples import example
from tests.support.ranks import device_mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # Automodel's and transformers' own
ROWS, COLUMNS = 2, 22
ENDS = [[9, 10, 22], [15, 20]]  # where documents of each row end; the second row has padding


@pytest.fixture(scope="module", autouse=True)
def stand_in_ends():
    yield
    automodel.forget()


def ids_and_labels(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, hf.VOCABULARY, (rows, COLUMNS), generator=generator)
    labels = torch.randint(3, hf.VOCABULARY, (rows, COLUMNS), generator=generator)
    for row, ends in enumerate(ENDS[:rows]):
        labels[row, ends[-1] :] = -100
    labels[0, 3] = -100
    return ids, labels


def numbers(rows=ROWS):
    """(rows, COLUMNS): the document of each token, from 1; 0 for padding."""
    made = torch.zeros(rows, COLUMNS, dtype=torch.long)
    for row, ends in enumerate(ENDS[:rows]):
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            made[row, start:end] = number + 1
    return made


def positions(rows=ROWS):
    made = torch.zeros(rows, COLUMNS, dtype=torch.long)
    for row, ends in enumerate(ENDS[:rows]):
        for start, end in zip([0, *ends], ends, strict=False):
            made[row, start:end] = torch.arange(end - start)
    return made


def batch(kind):
    """A batch as Automodel's collators make it."""
    rows = 1 if kind in ("one row", "positions") else ROWS
    ids, labels = ids_and_labels(rows)
    made = {"input_ids": ids, "labels": labels, "position_ids": positions(rows)}
    number = numbers(rows)
    if kind == "thd":
        made |= {
            "seq_lens": torch.tensor([[9, 1, 12], [15, 5, -1000]]),
            "seq_lens_padded": torch.tensor([[9, 1, 12], [15, 7, -1000]]),
            "qkv_format": "thd",
            "padding_mask": number == 0,
        }
    elif kind == "numbers":
        made |= {"attention_mask": number, "_packed_seq_ids": number}
    elif kind == "square":
        same = (number[:, :, None] == number[:, None]) & (number[:, None] > 0)
        made["attention_mask"] = (same & torch.ones(COLUMNS, COLUMNS).tril().bool())[:, None]
    elif kind == "one row":
        made["cu_seq_lens_q"] = made["cu_seq_lens_k"] = torch.tensor([0, *ENDS[0]])
        made["max_length_q"] = made["max_length_k"] = 12
    return made


def alone(model):
    """Logits of each document by itself, (ROWS, COLUMNS, V); and the gradients of both rows."""
    model = copy.deepcopy(model)
    ids, labels = ids_and_labels()
    logits = torch.zeros(ROWS, COLUMNS, hf.VOCABULARY)
    for row, ends in enumerate(ENDS):
        for start, end in zip([0, *ends], ends, strict=False):
            logits[row, start:end] = model(input_ids=ids[row : row + 1, start:end]).logits[0]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss / (labels != -100).sum()).backward()
    return logits.detach(), hf.gradients(model)


def strip_masks(model):
    """Register hooks with the effect of Automodel's, which take masks from attention layers."""

    def strip(module, args, kwargs):
        if "attention_mask" in kwargs:
            kwargs["attention_mask"], kwargs["is_causal"] = None, True
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(strip, with_kwargs=True, prepend=True)


def attach_hooks(model):
    """Register Automodel's hooks on attention layers, or hooks with their effect."""
    if not automodel.INSTALLED:
        return strip_masks(model)
    from nemo_automodel.components.distributed.context_parallel.utils import (
        attach_context_parallel_hooks,
    )

    return attach_context_parallel_hooks(model)


def on_rank(group, name, options, kind, strategy, layout="zigzag", wrapped=False, early=False):
    """The largest differences of logits and of gradients from one process."""
    _, integration = automodel.contract()
    model = hf.tiny(name, **options)
    expected, gradients = alone(model)
    mesh = device_mesh(2, 2, names=("dp", "cp"))
    if not early:
        attach_hooks(model)
    if wrapped:
        fully_shard(model, mesh=mesh["cp"])
    sp = integration.enable(model, mesh, strategy, layout=layout)
    if early:
        attach_hooks(model)
    of = batch(kind)
    sharder, outputs, labels = automodel.forward(model, mesh, of)
    logits = sharder.gather_token_tensor(outputs.logits, trim=True).reshape(-1, COLUMNS, 64)
    kept = numbers(len(logits)) > 0
    worst = float((logits - expected[: len(logits)])[kept].abs().max())
    if len(logits) == ROWS:
        count = (ids_and_labels()[1] != -100).sum()
        loss = F.cross_entropy(outputs.logits[0], labels[0], reduction="sum") / count
        (loss * 2 if wrapped else loss).backward()
        for key, p in model.named_parameters():
            gradient = p.grad.full_tensor() if wrapped else p.grad
            if not wrapped:
                torch.distributed.all_reduce(gradient, group=mesh["cp"].get_group())
            scale = gradients[key].abs().max()
            worst = max(worst, float((gradient - gradients[key]).abs().max() / scale))
    labels = sharder.gather_token_tensor(labels, trim=True).reshape(-1, COLUMNS)
    assert torch.equal(labels, of["labels"])
    sp.disable()
    assert not hasattr(model, "prepare_model_inputs_for_cp")
    return worst


WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CASES = {
    "ring": ("LlamaForCausalLM", {}, "thd", "ring"),
    "windows": ("Qwen3ForCausalLM", {**WINDOW, "use_sliding_window": True}, "numbers", "ulysses"),
    "enabled first": (
        "Qwen3ForCausalLM",
        {**WINDOW, "use_sliding_window": True},
        "numbers",
        "ring",
        "zigzag",
        False,
        True,
    ),
    "square mask": ("LlamaForCausalLM", {}, "square", "all_gather"),
    "FSDP": ("LlamaForCausalLM", {}, "numbers", "ring", "striped", True),
    "one row": ("LlamaForCausalLM", {}, "one row", "ring", "contiguous"),
    "positions": ("LlamaForCausalLM", {}, "positions", "token_ring"),
}


@pytest.mark.composes(
    "NeMo Automodel",
    "`automodel.enable(model, device_mesh)`; Automodel's FSDP2 averages gradients",
    case="FSDP",
    context=2,
    FSDP=2,
    equal="logits and gradients",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", CASES)
def test_logits_and_gradients_are_those_of_one_process(pool, kind):
    for worst in pool(4, on_rank, *CASES[kind]):
        assert worst < 2e-5, worst


def of_own_row(group):
    """The largest difference of a gradient from one process, where each group reads a row."""
    _, integration = automodel.contract()
    model = hf.tiny("LlamaForCausalLM")
    _, gradients = alone(model)
    mesh = device_mesh(2, 2, names=("dp", "cp"))
    fully_shard(model, mesh=mesh["dp", "cp"])
    integration.enable(model, mesh, "ring")
    row = mesh["dp"].get_local_rank()
    own = {name: x[row : row + 1] for name, x in batch("numbers").items()}
    _, outputs, labels = automodel.forward(model, mesh, own)
    count = (ids_and_labels()[1] != -100).sum()
    loss = F.cross_entropy(outputs.logits[0], labels[0], reduction="sum") / count
    (loss * group.size()).backward()
    return max(
        float((p.grad.full_tensor() - gradients[name]).abs().max() / gradients[name].abs().max())
        for name, p in model.named_parameters()
    )


@pytest.mark.composes(
    "NeMo Automodel",
    "FSDP2 over data and context, as in Automodel: each group of ranks reads its own batches",
    data=2,
    context=2,
    FSDP=4,
    equal="gradients",
)
@pytest.mark.exhaustive
def test_groups_with_own_rows_have_the_gradients_of_one_process(pool):
    assert max(pool(4, of_own_row)) < 2e-5


def trained(group):
    """The losses of the example."""
    automodel.contract()
    return example("automodel_packed").train(device_mesh(2, 2, names=("dp", "cp")), "ring")


def trained_alone():
    """The same of one process, which computes each document by itself."""
    automodel.contract()
    program = example("automodel_packed")
    model, losses = program.make_model(), []
    for step in range(program.STEPS):
        batch, total = program.packed(step), 0.0
        for part in torch.arange(sum(program.LENGTHS)).split(program.LENGTHS):
            logits = model(input_ids=batch["input_ids"][:, part]).logits[0]
            total += F.cross_entropy(logits, batch["labels"][0, part], reduction="sum")
        loss = total / sum(program.LENGTHS)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad
                p.grad = None
        losses.append(float(loss))
    return losses


@pytest.mark.exhaustive
def test_the_example_has_the_losses_of_one_process(pool):
    expected = trained_alone()
    for losses in pool(4, trained):
        assert losses == pytest.approx(expected, rel=1e-4)


def uneven(group):
    """Tokens that this rank holds in a layout of the caller's, and what Automodel's gather says."""
    _, integration = automodel.contract()
    mesh = device_mesh(2, 2, names=("dp", "cp"))
    model = hf.tiny("LlamaForCausalLM")

    def layout(cu_seqlens):
        rows = [(x, 0, y) for x, y in enumerate(np.diff(cu_seqlens).tolist())]
        return Layout.from_spans([rows[:2], rows[2:]], cu_seqlens)

    sp = integration.enable(model, mesh, layout=layout)
    sharder, outputs, _ = automodel.forward(model, mesh, batch("one row"))
    text = hf.refused(lambda: sharder.gather_token_tensor(outputs.logits))
    whole, expected = sp.unshard(outputs).logits, alone(hf.tiny("LlamaForCausalLM"))[0][:1]
    return outputs.logits.shape[1], text, float((whole - expected).abs().max())


def test_layouts_of_the_caller_may_be_uneven(pool):
    found = pool(4, uneven)
    assert [x[0] for x in found] == [10, 12, 10, 12]
    for _, text, worst in found:
        assert "layout must give all ranks the same number of tokens" in text and worst < 2e-5


class AttentionLayer(torch.nn.Module):
    def forward(self, attention_mask=None, is_causal=None):
        return attention_mask, is_causal


def test_masks_survive_hooks_that_are_registered_later():
    _, integration = automodel.contract()
    model = torch.nn.ModuleDict({"self_attn": AttentionLayer()})
    masks = integration._KeptMasks(model)
    masks.register()
    attach_hooks(model)
    masks.register()
    assert model["self_attn"](attention_mask="window") == ("window", None)
    masks.remove()
    assert model["self_attn"](attention_mask="window") == (None, True)


def wrong_on_one(group):
    """What this rank says if a batch, or the layout of the caller, is wrong on the first ranks."""
    _, integration = automodel.contract()
    mesh = device_mesh(2, 2, names=("dp", "cp"))
    first = mesh["cp"].get_local_rank() == 0
    model = hf.tiny("LlamaForCausalLM")

    def layout(cu_seqlens):
        if first:
            raise ValueError("no layout")
        return Layout.zigzag(cu_seqlens, 2, equal=True)

    sp = integration.enable(model, mesh)
    of = batch("thd")
    if first:
        of["seq_lens"] = of["seq_lens"] + 9
    said = [hf.refused(lambda: automodel.forward(model, mesh, of))]
    sp.disable()
    integration.enable(model, mesh, layout=layout)
    return *said, hf.refused(lambda: automodel.forward(model, mesh, batch("thd")))


def test_all_ranks_raise_the_error_of_one(pool):
    for of_batch, of_layout in pool(4, wrong_on_one):
        assert "seq_lens_padded must be at least seq_lens" in of_batch
        assert "no layout" in of_layout


# What a sharder needs of the enabled model and of its masks until it shards.
UNBOUND = types.SimpleNamespace(
    sp=types.SimpleNamespace(faults=contextlib.nullcontext), register=lambda: None
)


class Mesh:
    """A mesh of which only the sizes are read."""

    def __init__(self, **sizes):
        self.mesh_dim_names, self._sizes = tuple(sizes), sizes

    def __getitem__(self, name):
        return types.SimpleNamespace(size=lambda: self._sizes[name])


class Positional(torch.nn.Module):
    def forward(self, input_ids):
        return input_ids


@pytest.mark.composes(
    "NeMo Automodel",
    "set `distributed.pp_size` to 1",
    pipeline=2,
    context=2,
    refused='device_mesh must have 1 rank in "pp"',
)
@pytest.mark.composes(
    "NeMo Automodel",
    "set `distributed.tp_size` to 1",
    context=2,
    tensor=2,
    refused='device_mesh must have 1 rank in "tp"',
)
def test_what_it_cannot_do_is_refused_when_it_is_enabled():
    _, integration = automodel.contract()
    model = hf.tiny("LlamaForCausalLM")
    with pytest.raises(ValueError, match='device_mesh must have a dimension "cp" of at least 2'):
        integration.enable(model, Mesh(dp=2))
    with pytest.raises(ValueError, match='device_mesh must have 1 rank in "pp", got 2'):
        integration.enable(model, Mesh(cp=2, pp=2))
    with pytest.raises(ValueError, match='device_mesh must have 1 rank in "tp", got 2'):
        integration.enable(model, Mesh(cp=2, tp=2))
    with pytest.raises(ValueError, match=r"model must take \*\*kwargs"):
        integration.enable(Positional(), Mesh(cp=2))
    with pytest.raises(ValueError, match="layout must be zigzag, striped, contiguous, or a func"):
        integration.enable(model, Mesh(cp=2), layout="zig")
    model.prepare_model_inputs_for_cp = lambda batch: {}
    with pytest.raises(ValueError, match="model must not have its own prepare_model_inputs"):
        integration.enable(model, Mesh(cp=2))


def test_a_recipe_enables_its_model_when_it_is_built(monkeypatch):
    _, integration = automodel.contract()
    enabled = []
    monkeypatch.setattr(integration, "enable", lambda *x, **options: enabled.append((x, options)))

    class Recipe:
        device_mesh, loss_fn = Mesh(cp=2), torch.nn.CrossEntropyLoss()

        def setup(self, models):
            self.model_parts = models
            assert enabled or self.device_mesh["cp"].size() == 1

    made = integration.recipe(Recipe, "ulysses", layout="striped")
    assert made.__name__ == "Recipe"
    made().setup(["model"])
    assert enabled == [(("model", made.device_mesh, "ulysses"), {"layout": "striped"})]
    with pytest.raises(ValueError, match="model_parts must be one model, got 2 stages"):
        made().setup(["first", "second"])
    linear = pytest.importorskip("nemo_automodel.components.loss.linear_ce").LinearCrossEntropy
    monkeypatch.setattr(Recipe, "loss_fn", linear.__new__(linear))
    with pytest.raises(ValueError, match="loss_fn must be a loss of logits"):
        made().setup(["model"])
    monkeypatch.setattr(Recipe, "device_mesh", Mesh(cp=1))
    enabled.clear()
    made().setup(["model"])
    assert not enabled


def of(**keys):
    ids, _ = ids_and_labels()
    return {"input_ids": ids} | keys


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask must be \(2, 22\), got \(2, 9\)"),
        ({"attention_mask": numbers() % 2}, "attention_mask must be a document number for each"),
        ({"attention_mask": torch.ones(2, 1, 22, 22)}, "attention_mask must be .* got torch.float"),
        (
            {"attention_mask": torch.ones(2, 1, 22, 22, dtype=torch.bool)},
            "attention_mask must be causal within documents, got a mask that is not",
        ),
        (
            {"seq_lens": torch.full((2, 1), 20), "seq_lens_padded": torch.full((2, 1), 21)},
            "seq_lens_padded must be at least seq_lens, with a sum of 22 in each row",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q must end at the 44 tokens"),
    ],
)
def test_documents_that_are_described_wrongly_are_refused(keys, text):
    _, integration = automodel.contract()
    with pytest.raises(ValueError, match=text):
        integration.document_numbers(of(**keys), (ROWS, COLUMNS))


@pytest.mark.parametrize("kind", ["thd", "numbers", "square"])
def test_documents_are_those_of_the_collator(kind):
    _, integration = automodel.contract()
    assert np.array_equal(integration.document_numbers(batch(kind), (ROWS, COLUMNS)), numbers())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"pixel_values": torch.ones(1, 3)}, r"pixel_values must be \(2, 22, …\), with a value"),
        ({"position_ids": torch.ones(3, 2, 22)}, r"position_ids must be \(2, 22\), got \(3, 2"),
        ({"input_ids": None}, "batch must have either input_ids"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(keys, text):
    _, integration = automodel.contract()
    prepare = integration._BatchSharder(UNBOUND, UNBOUND, set()).prepare
    batch = of(**keys)
    with pytest.raises(ValueError, match=text):
        prepare(batch)["cp_sharder"].shard_batch(None, None, batch)
    with pytest.raises(ValueError, match="num_chunks must be 1, got 2"):
        prepare(batch, num_chunks=2)


@pytest.mark.skipif(not automodel.INSTALLED, reason="nemo-automodel is not installed")
def test_the_stand_in_has_the_packages_signatures():
    sharder_class, _ = automodel.contract()
    layout_class = sys.modules[automodel.CONTRACT].ShardLayout
    fields = [x.name for x in dataclasses.fields(layout_class)]
    assert fields == [x.name for x in dataclasses.fields(automodel.ShardLayout)]
    for name in ("__init__", "shard", "shard_token_tensor", "gather_token_tensor"):
        own, package = (
            inspect.signature(getattr(x, name))
            for x in (automodel.ContextParallelSharder, sharder_class)
        )
        assert [(x.name, x.kind, x.default) for x in own.parameters.values()] == [
            (x.name, x.kind, x.default) for x in package.parameters.values()
        ], name


def record_a_step(name, model, inputs, labels, count, finish=None, **where):
    """Record a forward and a backward whose loss is a sum over labels, divided by `count`."""
    with parity.record(name, model, **where):
        logits = model(**inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        if finish is not None:
            finish()


def recorded_on_rank(group, folder):
    """2 ranks share the batch; the other 2 ranks do the same."""
    _, integration = automodel.contract()
    model, mesh = hf.tiny("LlamaForCausalLM"), device_mesh(2, 2, names=("dp", "cp"))
    group = mesh["cp"].get_group()
    integration.enable(model, mesh, "ring")
    sharder = automodel.contract()[0](model, mesh, whole_rows())
    context, part = sharder.shard(whole_rows())
    labels = part.pop("labels")

    def average():
        for x in model.parameters():
            torch.distributed.all_reduce(x.grad, group=group)
            x.grad /= group.size()

    count = labels.numel()  # of a rank: half of all labels, since gradients are averaged
    tokens = sharder.shard_layout.local_token_global_indices
    with context():
        record_a_step(folder, model, part, labels, count, average, group=group, tokens=tokens)


def whole_rows():
    """Rows of one document each, without padding."""
    ids, _ = ids_and_labels()
    positions = torch.arange(COLUMNS).expand(ROWS, -1).clone()
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions}


def test_a_recording_of_a_sharded_step_agrees_with_one_process(pool, tmp_path):
    of = whole_rows()
    labels = of.pop("labels")
    record_a_step(tmp_path / "one", hf.tiny("LlamaForCausalLM"), of, labels, labels.numel())
    pool(4, recorded_on_rank, tmp_path / "two")
    report = parity.compare(tmp_path / "one", tmp_path / "two")
    assert report.first is None, str(report)
    assert {"output", "loss", "gradient of output", "gradient"} <= {
        x.stage for x in report.findings
    }
