"""What `import seqpar` makes available."""

import subprocess
import sys

import pytest

NAMES = (
    "masks.causal",
    "balance.plan",
    "simulate.step",
    "elastic.steps",
    "integrations.flash_attn.flash_attn_varlen_func",
    "integrations.mask_functions.ranges_of",
)
EXTRAS = "transformers", "accelerate", "trl", "zmq", "simpy", "matplotlib", "rich"
PROGRAM = f"""
import sys, seqpar, seqpar.costs.profile.harness
assert not set({EXTRAS!r}) & set(sys.modules)
{"; ".join(f"seqpar.{name}" for name in NAMES)}
"""


@pytest.mark.exhaustive
def test_import_seqpar_makes_public_packages_available_without_extras():
    """The harness of profiles and benchmarks needs none either."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
