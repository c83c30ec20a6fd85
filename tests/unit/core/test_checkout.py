"""Where `seqpar.kernels` is found: in a checkout, and in site-packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def files(tmp_path):
    """A package `seqpar` with only the finder, and a folder triton_kernels next to it."""
    for folder in ("seqpar/core", "triton_kernels/inner"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "seqpar/__init__.py").write_text("import seqpar.core.checkout")
    (tmp_path / "triton_kernels/__init__.py").touch()
    shutil.copy(ROOT / "seqpar/core/checkout.py", tmp_path / "seqpar/core")
    return tmp_path


def found(folder):
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import seqpar.kernels.inner as found"
    command = [sys.executable, "-I", "-S", "-c", f"{code}; print(found.__file__)"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_checkout_has_its_kernels_next_to_seqpar(files):
    assert found(files).stdout.strip() == str(files / "triton_kernels/inner/__init__.py")


def test_an_installed_package_has_its_kernels_inside(files):
    """Another project has the import name `triton_kernels`."""
    shutil.copytree(files / "triton_kernels", files / "seqpar/kernels")
    assert found(files).stdout.strip() == str(files / "seqpar/kernels/inner/__init__.py")


def test_without_kernels_the_missing_module_is_named(files):
    shutil.rmtree(files / "triton_kernels")
    assert "No module named 'seqpar.kernels'" in found(files).stderr
