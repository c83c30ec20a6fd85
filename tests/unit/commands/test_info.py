"""What the command info prints."""

import json

import pytest
import torch

from seqpar.__main__ import main
from seqpar.backend import BACKENDS
from seqpar.commands import info
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


def test_a_refusal_is_a_number_with_its_reason_below(capsys, monkeypatch):
    def refuse(self, *arguments, softcap=0.0, **options):
        return "softcap must be 0" if softcap else None

    monkeypatch.setattr(UlyssesAttention, "unsupported", refuse)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = next(line.split() for line in lines if line.startswith("  softcap"))
    names = lines[lines.index("strategies, on 4 ranks") + 1].split()
    assert words[1 + names.index("ulysses")] == "[1]" and words.count("yes") == len(names) - 1
    assert "  [1] softcap must be 0" in lines


def test_no_call_is_refused_for_how_it_is_asked():
    """What strategies are asked about are calls that they take on any number of ranks."""
    for ranks in (1, 3, 4, 8):
        for name in SOFTMAX:
            assert not any(info.supported(name, ranks).values())


def test_a_wrong_argument_is_named(capsys):
    assert main(["info", "--ranks", "0"]) == 2
    with pytest.raises(SystemExit):
        main(["info", "--ranks", "many"])
    assert "ranks must be at least 1, got 0" in capsys.readouterr().err
