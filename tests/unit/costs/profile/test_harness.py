"""The environment of a measurement, and the progress of many."""

import subprocess

from seqpar.costs.profile import harness, machine


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert harness.environment()["commit"] == ""


def test_a_device_has_its_cores_whatever_the_threads():
    with machine.one_thread():
        assert harness.environment()["cores"] == harness.CORES


def test_progress_is_line_by_line_without_a_terminal(capsys):
    with harness.progress(2) as begin:
        for what in ("one", "two"):
            begin(what)
    assert capsys.readouterr().err.split("\n")[:2] == ["1 of 2: one", "2 of 2: two"]


def test_the_commit_is_seqpars_wherever_it_is_used(tmp_path, monkeypatch):
    here = harness.environment()["commit"]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    assert harness.environment()["commit"] == here
