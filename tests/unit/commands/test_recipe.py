"""`python -m seqpar recipe`."""

import ast
import re

import pytest

from seqpar.__main__ import main


def test_it_prints_a_program_with_its_command_and_predictions(capsys):
    assert main(["recipe", "qwen3-8b", "--gpus", "4x8-h100", "--tokens", "64K"]) == 0
    text = capsys.readouterr().out
    docstring = ast.get_docstring(ast.parse(text))
    assert "torchrun --nnodes 4 " in docstring and "--nproc-per-node 8 train.py" in docstring
    for what in ("seconds of a step", "GB on the fullest GPU"):
        heading, *parts = re.search(rf"Predicted {what}.*(\n  .*)+", docstring)[0].splitlines()
        total = float(re.search(r": ([\d.]+)", heading)[1])
        listed = [float(line.split()[-1]) for line in parts]
        assert len(parts) >= 5 and sum(listed) == pytest.approx(total, abs=0.05 * len(parts))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-9", "--gpus", "8xh100"], "invalid choice"),
        (["qwen3-8b", "--gpus", "8xh100", "--tokens", "many"], "tokens must be numbers"),
        (["qwen3-8b", "--gpus", "8xh100", "--memory", "-1"], "must be a number of GB above 0"),
        (["qwen3-8b", "--gpus", "8"], "gpus must be like"),
    ],
)
def test_wrong_arguments_are_named(capsys, words, message):
    try:
        status = main(["recipe", *words])
    except SystemExit as end:
        status = end.code
    assert status == 2 and message in capsys.readouterr().err
