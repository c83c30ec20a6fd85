"""Make the reference from docstrings, and lead the table of public names to it."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FOLDER = "reference/api/"
# Pages of `seqpar.__all__`, in the order in which one meets the names.
OF_SEQPAR = {
    "Layouts and masks": ["Layout", "Span", "Mask", "shift_labels"],
    "Attention": [
        "make_attention", "Attention", "RingAttention", "AllGatherAttention", "UlyssesAttention",
        "TokenRingAttention", "MeshAttention", "USPAttention", "DisaggregatedAttention",
        "AutoAttention", "best_mesh", "Routing", "Group", "use_backend",
    ],
    "Linear and recurrent attention": [
        "LASP2Attention", "RecurrentAttention", "causal_conv1d", "token_shift",
    ],
    "In a model": [
        "context_parallel", "sdpa", "checkpoint", "save_attention", "SAVED_OPS", "offload",
    ],
    "Decoding and servers": ["ShardedCache", "merge", "ServerPool", "ServerCache"],
    "Measuring": ["trace", "Trace", "exposure", "Exposure", "recommend"],
    "Errors": ["PeerError", "ServersError"],
}  # fmt: skip
MODULES = [
    "seqpar.masks",
    "seqpar.balance",
    "seqpar.simulate",
    "seqpar.integrations.huggingface",
    "seqpar.integrations.flash_attn",
    "seqpar.integrations.mask_functions",
    "seqpar.integrations.torchtitan",
]


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the reference."""
    public = set(names_of("seqpar")) - {"__version__"}
    placed = [name for names in OF_SEQPAR.values() for name in names]
    pages = {title: [f"seqpar.{name}" for name in names] for title, names in OF_SEQPAR.items()}
    rest = sorted(public - set(placed))
    if rest:
        pages["More"] = [f"seqpar.{name}" for name in rest]
    if set(placed) - public:
        raise PluginError(f"seqpar has no {sorted(set(placed) - public)}")
    pages |= {module: [f"{module}.{name}" for name in names_of(module)] for module in MODULES}
    for number, (title, names) in enumerate(pages.items()):
        text = f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"
        slug = f"{number:02}-{re.sub(r'[^a-z_.]+', '-', title.lower())}.md"
        files.append(File.generated(config, FOLDER + slug, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lead the first column of the tables of public names to their docstrings."""
    if page.file.src_uri != "reference/interface.md":
        return markdown
    lines, module = [], ""
    for line in markdown.splitlines():
        if line.startswith("| name | what it is"):
            module = "seqpar"
        elif heading := re.match(r"\| `(seqpar\.\w+)` \|", line):
            module = heading[1] if heading[1] in MODULES else ""
        elif not line.startswith("|"):
            module = ""
        elif module and (row := re.match(r"\| `(\w+)` \|", line)):
            name = row[1]
            if name in names_of(module) and name != "__version__":
                line = line.replace(f"`{name}`", f"[`{name}`][{module}.{name}]", 1)
        lines.append(line)
    return "\n".join(lines)


def names_of(module: str) -> list[str]:
    """Return what a module's __all__ has, or its public functions and classes."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = ast.FunctionDef | ast.ClassDef
    found = [node.name for node in tree.body if isinstance(node, kinds)]
    return [name for name in found if not name.startswith("_")]
