"""The steps that a machine with a GPU runs (`tests/tools/gpu.py`)."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.cases import STRATEGIES
from tests.support.commands import fork_commands
from tests.tools import gpu, overlap, profiles, wheels
from tests.tools.steps import STEP_SECONDS

ROOT = Path(__file__).parents[2]


def start(folder, *arguments, **environment):
    command = [sys.executable, "-m", "tests.tools.gpu", "--folder", str(folder), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def forked(monkeypatch):
    """`start`, but the command and its steps are forked."""
    fork_commands(monkeypatch)
    return start


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_steps_have_unique_names_and_nine_minutes(tmp_path, device):
    steps = gpu.plan(device, tmp_path).steps
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert step.seconds <= STEP_SECONDS <= 540
        files = [x for x in step.command if x.startswith("tests/")]
        assert all((ROOT / file).is_file() for file in files)
        assert step.name.startswith("tests") == bool(files)


def test_the_first_start_asks_what_is_most_worth_knowing(tmp_path, monkeypatch):
    """Defaults come first, and the limits of the first start's steps fit into nine minutes."""
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)
    steps = gpu.plan("cuda", tmp_path).steps
    first = steps[: len(gpu.FIRST)]
    assert [step.name for step in first] == list(gpu.FIRST)
    names = ["install: local wheels", "tests: default path", "speed: kernels"]
    assert [step.name for step in first[:3]] == names
    assert [step.seconds for step in first] == list(gpu.FIRST.values())
    assert sum(step.seconds for step in first) <= 540
    assert {step.name for step in steps if step.shown} == {"speed: kernels", "speed: backends"}
    assert float(first[2].command[-1]) < first[2].seconds  # it stops before it is stopped
    assert [step.name for step in steps[-2:]] == ["tests: memcheck", "tests: racecheck"]
    then = [step.name for step in steps[len(first) :]]
    assert then[0] == "tuner: head dim 128" and then[1].startswith("tests: ")


def test_without_sanitizer_its_steps_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    names = {step.name for step in gpu.plan("cuda", tmp_path).steps}
    assert not names & {f"tests: {name}" for name in gpu.SANITIZERS}


def test_only_chooses_steps_by_name(tmp_path):
    tuners = gpu.plan("cuda", tmp_path, only="tuner:").steps
    assert [step.name for step in tuners] == ["tuner: head dim 128", "tuner: head dim 64"]
    with pytest.raises(SystemExit, match="--only must be part of the name of a step"):
        gpu.plan("cuda", tmp_path, only="no such step")


def test_every_gpu_test_belongs_to_a_step():
    """The others never do: they compile ahead of time, or interpret on CPU processes."""
    in_steps = {x for tests in gpu.TESTS.values() for x in tests if x.startswith("tests/")}
    others = {f"tests/kernels/test_{name}.py" for name in ("aot", "triton_backend")}
    every = {f"tests/kernels/{path.name}" for path in (ROOT / "tests/kernels").glob("test_*.py")}
    assert in_steps | others == every


def test_without_a_gpu_it_says_so(tmp_path, forked):
    found = forked(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2 and "there is no NVIDIA GPU" in found.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_sources_need_not_be_installed():
    """Steps' processes find seqpar and its kernels without the installation in site-packages."""
    code = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "__editable__" not in str(x)]
import seqpar.kernels
print(seqpar.kernels.__file__)
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | gpu.environment("cpu"),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == ROOT / "triton_kernels/__init__.py"


