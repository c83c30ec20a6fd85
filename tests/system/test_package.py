"""The package as its users get it: both kinds of installation, and the rules about who imports
what."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import seqpar

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
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
        ".venv", ".git", "*.egg-info", "build", "__pycache__", ".*_cache", ".hypothesis"
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


@pytest.mark.exhaustive
def test_a_wheel_and_a_source_distribution_are_released(tmp_path):
    """Both are built, the wheel also from the source distribution, and installed elsewhere."""
    checkout, prefix = tmp_path / "checkout", tmp_path / "prefix"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    build = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def built(kind, folder):
        command = [sys.executable, "-c", build, kind, str(tmp_path)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=110)

    built("build_sdist", checkout)
    source = tmp_path / f"seqpar-{seqpar.__version__}.tar.gz"
    shutil.unpack_archive(source, tmp_path / "unpacked", filter="data")
    built("build_wheel", tmp_path / "unpacked" / source.name.removesuffix(".tar.gz"))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"seqpar-{seqpar.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith((".py", ".json"))}
    for folder, installed in (("seqpar", "seqpar"), ("triton_kernels", "seqpar/kernels")):
        for file in (checkout / folder).rglob("*.py"):
            assert f"{installed}/{file.relative_to(checkout / folder)}" in packed
    assert "seqpar/simulate/validated.json" in packed
    assert not {name.split("/")[0] for name in packed} - {"seqpar"}
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-index", "--ignore-installed", f"--prefix={prefix}", str(wheel)]
    subprocess.run(command, check=True, timeout=110)
    packages = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    ours = str(Path(torch.__file__).parents[1])
    run = [sys.executable, "-I", "-S", "-W", "ignore", "-c", CHECK, packages, ours]
    shown = subprocess.run(
        run, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=110
    ).stdout.split()
    assert [Path(x) for x in shown[:2]] == [
        Path(packages) / f"seqpar/{name}__init__.py" for name in ("", "kernels/")
    ]


def pinned():
    """Return the versions of constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


@pytest.mark.parametrize(
    "extra", [None, *tomllib.loads(PROJECT)["project"]["optional-dependencies"]]
)
def test_what_an_extra_asks_for_is_pinned_within_its_bounds(extra):
    project = tomllib.loads(PROJECT)["project"]
    asked = project["optional-dependencies"][extra] if extra else project["dependencies"]
    for text in asked:
        requirement = Requirement(text)
        version = pinned()[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert requirement.specifier.contains(version), text


def test_the_citation_has_the_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {seqpar.__version__}\n" in citation


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


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_comm_imports_torch_distributed(file):
    if file.relative_to(ROOT / "seqpar").parts[0] != "comm":
        assert not any(module.startswith("torch.distributed") for module in imports(file))


def test_kernels_import_nothing_of_seqpar():
    for file in (ROOT / "triton_kernels").rglob("*.py"):
        assert not any(module.startswith("seqpar") for module in imports(file))


@pytest.mark.parametrize("module", [seqpar.Attention, seqpar.LASP2Attention])
def test_help_has_a_line_for_each_argument_of_a_call(module):
    """`help` shows a docstring as it is written: arguments in one paragraph cannot be found."""
    lines = inspect.getdoc(module.forward).splitlines()
    _, *names = inspect.signature(module.forward).parameters
    for name in names:
        assert any(line.startswith(f"    {name}: ") for line in lines), name
    assert {"Args:", "Returns:", "Raises:"} <= set(lines)
