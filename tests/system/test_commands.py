"""The commands of `python -m seqpar`, as their users start them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

import seqpar
from seqpar.__main__ import COMMANDS, main
from seqpar.servers import status_client
from seqpar.servers.server_check import payload
from tests.support.commands import fork_commands
from tests.support.faults import LIMIT, free_port
from tests.support.servers import connect


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
        assert code == 0 and text.count("correct, same bits as here") == 1
        with connect(address, home=False) as pool, seqpar.ServerCache(pool, 9) as cache:
            cache.put(0, *torch.zeros(2, 9, 1, 32).unbind())
            code, text = said("status", address, f"ipc://{tmp_path}/none", "--timeout", "1")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                metrics = page.read().decode()
        assert code == 1 and "ready on cpu" in text and "has not answered within 1 s" in text
        assert re.search(r"caches +GB of caches", text) and re.search(r" 1 +0\.00 +ready", text)
        assert "seqpar_tasks_total" in metrics and "seqpar_waiting 0.0" in metrics
        assert "seqpar_caches 1.0" in metrics and "seqpar_cache_bytes 6" in metrics
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=LIMIT)
    assert server.returncode == 0 and "Traceback" not in errors


def test_a_bare_program_lists_its_commands(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not err and all(re.search(rf"^ +{name} +\w", out, re.MULTILINE) for name in COMMANDS)


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"seqpar {seqpar.__version__}\n"


def refused(words, capsys):
    """What a command says that is wrong with its arguments, in one line."""
    assert main(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("words", [["info"], ["info", "--json"]])
def test_output_that_cannot_be_written_ends_commands(words, monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    for path, code, told in (
        (write, 128 + signal.SIGPIPE, ""),  # as in `| head`
        ("/dev/full", 2, "info: [Errno 28] No space left on device\n"),
    ):
        with open(path, "w") as output, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            assert main(words) == code
        assert capfd.readouterr().err == told


@pytest.fixture
def busy():
    """A port that another process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(("words", "wrong"), [
    (["serve", "--bind", "tcp://0.0.0.0:5555"], "keygen"),
    (["serve", "--bind", "nonsense"], "address must be"),
    (["serve", "--bind", "ipc:///tmp/s", "--keys", "/nonexistent"], "server.crt cannot be read"),
    (["serve", "--bind", "ipc:///tmp/s", "--max-tokens", "0"], "tokens must be at least 1"),
    (["serve", "--bind", "ipc:///tmp/s", "--cache-bytes", "0"], "cache_bytes must be at least 1"),
    (["serve", "--bind", "ipc:///tmp/s", "--device", "gpu"], "device must be"),
    (["serve", "--bind", "ipc:///tmp/s", "--device", "meta"], "device must be a CPU or GPU"),
    (["serve", "--bind", "ipc:///tmp/s\0t"], "address must be"),
    (["keygen", ""], "folder must be the path of a folder"),
    (["serve", "--bind", "ipc:///tmp/s", "--threads", "0"], "threads must be at least 1"),
    (["serve", "--bind", "ipc:///tmp/s", "--threads", "99999"], "threads must be at most"),
    *[
        (["serve", "--bind", "ipc:///tmp/s", "--metrics", place], "metrics must be PORT")
        for place in ("x", "0", "-1", "65536", "host:", "9" * 9, "\u0663", "")
    ],
    (["serve", "--bind", "ipc:///attention-0"], "address must be in a folder below /"),
    (["status", "ipc:///attention-0"], "address must be in a folder below /"),
    (["check", "ipc:///attention-0"], "address must be in a folder below /"),
    (["status", "tcp://*:5555"], "address must name the host and port of a server"),
    (["status", "tcp://127.0.0.1:0"], "address must name the host and port of a server"),
    (["status", "tcp://10.0.0.1:5555"], "it needs keys"),
    (["status", "ipc:///tmp/s", "--keys", "/nonexistent"], "client.crt cannot be read: No such"),
    (["check", "http://127.0.0.1:5555"], "address must be"),
    (["keygen", "/dev/null"], "folder: /dev/null/authorities cannot be made: Not a"),
    (["keygen", "/proc/keys/none"], "cannot be made"),
])  # fmt: skip
def test_commands_name_what_is_wrong(words, wrong, capsys):
    assert wrong in refused(words, capsys)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
@pytest.mark.parametrize("command", ["status", "check"])
def test_a_timeout_that_is_none_is_refused(command, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "ipc:///tmp/s", f"--timeout={text}"])
    assert "--timeout: must be a number of seconds" in capsys.readouterr().err


