"""What a recording keeps, what it refuses, and what it says it could not see."""

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from seqpar import Layout, parity
from seqpar.parity import files, recording

IDS = torch.arange(12).view(2, 6) % 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, wrap=lambda block, x: block(x)):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wrap = wrap

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.head(x)


def model(**options):
    torch.manual_seed(0)
    return Model(**options)


def step(folder, network, ids=IDS, labels=None, steps=1, **options):
    """Record the last of some steps, of which each trains."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for i in range(steps):
        path = folder if i == steps - 1 else folder.with_name(f"{folder.name}-{i}")
        with parity.record(path, network, **options):
            logits = network(ids)
            target = (ids if labels is None else labels).flatten()
            nn.functional.cross_entropy(logits.flatten(0, 1), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def test_files_are_readable_without_seqpar(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    step(tmp_path / "run", model(), full=["blocks.1*"])
    content = json.loads((tmp_path / "run/rank-00000.json").read_text())
    tensors = safetensors.load_file(tmp_path / "run/rank-00000.safetensors")
    (whole,) = [x for x in content["outputs"] if x["name"] == "blocks.1"]
    assert whole["shape"] == [2, 6, 8] and tensors[whole["tensors"]["full"]].shape == (2, 6, 8)
    assert tensors[whole["tensors"]["summary"]].shape == (2, 6, 6)
    norms = tensors[whole["tensors"]["full"]].double().norm(dim=-1)
    assert torch.allclose(tensors[whole["tensors"]["summary"]][..., 0], norms)
    assert content["optimizer"]["learning_rates"] == [0.01]
    assert content["cross_entropy"][0]["labels"] == 12


def test_a_recording_grows_with_tokens_times_outputs(tmp_path):
    """By 96 bytes per token and output, whatever the width; and by ids, labels and losses."""

    def size(name, tokens, width):
        network = nn.Sequential(
            nn.Embedding(7, width), nn.Linear(width, width), nn.Linear(width, 7)
        )
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with parity.record(tmp_path / name, network):
            nn.functional.cross_entropy(network(ids).flatten(0, 1), ids.flatten()).backward()
        return sum(x.nbytes for x in load_file(tmp_path / name / "rank-00000.safetensors").values())

    load_file = pytest.importorskip("safetensors.torch").load_file
    outputs = 4  # three modules, and the model
    expected = 100 * (96 * outputs + 8 + 16)
    for width in (8, 128):
        few, many = (size(f"{width}-{tokens}", tokens, width) for tokens in (50, 150))
        assert many - few == expected


def test_gradients_are_those_before_the_step(tmp_path):
    """`zero_grad` within the context loses none."""
    report = parity.compare(step(tmp_path / "a", model()), step(tmp_path / "b", model()))
    gradients = [x for x in report.findings if x.stage == "gradient"]
    assert report.first is None and len(gradients) == len(list(model().parameters()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_recorded_once(tmp_path, reentrant):
    def wrap(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    step(tmp_path / "a", model())
    report = parity.compare(tmp_path / "a", step(tmp_path / "b", model(wrap=wrap)))
    assert report.first is None and not report.notes
    gradients = [x.name for x in report.findings if x.stage == "gradient of output"]
    assert "blocks.0.up" in gradients and "blocks.1" in gradients


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it
def test_a_compiled_block_is_seen_from_outside(tmp_path):
    compiled = model()
    compiled.blocks[0].compile(backend="eager")
    compiled.blocks[1] = torch.compile(compiled.blocks[1], backend="eager")
    step(tmp_path / "a", model())
    report = parity.compare(tmp_path / "a", step(tmp_path / "b", compiled))
    compared = [x.name for x in report.findings if x.stage == "output"]
    assert report.first is None and {"blocks.0", "blocks.1"} <= set(compared)
    assert "blocks.0.up" not in compared
    assert any("blocks.1: compiled, so nothing inside it was seen" in x for x in report.notes)


def test_parts_of_a_model_may_be_called_by_the_loop(tmp_path):
    """The inputs are then those of the first module that runs."""
    for name in ("a", "b"):
        network = model()
        with parity.record(tmp_path / name, network) as recorder:
            x = network.embed(IDS)
            recorder.loss(network.blocks[0](x).sum(), 12)
    report = parity.compare(tmp_path / "a", tmp_path / "b")
    (loss,) = [x for x in report.findings if x.stage == "loss"]
    assert report.first is None and loss.values[0] == loss.values[1] != 0


def test_wrong_arguments_are_refused(tmp_path):
    def refused(error, match, *arguments, **options):
        with pytest.raises(error, match=match), parity.record(*arguments, **options):
            pass

    refused(TypeError, "model must be a Module", tmp_path / "a", len)
    refused(ValueError, "folder must be a path", 3, model())
    refused(ValueError, "layout must be one of head_tail", tmp_path / "a", model(), layout="zigzag")
    refused(ValueError, "layout must be a Layout, one of", tmp_path / "a", model(), layout=3)
    with pytest.raises(ValueError, match="tokens must be None with layout"):
        step(tmp_path / "a", model(), layout="striped", tokens=torch.arange(6))
    with pytest.raises(
        ValueError, match="tokens has 5 tokens on this rank, but no input of the model"
    ):
        step(tmp_path / "a", model(), tokens=torch.arange(5))
    with pytest.raises(ValueError, match="layout must have 1 ranks, as the group, got 2"):
        step(tmp_path / "a", model(), layout=Layout.contiguous(12, 2))
    with pytest.raises(ValueError, match="the function must return 6 positions for rank 0"):
        step(tmp_path / "a", model(), layout=lambda rank, ranks, tokens: range(tokens + 1))
    assert not (tmp_path / "a").exists()
    step(tmp_path / "a", model())
    refused(ValueError, "exists: choose a different folder", tmp_path / "a", model())


@dataclasses.dataclass
class Logits:
    logits: torch.Tensor
    count: int = 3


class Returns(Model):
    """Returns its logits in a structure, from a batch in one argument."""

    def __init__(self, structure):
        super().__init__()
        self.structure = structure

    def forward(self, batch):
        return self.structure(super().forward(batch["input_ids"]))


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (Logits, ["(model)[logits]"]),
        (lambda x: (x, {"scores": [x, None]}), ["(model)[0]", "(model)[1.scores.0]"]),
        (lambda x: torch.complex(x, x), ["(model)"]),
    ],
)
def test_tensors_in_structures_are_compared(tmp_path, structure, names):
    for name in "ab":
        torch.manual_seed(0)
        network = Returns(structure)
        with parity.record(tmp_path / name, network):
            network({"input_ids": IDS, "rows": 2})
    report = parity.compare(tmp_path / "a", tmp_path / "b")
    seen = [x.name for x in report.findings if x.name.startswith("(model)")]
    assert seen == names and report.first is None and not report.notes


def test_a_module_called_twice_is_compared_twice(tmp_path):
    def twice(block, x):
        return block(block(x))

    step(tmp_path / "a", model(wrap=twice))
    report = parity.compare(tmp_path / "a", step(tmp_path / "b", model(wrap=twice)))
    assert report.first is None
    assert {"blocks.0.up", "blocks.0.up, call 2"} <= {x.name for x in report.findings}


def test_complex_and_integer_parameters_are_compared(tmp_path):
    for name in "ab":
        network = model()
        network.phase = nn.Parameter(torch.full((3,), 1 + 2j))
        network.scale = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        if name == "b":
            network.phase.data[1] = 1 - 2j
        step(tmp_path / name, network)
    report = parity.compare(tmp_path / "a", tmp_path / "b")
    assert report.diagnosis == "Different weights at the start: phase is the first of 1 in b."
    assert "scale" in [x.name for x in report.findings if x.stage == "weight before"]


def test_a_model_that_is_not_called_is_refused(tmp_path):
    """Then the step calls a copy, or a module around it, and nothing would be compared."""
    with (
        pytest.raises(ValueError, match="model: none of its modules returned a tensor"),
        parity.record(tmp_path / "a", model()),
    ):
        model()(IDS)
    assert not (tmp_path / "a").exists()


def test_outputs_without_tokens_are_named(tmp_path):
    for name in "ab":
        network = model()
        network.head.register_forward_hook(lambda _, __, y: y.mean(1)[:1])
        with parity.record(tmp_path / name, network):
            network(IDS)
    (note,) = parity.compare(tmp_path / "a", tmp_path / "b").notes
    assert note.startswith("not compared, because no dimension has the size of the tokens")
    assert note.endswith("2 modules: head, (model)")


def test_function_modes_do_not_see_the_recording(tmp_path):
    """Such a mode may check the types of all operations, as torchtitan's does."""

    class Seen(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_function__(self, function, types, arguments=(), options=None):
            self.calls.append(function)
            return function(*arguments, **(options or {}))

    def trained(folder):
        network = model()
        with Seen() as seen, nullcontext() if folder is None else parity.record(folder, network):
            loss = nn.functional.cross_entropy(network(IDS).flatten(0, 1), IDS.flatten())
            loss.backward()
        return [x.__name__ for x in seen.calls]

    assert trained(tmp_path / "a") == trained(None)


def test_nothing_is_left_on_the_model(tmp_path):
    network, loss = model(), nn.functional.cross_entropy
    step(tmp_path / "a", network)
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in network.modules())
    assert nn.functional.cross_entropy is loss


