"""Install the folder triton_kernels/ as seqpar.kernels; all else is in pyproject.toml."""

from setuptools import find_packages, setup

kernels = [
    "seqpar.kernels",
    *(f"seqpar.kernels.{name}" for name in find_packages("triton_kernels")),
]
setup(
    packages=[*find_packages(include=["seqpar", "seqpar.*"]), *kernels],
    package_dir={"seqpar.kernels": "triton_kernels"},
)
