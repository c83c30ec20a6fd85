"""Hold the table of layers in the architecture page against every import: they point downward."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/internals/architecture.md"
SOURCES = sorted((ROOT / "seqpar").rglob("*.py"))


def layers():
    """The table's rows, each a list of units: files and folders of seqpar/, lowest first."""
    section = PAGE.read_text().split("## Layers")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([\w/.]+)`", row) for row in rows]


def unit_of(file):
    """The unit that a file belongs to: itself, or the folder of seqpar/ that it is in."""
    first, *rest = file.relative_to(ROOT / "seqpar").parts
    return f"{first}/" if rest else first


def imported_files(file):
    """The files of seqpar/ that a file imports, wherever the import stands."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for module in modules:
        path = ROOT / module.replace(".", "/")
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate in SOURCES and candidate.read_text().count("\n") > 1:
                yield candidate


def test_every_file_has_its_layer():
    known = [unit for row in layers() for unit in row] + ["__init__.py"]
    assert len(known) == len(set(known))
    assert {unit_of(file) for file in SOURCES} == set(known)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_dependencies_point_downward(file):
    if file == ROOT / "seqpar/__init__.py":
        return  # it exports what users call
    rows, own = layers(), unit_of(file)
    level = next(i for i, row in enumerate(rows) if own in row)
    allowed = {own, *(unit for row in rows[:level] for unit in row)}
    for other in imported_files(file):
        assert unit_of(other) in allowed, f"{file.name} imports {other.relative_to(ROOT)}"


def test_no_files_import_each_other_in_a_circle():
    graph = {file: set(imported_files(file)) - {file} for file in SOURCES}
    order = tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) == len(SOURCES)


def test_imports_are_seen_at_all():
    usp = ROOT / "seqpar/strategies/usp.py"
    seen = {str(x.relative_to(ROOT / "seqpar")) for x in imported_files(usp)}
    assert {"comm/exchange.py", "softmax/module.py", "strategies/registry.py"} <= seen
