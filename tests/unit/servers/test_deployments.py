"""What the guides to servers show of deployments agrees with the commands and deadlines."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from seqpar.__main__ import COMMANDS
from seqpar.servers.transport.addresses import check_address
from seqpar.servers.wire.limits import ServerDeadlines

GUIDES = Path(__file__).parents[3] / "docs/guides"
PAGE = (GUIDES / "servers.md").read_text()
VARIABLES = {"${XDG_RUNTIME_DIR:?}": "/run/user/1000"}  # which the shell expands
WORDS = [
    shlex.split(found.replace("\\\n", " "), comments=True)
    for text in (PAGE, (GUIDES / "kubernetes.md").read_text())
    for found in re.findall(r"^(python -m seqpar [^&\n]*)", text, re.MULTILINE)
]


def parsed(words):
    """A command's arguments, as the command reads them."""
    assert words[:3] == ["python", "-m", "seqpar"] and words[3] in COMMANDS, words
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"seqpar.commands.{words[3]}").add_arguments(parser)
    return parser.parse_args(words[4:])


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_commands_are_read_as_they_are_shown(words):
    found = vars(parsed(words))
    for address in [*found.get("addresses", []), *filter(None, [found.get("bind")])]:
        for name, value in VARIABLES.items():
            address = address.replace(name, value)
        check_address("address", address)


def test_there_are_commands_to_read():
    assert {words[3] for words in WORDS} >= {"serve", "status", "check", "keygen"}
    assert len(WORDS) >= 8


def test_the_time_to_drain_is_told():
    drain, words = ServerDeadlines().drain, " ".join(PAGE.split())
    assert f"for at most {drain:g} s" in words and f"{drain:g} s more" in words
