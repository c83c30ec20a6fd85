"""The pages of the documentation: their blocks, prose, tables and links."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page on which its text begins."""

    language: str
    text: str
    line: int
    output: str | None = None  # the output that the page shows


def blocks_of(page):
    """Return a page's fenced blocks; a python block has the output that the page shows for it."""
    text = page.read_text()
    found = list(re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    blocks = []
    for i, match in enumerate(found):
        output = None
        behind = found[i + 1] if i + 1 < len(found) else None
        if match[1] == "python" and behind and behind[1] == "text":
            output = None if text[match.end() : behind.start()].strip() else behind[2]
        line = text[: match.start(2)].count("\n")
        blocks.append(Block(match[1], match[2], line, output))
    return blocks


def prose_of(page):
    """Return a page's text without fenced blocks and code spans."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def python_of(page):
    return [block for block in blocks_of(page) if block.language == "python"]


def table_of(page, heading):
    """Return {first cell: remaining cells} of the rows of a table.

    `heading` is a text in the head of the table.
    """
    lines = iter(page.read_text().splitlines())
    next(line for line in lines if line.startswith("|") and heading in line)
    next(lines)  # the line between the head and the rows
    body = itertools.takewhile(lambda line: line.startswith("|"), lines)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body]
    return {first: cells for first, *cells in rows}


def anchors_of(page):
    """Return the names by which GitHub links to a page's headings, and to other parts of it."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    names = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
    return names | set(re.findall(r'<a id="([\w-]+)">', text))


def links_of(page):
    """Yield (path, anchor) of the links that stay in the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if not target.startswith(("http://", "https://", "mailto:")):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor
