"""What the command info prints."""

import json
import re
import tomllib
import types
from pathlib import Path

import pytest
import torch

import seqpar
from seqpar.__main__ import main
from seqpar.attention.backend import BACKENDS
from seqpar.commands import info
from seqpar.softmax.backends import flash_attn, kernel_order
from seqpar.softmax.backends.flash_attn import PACKAGES
from seqpar.strategies.registry import SOFTMAX
from seqpar.strategies.ulysses import UlyssesAttention


def test_json_has_all_that_is_here(capsys, monkeypatch):
    monkeypatch.setenv("SEQPAR_CACHE", "/somewhere")
    monkeypatch.setenv("UNRELATED", "secret")
    assert main(["info", "--json", "--ranks", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["settings"]["SEQPAR_CACHE"] == "/somewhere"
    assert "UNRELATED" not in found["settings"]
    assert list(found["backends"]) == list(BACKENDS) and found["ranks"] == 2
    assert set(found["strategies"]) == set(SOFTMAX)
    assert found["strategies"]["ring"]["cross attention"] is None
    assert found["versions"]["seqpar"] == seqpar.__version__
    assert found["missing in torch"] == {} and found["builds"]["CUDA of torch"]


def test_versions_are_those_of_all_that_is_used():
    """A report of a fault has the version of each package that an extra installs."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    asked = [x for extra, of_it in extras if extra not in ("docs", "dev") for x in of_it]
    for text in [*project["dependencies"], *asked]:
        assert re.match(r"[\w-]+", text)[0] in info.DISTRIBUTIONS


def test_links_are_active_cards_with_their_rates(tmp_path):
    cards = {
        "lo": {"operstate": "unknown"},
        "eth0": {"operstate": "up", "speed": "25000"},
        "eth1": {"operstate": "down", "speed": "-1"},
        "veth": {"operstate": "up", "speed": "-1"},
        "tun0": {"operstate": "unknown"},
    }
    port = {"rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    files = {f"net/{name}": rows for name, rows in cards.items()}
    for folder, rows in (files | {"infiniband/mlx5_0/ports/1": port}).items():
        (tmp_path / folder).mkdir(parents=True)
        for name, text in rows.items():
            (tmp_path / folder / name).write_text(f"{text}\n")
    assert info.links(tmp_path) == {
        "eth0": "25 Gbit/s",
        "tun0": "rate unknown",
        "veth": "rate unknown",
        "mlx5_0, port 1": "400 Gb/sec (4X NDR), InfiniBand",
    }
    assert info.links(tmp_path / "nowhere") == {}


def test_functions_that_torch_removed_are_explained(capsys, monkeypatch):
    monkeypatch.setattr(info.TORCH, "missing", lambda: {"torch._gone": "to go fast"})
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("missing in torch") + 1] == "  torch._gone  to go fast"


def test_a_refusal_is_a_numbered_footnote(capsys, monkeypatch):
    def refuse(self, *arguments, softcap=0.0, **options):
        return "softcap must be 0" if softcap else None

    monkeypatch.setattr(UlyssesAttention, "unsupported", refuse)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = next(line.split() for line in lines if line.startswith("  softcap"))
    names = lines[lines.index("strategies, on 4 ranks") + 1].split()
    assert words[1 + names.index("ulysses")] == "[1]" and words.count("yes") == len(names) - 1
    assert "  [1] softcap must be 0" in lines


def test_no_call_is_refused_for_its_form():
    """What strategies are asked about are calls that they take on any number of ranks."""
    for ranks in (1, 3, 4, 8):
        for name in SOFTMAX:
            assert not any(info.supported(name, ranks).values())


def test_a_wrong_argument_is_named(capsys):
    assert main(["info", "--ranks", "0"]) == 2
    with pytest.raises(SystemExit):
        main(["info", "--ranks", "many"])
    assert "ranks must be at least 1, got 0" in capsys.readouterr().err


def test_a_cudnn_that_torch_refuses_is_reported(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr("torch.backends.cudnn.version", version)
    assert info.builds()["cuDNN"] == "broken: cuDNN version incompatibility"


@pytest.mark.parametrize(
    ("capability", "missing", "expected"),
    [
        (None, (), {"kernel": "aten, on the CPU", "not FlashAttention-4": "torch finds no GPU"}),
        ((9, 0), (), {"kernel": "FlashAttention-4"}),
        (
            (9, 0),
            ("FlashAttention-4", "FlashAttention-3"),
            {
                "kernel": "cuDNN",
                "not FlashAttention-4": "no FlashAttention-4",
                "not FlashAttention-3": "no FlashAttention-3",
                "to use FlashAttention-4": "pip install 'seqpar[flash-attn]'",
            },
        ),
        (
            (8, 0),
            ("FlashAttention-4",),
            {"kernel": "FlashAttention-2", "not FlashAttention-4": "no FlashAttention-4"},
        ),
        (
            (12, 0),
            tuple(PACKAGES),
            {"kernel": "aten", **{f"not {x}": f"no {x}" for x in PACKAGES if x[-1] != "3"}},
        ),
    ],
)
def test_the_default_kernel_of_this_machine_is_named(
    capsys, monkeypatch, capability, missing, expected
):
    """With the reason why it is not FlashAttention-4, and the way to have it."""

    def load(name, major):
        assert major == capability[0]
        return f"no {name}" if name in missing else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernel_order, "load_package", load)
    monkeypatch.setattr(kernel_order, "load_cudnn", lambda major: None)
    scope = ", for bf16 and fp16 with full, causal and window masks" if capability else ""
    assert info.default() == expected | {"kernel": expected["kernel"] + scope}


def test_no_kernel_is_named_for_gpus_before_sm_80(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert info.default()["kernel"] == "plain PyTorch, for all calls"


def test_the_default_kernel_is_printed(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = lines.index("default kernel of softmax attention on this machine")
    assert lines[title + 1].split()[0] == "kernel"


def test_flash_attention_3_is_shown_with_its_backward(monkeypatch):
    def load(name, major):
        module = types.ModuleType(PACKAGES[name].modules[0])
        return PACKAGES[name].kernel(module, major)

    monkeypatch.setattr(info, "load_package", load)
    monkeypatch.setattr(flash_attn, "installed_version", lambda distribution: "4.0.0b36")
    monkeypatch.setattr(info, "load_cudnn", lambda major: "cuDNN is broken")
    assert info.packages() == {
        "FlashAttention-4": "available",
        "FlashAttention-3": "available; Triton computes a deterministic backward",
        "FlashAttention-2": "available",
        "cuDNN": "cuDNN is broken",
    }
