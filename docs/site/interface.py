"""Write the page of public names from `__all__` and docstrings: `python docs/site/interface.py`."""

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/interface.md"
# The names of `seqpar.__all__`, in the order in which one meets them, and where they are explained.
OF_SEQPAR = {
    ("Layouts and masks", "../guides/layouts.md"): ["Layout", "Span", "Mask", "shift_labels"],
    ("Softmax attention", "../strategies/index.md"): [
        "make_attention", "Attention", "RingAttention", "AllGatherAttention", "UlyssesAttention",
        "TokenRingAttention", "MeshAttention", "USPAttention", "DisaggregatedAttention",
        "AutoAttention", "best_mesh", "Routing", "Group", "use_backend",
    ],
    ("Linear and recurrent attention", "../guides/recurrent.md"): [
        "LASP2Attention", "RecurrentAttention", "causal_conv1d", "token_shift",
    ],
    ("In a model", "../guides/training.md"): [
        "context_parallel", "sdpa", "checkpoint", "save_attention", "SAVED_OPS", "offload",
    ],
    ("Decoding and servers", "../guides/decoding.md"): [
        "ShardedCache", "merge", "ServerPool", "ServerCache",
    ],
    ("Measuring", "../guides/tracing.md"): ["trace", "Trace", "exposure", "Exposure", "recommend"],
    ("Errors", "errors.md"): ["PeerError", "ServersError"],
}  # fmt: skip
# All other public modules: the names of their `__all__`.
MODULES = {
    "seqpar.masks": "../guides/masks.md",
    "seqpar.memory": "../guides/memory.md",
    "seqpar.balance": "../guides/balance.md",
    "seqpar.costs": "../guides/costs.md",
    "seqpar.simulate": "../guides/simulate.md",
    "seqpar.servers": "../guides/servers.md",
    "seqpar.elastic": "../guides/elastic.md",
    "seqpar.parity": "../guides/parity.md",
    "seqpar.layout.plot": "../guides/layouts.md",
    "seqpar.integrations.huggingface": "../guides/huggingface.md",
    "seqpar.integrations.accelerate": "../guides/huggingface.md#accelerate",
    "seqpar.integrations.flash_attn": "../guides/pytorch.md",
    "seqpar.integrations.mask_functions": "../guides/masks.md",
    "seqpar.integrations.megatron": "../guides/megatron.md",
    "seqpar.integrations.torchtitan": "../guides/torchtitan.md",
    "seqpar.integrations.automodel": "../guides/automodel.md",
    "seqpar.integrations.verl": "../guides/verl.md",
}
# What these objects offer is listed too.
WITH_METHODS = {
    "`attn`, any attention module": ("seqpar.attention.module", "BoundModule"),
    "`attn`, a module of softmax attention": ("seqpar", "Attention"),
    "`attn`, a module of linear attention": ("seqpar.linear.module", "LinearModule"),
    "`sp`, which `huggingface.enable` returns": (
        "seqpar.integrations.huggingface",
        "SequenceParallel",
    ),
}
HEAD = """# Public interface

These are all public names, by the first words of their docstrings. Everything else may change with
any version. `import seqpar` makes the modules of this page available, except those of other
libraries, `seqpar.integrations`. The [command line](command_line.md) and the
[variables](environment.md) have pages of their own.
"""
TAIL = """
## Options of modules

* `check_ranks=True`: compare each call over the ranks first, so that all raise the same error.
* `routing=Routing(...)`: divide messages between nodes among all [NICs](../guides/routing.md).
* `deterministic=False`: the `triton` backend may add to dq atomically.
* `deterministic="ranks"`: [the same bits](../internals/numerics.md) on any number of ranks.
* `message_dtype=torch.int8` or `torch.float8_e4m3fn`: keys and values travel [in 8
  bits](../internals/numerics.md), with Ring, AllGather, Mesh, and USP over these.
* `gradient_dtype=torch.bfloat16`: gradients travel [in bf16](../internals/numerics.md).

The last four are options of softmax attention. Each strategy's page has its own options.

## Saving modules

`torch.save(model)` and `pickle` keep a module's options, and the name and global ranks of its
group. `torch.load(file, weights_only=False)` finds the group among those of the process: the
default group if it was that, else the one of the same name and ranks, else the first of the same
ranks. A RuntimeError says which group is missing. A mesh other than of all ranks counts once a
module was made on it.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for (title, guide), names in OF_SEQPAR.items():
        parts.append(section(title, guide, "seqpar", names))
    for module, guide in MODULES.items():
        parts.append(section(f"`{module}`", guide, module, names_of(module)))
    for title, (module, name) in WITH_METHODS.items():
        parts.append(table(title, "method", members(module, name)))
    return "".join(parts) + TAIL


def section(title: str, guide: str, module: str, names: list[str]) -> str:
    """Return the table of some names of a module."""
    rows = [(name, summary(documented(module, name))) for name in names]
    return table(f"[{title}]({guide})", f"`{module}`", rows)


def table(title: str, what: str, rows: list[tuple[str, str]]) -> str:
    """Return a section with a table of names."""
    lines = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in rows)
    return f"\n## {title}\n\n| {what} | what it is |\n|---|---|\n{lines}"


def names_of(module: str) -> list[str]:
    """Return the names in a module's `__all__`."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def members(module: str, name: str) -> list[tuple[str, str]]:
    """Return (name, summary) of the public methods and properties of a class."""
    node = definition(module, name)[0]
    assert isinstance(node, ast.ClassDef)
    methods = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name[0] != "_"]
    texts = [(x.name, ast.get_docstring(x)) for x in methods if x.name != "forward"]
    return [(name, summary(text)) for name, text in texts if text]


def documented(module: str, name: str) -> str:
    """Return the docstring of a name."""
    node, following = definition(module, name)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or ""
    return ast.literal_eval(following.value) if isinstance(following, ast.Expr) else ""


def definition(module: str, name: str) -> tuple[ast.stmt, ast.stmt]:
    """Return the statement that defines a name of a module, and the next statement."""
    body = [*tree_of(module).body, ast.Pass()]
    for node, following in pairwise(body):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return definition(str(node.module), name)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, following
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node, following
    raise ValueError(f"{module} does not define {name}")


@cache
def tree_of(module: str) -> ast.Module:
    """Return the source of a module."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def summary(text: str) -> str:
    """Return the first paragraph of a docstring in a line, for a cell of a table."""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
