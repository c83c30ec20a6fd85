"""Write the page of commands from their parsers: `python docs/site/command_line.py`."""

import argparse
import textwrap
from pathlib import Path

from seqpar.__main__ import COMMANDS, load

PAGE = Path(__file__).parents[1] / "reference/command_line.md"
HEAD = """# Command line

`python -m seqpar COMMAND`, or `seqpar COMMAND`. Without a command, the program lists them;
`--version` prints the version. `--help` after a command shows the same text as this page. Commands
end with status 0 if all went well, 2 for wrong arguments or a missing package, and 130 after
Ctrl-C. Status 1 means that `bench` found a wrong result or a broken rule, `check` failed, `status`
got no answer, `plan` found nothing that fits, `parity` found a difference, or `elastic` could not
continue.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(section(name, load(name)[1]) for name in COMMANDS)


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return a command's section: its description and a table of its arguments."""
    actions = [x for x in parser._actions if not isinstance(x, argparse._HelpAction)]
    text = f"\n## {name}\n\n{sentence(parser.description)}\n"
    rows = [f"| {words(x)} | {meaning(x)} |" for x in actions]
    if rows:
        text += "\n" + "\n".join(["| argument | what it means |", "|---|---|", *rows]) + "\n"
    return text + (f"\n{wrapped(parser.epilog)}\n" if parser.epilog else "")


def words(action: argparse.Action) -> str:
    """Return an argument as one types it."""
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    if action.choices:
        value = " " + "\\|".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def meaning(action: argparse.Action) -> str:
    """Return an argument's help text, and its default or that it is required."""
    text = escaped((action.help or "") % {"default": action.default})
    if action.required and action.option_strings:
        return f"{text}; required"
    shown = action.default not in (None, False, argparse.SUPPRESS, []) and "%(default)" not in (
        action.help or ""
    )
    default = " ".join(action.default) if isinstance(action.default, list) else action.default
    return f"{text} (default: `{default}`)" if shown and action.nargs != 0 else text


def sentence(text: str) -> str:
    """Return a description as a sentence."""
    return wrapped(text[0].upper() + text[1:].rstrip(".") + ".")


def wrapped(text: str) -> str:
    """Return a paragraph."""
    return textwrap.fill(escaped(text), 100, break_on_hyphens=False)


def escaped(text: str) -> str:
    """Return a text without what a table or Markdown would take for its own."""
    return " ".join(text.split()).translate({ord(c): f"\\{c}" for c in "|*_<>[]"})


if __name__ == "__main__":
    PAGE.write_text(page())
