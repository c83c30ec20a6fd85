"""The commands of `python -m seqpar`, as their users start them."""

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from seqpar.__main__ import main
from seqpar.servers.one_sided import available
from tests.support.faults import LIMIT, free_port


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "seqpar", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip


def said(*words):
    """The exit status of a command, and what it printed."""
    process = command(*words)
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out + err


@pytest.mark.exhaustive
def test_the_commands(tmp_path):
    address, port = f"ipc://{tmp_path}/s", free_port()
    server = command("serve", "--bind", address, "--metrics", str(port), "--max-tokens", "70000")
    try:
        assert server.stdout.readline() == f"serving at {address} on cpu\n"
        code, text = said("check", address)
        assert code == 0 and text.count("right, the same bits as here") == 1 + available()
        code, text = said("status", address, f"ipc://{tmp_path}/none", "--timeout", "1")
        assert code == 1 and "ready on cpu" in text and "has not answered within 1 s" in text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            metrics = page.read().decode()
        assert "seqpar_tasks_total" in metrics and "seqpar_waiting 0.0" in metrics
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=LIMIT)
    assert server.returncode == 0 and not errors


@pytest.mark.parametrize(("words", "wrong"), [
    (["serve", "--bind", "tcp://0.0.0.0:5555"], "keygen"),
    (["serve", "--bind", "nonsense"], "address must be"),
    (["serve", "--bind", "ipc:///tmp/s", "--keys", "/nonexistent"], "trusted must be a folder"),
    (["serve", "--bind", "ipc:///tmp/s", "--max-tokens", "0"], "tokens must be at least 1"),
])  # fmt: skip
def test_commands_name_what_is_wrong(words, wrong, capsys):
    assert main(words) == 2 and wrong in capsys.readouterr().err


WITHOUT = """
import sys
import seqpar
from seqpar.__main__ import main
extra = {"zmq", "msgspec", "nixl", "prometheus_client"}
assert not extra & set(sys.modules), extra & set(sys.modules)
sys.modules["zmq"] = None
assert main(["serve", "--bind", "ipc:///tmp/s"]) == 2
try:
    seqpar.ServerPool.connect("ipc:///tmp/s")
except ImportError as error:
    assert str(error) == "attention servers need zmq: pip install 'seqpar[serve]'"
"""


@pytest.mark.exhaustive
def test_without_the_extra_all_else_works():
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "pip install 'seqpar[serve]'" in ended.stderr
