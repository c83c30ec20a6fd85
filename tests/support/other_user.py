"""Processes of another user. Only root can start them."""

import contextlib
import os
import subprocess
import sys

import pytest

NOBODY = 65534
BECOME_NOBODY = f"os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})\n"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextlib.contextmanager
def python_of_nobody(code, *arguments, first=""):
    """Run Python code as the user nobody, after code `first` as root; return the process."""
    lines = "import encodings.idna, os, socket, sys\n" + first + BECOME_NOBODY + code
    command = [sys.executable, "-c", lines, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()
