"""Every shipped configuration, compiled ahead of time: no GPU is needed to see that it fits the hardware."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from seqpar.kernels.flash_attention.configs import Config

from tests import aot

pytestmark = pytest.mark.alone

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.fixture(scope="module")
def compilers():
    """For each architecture a process that compiles all of its configurations, all at the same time."""
    command, pipe = [sys.executable, "-m", "tests.aot", "--architecture"], subprocess.PIPE
    options = {"env": ENVIRONMENT, "stdout": pipe, "stderr": pipe, "text": True}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(subprocess.Popen([*command, name], **options)) for name in aot.TARGETS}
        yield processes
        for process in processes.values():
            process.kill()


@pytest.mark.parametrize("architecture", aot.TARGETS)
@pytest.mark.timeout(600)
def test_every_configuration_passes_its_gates(compilers, architecture):
    printed, errors = compilers[architecture].communicate()
    found = [json.loads(line) for line in printed.splitlines()]
    assert compilers[architecture].returncode == 0, [case for case in found if case["wrong"]] or errors[-2000:]
    shipped = {(precision, width, kind) for precision, width, kind, _ in aot.shipped(architecture)}
    assert {(case["precision"], case["width"], case["kind"]) for case in found} == shipped
    assert {kind for *_, kind in shipped} == set(aot.KERNELS)


def test_the_gates_notice():
    """A tile too large for its warps, and a specialisation that the compiler left out."""
    for config, word in [
        (Config(128, 128, 4, 2, tma=True, cut=(4, 2)), "spilled"),
        (Config(128, 128, 4, 3, tma=True, specialise=True, cut=(8, 2)), "shared memory"),
        (Config(128, 64, 8, 2, tma=True, specialise=True, cut=(8, 2)), "not specialised"),
    ]:
        script = (
            "from tests import aot; from seqpar.kernels.flash_attention.configs import Config; import dataclasses\n"
            f"config = {config!r}; name, launch = next(iter(aot.variants('forward', config).items()))\n"
            "made = aot.compile_kernel('sm_90', 'half', 128, 'forward', config, *launch)\n"
            "found = {'architecture': 'sm_90', 'precision': 'half', 'launch': name, 'config': dataclasses.asdict(config)}\n"
            "print(aot.broken_gates(found | aot.report(made, 'sm_90')))"
        )
        done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
        assert word in done.stdout