def test_no_hook_is_left_on_a_parameter_that_a_module_returns(tmp_path):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, 8))

        def forward(self):
            return self.weight

    network = model()
    network.embed = Table()
    network.forward = lambda ids: network.head(network.embed()[ids])
    with parity.record(tmp_path / "a", network):
        network(IDS).sum().backward()
    assert not network.embed.weight._backward_hooks


def test_options_of_cross_entropy_may_be_positional(tmp_path):
    network, labels = model(), IDS.flatten().clone()
    labels[:2] = -1
    with parity.record(tmp_path / "a", network):
        loss = nn.functional.cross_entropy(network(IDS).flatten(0, 1), labels, None, None, -1)
        loss.backward()
    content = json.loads((tmp_path / "a" / "rank-00000.json").read_text())
    assert content["cross_entropy"] == [{"value": pytest.approx(loss.item()), "labels": 10}]


def test_replicas_may_hold_rows_in_any_order(tmp_path, monkeypatch):
    """A sampler gives ranks of DDP other rows; none of them says so."""
    step(tmp_path / "one", model())
    for rank, row in ((0, 1), (1, 0)):
        monkeypatch.setattr(recording, "members_of", lambda _, rank=rank: (rank, [0, 1]))
        monkeypatch.setattr(files, "_BEGAN", 0.0)
        network = model()
        with parity.record(tmp_path / "two", network):
            logits, target = network(IDS[row : row + 1]), IDS[row]
            nn.functional.cross_entropy(logits.flatten(0, 1), target).backward()
    report = parity.compare(tmp_path / "one", tmp_path / "two")
    assert "two: each rank has whole sequences" in report.notes
    assert report.first.stage == "gradient"  # nobody has averaged
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no rank has row 1 of the other recording"):
        parity.compare(tmp_path / "one", step(tmp_path / "twice", model(), ids=IDS[[0, 0]]))


