"""Texts of peers that reach terminals, logs and reports."""

from __future__ import annotations

from importlib import import_module


def printable(text: str) -> str:
    """Escape characters of a peer's text that could change a terminal or forge a log line."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def library_version() -> str:
    version: str = import_module("seqpar").__version__  # it imports this module
    return version
