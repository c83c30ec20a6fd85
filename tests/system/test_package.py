"""The package as its users get it: both kinds of installation, public names and help."""

import inspect
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import seqpar

ROOT = Path(__file__).parents[2]
CHECK = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import seqpar, seqpar.kernels, seqpar.strategies.ring, importlib.resources
print(seqpar.__file__, seqpar.kernels.__file__, seqpar.RingAttention.__name__)
assert importlib.resources.files("seqpar").joinpath("py.typed").is_file()
"""


@pytest.mark.exhaustive
def test_an_editable_installation_is_the_checkout(tmp_path):
    """triton_kernels/ is imported as seqpar.kernels, from the right place."""
    checkout, prefix = tmp_path / "checkout", tmp_path / "prefix"
    ignored = shutil.ignore_patterns(
        ".venv*", ".git", "*.egg-info", "build", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, checkout, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    command += ["--no-warn-script-location", f"--prefix={prefix}"]
    subprocess.run([*command, "-e", str(checkout)], check=True, timeout=110)
    packages = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    # -S: without our own editable installation of seqpar, but with torch
    ours = str(Path(torch.__file__).parents[1])
    run = [sys.executable, "-I", "-S", "-W", "ignore", "-c", CHECK, packages, ours]
    shown = subprocess.run(
        run, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=110
    ).stdout.split()
    assert Path(shown[0]) == checkout / "seqpar/__init__.py"
    assert Path(shown[1]) == checkout / "triton_kernels/__init__.py"


@pytest.mark.parametrize("folder", ["seqpar", "triton_kernels"])
def test_every_folder_of_sources_is_a_package(folder):
    """Else setuptools leaves it out; the installations themselves are tested where time allows."""
    for file in (ROOT / folder).rglob("*.py"):
        assert (file.parent / "__init__.py").exists(), file


def test_what_is_exported_is_what_is_visible():
    visible = {
        name
        for name, value in vars(seqpar).items()
        if not name.startswith("__") and not isinstance(value, types.ModuleType)
    }
    visible.add("__version__")
    assert visible == set(seqpar.__all__) and len(seqpar.__all__) == len(visible)
    assert visible <= set(dir(seqpar))


@pytest.mark.parametrize("module", [seqpar.Attention, seqpar.LASP2Attention])
def test_help_describes_each_call_argument(module):
    """`help` shows a docstring as it is written: arguments in one paragraph cannot be found."""
    lines = inspect.getdoc(module.forward).splitlines()
    _, *names = inspect.signature(module.forward).parameters
    for name in names:
        assert any(line.startswith(f"    {name}: ") for line in lines), name
    assert {"Args:", "Returns:", "Raises:"} <= set(lines)
