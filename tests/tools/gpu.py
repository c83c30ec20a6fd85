"""Test and measure seqpar on a machine with an NVIDIA GPU, in steps of at most nine minutes.

Run `python -m tests.tools.gpu` in the root of the sources. It needs only what seqpar and its tests
import: torch, triton, einops, numpy, pytest, pytest-timeout, hypothesis and allpairspy. It first
installs the wheels of the folder gpu-wheels, if there are any.

The first nine minutes answer the most important questions:

- Is the default path of every strategy right?
- How fast is the default, compared with other libraries?
- Which kernels does a rank of each strategy launch?
- How much of the messages' time is hidden?
- Are ranks right on NCCL?
- Does the kernel that merges stay within its memory?

Then it runs the kernels' tests, all strategies on virtual ranks, a table of the best backend for
each kind of call, the kernels' benchmark, the tuner, a measurement of how efficiently virtual ranks
compute, and compute-sanitizer. A second start continues where the first start was stopped
(`steps.py`).

All results go to one folder with few files: state.json says how each step went, and log.txt has
what the steps printed. The command exits with 0 if all steps succeeded, 1 if a step failed, 2
without a GPU, and 3 if the time of this start is up and steps are left.

Without a GPU, `--device cpu` runs small versions of all steps, with Triton's interpreter.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from tests.tools import wheels
from tests.tools.steps import STEP_SECONDS, Plan, Step

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "gpu-wheels"  # the folder that `make gpu-wheels` fills
TEST_MODULES = ("pytest", "pytest_timeout", "hypothesis", "allpairspy")
# The steps of the first start, in order of importance, and the seconds that each step may take on a
# GPU. The sum is at most STEP_SECONDS.
FIRST = {
    "install: local wheels": 45.0,
    "tests: default path": 125.0,
    "speed: kernels": 110.0,
    "profile: strategies": 80.0,
    "overlap: streams": 35.0,
    "tests: NCCL on one GPU": 60.0,
    "tests: memcheck of merges": 85.0,
}
# Names of steps, and the tests that they run. Some tests take all of the GPU's memory.
TESTS = {
    "default path": ["tests/kernels/test_strategies.py", "-k", "test_default_path"],
    "strategies on virtual ranks": [
        f"tests/kernels/test_{name}.py" for name in ("strategies", "same_bits")
    ],
    "softmax kernels": [
        f"tests/kernels/test_{name}.py"
        for name in ("flash_attention", "merge_hops", "eight_bit_rows")
    ],
    "linear kernels": ["tests/kernels/test_lightning_attention.py"],
    "launching, arguments, tuner": [
        f"tests/kernels/test_{name}.py"
        for name in ("tables", "launching", "malformed", "configs", "tune", "isolation")
    ],
    "NCCL on one GPU": ["tests/kernels/test_nccl.py", "-k", "share_a_gpu"],
    "several GPUs": ["tests/kernels/test_nccl.py", "-k", "every_strategy"],
    "Trainer with FSDP": ["tests/kernels/test_trainer_fsdp.py"],
    "length and memory": ["tests/kernels/test_gpu.py", "-k", "not sanitizer"],
    "memcheck of merges": ["tests/kernels/test_gpu.py", "-k", "sanitizer and memcheck-merges"],
    "memcheck": ["tests/kernels/test_gpu.py", "-k", "sanitizer and memcheck"],
    "racecheck": ["tests/kernels/test_gpu.py", "-k", "sanitizer and racecheck"],
}
SANITIZERS = ("memcheck of merges", "memcheck", "racecheck")
ALONE = ("NCCL on one GPU", "several GPUs", "Trainer with FSDP", "length and memory", *SANITIZERS)
# A few of the tests, for a machine without a GPU.
IN_MINIATURE = {
    "default path": [*TESTS["default path"][:2], "test_default_path and -ring"],
    "strategies on virtual ranks": ["tests/kernels/test_strategies.py", "-k", "ring and zigzag"],
    "softmax kernels": ["tests/kernels/test_flash_attention.py", "-k", "continue_one_partial"],
    "NCCL on one GPU": TESTS["NCCL on one GPU"],
    "several GPUs": TESTS["several GPUs"],
}


def environment(device, folder=WHEELS):
    """Return the environment variables that let the steps find seqpar and the wheels."""
    installed = wheels.environment(folder)
    paths = [str(ROOT), installed["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    found = installed | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",  # many processes share the cores
    }
    if device == "cpu":
        found |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return found


def install_step(folder, around):
    """Return the step that installs the wheels of a folder."""
    command = (sys.executable, "-m", "tests.tools.wheels", "install", str(folder))
    skipped = "" if any(folder.glob("*.whl")) else f"{folder} has no wheels"
    return Step("install: local wheels", command, skipped=skipped, environment=around)


def test_steps(device, folder, around):
    """Yield the steps of tests. A step that starts again skips the tests that have passed."""
    missing = [name for name in TEST_MODULES if importlib.util.find_spec(name) is None]
    skipped = f"{', '.join(missing)} cannot be imported" if missing else ""
    cores = os.cpu_count() or 1
    many = importlib.util.find_spec("xdist") is not None and cores >= 8
    chosen = TESTS if device == "cuda" else IN_MINIATURE
    for name, tests in chosen.items():
        command = [sys.executable, "-m", "pytest", *tests, "-p", "tests.tools.passed"]
        command += ["-q", "-rs", "-p", "no:cacheprovider", "--timeout=450"]
        command += ["-W", "default"]  # other versions than the pinned ones may warn
        if many and name not in ALONE:  # compiling takes most of the time, on all cores
            command += ["-n", str(cores - 1), "--dist", "worksteal"]
        passed = str(folder / "passed.txt")
        yield Step(
            f"tests: {name}",
            tuple(command),
            skipped=skipped,
            environment=around | {"SEQPAR_PASSED": passed},
        )


def speed_steps(device, around):
    """Yield the steps that only print a table."""
    command = (sys.executable, "-m", "benchmarks.kernels.quick", "--seconds")
    for name in ("kernels", "backends"):
        limit = seconds(f"speed: {name}", device)
        options = (f"{limit - 10}", *["--backends"] * (name == "backends"))
        yield Step(f"speed: {name}", command + options, shown=True, environment=around)


def measuring_steps(device, folder, around):
    """Yield the steps that measure. A benchmark that starts again skips workloads with results."""
    small = device == "cpu"
    python = (sys.executable, "-m")
    limit = ("--seconds", str(STEP_SECONDS - 60))
    kernels = ("benchmarks.kernels.run", "--resume", "--folder", str(folder), *limit)
    if small:
        kernels += ("--only", "lightning 2k 8 d64 fp32", "--rounds", "3")
    virtual = ("benchmarks.kernels.virtual_ranks", "--folder", str(folder), *limit)
    if small:
        virtual += ("--tokens", "128", "--ranks", "2", "--heads", "2", "1", "--dim", "16")
        virtual += ("--rounds", "1")
    sizes = ("--tokens", "64", "--ranks", "4", "--heads", "4", "2", "--dim", "16")
    profiles = ("tests.tools.profiles", "--folder", str(folder))
    if small:
        profiles += (*sizes, "--documents", "2")
    yield Step("profile: strategies", python + profiles, environment=around)
    overlap = ("tests.tools.overlap", "--folder", str(folder))
    if small:
        overlap += (*sizes, "--rounds", "1")
    yield Step("overlap: streams", python + overlap, environment=around)
    for name, command in (("kernels", kernels), ("virtual ranks", virtual)):
        yield Step(f"benchmark: {name}", python + command, environment=around)
    for dim in (16,) if small else (128, 64):
        command = ("seqpar.kernels.flash_attention.tune", "--dim", str(dim))
        if small:
            command += ("--tokens", "48", "--heads", "1", "--dtype", "float32", "--repeats", "1")
        kept = around | {
            "SEQPAR_CACHE": str(folder)
        }  # for results of the tuner; no other step uses them
        yield Step(f"tuner: head dim {dim}", python + command, environment=kept)


def seconds(name, device):
    """Return the seconds that a step may take in one start. A CPU always gets the longest time."""
    return FIRST.get(name, STEP_SECONDS) if device == "cuda" else STEP_SECONDS


def plan(device, folder, only="", local=WHEELS):
    """Return all steps whose names contain `only`, first those of `FIRST`, and last the sanitizers.

    The folder `local` has the wheels to install.
    """
    around = environment(device, local)
    steps = [install_step(local, around)]
    steps += [*test_steps(device, folder, around), *speed_steps(device, around)]
    steps += measuring_steps(device, folder, around)
    sanitizers = [f"tests: {name}" for name in SANITIZERS]
    if shutil.which("compute-sanitizer") is None:
        steps = [x for x in steps if x.name not in sanitizers]
    first = [*FIRST, "tuner: head dim 128"]  # the tuner gets the rest of the nine minutes
    last = [x for x in sanitizers if x not in first]
    middle = [x.name for x in steps if x.name not in (*first, *last)]
    steps.sort(key=lambda step: [*first, *middle, *last].index(step.name))
    steps = [replace(step, seconds=seconds(step.name, device)) for step in steps]
    chosen = [x for x in steps if only in x.name]
    if not chosen:
        names = ", ".join(step.name for step in steps)
        sys.exit(f"--only must be part of the name of a step ({names}), got {only}")
    return Plan(chosen, folder)


def gpu():
    """Return the GPU's name, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu-results", help="for results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that this start has")
    parser.add_argument("--only", metavar="STEP", default="", help="steps whose names contain this")
    parser.add_argument("--again", nargs="*", default=[], help='steps to run again; "failed": all')
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels to install")
    parser.add_argument("--list", action="store_true", help="say how steps went, and run none")
    options = parser.parse_args()
    found = gpu()
    if options.device == "cuda" and found is None and not options.list:
        print("there is no NVIDIA GPU that torch can use (--device cpu runs all in miniature)")
        return 2
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the running step too
    folders = options.folder.absolute(), options.wheels.absolute()
    steps = plan(options.device, folders[0], options.only, folders[1])
    if options.list:
        print(steps.table())
        return 0
    print(f"on {found or 'the CPU, in miniature'}; results go to {steps.folder}", flush=True)
    if not steps.start(options.seconds, options.again):
        return 3
    return 0 if steps.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
