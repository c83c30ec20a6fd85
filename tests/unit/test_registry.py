"""The registry against every list of strategies: files, exports, examples, oracles.

`tests/system/test_docs_references.py` holds the pages and the README's table to it.
"""

import ast
from pathlib import Path

import pytest

import seqpar
from seqpar.strategies.registry import LINEAR, SOFTMAX
from tests.ranks.test_traffic import BYTES
from tests.support.cases import STRATEGIES
from tests.support.formulas import FORMULAS

ROOT = Path(__file__).parents[2]
TRANSPORTS = {"zeco"}  # of LASP-2, in files of their own


def constant(file, name):
    """The value that an example gives a name, without running it."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and [x.id for x in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} does not define {name}")


def test_a_strategy_is_a_file():
    files = {file.stem for file in (ROOT / "seqpar/strategies").glob("*.py")}
    assert files == {*SOFTMAX, *LINEAR, *TRANSPORTS, "registry", "__init__"}
    for name, module in (SOFTMAX | LINEAR).items():
        assert module.__module__ == f"seqpar.strategies.{name}"
        assert module.strategy.name == name


def test_every_module_is_exported():
    for module in (SOFTMAX | LINEAR).values():
        assert getattr(seqpar, module.__name__) is module
        assert module.__name__ in seqpar.__all__


def test_every_strategy_has_its_oracles():
    assert set(FORMULAS) == set(BYTES) == set(STRATEGIES) == set(SOFTMAX)


def test_the_example_offers_every_strategy_of_one_dimension():
    """Its parser adds those that need a mesh."""
    meshes = {name for name, module in SOFTMAX.items() if module.dimensions > 1}
    assert {*constant("examples/options.py", "STRATEGIES"), *meshes} == set(SOFTMAX)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"name must be one of .*'ring'.*'usp'.*got 'rung'"):
        seqpar.make_attention("rung", None)
