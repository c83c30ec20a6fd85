"""The environment of a measurement, and the progress of many."""

import subprocess
import threading

import torch

from seqpar.costs.profile import harness, machine
from tests.support.same_bits import default_threads, torch_threads


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert harness.environment()["commit"] == ""


def test_a_device_has_its_cores_whatever_the_threads():
    with machine.one_thread():
        assert harness.environment()["cores"] == harness.CORES


def test_one_thread_is_for_the_thread_that_measures():
    """Another thread that measures meanwhile, or starts meanwhile, has as many as before."""
    begun, may_end = threading.Event(), threading.Event()
    counts = []

    def other():
        with machine.one_thread():
            begun.set()
            assert may_end.wait(60)
        counts.append(torch.get_num_threads())

    with torch_threads(3):
        thread = threading.Thread(target=other)
        with machine.one_thread():
            thread.start()
            assert begun.wait(60)
            assert torch.get_num_threads() == 1 and default_threads() == 3
        assert torch.get_num_threads() == 3
        may_end.set()
        thread.join()
        assert counts == [3] and default_threads() == 3


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


def test_each_change_of_the_code_is_another_commit(tmp_path, monkeypatch):
    file = tmp_path / "seqpar/costs/profile/harness.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "triton_kernels").mkdir()
    kernel = tmp_path / "triton_kernels/kernel.py"
    monkeypatch.setattr(harness, "__file__", str(file))

    def git(*words):
        identity = "-c", "user.name=a", "-c", "user.email=a@b"
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    def commit(path, text):
        path.write_text(text)
        return harness.environment()["commit"]

    file.write_text("1")
    kernel.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = harness.environment()["commit"]
    assert clean and "-" not in clean
    new = tmp_path / "seqpar/new.py"
    found = [commit(*x) for x in ((file, "2"), (kernel, "2"), (kernel, "3"), (new, "1"))]
    assert len({clean, *found}) == 5
    assert commit(tmp_path / "notes.txt", "1") == found[-1]
