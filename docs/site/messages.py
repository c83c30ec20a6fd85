"""List every error message of the library with the module that raises it, from the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGE = "reference/messages.md"
HEAD = """# All messages

These are the messages of all errors that seqpar raises itself, read from its sources; … stands
for a value. Find yours with your browser's search. [Errors](errors.md) explains those that are met
most often.

"""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the page."""
    text = HEAD
    for path in sorted((ROOT / "seqpar").rglob("*.py")):
        rows = sorted(set(messages_of(path)), key=lambda row: (row[1].lower(), row))
        if rows:
            text += f"\n## {path.relative_to(ROOT)}\n\n| message | error |\n|---|---|\n"
            text += "".join(f"| {cell(message)} | `{error}` |\n" for error, message in rows)
    files.append(File.generated(config, PAGE, content=text))
    return files


def messages_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (error, message) of each exception that a file raises with a literal message."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        error = ast.unparse(node.exc.func)
        for argument in node.exc.args[:1]:
            message = words(argument)
            if re.search(r"\w{3,} \w", message) and re.fullmatch(r"[\w.]*(Error|Exit)", error):
                yield error, message


def words(node: ast.expr) -> str:
    """Return a text with … for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return "…"


def cell(message: str) -> str:
    """Return a message as a cell of a table."""
    message = re.sub(r"\s+", " ", message).strip()
    return message.replace("\\", "\\\\").translate({ord(c): f"\\{c}" for c in "|*_`[]<>"})
