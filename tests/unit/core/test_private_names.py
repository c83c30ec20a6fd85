"""Private names of other libraries: all are in tables, and the libraries have them."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from seqpar.core.private_names import PrivateNames, Use
from seqpar.softmax.backends.flash_attn import PACKAGES

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    file for folder in ("seqpar", "triton_kernels") for file in (ROOT / folder).rglob("*.py")
)
# Generated code has private names of protobuf's own.
TEXTS = {x: x.read_text() for x in SOURCES if not x.stem.endswith("_pb2")}
MODULES = [
    importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    for file in TEXTS
    if " = PrivateNames(" in TEXTS[file]
]
TABLES = [x for module in MODULES for x in vars(module).values() if isinstance(x, PrivateNames)]
OF_NAMEDTUPLE = {"_replace", "_fields", "_field_defaults", "_asdict", "_make"}
# flash_attn.py refuses versions of these packages whose functions are others.
OF_FLASH_ATTN = {name for package in PACKAGES.values() for name in package.parameters}
OF_FILES = {"_sliding_window_pattern"}  # a key in models' config.json
OF_TYPES = {"_typeshed"}  # a module for type checkers only
ON_OBJECTS = {"_refuses_sharded_batches"}  # what seqpar sets on other libraries' objects; _seqpar_*


def private(name):
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def nodes_of(source):
    """All nodes of a source text's syntax tree."""
    return list(ast.walk(ast.parse(source)))


def definitions(source):
    """The private names that a file defines: functions, classes, attributes, fields, variables."""
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
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
    nodes, roots = nodes_of(source), {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                if name.split(".")[0] not in ("seqpar", "__future__"):
                    roots[alias.asname or alias.name.split(".")[0]] = name
                    if any(map(private, name.split("."))):
                        yield name
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr):
            root, *names = dotted(node).split(".")
            if root in roots and node.attr not in OF_NAMEDTUPLE:
                yield ".".join([roots[root], *names])
            elif node.attr not in ours:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split(".")
            # "torch._C._x" is a path, and "_x" may be an attribute's name.
            is_name = len(words) == 1 or words[0] in ("torch", "triton", "transformers")
            is_name = is_name and re.fullmatch(r"[\w.]+", node.value) is not None
            if is_name and any(private(word) and word not in ours for word in words):
                yield node.value


def of_ours():
    """The private names that seqpar defines."""
    defined = {name for text in TEXTS.values() for name in definitions(text)}
    named = {x for text in TEXTS.values() for x in re.findall(r'"(_\w*seqpar\w*)"', text)}
    return defined | named | ON_OBJECTS | OF_NAMEDTUPLE


def listed():
    """The names in all tables, as attributes and as paths."""
    names = {name for table in TABLES for name in (*table.names, *table.attributes)}
    names |= {use.named_in for table in TABLES for use in table.attributes.values()}
    # The modules of a name are private too.
    paths = {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
    return paths | {word for name in names for word in name.split(".")} | OF_FLASH_ATTN


OURS, LISTED = of_ours(), listed()


def test_every_private_name_in_use_is_in_a_table():
    known = LISTED | OF_FILES
    for file, text in TEXTS.items():
        unlisted = {
            name
            for name in foreign(text, OURS)
            if name not in known and name.split(".")[0] not in OF_TYPES
        }
        assert not unlisted, f"{file.relative_to(ROOT)} uses {unlisted}: add them to a table"


def test_only_its_table_uses_a_private_name_of_torch():
    """Else a search for its uses would have to know every file."""
    table = next(x for x in TABLES if x.library == "torch")
    names = {name.rsplit(".", 1)[-1] for name in (*table.names, *table.attributes)}
    names -= {"_transformer_encoder_layer_fwd"}  # which an error message contains
    for file, text in TEXTS.items():
        if file.name != "torch_private.py":
            used = set(foreign(text, OURS))
            assert not {name for name in used if name.startswith("torch.")}, file
            assert not used & set(filter(private, names)), file


def test_seqpar_defines_no_name_of_a_table():
    """Else a use of the library's name would look like a use of ours."""
    overridden = {name.rsplit(".", 1)[-1] for table in TABLES for name in table.names}
    overridden &= {name for name, text in _in_trainers()}
    names = {name.rsplit(".", 1)[-1] for name in LISTED if private(name.rsplit(".", 1)[-1])}
    stored = {"_signature_columns", "_total_train_tokens"}  # which trainers set
    assert names & OURS <= overridden | stored


def _in_trainers():
    trainer = importlib.import_module("seqpar.integrations.huggingface.train.trainer")
    return inspect.getmembers(trainer.OverRanks) + inspect.getmembers(trainer.OverRanksSFT)


def test_methods_of_transformers_that_trainers_override_are_in_a_table():
    """Else a renamed method would never be called."""
    transformers = pytest.importorskip("transformers")
    overridden = {name for name, _ in _in_trainers() if private(name)}
    of_library = {name for name in overridden if hasattr(transformers.Trainer, name)}
    assert of_library and of_library <= LISTED


def test_every_name_in_a_table_is_in_use():
    texts = " ".join(TEXTS.values())
    for table in TABLES:
        for name in (*table.names, *table.attributes):
            # Once in the table; a table may be checked as a whole.
            last = name.rsplit(".", 1)[-1]
            assert len(re.findall(rf"(?<![A-Za-z0-9]){re.escape(last)}\b", texts)) > 1, name


@pytest.mark.parametrize("table", TABLES, ids=lambda x: x.library)
def test_the_library_has_the_names(table):
    pytest.importorskip(table.library)
    assert not table.missing(), "find what stands in their place"


def test_a_missing_name_is_explained():
    table = PrivateNames("torch", {"torch._of_a_past_release": Use("1.0", "to go fast")})
    assert table.missing() == {"torch._of_a_past_release": "to go fast"}
    version = torch.__version__.split("+")[0]
    for look_up in (table.check, lambda: table.get("torch._of_a_past_release")):
        with pytest.raises(RuntimeError, match=rf"torch {version}.*_of_a_past_release.*go fast"):
            look_up()


def test_a_missing_attribute_is_explained():
    table = PrivateNames("torch", {}, {"_old": Use("1.0", "to go fast"), "_new": Use("2.0", "")})
    assert table.read(type("X", (), {"_new": 1})(), "_old", "_new") == 1
    with pytest.raises(RuntimeError, match=r"torch 2\S+ has no \S+object._old or _new .*go fast"):
        table.read(object(), "_old", "_new")


def test_an_attribute_of_some_objects_needs_a_library_that_names_it():
    has, lacks = "torch.Tensor.backward", "torch.Tensor.register_hook"
    uses = {"gradient": Use("1.0", "", has), "_x": Use("1.0", "", lacks)}
    table = PrivateNames("torch", {}, uses)
    assert table.read_if_set(object(), "gradient", 3) == 3
    assert table.missing() == {"_x": ""}
    with pytest.raises(RuntimeError, match="has no _x"):
        table.read_if_set(object(), "_x", 3)


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
        "vars(x)['_unknown_to_us']",
        "NAME = '_unknown_to_us'",
        "import triton.language as tl\ntl._experimental(1)",
        "from nixl._api import nixl_agent",
        "from transformers.utils import _is_package_available",
    ],
)
def test_private_names_are_seen_at_all(source):
    assert set(foreign(source, OURS))
