"""What the guide to servers shows of deployments agrees with the commands, deadlines and keys."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from seqpar.__main__ import COMMANDS
from seqpar.servers.transport.addresses import check_address
from seqpar.servers.transport.curve_keys import client_keys, generate, server_keys, trusts
from seqpar.servers.wire.limits import ServerDeadlines

PAGE = (Path(__file__).parents[3] / "docs/guides/servers.md").read_text()
VARIABLES = {"$XDG_RUNTIME_DIR": "/run/user/1000"}  # which the shell expands
WORDS = [
    re.split(r",\s*", found.replace('"', "")) for found in re.findall(r"command: \[(.*?)\]", PAGE)
] + [
    shlex.split(found.replace("\\\n", " "), comments=True)
    for found in re.findall(r"^(?:sudo )?(python -m seqpar [^&\n]*)", PAGE, re.MULTILINE)
]  # fmt: skip


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
    assert len([words for words in WORDS if words[0] == "python"]) >= 8


def value(name):
    """A number of the manifest."""
    return int(re.search(rf"{name}: (\d+)", PAGE)[1])


def test_a_pod_has_time_to_drain():
    drain = ServerDeadlines().drain
    assert value("terminationGracePeriodSeconds") > 2 * drain + 1
    assert f"for {drain:g} s at most" in PAGE and f"{drain:g} s more" in PAGE
    assert value("timeoutSeconds") < value("periodSeconds")


def mounted(folder, secret, items):
    """Mount a secret as a kubelet does: links to a folder of links to a folder of its files."""
    version = folder / "..2026_01_01"
    for key, path in items:
        (version / path).parent.mkdir(parents=True, exist_ok=True)
        (version / path).write_bytes(secret[key])
        (version / path).chmod(0o400)
    (folder / "..data").symlink_to(version.name)
    for name in {path.partition("/")[0] for _, path in items}:
        (folder / name).symlink_to(f"..data/{name}")


def test_the_secret_is_a_folder_of_keys(tmp_path):
    made = generate(tmp_path / "keys")[0].parent
    secret = {file.name: file.read_bytes() for file in made.iterdir() if file.is_file()}
    items = re.findall(r"- \{key: (\S+), path: (\S+)\}", PAGE)
    mounted(tmp_path / "mounted", secret, items)
    server, client = server_keys(tmp_path / "mounted"), client_keys(tmp_path / "mounted")
    assert trusts(server.trusted, client.public) and client.server == server.public
