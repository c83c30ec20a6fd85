"""What is compared, with which bound, and what is refused."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from seqpar import parity
from seqpar.__main__ import main
from seqpar.parity.bounds import rounding_bound, unit_roundoff
from seqpar.parity.evidence import Finding
from seqpar.parity.picture import column_edges, excesses
from tests.unit.parity.test_recorder import IDS, model, step


def differing(tmp_path, change=lambda network: None, **options):
    """The report on two recordings, of which the second is of a changed model."""
    step(tmp_path / "a", model())
    network = model()
    change(network)
    return parity.compare(tmp_path / "a", step(tmp_path / "b", network, **options))


def test_the_first_module_in_order_of_execution_is_named(tmp_path):
    def change(network):
        network.blocks[1].up.register_forward_hook(lambda _, __, y: y + 1e-3)

    report = differing(tmp_path, change)
    assert (report.first.stage, report.first.name) == ("output", "blocks.1.up")
    text = str(report)
    assert "\n> blocks.1.up" in text and "First difference: output blocks.1.up, token 0" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_rounding_explains_is_no_difference(tmp_path):
    def change(network):
        network.blocks[0].up.register_forward_hook(lambda _, __, y: y * (1 + 2e-7))

    assert differing(tmp_path, change).first is None


def test_a_gradient_hook_is_found_in_the_gradients(tmp_path):
    def change(network):
        network.blocks[0].up.weight.register_hook(lambda x: x * 1.5)

    report = differing(tmp_path, change)
    assert (report.first.stage, report.first.name) == ("gradient", "blocks.0.up.weight")
    assert report.diagnosis == "Gradients are scaled: all are 1.5 times those of a."


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"network": nn.Embedding(7, 8)},
            "different models: a has the parameter blocks.0.down.bias",
        ),
        ({"ids": IDS.flip(1)}, "different batches, .*token 0 of row 0 is 0 in a and 5 in b"),
        (
            {"ids": IDS[:, :4]},
            r"different batches, .*a has \(rows, tokens\) \(2, 6\), b has \(2, 4\)",
        ),
        (
            {"network": model().double()},
            "different dtypes: a has embed.weight in float32, b has float64",
        ),
        ({"network": model().eval()}, r"different modes \(training\): a has True, b has False"),
        ({"steps": 3}, "different steps: a has an optimizer after 0 steps, b has .* after 2 steps"),
    ],
)
def test_recordings_that_do_not_belong_together_are_refused(tmp_path, changes, match):
    step(tmp_path / "a", model())
    changes = {"network": model()} | changes
    if isinstance(changes["network"], nn.Embedding):
        with parity.record(tmp_path / "b", changes["network"]):
            changes["network"](IDS)
    else:
        step(tmp_path / "b", **changes)
    with pytest.raises(ValueError, match=match):
        parity.compare(tmp_path / "a", tmp_path / "b")


def test_other_rows_of_features_are_another_batch(tmp_path):
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 6, 4)
    for name, value in (("a", 1.0), ("b", 3.0)):
        with parity.record(tmp_path / name, network):
            network(x.index_fill(1, torch.tensor([2]), value))
    with pytest.raises(ValueError, match=r"different batches, .* input differs at token 2"):
        parity.compare(tmp_path / "a", tmp_path / "b")


def test_rows_are_compared_with_one_row_without_padding(tmp_path):
    """Padding is left out of a packed batch, or named by −1."""
    step(tmp_path / "rows", model())
    report = parity.compare(tmp_path / "rows", step(tmp_path / "one", model(), ids=IDS.view(1, 12)))
    assert report.first is None and "rows: rows were put into one, without padding" in report.notes
    padded, at = nn.functional.pad(IDS, (2, 0)), torch.tensor([-1, -1, *range(6)])
    labels = nn.functional.pad(IDS, (2, 0), value=-100)
    step(tmp_path / "padded", model(), ids=padded, labels=labels, tokens=at)
    assert parity.compare(tmp_path / "rows", tmp_path / "padded").first is None


def divides_by_zero(network):
    network.blocks[0].up.register_forward_hook(lambda _, __, y: y / 0)


@pytest.mark.parametrize(
    ("change", "diagnosis"),
    [
        (
            lambda network: network.embed.weight.requires_grad_(False),
            "A gradient is missing: embed.weight has none in b.",
        ),
        (
            divides_by_zero,
            "Infinite or NaN values are in one run only: blocks.0.up is the first with them.",
        ),
    ],
)
def test_what_is_missing_or_not_finite_is_named(tmp_path, change, diagnosis):
    assert differing(tmp_path, change).diagnosis == diagnosis


def test_other_options_of_an_optimizer_are_named(tmp_path):
    for name, options in (("a", {}), ("decay", {"weight_decay": 1.0}), ("rate", {"lr": 0.02})):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), **{"lr": 0.01} | options)
        with parity.record(tmp_path / name, network):
            nn.functional.cross_entropy(network(IDS).flatten(0, 1), IDS.flatten()).backward()
            optimizer.step()
    rate = parity.compare(tmp_path / "a", tmp_path / "rate")
    assert rate.diagnosis == "The learning rates differ: 0.01 and 0.02."
    decay = parity.compare(tmp_path / "a", tmp_path / "decay")
    assert decay.first.stage == "weight after"
    assert decay.diagnosis.startswith("The gradients agree before the optimizer's step")


class DropPath(nn.Module):
    """Drops whole rows, with a generator of its own."""

    def __init__(self, drop_prob, seed):
        super().__init__()
        self.drop_prob, self.generator = drop_prob, torch.Generator().manual_seed(seed)

    def forward(self, x):
        return x * (torch.rand(len(x), 1, 1, generator=self.generator) >= self.drop_prob)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([nn.Dropout(0.3)] * 2, "Dropout: blocks.0.down drops different elements"),
        (
            [nn.Dropout(0.3), nn.Dropout(0.0)],
            "Dropout: blocks.0.down drops with probability 0.3 in a and 0 in b.",
        ),
        (
            [DropPath(0.6, 0), DropPath(0.6, 1)],
            "Dropout: blocks.0.down drops different elements",
        ),
        ([Noise()] * 2, "Dropout: blocks.0.down, or the code before it, draws random numbers"),
    ],
)
def test_the_module_that_draws_random_numbers_is_named(tmp_path, modules, expected):
    for i, name in enumerate("ab"):
        network = model()
        network.blocks[0].down = modules[i]
        network.blocks[0].register_forward_hook(lambda _, __, y: y[..., :8])
        network.blocks[0].forward = lambda x, block=network.blocks[0]: block.down(block.up(x))
        torch.manual_seed(i)
        with parity.record(tmp_path / name, network):
            network(IDS)
    report = parity.compare(tmp_path / "a", tmp_path / "b")
    assert report.diagnosis is not None and report.diagnosis.startswith(expected), str(report)


def test_random_numbers_of_a_later_module_are_not_blamed(tmp_path):
    def change(network):
        network.blocks[0].up.register_forward_hook(lambda _, __, y: y + 1e-3)
        network.blocks[1].down.register_forward_hook(lambda _, __, y: y + torch.rand_like(y))

    report = differing(tmp_path, change)
    assert report.first.name == "blocks.0.up" and "Dropout" not in str(report.diagnosis)


def test_a_part_in_another_mode_is_refused(tmp_path):
    frozen = model()
    frozen.blocks[0].eval()
    step(tmp_path / "a", model())
    step(tmp_path / "b", frozen)
    with pytest.raises(ValueError, match=r"modes \(training\) of blocks.0: a has True, b has F"):
        parity.compare(tmp_path / "a", tmp_path / "b")


def test_incomplete_recordings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no recording; seqpar\.parity\.record makes one"):
        parity.compare(tmp_path / "none", tmp_path / "none")
    file = step(tmp_path / "a", model()) / "rank-00000.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"group": [0, 1]}))
    with pytest.raises(ValueError, match="the files of rank 1 are missing"):
        parity.compare(tmp_path / "a", tmp_path / "a")
    file.write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(ValueError, match="must be of format 1, got 99"):
        parity.compare(tmp_path / "a", tmp_path / "a")
    file.write_text(json.dumps({"format": 1, "rank": 0}))
    with pytest.raises(ValueError, match="not a rank of a recording: it lacks group"):
        parity.compare(tmp_path / "a", tmp_path / "a")
    tensors = step(tmp_path / "cut", model()) / "rank-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"cut/rank-00000\.json: not a rank of a recording"):
        parity.compare(tmp_path / "cut", tmp_path / "cut")
    file.write_text("{")
    with pytest.raises(ValueError, match="not a rank of a recording"):
        parity.compare(tmp_path / "a", tmp_path / "a")


def test_a_second_recording_measures_the_bound(tmp_path):
    """Noise as large as that between two correct runs is no difference; without, it is one."""

    def noisy(size):
        network = model()
        network.blocks[0].register_forward_hook(lambda _, __, y: y + size * torch.sin(1e6 * y))
        return network

    step(tmp_path / "a", model())
    step(tmp_path / "again", noisy(1e-4))
    step(tmp_path / "b", noisy(-2e-4))
    assert parity.compare(tmp_path / "a", tmp_path / "b").first.name == "blocks.0"
    assert parity.compare(tmp_path / "a", tmp_path / "b", again=tmp_path / "again").first is None
    step(tmp_path / "c", noisy(1e-2))
    assert (
        parity.compare(tmp_path / "a", tmp_path / "c", again=tmp_path / "again").first is not None
    )


def test_bounds_grow_with_depth_and_with_roundings():
    values = [
        rounding_bound(n, unit_roundoff(dtype), 64)
        for dtype in ("float64", "float32", "bfloat16")
        for n in (1, 100)
    ]
    assert values == sorted(values) and values[1] == pytest.approx(10 * values[0])


def test_a_picture_shows_how_far_each_token_exceeds_the_bound(tmp_path):
    """Of 12 tokens in 6 columns, one pair is not compared, and one is 100 times the bound off."""
    errors = np.array([0, 0, 0, 1e-7, np.nan, np.nan, np.nan, 1e-4, 0, np.inf, 0, 0])
    finding = Finding("output", "x", np.inf, 1e-6, errors=errors)
    (row,) = excesses([finding], column_edges(12, 6))
    assert row[[0, 1, 3, 4, 5]] == pytest.approx([-1, -1, 2, 3, -1]) and np.isnan(row[2])
    assert column_edges(3, 6).tolist() == [0, 1, 2, 3]


def test_a_picture_of_runs_that_agree_is_drawn(tmp_path):
    report = parity.compare(step(tmp_path / "a", model()), step(tmp_path / "b", model()))
    report.plot(tmp_path / "same.svg")
    text = (tmp_path / "same.svg").read_text()
    assert text.startswith("<?xml")
    with pytest.raises(ValueError, match="path must be a path, got 3"):
        report.plot(3)


def test_the_command_ends_with_1_if_runs_differ(tmp_path, capsys):
    a, b = step(tmp_path / "a", model()), step(tmp_path / "b", model())
    other = model()
    with torch.no_grad():
        other.head.weight[0, 0] += 1
    c, found = step(tmp_path / "c", other), tmp_path / "found.json"
    assert main(["parity", str(a), str(b)]) == 0
    assert "The runs agree" in capsys.readouterr().out
    assert main(["parity", str(a), str(c), "--again", str(b), "--json", str(found)]) == 1
    assert "Different weights at the start: head.weight" in capsys.readouterr().out
    content = json.loads(found.read_text())
    picture = tmp_path / "found.png"
    assert main(["parity", str(a), str(c), "--picture", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["parity", str(a), str(c), "--picture", str(tmp_path / "none/x.png")]) == 2
    assert "picture: " in capsys.readouterr().err
    assert content["first"]["name"] == "head.weight" and content["findings"][0]["differs"] is False
    assert main(["parity", str(a), str(tmp_path / "none")]) == 2
    assert "no recording" in capsys.readouterr().err
