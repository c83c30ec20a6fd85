"""A release: the wheel and the source distribution, the wheel in a new environment, its extras, and
a checkout that is installed with the dependencies alone."""

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import seqpar

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Their packages require an older transformers than the pinned one, as the environment page says.
OLDER_TRANSFORMERS = {"automodel", "verl"}
PYTHONS = [
    text.rpartition(" ")[2]
    for text in PROJECT["classifiers"]
    if re.search(r"Python :: 3\.\d", text)
]
pytestmark = pytest.mark.timeout(600)  # processes import torch, beside other tests
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The source distribution of what git has, unpacked, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("release")
    checkout = folder / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)

    def build(kind, of):
        code = f"import setuptools.build_meta as b; b.build_{kind}({str(folder)!r})"
        run(sys.executable, "-c", code, cwd=of)

    build("sdist", checkout)
    name = f"seqpar-{seqpar.__version__}"
    shutil.unpack_archive(folder / f"{name}.tar.gz", folder, filter="data")
    shutil.copytree(folder / name, folder / "source")
    build("wheel", folder / name)
    return folder / "source", folder / f"{name}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(release, tmp_path_factory):
    """The folder of programs of a new environment with the wheel, and with our torch."""
    folder = tmp_path_factory.mktemp("new")
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    # A path that a file adds may not add others: our own installation stays out of sight.
    (Path(packages) / "ours.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    run(*PIP, "--python", folder / "bin/python", "install", *options, release[1])
    return folder / "bin"


@pytest.fixture(scope="module")
def base(release, tmp_path_factory):
    """A checkout, and the folder of programs of a new environment after `pip install .` in it.

    The environment has seqpar's dependencies without extras, and what they need in turn: links to
    the packages that are installed here. Pip looks nowhere else, and checks that none is missing.
    """
    checkout = release[0].parent / "checkout"
    folder, tools = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("tools")
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    for name in base_packages():
        link(name, Path(packages))
    link("setuptools", tools)  # which builds; pip would download one
    options = ["--quiet", "--no-index", "--no-build-isolation"]
    install = [*PIP, "--python", folder / "bin/python", "install", *options, "."]
    run(*install, cwd=checkout, PYTHONPATH=str(tools))
    return checkout, folder / "bin"


def base_packages():
    """The names of the packages that `pip install seqpar` installs."""
    names, waiting = set(), list(map(Requirement, PROJECT["dependencies"]))
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in names and (not requirement.marker or requirement.marker.evaluate()):
            names.add(name)
            waiting += map(Requirement, importlib.metadata.requires(name) or [])
    return names


def link(package, folder):
    """Let a folder of packages contain one that is installed here."""
    distribution = importlib.metadata.distribution(package)
    for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(distribution.locate_file(name)).resolve())


