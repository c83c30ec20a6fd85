"""The line that says what a server does."""

import sys

import pytest

from seqpar.commands import serve
from tests.support.servers import running


class Stream:
    """What a line is written to: a terminal, a file, or a pipe that nobody reads any more."""

    def __init__(self, kind):
        self.kind, self.text = kind, ""

    def isatty(self):
        return self.kind == "terminal"

    def write(self, text):
        if self.kind == "broken":
            raise BrokenPipeError
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("kind", ["terminal", "file", "broken"])
def test_a_server_shows_its_work_while_somebody_reads(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sys, "stderr", stream := Stream(kind))
    monkeypatch.setattr(serve, "_LOG_SECONDS", 2.0)
    with running(f"ipc://{tmp_path}/s") as server:
        line = serve.LiveLine(server)
        line()
        assert not stream.text  # it has been silent for less than a moment
        line._time -= 5
        line()
        if kind == "broken":
            return
        assert "0 clients  0 tasks/s" in stream.text
        assert stream.text.startswith("\r") == (kind == "terminal")
        assert stream.text.endswith("\n") == (kind == "file")
