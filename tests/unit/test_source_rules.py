"""Each folder says what it is for, and internal functions have few parameters."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "seqpar").rglob("*.py"))


def test_every_room_says_what_it_is_for():
    for folder in {file.parent for file in SOURCES}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


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
