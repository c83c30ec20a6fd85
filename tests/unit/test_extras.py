"""`import seqpar` needs no extras. If one is missing, the error has the pip command for it."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from seqpar.softmax.backends.flash_attn import PACKAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKED = """
import sys
# Without the finder of an editable installation, as after `pip install .`
sys.meta_path[:] = [x for x in sys.meta_path if "__editable__" not in str(x)]
import seqpar, seqpar.costs.profile.harness
for name in NAMES:
    eval("seqpar." + name)
from seqpar.__main__ import COMMANDS, load, main
for name in COMMANDS:
    load(name)[1].format_help()
assert not EXTRAS & set(sys.modules), EXTRAS & set(sys.modules)
from seqpar.comm.messages.comm import Comm
from seqpar.integrations import huggingface
group, cluster = Comm("alone", 0, 2), seqpar.balance.Cluster.preset("1x1-h100")
for package, statement in CASES:
    sys.modules[package] = None
    try:
        exec(statement)
    except ImportError as error:
        print(error, file=sys.stderr)
    del sys.modules[package]
"""
NAMES = (
    "masks.causal",
    "balance.plan",
    "simulate.step",
    "elastic.steps",
    "integrations.flash_attn.flash_attn_varlen_func",
    "integrations.mask_functions.ranges_of",
)
HF, PLAN, SERVE = (f"pip install 'seqpar[{extra}]'" for extra in ("hf", "plan", "serve"))
PLANNED = ["plan", "--model", "llama-8b", "--cluster", "1x4-h100", "--lengths", "2000"]
MISSING = [
    (
        "transformers",
        "import torch; huggingface.enable(torch.nn.Linear(2, 2), group)",
        f"seqpar.integrations.huggingface needs transformers: {HF}",
    ),
    (
        "transformers",
        "huggingface.trainer(object)",
        f"huggingface.trainer needs transformers: {HF}",
    ),
    ("accelerate", "huggingface.trainer(object)", f"huggingface.trainer needs accelerate: {HF}"),
    ("simpy", "seqpar.make_attention('auto', group)", f"simulations need simpy: {PLAN}"),
    ("simpy", f"assert main({PLANNED}) == 2", f"plan: simulations need simpy: {PLAN}"),
    ("simpy", "assert main(['explore']) == 2", f"explore: simulations need simpy: {PLAN}"),
    (
        "simpy",
        "seqpar.simulate.play([seqpar.simulate.Program()], cluster)",
        f"simulations need simpy: {PLAN}",
    ),
    (
        "safetensors",
        "seqpar.parity.compare('one', 'other')",
        f"recordings of seqpar.parity need safetensors: {HF}",
    ),
    (
        "megatron",
        "from seqpar.integrations import megatron; megatron.sequence_parallel(None)",
        "seqpar.integrations.megatron needs megatron-core: pip install 'seqpar[megatron]'",
    ),
    ("rich", "assert main(['bench']) == 2", "bench: it needs rich: pip install 'seqpar[bench]'"),
    ("grpc", "assert main(['serve', '--bind', 'ipc:///tmp/s']) == 2", f"serve needs grpc: {SERVE}"),
    (
        "grpc",
        "seqpar.ServerPool.connect('ipc:///tmp/s')",
        f"attention servers need grpc: {SERVE}",
    ),
]


def modules_of_extras():
    """The import names of all installed packages that pyproject.toml lists as extras."""
    modules = {}  # of each package
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in map(canonicalize_name, packages):
            modules.setdefault(package, set()).add(module)
    found = set()
    for text in [text for of in PROJECT["optional-dependencies"].values() for text in of]:
        package = canonicalize_name(Requirement(text).name)
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # an import of it would have failed in every other test
        assert modules.get(package), f"the import names of {package} are unknown"
        found |= modules[package]
    return found


@pytest.mark.exhaustive
def test_missing_packages_name_their_extras():
    installed = importlib.util.find_spec("transformers") is not None
    cases = [x for x in MISSING if installed or x[0] not in ("accelerate", "safetensors")]
    program = BLOCKED.replace("CASES", repr([x[:2] for x in cases])).replace("NAMES", repr(NAMES))
    program = program.replace("EXTRAS", repr(modules_of_extras()))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.strip().splitlines() == [x[2] for x in cases]


def test_the_extra_of_flash_attention_installs_the_version_that_is_called():
    (text,) = PROJECT["optional-dependencies"]["flash-attn"]
    extra, called = Requirement(text), Requirement(PACKAGES["FlashAttention-4"].requirement)
    assert (extra.name, extra.specifier) == (called.name, called.specifier)
