"""Each promise of SECURITY.md names tests that exist, and the comparison names promises."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "SECURITY.md").read_text()
NOT_OFFERED = "not offered"


def rows(header):
    """The cells of the rows of the table that begins with this header."""
    _, table = TEXT.split(header + "\n", 1)
    lines = table.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions_of(file):
    """The names of all functions in a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}


PROMISES = rows("| promise | mechanism | test |")
PROPERTIES = rows("| property | gRPC over mTLS | etcd | sshd | attention servers |")


@pytest.mark.parametrize(("promise", "mechanism", "tests"), PROMISES)
def test_each_promise_names_tests_that_exist(promise, mechanism, tests):
    names = re.findall(r"`([^`]+)`", tests)
    assert names or mechanism.startswith(NOT_OFFERED), promise
    file = None
    for name in names:  # a name without a file is a test of the file before it
        path, _, function = name.rpartition("::") if "::" in name else ("", "", name)
        if function.endswith(".py"):
            file, function = function, ""
        file = path or file
        assert file is not None and (ROOT / file).is_file(), name
        assert not function or function in functions_of(file), name


@pytest.mark.parametrize("cells", PROPERTIES)
def test_the_comparison_names_promises(cells):
    known = {promise for promise, *_ in PROMISES}
    assert len(cells) == 5 and set(cells[4].split("; ")) <= known


def test_sources_of_the_comparison_are_listed():
    cited = set(re.findall(r"\[(\d+)\]", "".join(cell for cells in PROPERTIES for cell in cells)))
    assert cited == set(re.findall(r"^\[(\d+)\] \[", TEXT, re.M))
