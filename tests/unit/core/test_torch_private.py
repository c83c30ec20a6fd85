"""The one file of torch's private names: they are all there, and nothing else uses any."""

import ast
import re
from pathlib import Path

import pytest
import torch

from seqpar.core import torch_private

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    file for folder in ("seqpar", "triton_kernels") for file in (ROOT / folder).rglob("*.py")
)
OTHERS = [file for file in SOURCES if file != Path(torch_private.__file__)]
OF_NAMEDTUPLE = {"_replace", "_fields", "_asdict", "_make"}
OF_TRANSFORMERS = {"_relative_position_bucket"}  # of a layer that is looked at for it
OF_ACCELERATE = {"_dataloaders", "_is_accelerate_prepared"}  # what its own loaders set
OF_FLASH_ATTN = {  # packages, not torch
    *("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_fwd", "_flash_attn_bwd"),
    *("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
}


def private(name):
    return name.startswith("_") and not name.endswith("__")


def nodes_of(source):
    """All nodes of a source text's syntax tree."""
    return list(ast.walk(ast.parse(source)))


def definitions(source):
    """The private names that a file defines: functions, classes, attributes, fields, variables."""
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def dotted(node):
    """The name that a chain of attributes spells, such as torch.ops.aten; "" if it is none."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def foreign(source, ours):
    """The private names in a source text that it takes from elsewhere than `ours`."""
    nodes, roots = nodes_of(source), {"torch": "torch", "triton": "triton"}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                if name.split(".")[0] in roots.values():
                    if alias.asname or isinstance(node, ast.ImportFrom):
                        roots[alias.asname or alias.name] = name
                    if any(map(private, name.split("."))):
                        yield name
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, *names = dotted(node).split(".")
            if root in roots and private(node.attr):
                yield ".".join([roots[root], *names])
            elif private(node.attr) and node.attr not in ours:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"(torch|triton)(\.\w+)*\._\w+(\.\w+)*", node.value):
                yield node.value
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr"):
            name = str(getattr(node.args[1], "value", ""))
            if private(name) and name not in ours:
                yield name


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_torch_still_has_it(name):
    use = torch_private.NAMES[name]
    assert name not in torch_private.missing(), (
        f"torch {torch.__version__} has no {name}. seqpar uses it ({use.why}) since {use.since}: "
        "find what stands in its place, and change seqpar/core/torch_private.py alone"
    )


def test_a_missing_private_name_is_explained(monkeypatch):
    name = "torch.ops.aten._of_a_past_release"
    monkeypatch.setitem(torch_private.NAMES, name, torch_private.Use("1.0", "to go fast"))
    assert torch_private.missing() == {name: "to go fast"}
    with pytest.raises(
        RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}.*{name}.*go f"
    ):
        torch_private._get(name)


def test_every_name_in_use_is_in_the_table():
    """Else `missing` would not see that it is gone: names are looked up by it, but for attributes
    of what a name returns."""
    tree = ast.parse(Path(torch_private.__file__).read_text())
    table = " ".join(torch_private.NAMES)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and private(node.attr)
    }
    # The next test looks at these.
    marks = {"_torchdynamo_disable", "_torchdynamo_disable_msg", "_dynamo_marked_constant"}
    assert used - marks <= set(re.findall(r"\w+", table))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    looked_up = {x for x in strings if isinstance(x, str) and re.fullmatch(r"torch[\w.]*\._\S+", x)}
    assert looked_up - {"torch._dynamo"} <= set(torch_private.NAMES)


def test_functions_are_marked_as_torch_marks_them():
    def ours(): ...
    def theirs(): ...

    torch_private.mark_disabled(ours, "because")
    torch_private.mark_constant(ours)
    marked = torch.compiler.disable(torch.compiler.assume_constant_result(theirs), reason="because")
    assert {name: getattr(marked, name) for name in vars(ours)} == vars(ours)
    assert vars(ours)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing the compiler
def test_compiled_modules_are_known():
    module = torch.nn.Linear(1, 1)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module))
    module.compile()
    assert torch_private.is_compiled(module)


def test_no_other_file_uses_a_private_name(ours):
    used = {file: set(foreign(file.read_text(), ours)) for file in OTHERS}
    assert not {str(file.relative_to(ROOT)): names for file, names in used.items() if names}, (
        "they belong into seqpar/core/torch_private.py"
    )


@pytest.fixture(scope="module")
def ours():
    """The private names that seqpar defines, or that are of other packages than torch."""
    defined = {name for file in OTHERS for name in definitions(file.read_text())}
    return defined | OF_NAMEDTUPLE | OF_ACCELERATE | OF_FLASH_ATTN | OF_TRANSFORMERS


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._jit",
        "import torch._dynamo",
        "from torch.distributed.distributed_c10d import _world",
        "from torch._C import DispatchKey",
        "import torch\ntorch.ops.aten._scaled(1)",
        "from torch import ops\nops.aten._scaled(1)",
        "import torch as t\nt._foreach_add(1)",
        "def f(group): return group._get_unknown_backend()",
        "import sys\nsys.modules['torch._inductor']",
        "getattr(x, '_unknown_to_us')",
        "import triton.language as tl\ntl._experimental(1)",
    ],
)
def test_private_names_are_seen_at_all(source, ours):
    assert set(foreign(source, ours))
