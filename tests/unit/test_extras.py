"""`import seqpar` needs no extras. If one is missing, the error has the pip command for it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys
import seqpar, seqpar.costs.profile.harness
for name in NAMES:
    eval("seqpar." + name)
from seqpar.__main__ import main
extras = {"transformers", "accelerate", "trl", "simpy", "rich", "matplotlib"}
extras |= {"zmq", "msgspec", "nixl", "prometheus_client"}
assert not extras & set(sys.modules), extras & set(sys.modules)
from seqpar.comm.messages.exchange import Comm
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
    ("rich", "assert main(['bench']) == 2", "bench: it needs rich: pip install 'seqpar[bench]'"),
    ("zmq", "assert main(['serve', '--bind', 'ipc:///tmp/s']) == 2", f"serve needs zmq: {SERVE}"),
    (
        "zmq",
        "seqpar.ServerPool.connect('ipc:///tmp/s')",
        f"attention servers need zmq: {SERVE}",
    ),
]


def test_missing_packages_name_their_extras():
    installed = importlib.util.find_spec("transformers") is not None
    cases = [x for x in MISSING if installed or x[0] != "accelerate"]
    paths = os.pathsep.join([str(ROOT / "tests/tools/uninstalled"), str(ROOT)])
    program = BLOCKED.replace("CASES", repr([x[:2] for x in cases])).replace("NAMES", repr(NAMES))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.strip().splitlines() == [x[2] for x in cases]