def test_rows_of_padding_alone_are_left_out(tmp_path):
    """A difference is still told by its document, which ends with the row."""
    ids, tokens = nn.functional.pad(IDS, (0, 0, 0, 1)), torch.tensor([*range(6)])
    at = torch.stack([tokens, tokens, torch.full_like(tokens, -1)])
    labels = ids.masked_fill(at < 0, -100)
    step(tmp_path / "rows", model(), ids=ids, labels=labels, tokens=at)
    other = model()
    with torch.no_grad():
        other.blocks[0].up.weight[0] += 1
    report = parity.compare(tmp_path / "rows", step(tmp_path / "one", other, ids=IDS.view(1, 12)))
    assert report.first.name == "blocks.0.up.weight"


def test_replicas_may_pack_rows_of_any_lengths(tmp_path, monkeypatch):
    """Each of two groups packs rows of the batch into one row, so their rows have other lengths."""
    ids = torch.arange(18).view(3, 6) % 7
    step(tmp_path / "one", model(), ids=ids)

    def record(rows):
        for rank, row in enumerate(rows):
            monkeypatch.setattr(recording, "members_of", lambda _, rank=rank: (rank, [rank]))
            monkeypatch.setattr(files, "_BEGAN", 0.0)
            network, own = model(), ids[row].view(1, -1)
            with parity.record(tmp_path / f"two {rows}", network):
                logits = network(own).flatten(0, 1)
                nn.functional.cross_entropy(logits, own[0], reduction="sum").div(9).backward()
        return parity.compare(tmp_path / "one", tmp_path / f"two {rows}")

    report = record([[2, 0], [1]])
    assert report.first.stage == "gradient"  # nobody has averaged
    assert "one: rows were put into one, without padding" in report.notes
    with pytest.raises(ValueError, match="no rank has row 1 of the other recording"):
        record([[2, 0], [2]])
    ids[1, 3] = 6
    with pytest.raises(ValueError, match=r"no row of one begins at token 0 of the row that rank 1"):
        record([[2, 0], [1, 1]])
