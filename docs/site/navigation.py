"""Name the pages of folders in the navigation: FOLDER/* stands for those not named elsewhere."""

from pathlib import Path
from typing import Any


def on_files(files: Any, *, config: Any) -> Any:
    """Fill the navigation once all pages are there, also those that other hooks make."""
    pages = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = expanded(config.nav, set(pages) - set(named(config.nav)))
    return files


on_files.mkdocs_priority = -100  # after all others


def named(entry: Any) -> list[str]:
    """Return the pages that a navigation names."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [name for part in parts for name in named(part)]


def expanded(entries: list[Any], rest: set[str]) -> list[Any]:
    """Return a navigation in which each FOLDER/* is the pages of the rest that are in it."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            inner = inner if isinstance(inner, str) else expanded(inner, rest)
            found += [{title: inner}] if inner else []
        elif entry.endswith("/*"):
            found += sorted(name for name in rest if str(Path(name).parent) == entry[:-2])
        else:
            found.append(entry)
    return found
