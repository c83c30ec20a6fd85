"""The folder triton_kernels/ is imported as seqpar.kernels; everything else about the package is in pyproject.toml."""

from setuptools import find_packages, setup

kernels = ["seqpar.kernels", *(f"seqpar.kernels.{name}" for name in find_packages("triton_kernels"))]
setup(packages=[*find_packages(include=["seqpar", "seqpar.*"]), *kernels], package_dir={"seqpar.kernels": "triton_kernels"})
