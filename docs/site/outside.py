"""Show what pages link to outside docs/: such files become pages, and pictures are copied.

A link to ../README.md is right on GitHub. Here it leads to repository/README.md, a page that is
made of that file, with its own links led in the same way.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
PREFIX = "repository/"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages, and every file that a page links to."""
    sources = {name: (ROOT / name).read_text() for name in PAGES}
    sources |= {f"docs/{x.src_uri}": x.content_string for x in files.documentation_pages()}
    linked = {path for name, text in sources.items() for path in outside(name, text)}
    for name in sorted(linked | set(PAGES)):
        path = ROOT / name
        if path.suffix in (".md", ".py"):
            text = path.read_text()
            if path.suffix == ".py":
                text = f"# {name}\n\n```python\n{text}```\n"
            files.append(File.generated(config, page_of(name), content=text))
        else:
            files.append(File.generated(config, PREFIX + name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lead the links of a page to where their targets are here."""
    here = page.file.src_uri
    name = source_of(here)

    def lead(match: re.Match[str]) -> str:
        path, anchor, target = resolved(name, match[2])
        if path is None:
            return match[0]
        target = path.removeprefix("docs/") if path.startswith("docs/") else page_of(path)
        target = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"{match[1]}{target}{anchor}{match[3]}"

    return without_code(markdown, lambda prose: LINK.sub(lead, prose))


def without_code(markdown: str, change: Any) -> str:
    """Change a page, but not its fenced blocks."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(x if i % 2 else change(x) for i, x in enumerate(parts))


def page_of(name: str) -> str:
    """Return the page that is made of a file."""
    return PREFIX + (f"{name}.md" if name.endswith(".py") else name)


def source_of(page: str) -> str:
    """Return the file that a page is made of, from the repository's root."""
    if not page.startswith(PREFIX):
        return f"docs/{page}"
    return page.removeprefix(PREFIX).replace(".py.md", ".py")


def resolved(name: str, target: str) -> tuple[str | None, str, str]:
    """Return the file that a link of a file leads to, or None, and the anchor."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return None, "", target
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    return found, mark + anchor, target


def outside(name: str, text: str) -> set[str]:
    """Return the files outside docs/ that a file links to."""
    found = set()
    without_code(text, lambda prose: found.update(m[2] for m in LINK.finditer(prose)) or prose)
    paths = {resolved(name, target)[0] for target in found}
    return {path for path in paths if path and not path.startswith("docs/")}
