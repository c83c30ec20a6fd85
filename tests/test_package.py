"""The package as its users get it: both kinds of installation, and the rules about who imports what."""

import ast
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import seqpar, seqpar.kernels, seqpar.strategies.ring, importlib.resources
print(seqpar.__file__, seqpar.kernels.__file__, seqpar.RingAttention.__name__)
assert importlib.resources.files("seqpar").joinpath("py.typed").is_file()
"""


@pytest.mark.parametrize("editable", [False, True])
def test_installs_from_a_plain_checkout(tmp_path, editable):
    """`pip install .` and `pip install -e .`: triton_kernels/ is imported as seqpar.kernels, from the right place."""
    checkout, prefix = tmp_path / "checkout", tmp_path / "prefix"
    ignored = shutil.ignore_patterns(".venv", ".git", "*.egg-info", "build", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--no-warn-script-location", "--ignore-installed", f"--prefix={prefix}"]
    subprocess.run([*command, *(["-e"] if editable else []), str(checkout)], check=True, timeout=110)
    packages = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    ours = sysconfig.get_path("purelib")  # -S: without our own editable installation of seqpar, but with torch
    run = [sys.executable, "-I", "-S", "-W", "ignore", "-c", CHECK, packages, ours]
    shown = subprocess.run(run, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=110).stdout.split()
    expected = checkout if editable else Path(packages)
    assert Path(shown[0]) == expected / "seqpar/__init__.py"
    assert Path(shown[1]) == expected / ("triton_kernels" if editable else "seqpar/kernels") / "__init__.py"


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "seqpar":
                yield from (f"seqpar.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""  # none in `from . import x`


SOURCES = sorted((ROOT / "seqpar").rglob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_dependencies_point_downward(file):
    """Only comm.py imports torch.distributed; geometry knows nothing else of ours, backends nothing above them."""
    allowed = {
        "geometry.py": [],
        "layout.py": ["seqpar.geometry", "seqpar.comm", "seqpar.reshard"],  # comm for its type, reshard inside unshard
        "mask.py": ["seqpar.geometry"],
        "liveness.py": [],
        "tracing.py": ["seqpar.comm", "seqpar.geometry"],  # comm for its type, and inside gather and exposure
        "comm.py": ["seqpar.liveness", "seqpar.tracing"],
        "attend.py": ["seqpar.backends", "seqpar.mask", "seqpar.tracing"],
        "linear.py": ["seqpar.attend", "seqpar.backends", "seqpar.geometry", "seqpar.tracing"],  # of attend, what is common
        "backends": [f"seqpar.{x}" for x in ("attend", "linear", "backends", "mask", "geometry", "kernels")],  # two for types
        "reshard.py": ["seqpar.comm", "seqpar.layout"],
    }
    name = file.relative_to(ROOT / "seqpar").parts[0]
    for module in imports(file):
        assert name == "comm.py" or not module.startswith("torch.distributed"), module
        if module.startswith("seqpar") and name in allowed:
            assert any(module.startswith(prefix) for prefix in allowed[name]), module


def test_kernels_import_nothing_of_seqpar():
    for file in (ROOT / "triton_kernels").rglob("*.py"):
        assert not any(module.startswith("seqpar") for module in imports(file))
