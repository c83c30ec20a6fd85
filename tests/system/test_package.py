"""The package as its users get it: both kinds of installation, and the rules about who imports
what."""

import ast
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
@pytest.mark.parametrize("editable", [False, True])
def test_installs_from_a_plain_checkout(tmp_path, editable):
    """`pip install .` and `pip install -e .`: triton_kernels/ is imported as seqpar.kernels, from
    the right place."""
    checkout, prefix = tmp_path / "checkout", tmp_path / "prefix"
    ignored = shutil.ignore_patterns(
        ".venv*", ".git", "*.egg-info", "build", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, checkout, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    command += ["--no-warn-script-location", f"--prefix={prefix}"]
    subprocess.run(
        [*command, *(["-e"] if editable else []), str(checkout)], check=True, timeout=110
    )
    packages = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    # -S: without our own editable installation of seqpar, but with torch
    ours = str(Path(torch.__file__).parents[1])
    run = [sys.executable, "-I", "-S", "-W", "ignore", "-c", CHECK, packages, ours]
    shown = subprocess.run(
        run, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=110
    ).stdout.split()
    expected = checkout if editable else Path(packages)
    assert Path(shown[0]) == expected / "seqpar/__init__.py"
    assert (
        Path(shown[1])
        == expected / ("triton_kernels" if editable else "seqpar/kernels") / "__init__.py"
    )


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "seqpar":
                yield from (f"seqpar.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""  # none in `from . import x`


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


SOURCES = sorted((ROOT / "seqpar").rglob("*.py"))


def test_only_comm_imports_torch_distributed():
    others = [x for x in SOURCES if x.relative_to(ROOT / "seqpar").parts[0] != "comm"]
    importing = [x for x in others if any(y.startswith("torch.distributed") for y in imports(x))]
    assert len(others) > 300 and not importing


def test_kernels_import_nothing_of_seqpar():
    for file in (ROOT / "triton_kernels").rglob("*.py"):
        assert not any(module.startswith("seqpar") for module in imports(file))


@pytest.mark.parametrize("module", [seqpar.Attention, seqpar.LASP2Attention])
def test_help_describes_each_call_argument(module):
    """`help` shows a docstring as it is written: arguments in one paragraph cannot be found."""
    lines = inspect.getdoc(module.forward).splitlines()
    _, *names = inspect.signature(module.forward).parameters
    for name in names:
        assert any(line.startswith(f"    {name}: ") for line in lines), name
    assert {"Args:", "Returns:", "Raises:"} <= set(lines)
