"""The committed table of what the compiler made of every shipped configuration, and its gates.

tests/kernels/aot.json has a section for each version of Triton. A section has a hash of the sources
of the kernels that have rows, and a row for each launch of each configuration of these kernels.
`make aot` and `make aot-triton-3.6` write the file again. A gate is a condition that every row must
meet.
"""

import ast
import hashlib
import io
import json
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/kernels/aot.json"
VERSIONS = {"3.6.0": "make aot-triton-3.6", "3.7.1": "make aot"}  # of Triton: the oldest and newest
DECORATORS = {"triton.jit", "kernel"}  # `kernel` is in triton_kernels/specialisation.py
KEY = "architecture", "precision", "width", "kind", "launch"
SHARED_LIMIT = {  # bytes of shared memory that a program may use
    "sm_80": 101_376,  # of sm_86 and sm_89, which run its configurations; sm_80 has 166,912
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
PAGE_ROWS = {  # (kind, launch) -> what docs/kernels.md calls it
    ("forward", "fused"): "forward",
    ("backward_kv", "full"): "dk and dv, full blocks",
    ("backward_q", "fused"): "dq",
    ("recurrence", "forward"): "lightning attention, out and dq",
    ("recurrence", "group"): "lightning attention, dk and dv, 8 query heads per KV head",
    ("states", "group"): "lightning attention, states of segments",
}


def load(file=FILE):
    """Return the table: {Triton's version: {"sources": hash, "rows": [row]}}."""
    return json.loads(file.read_text()) if file.is_file() else {}


def write(version, sources, rows, file=FILE):
    """Replace the section of one version of Triton; each row is a line."""
    sections = load(file) | {version: {"sources": sources, "rows": rows}}
    texts = []
    for name, section in sorted(sections.items()):
        lines = ",\n".join(json.dumps(row) for row in section["rows"])
        texts.append(f'"{name}": {{"sources": "{section["sources"]}", "rows": [\n{lines}\n]}}')
    file.write_text("{\n" + ",\n".join(texts) + "\n}\n")


def sources_hash(kernels, root=ROOT / "triton_kernels"):
    """Return a hash of all code that is compiled for the kernels of these names.

    The code is that of the kernels, and of the functions and constants that they reach. A function
    counts if `triton.jit` or `kernel` decorates it, and a constant if an assignment of
    `tl.constexpr` defines it. A definition reaches every definition whose name is in its code, in
    any file. Other kernels, docstrings, comments, blank lines and names of files do not count. The
    host's code does not count either, since the arguments that it passes to a kernel are in the
    row's `arguments`.
    """
    definitions = {}  # name: definitions, each as its code and the names in it
    for file in root.rglob("*.py"):
        source = file.read_text()
        for node in ast.parse(source).body:
            for name, code, names in _definitions(node, source):
                definitions.setdefault(name, []).append((code, names))
    reached, ahead, parts = set(), set(kernels), set()
    if missing := ahead - set(definitions):
        raise ValueError(f"kernels must be names of kernels in {root}, got {sorted(missing)}")
    while ahead:
        reached |= ahead
        found = [definition for name in ahead for definition in definitions[name]]
        parts |= {code for code, _ in found}
        ahead = set().union(*(names for _, names in found)) & set(definitions) - reached
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def _definitions(node, source):
    """Yield (name, code, names in the code) of each definition for kernels in a statement."""
    text = ast.get_source_segment(source, node)
    names = {getattr(x, "id", getattr(x, "attr", None)) for x in ast.walk(node)}
    if isinstance(node, ast.FunctionDef):
        if DECORATORS & set(map(ast.unparse, node.decorator_list)):
            yield node.name, _tokens(_without_docstring(node, text)), names
    elif isinstance(node, ast.Assign) and "tl.constexpr" in text:
        for name in (x.id for target in node.targets for x in ast.walk(target) if "id" in vars(x)):
            yield name, _tokens(text), names
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, "", {alias.name}


def _without_docstring(function, text):
    if ast.get_docstring(function) is None:
        return text
    lines, string = text.splitlines(), function.body[0]
    del lines[string.lineno - function.lineno : string.end_lineno - function.lineno + 1]
    return "\n".join(lines)


def _tokens(text):
    """Return the tokens of a piece of code in one line.

    The tokens show where an indentation begins and ends, but not how many spaces it has.
    """
    names = {tokenize.INDENT: "INDENT", tokenize.DEDENT: "DEDENT"}
    left_out = tokenize.COMMENT, tokenize.NL
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(names.get(x.type, x.string) for x in tokens if x.type not in left_out)


def broken_gates(row):
    """Return what is wrong with a launch that is shipped.

    On gfx942, a launch only has to fit into shared memory.
    """
    architecture, config = row["architecture"], row["config"]
    wrong = []
    if row["shared"] > SHARED_LIMIT[architecture]:
        wrong.append(f"{row['shared']} bytes of shared memory")
    if architecture == "gfx942":
        return wrong
    if row["spilled"] > 64 or row["spills in loops"]:
        wrong.append(
            f"{row['spilled']} bytes spilled, {row['spills in loops']} times in inner loops"
        )
    tile_rows = config.get("tile_rows", config.get("chunk_rows"))
    needs_hgmma = architecture == "sm_90" and row["precision"] == "half" and tile_rows >= 64
    if needs_hgmma and not row["HGMMA"]:
        wrong.append("no HGMMA")  # these tiles have at least 64 rows
    return wrong


def markdown():
    """Return the table of docs/kernels.md, which is for sm_90, bf16, head dim 128 and the newest
    Triton."""
    version = max(VERSIONS)
    head = ["tile × block", "warps", "registers per thread", "spilled", "shared memory"]
    lines = [f"| kernel, by Triton {version} for sm_90, bf16, D = 128 | " + " | ".join(head) + " |"]
    lines.append("|---" * (len(head) + 1) + "|")
    rows = {tuple(row[name] for name in KEY): row for row in load()[version]["rows"]}
    for (kind, launch), label in PAGE_ROWS.items():
        row = rows["sm_90", "half", 128, kind, launch]
        sizes = " × ".join(str(size) for size in list(row["config"].values())[:2])
        where = ""
        if row["spilled"]:
            where = (
                f", {row['spills in loops']} in loops" if row["spills in loops"] else ", in no loop"
            )
        cells = [label, sizes, row["warps"], row["registers"], f"{row['spilled']} B{where}"]
        cells.append(f"{row['shared'] / 1024:.0f} KiB")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