def test_what_is_taken_is_left_to_its_owner(tmp_path, busy, capsys):
    file = tmp_path / "file"
    file.write_text("something")
    serve = ["serve", "--bind"]
    assert "in use" in refused([*serve, f"tcp://127.0.0.1:{busy}"], capsys)
    for path in (file, tmp_path):
        said = refused([*serve, f"ipc://{path}"], capsys)
        assert "cannot be bound: a file is there that is no socket" in said
    assert file.read_text() == "something"
    free = tmp_path / "free"
    for _ in range(2):  # the address is free again
        words = [*serve, f"ipc://{free}", "--metrics", busy]
        wrong = f"metrics: 127.0.0.1:{busy} cannot be served at: Address already in use"
        assert wrong in refused(words, capsys)
    assert "metrics: nowhere.invalid:5 " in refused(
        [*serve, f"ipc://{free}", "--metrics", "nowhere.invalid:5"], capsys
    )


@pytest.fixture
def keys(tmp_path, capsys):
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    capsys.readouterr()
    return tmp_path / "keys"


@pytest.mark.parametrize(("change", "wrong"), [
    (lambda keys: (keys / "server.key").chmod(0o604), "must be readable by its owner alone"),
    (lambda keys: (keys / "server.crt").write_text("x" * 40), "one certificate, as keygen makes"),
    (lambda keys: (keys / "server.key").unlink(), "server.key cannot be read: No such file"),
    (lambda keys: (keys / "client.key").replace(keys / "server.key"), "must be of one pair"),
    (lambda keys: ((keys / "server.crt").unlink(), (keys / "server.crt").mkdir()),
     "server.crt must be a regular file"),
    (lambda keys: (keys / "authorities").rename(keys / "others"), "must be a folder"),
    (lambda keys: (keys / "server.secret").touch(), "`python -m seqpar keygen NEWFOLDER`"),
])  # fmt: skip
def test_unusable_keys_are_named_and_not_shown(keys, change, wrong, capsys):
    secret = (keys / "server.key").read_text().splitlines()[1]
    change(keys)
    said = refused(["serve", "--bind", "tcp://0.0.0.0:*", "--keys", keys], capsys)
    assert said.startswith("serve: keys: ") and wrong in said and secret not in said


def test_keys_are_not_made_over_others(keys, capsys):
    before = {file: file.read_bytes() for file in keys.rglob("*.*") if file.is_file()}
    for words in (["keygen", keys], ["keygen", keys, "--client", "client"],
                  ["keygen", keys, "--revoke", "nobody"]):  # fmt: skip
        refused(words, capsys)
        assert {x: x.read_bytes() for x in keys.rglob("*.*") if x.is_file()} == before


def test_keygen_names_new_files_and_who_needs_them(keys, capsys):
    for words, file, told in (
        (["--client", "alice"], "clients/alice/client.key", "the client needs the files in"),
        (["--rotate"], "authorities/2.crt", "remove the older files"),
        (["--revoke", "alice"], "revoked/alice-1.crt", "copy the new files in revoked/"),
    ):
        assert main(["keygen", str(keys), *words]) == 0
        out = capsys.readouterr().out
        assert f"{keys}/{file}\n" in out and told in out and "PRIVATE" not in out


@pytest.mark.exhaustive
@pytest.mark.parametrize("times", [1, 2])
def test_one_interrupt_drains_and_a_second_one_ends(tmp_path, monkeypatch, times):
    fork_commands(monkeypatch)
    server = command("serve", "--bind", f"ipc://{tmp_path}/s", stdin=subprocess.DEVNULL)
    try:
        assert server.stdout.readline()
        with connect(f"ipc://{tmp_path}/s") as pool:
            futures = [pool.submit(payload(64)) for _ in range(16)]
            time.sleep(0.2)
            for _ in range(times):
                server.send_signal(signal.SIGINT)
                time.sleep(0.1)
            _, errors = server.communicate(timeout=LIMIT)
            assert all(future.result(LIMIT) for future in futures)
    finally:
        server.kill()
    assert server.returncode in ((0,) if times == 1 else (0, -signal.SIGINT)) and not errors


def test_an_interrupt_of_a_client_shows_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(status_client, "ask", interrupted)
    assert main(["status", "ipc:///tmp/nobody"]) == 130
    assert not any(capsys.readouterr())
