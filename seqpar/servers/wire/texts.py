"""Escaping of texts that peers have sent, for terminals, logs and reports."""

from __future__ import annotations

from importlib import import_module


def printable(text: str) -> str:
    """Escape the characters of a text that could control a terminal or forge a line of a log."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def library_version() -> str:
    # An import at the top would be circular, because seqpar imports this module.
    version: str = import_module("seqpar").__version__
    return version
