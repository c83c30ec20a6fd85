"""Make the reference from docstrings, and lead the table of public names to it."""

import re
from typing import Any

from interface import MODULES, OF_SEQPAR, names_of
from mkdocs.structure.files import File

FOLDER = "reference/api/"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the reference."""
    pages = {title: [f"seqpar.{x}" for x in names] for (title, _), names in OF_SEQPAR.items()}
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
        if heading := re.match(r"\| `(seqpar[.\w]*)` \|", line):
            module = heading[1]
        elif not line.startswith("|"):
            module = ""
        elif module and (row := re.match(r"\| `(\w+)` \|", line)):
            line = line.replace(f"`{row[1]}`", f"[`{row[1]}`][{module}.{row[1]}]", 1)
        lines.append(line)
    return "\n".join(lines)
