"""Hold the code to its habits: imports downward, no circles, short names and signatures."""

import ast
import functools
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/internals/architecture.md"
SOURCES = sorted((ROOT / "seqpar").rglob("*.py"))
WITH_IMPORTS = {file for file in SOURCES if "import" in file.read_text()}
# An __init__.py names what its room offers, wherever in the room or above it that is.
FILES = [file for file in SOURCES if file.name != "__init__.py"]


def layers():
    """The table's rows, lowest first, each a list of rooms: files and folders of seqpar/."""
    section = PAGE.read_text().split("## Rooms")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([\w/.]+)`", row) for row in rows]


def room_of(file):
    """The room that a file belongs to: the folder of seqpar/ that it is in, or itself."""
    first, *rest = file.relative_to(ROOT / "seqpar").parts
    return f"{first}/" if rest else first


@functools.cache
def imported_files(file):
    """The files of seqpar/ that a file imports, wherever the import stands."""
    modules, found = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for module in modules:
        path = ROOT / module.replace(".", "/")
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate in WITH_IMPORTS:
                found.add(candidate)
    return found


def order_of(graph):
    """The graph's nodes, those that others import first; a CycleError shows a circle."""
    return list(graphlib.TopologicalSorter(graph).static_order())


def test_every_file_has_its_room():
    known = [room for row in layers() for room in row]
    assert len(known) == len(set(known))
    assert {room_of(file) for file in FILES} == set(known)


def test_rooms_import_downward():
    rows = layers()
    level_of = {room: level for level, row in enumerate(rows) for room in row}
    upward = [
        f"{file.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for file in FILES
        for other in imported_files(file)
        if room_of(other) != room_of(file)
        and level_of.get(room_of(other), len(rows)) >= level_of[room_of(file)]
    ]
    assert not upward


def test_no_files_import_each_other_in_a_circle():
    graph = {file: imported_files(file) - {file} for file in SOURCES}
    assert len(order_of(graph)) == len(SOURCES)


def test_no_folders_import_each_other_in_a_circle():
    graph = {file.parent: set() for file in FILES}
    for file in FILES:
        imported = {other.parent for other in imported_files(file) if other.name != "__init__.py"}
        graph[file.parent] |= imported - {file.parent}
    assert len(order_of(graph)) == len(graph) > 50


def test_every_room_says_what_it_is_for():
    for folder in {file.parent for file in SOURCES}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_imports_are_seen_at_all():
    usp = ROOT / "seqpar/strategies/usp.py"
    seen = {str(x.relative_to(ROOT / "seqpar")) for x in imported_files(usp)}
    assert {"comm/messages/exchange.py", "softmax/module.py", "strategies/registry.py"} <= seen


MAX_PARAMETERS = 7  # without self
# Calls of these decorate the implementations of operators, which have the operators' signatures.
REGISTERING = {"implementation", "torch.library.register_fake"}


def parameters(function):
    """The number of a function's parameters; `*args` and `**kwargs` count as one each."""
    x = function.args
    several = [*x.posonlyargs, *x.args, *x.kwonlyargs]
    own = [name for name in several if name.arg not in ("self", "cls")]
    return len(own) + (x.vararg is not None) + (x.kwarg is not None)


def public_names(trees):
    """The names in all `__all__`."""
    return {
        name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def with_prescribed_signature(tree):
    """The names of kernels and of implementations and FLOP formulas of operators in a file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(x).split("(")[0] for x in node.decorator_list}
            if decorators & {"kernel", "triton.jit", *REGISTERING}:
                names.add(node.name)
        elif isinstance(node, ast.Assign) and "FLOP_FORMULAS[" in ast.unparse(node.targets[0]):
            names.add(ast.unparse(node.value))
    return names


def test_internal_functions_have_few_parameters():
    """Callers of public functions name the arguments; internal ones must fit into one's head."""
    files = [*SOURCES, *sorted((ROOT / "triton_kernels").rglob("*.py"))]
    trees = {file: ast.parse(file.read_text()) for file in files}
    public, long = public_names(trees.values()), set()
    for file, tree in trees.items():
        prescribed = with_prescribed_signature(tree)
        methods = {
            function: f"{node.name}.{function.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for function in node.body
            if isinstance(function, ast.FunctionDef)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name in prescribed:
                continue
            name = methods.get(node, node.name)
            private = node.name.startswith("_") and node.name != "__init__"
            if parameters(node) > MAX_PARAMETERS and (private or name.split(".")[0] not in public):
                long.add(f"{file.relative_to(ROOT)}: {name}")
    assert not long


def test_test_names_have_at_most_eight_words():
    names = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(names) > 2000
    assert not {name for name in names if name.count("_") > 8}