@pytest.fixture
def some_tests(pytester, monkeypatch):
    """Of two tests one passes while LATER is not set; and a function that runs them."""
    monkeypatch.setenv("SEQPAR_PASSED", str(pytester.path / "passed.txt"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        test_some="""
        import os
        def test_right(): pass
        def test_later(): assert "LATER" in os.environ
        """
    )
    return lambda *options: pytester.runpytest("-p", "tests.tools.passed", *options)


def assert_passed_tests_are_left_out(run, monkeypatch, *options):
    run(*options).assert_outcomes(passed=1, failed=1)
    monkeypatch.setenv("LATER", "now")
    run().assert_outcomes(passed=1, deselected=1)
    monkeypatch.delenv("LATER")
    last = run(*options)
    assert last.ret == 0
    noted = Path(os.environ["SEQPAR_PASSED"]).read_text().splitlines()
    assert noted == ["test_some.py::test_right", "test_some.py::test_later"]


def test_tests_that_passed_are_left_out(some_tests, monkeypatch):
    assert_passed_tests_are_left_out(some_tests, monkeypatch)


def make_wheel(folder):
    """Write a wheel with one module, `local_only`, which is no package of an index."""
    folder.mkdir()
    information = "local_only-1.0.dist-info"
    files = {
        "local_only.py": "",
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: local-only\nVersion: 1.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "local_only-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return folder


def test_packed_wheels_are_installed_where_steps_find_them(tmp_path):
    folder = make_wheel(tmp_path / "wheels")
    (wheel,) = folder.iterdir()
    original = zipfile.ZipFile(wheel).namelist()
    wheels.pack(folder)
    with zipfile.ZipFile(wheel) as packed:
        assert packed.namelist() == original and packed.testzip() is None
        assert {x.compress_type for x in packed.infolist()} == {zipfile.ZIP_LZMA}
    step = gpu.plan("cpu", tmp_path, only="install", local=folder).steps[0]
    environment = os.environ | step.environment
    subprocess.run(step.command, cwd=ROOT, env=environment, check=True, capture_output=True)
    code = "import local_only; print(local_only.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True
    )
    assert Path(found.stdout.strip()) == folder / "site/local_only.py"


def test_without_wheels_nothing_is_installed(tmp_path):
    (step,) = gpu.plan("cuda", tmp_path, only="install", local=tmp_path).steps
    assert step.skipped == f"{tmp_path} has no wheels"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_steps_in_miniature(tmp_path, forked):
    """On the CPU, stopped after a second, before the next step, and started again."""
    results = tmp_path / "results"
    arguments = "--device", "cpu", "--wheels", str(make_wheel(tmp_path / "wheels"))
    found = forked(results, *arguments, "--seconds", "31")
    assert found.returncode == 3, found.stdout + found.stderr
    found = forked(results, *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    assert (tmp_path / "wheels/site/local_only.py").is_file()
    assert_results_are_whole(results)


def assert_results_are_whole(folder):
    state = json.loads((folder / "state.json").read_text())
    assert {step["status"] for step in state.values()} == {"done"}
    log = (folder / "log.txt").read_text()
    assert "needs 2 GPUs" in log and "needs a GPU" in log
    assert log.count("relative errors against fp64") == 2
    files = [path.name for path in folder.rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert {"kernels.json", "virtual-ranks.json"} <= set(files)
    (profiles_file,) = folder.rglob("profiles.json")
    assert_profiles_are_whole(json.loads(profiles_file.read_text()))
    (overlap_file,) = folder.rglob("overlap.json")
    overlaps = json.loads(overlap_file.read_text())["results"]
    assert list(overlaps) == list(overlap.STRATEGIES)
    for found in overlaps.values():
        assert found["same_bits"] and set(found["seconds"]) == {"streams", "in turn", "no messages"}
        assert min(found["seconds"].values()) > 0


def assert_profiles_are_whole(written):
    """Of every strategy: its launches by name, gaps, and (on a GPU only) memory."""
    assert written["sizes"] == {"tokens": 64, "ranks": 4, "heads": [4, 2], "dim": 16}
    assert [x["strategy"] for x in written["results"]] == STRATEGIES
    for result in written["results"]:
        assert result["documents"] == 2
        for found in (result["forward"], result["backward"]):
            named = found["kernels"].values()
            assert 0 < len(named) <= sum(x["launches"] for x in named) <= found["launches"]
            assert found["busy_seconds"] > 0 and found["longest_gap_seconds"] > 0
            assert found["longest_gap_seconds"] <= found["gap_seconds"]
            assert found["busy_seconds"] + found["gap_seconds"] <= found["host_seconds"]
            assert found["peak_bytes"] is found["allocations"] is None
    launches = {x["strategy"]: x["backward"]["launches"] for x in written["results"]}
    assert launches["ring"] > launches["ulysses"]  # a call of the kernel per hop


def test_a_device_waits_where_no_interval_is():
    """Intervals overlap, touch, lie within others, and come in any order; µs become seconds."""
    found = profiles.use([(30, 40), (0, 10), (2, 4), (8, 12), (12, 15), (20, 21)])
    expected = {"busy_seconds": 26e-6, "gap_seconds": 14e-6, "longest_gap_seconds": 9e-6}
    assert found == pytest.approx(expected)
    assert set(profiles.use([]).values()) == {0.0}