def run(*command, cwd=None, status=0, **environment):
    """Run a program as if this checkout were not here; return what it prints."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd or "/",
        env=outside | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout or done.stderr


@pytest.mark.exhaustive
def test_the_sdist_contains_exactly_the_wheels_sources(release):
    source, _ = release
    ours = {"seqpar", "triton_kernels", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert {path.name for path in source.iterdir()} - ours == {
        "PKG-INFO", "setup.cfg", "seqpar.egg-info",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_the_wheel_has_sources_types_and_index_metadata(release):
    with zipfile.ZipFile(release[1]) as archive:
        packed = set(archive.namelist())
        about = f"seqpar-{seqpar.__version__}.dist-info"
        shown = message_from_string(archive.read(f"{about}/METADATA").decode())
        scripts = archive.read(f"{about}/entry_points.txt").decode()
    for folder, package in (("seqpar", "seqpar"), ("triton_kernels", "seqpar/kernels")):
        for file in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{file.relative_to(ROOT / folder)}" in packed
    templates = {f"seqpar/recipes/{x}_script.txt" for x in ("plain", "trl")}
    assert {"seqpar/py.typed", "seqpar/simulate/validated.json", *templates} <= packed
    assert f"{about}/licenses/LICENSE" in packed
    assert {name.split("/")[0] for name in packed} == {"seqpar", about}
    command = ["[console_scripts]", *["seqpar", "=", "seqpar.__main__:main"]]
    plugin = ["[verl.plugins]", *["seqpar", "=", "seqpar.integrations.verl_plugin"]]
    assert scripts.split() == [*command, *plugin]
    assert shown["License-Expression"] == "Apache-2.0" and shown["Requires-Python"] == ">=3.11"
    assert set(shown.get_all("Provides-Extra")) == set(EXTRAS)
    assert len(shown.get_payload()) > 1000  # the README


@pytest.mark.exhaustive
def test_the_wheel_works_in_a_new_environment(installed):
    """The program and the module say what is here."""
    for command in (["seqpar"], ["python", "-W", "error", "-m", "seqpar"]):
        found = json.loads(run(installed / command[0], *command[1:], "info", "--json"))
        assert found["versions"]["seqpar"] == seqpar.__version__
        assert found["builds"]["commit of seqpar"] == "not a checkout"
    where = run(installed / "python", "-c", "import seqpar.kernels as x; print(x.__file__)")
    assert Path(where).is_relative_to(installed.parent)


@pytest.mark.exhaustive
def test_a_checkout_works_with_only_the_dependencies(base, tmp_path):
    """`pip install .`, then the README's first example and commands. Inside the checkout, Python
    finds its folder seqpar/ before the installed package."""
    checkout, programs = base
    folder, python = tmp_path, programs / "python"
    code = "import seqpar, seqpar.kernels as x; print(seqpar.__file__, x.__file__)"
    for inside, here in ((checkout, checkout), (folder, programs.parent)):
        for file in run(python, "-W", "error", "-c", code, cwd=inside).split():
            assert Path(file).is_relative_to(here)
    module = [python, "-m", "seqpar"]
    found = json.loads(run(*module, "info", "--json", cwd=checkout))
    assert {found["versions"][name] for name in ("grpcio", "xxhash", "simpy", "rich")} == {None}
    planned = ["plan", "--model", "llama-8b", "--cluster", "1x2-h100", "--lengths", "2000"]
    for command in (module, [programs / "seqpar"]):
        said = run(*command, *planned, cwd=folder, status=2)
        assert said == "plan: simulations need simpy: pip install 'seqpar[plan]'\n"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    said = run(python, *launch, checkout / "examples/quickstart.py", cwd=folder)
    assert said.count("512 of 1024 tokens, error") == 2


@pytest.mark.exhaustive
@pytest.mark.network
def test_pip_resolves_all_extras_to_pinned_versions(release):
    """All together, and so each: what is not installed yet is found where pip looks."""
    together = ",".join(name for name in EXTRAS if name not in OLDER_TRANSFORMERS)
    asked = f"seqpar[{together}] @ {release[1].as_uri()}"
    options = ["--dry-run", "--quiet", "--report", "-", "-c", ROOT / "constraints.txt"]
    found = json.loads(run(*PIP, "install", *options, asked))["install"]
    for package in (of["metadata"] for of in found):
        if package["name"] != "seqpar":
            assert pinned()[canonicalize_name(package["name"])] == package["version"]


@functools.cache
def pinned():
    """The versions of constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_pre_commit_installs_the_pinned_tools():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = re.findall(r"\[(\w+)==([\d.]+)\]", text)
    assert len(tools) == text.count("language: python") == text.count("- id:")
    assert all(pinned()[name] == version for name, version in tools)


@pytest.mark.parametrize("python", PYTHONS)
def test_dependencies_of_extras_are_pinned_within_their_bounds(python):
    """Also what their packages need in turn, as far as they are installed, on each Python."""
    here = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    waiting = [Requirement(text) for of in EXTRAS.values() for text in of]
    waiting += map(Requirement, PROJECT["dependencies"])
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), ("", *sorted(requirement.extras))
        version = pinned()[name]
        assert requirement.specifier.contains(version, prereleases=True), (str(requirement), name)
        if (name, extras) not in seen:
            seen.add((name, extras))
            waiting += [
                further
                for further in map(Requirement, requires(name))
                if not further.marker
                or any(further.marker.evaluate(here | {"extra": extra}) for extra in extras)
            ]


def requires(package):
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def test_the_oldest_python_is_allowed_and_linted():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    oldest = PYTHONS[0]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert tools["mypy"]["python_version"] == oldest
    assert tools["ruff"]["target-version"] == "py" + oldest.replace(".", "")


@pytest.mark.parametrize("target", ["test-oldest", "test-newest"])
def test_versions_are_tested_with_all_operators(target):
    planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    files = (ROOT / "tests/unit").rglob("test_*.py")
    operators = {str(x.relative_to(ROOT)) for x in files if "library.opcheck(" in x.read_text()}
    assert operators and operators <= set(planned.stdout.split())


def test_citation_and_changelog_are_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    (date,) = re.findall(r"^date-released: (\d{4}-\d\d-\d\d)$", citation, re.MULTILINE)
    assert f"\nversion: {seqpar.__version__}\n" in citation
    assert f"\n## {seqpar.__version__} ({date})\n" in (ROOT / "CHANGELOG.md").read_text()


def test_a_bug_report_asks_for_this_information():
    for file in (".github/ISSUE_TEMPLATE/bug.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert "`python -m seqpar info`" in (ROOT / file).read_text(), file
