"""Every shipped configuration, compiled ahead of time.

No GPU is needed to see that it fits the hardware. That takes minutes, so what the compiler made of
them is kept in a table (`make aot`), which is checked here.
"""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import triton
from seqpar.kernels.flash_attention import configs
from seqpar.kernels.flash_attention.configs import Config
from seqpar.kernels.gpus import Gpu

from tests.tools import aot, aot_table, candidates

MERGES = """
from importlib import import_module

import triton
from seqpar.kernels.flash_attention.launching import dims_of
from triton.compiler import ASTSource

from tests.tools import aot, sass

forward = import_module("seqpar.kernels.flash_attention.forward")
kernel = forward.flash_merge
types = {"out": "*bf16", "lse": "*fp32", "split_out": "*fp32", "split_lse": "*fp64"}
types |= {"partial_out": "*fp32", "partial_lse": "*fp64", "sinks": "*fp32", "tiles": "*i32"}
for name, target in aot.TARGETS.items():
    for dim in (64, 192, 256) if target.backend == "cuda" else ():
        rows = forward._MERGED_ELEMENTS // forward.padded(dim)
        known = dims_of("DV", dim) | {"ROWS": rows, "HAS_PARTIAL": True, "HAS_SINKS": True}
        kinds = {x: "constexpr" if x in known else types.get(x, "i32") for x in kernel.arg_names}
        positions = {(kernel.arg_names.index(x),): value for x, value in known.items()}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=positions)
        options = {"num_warps": 4, "num_stages": 1}
        asm = triton.compile(source, target=target, options=options).asm
        print(name, dim, "barrier" in asm["ttgir"], sass.usage(asm["cubin"])["spills in loops"])
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
SECTIONS = aot_table.load()
SECTIONS_OF_CANDIDATES = aot_table.load(candidates.FILE)
SHIPPED = [case.row() for architecture in aot.TARGETS for case in aot.shipped(architecture)]


@pytest.mark.parametrize("version", aot_table.VERSIONS)
def test_the_table_holds_for_these_sources(version):
    """It is of the code in the tree, and has a row for every launch that is shipped."""
    advice = f"run {aot_table.VERSIONS[version]}"
    assert version in SECTIONS, f"tests/kernels/aot.json has nothing of Triton {version}: {advice}"
    section = SECTIONS[version]
    sources = aot_table.sources_hash(aot.NAMES)
    assert section["sources"] == sources, f"the kernels have changed: {advice}"
    compiled = [{name: row.get(name) for name in SHIPPED[0]} for row in section["rows"]]
    shipped = json.loads(json.dumps(SHIPPED))
    assert compiled == shipped, f"the configurations or their arguments have changed: {advice}"
    assert {row["kind"] for row in section["rows"]} == set(aot.KERNELS)


@pytest.mark.parametrize("version", aot_table.VERSIONS)
def test_no_row_of_the_table_breaks_a_gate(version):
    rows = SECTIONS[version]["rows"]
    wrong = {
        tuple(row[name] for name in aot_table.KEY): aot_table.broken_gates(row) for row in rows
    }
    wrong = {key: gates for key, gates in wrong.items() if gates}
    assert not wrong, f"run {aot_table.VERSIONS[version]} when these are mended: {wrong}"


def test_the_tuners_candidates_hold_for_these_sources():
    """Each was compiled from the code in the tree, and has no spills in loops."""
    advice = "run make candidates"
    section = SECTIONS_OF_CANDIDATES[max(aot_table.VERSIONS)]
    assert section["sources"] == aot_table.sources_hash(candidates.KERNELS), advice
    assert {row["kind"] for row in section["rows"]} == set(configs.KernelConfigs._fields)
    for row in section["rows"]:
        key = [row[name] for name in candidates.KEY]
        assert key[:2] == [candidates.ARCHITECTURE, candidates.PRECISION]
        expected = candidates.row_of(*key[2:], configs.from_fields(row["config"]))
        assert row == json.loads(json.dumps(row | expected)), advice
        assert row["spills in loops"] == 0


@pytest.mark.parametrize(
    ("major", "name"),
    [(8, "sm_80"), (9, "sm_90"), (10, "sm_100"), (11, "sm_100"), (12, "sm_120"), (13, "sm_80")],
)
def test_each_gpu_has_configurations(monkeypatch, major, name):
    monkeypatch.setattr(configs, "gpu_of", lambda device: Gpu("", major, 1))
    monkeypatch.setattr(torch.version, "hip", None)
    assert configs.architecture(torch.device("cuda")) == name
    assert name in aot.TARGETS


@pytest.mark.parametrize(
    ("launch", "fields", "words"),
    [
        ("fused", {"spilled": 68}, "68 bytes spilled"),
        ("fused", {"spilled": 4, "spills in loops": 1}, "1 times in inner loops"),
        ("fused", {"shared": 232_449}, "232449 bytes of shared memory"),
        ("fused", {"HGMMA": 0}, "no HGMMA"),
        ("fused", {}, None),
    ],
)
def test_each_gate_notices(launch, fields, words):
    """In a row that is sound otherwise."""
    for row in SECTIONS["3.7.1"]["rows"]:
        if [row[name] for name in aot_table.KEY] == ["sm_90", "half", 128, "forward", launch]:
            wrong = aot_table.broken_gates(row | fields)
    assert len(wrong) == (words is not None) and (words is None or words in wrong[0])


def test_the_hash_is_of_code_alone(tmp_path):
    """Docstrings, comments, names of files and code of the host do not change it.

    A kernel or its constants do.
    """
    kernel = """
WIDTH = tl.constexpr(8)

@triton.jit
def kernel(x, D: tl.constexpr):
    \"\"\"Store.\"\"\"
    tl.store(x, WIDTH)

def host():
    return 1
"""

    def hash_of(*change):
        (tmp_path / "kernel.py").write_text(kernel.replace(*change) if change else kernel)
        return aot_table.sources_hash(["kernel"], tmp_path)

    for change in (
        ("Store.", "Other\n\n    words."),
        ("return 1", "return 2"),
        ("(x, W", "(  # why\n        x, W"),
    ):
        assert hash_of(*change) == hash_of()
    for change in (("(8)", "(6)"), ("WIDTH)", "WIDTH + 1)"), ("x, D", "x, y, D")):
        assert hash_of(*change) != hash_of()
    before = hash_of()
    (tmp_path / "kernel.py").rename(tmp_path / "other.py")
    assert aot_table.sources_hash(["kernel"], tmp_path) == before


HELPERS = """
FIRST, LAST = tl.constexpr(1), tl.constexpr(2)
OTHER = tl.constexpr(3)

@triton.jit
def inner(x):
    return x + LAST

@triton.jit
def outer(x):
    return helpers.inner(x)

@kernel
def without_rows(x):
    tl.store(x, outer(OTHER))
"""
LISTED = """
from .helpers import outer as renamed

@kernel
def listed(x):
    tl.store(x, renamed(x))
"""


def test_the_hash_is_of_what_the_listed_kernels_reach(tmp_path):
    """A new kernel needs no new table; a change of a helper does, in whichever file it is."""

    def hash_of(*change):
        for name, text in (("helpers", HELPERS), ("listed", LISTED)):
            (tmp_path / f"{name}.py").write_text(text.replace(*change) if change else text)
        return aot_table.sources_hash(["listed"], tmp_path)

    before = hash_of()
    for change in (("(3)", "(4)"), ("outer(OTHER)", "outer(x)"), ("def without_rows", "def new")):
        assert hash_of(*change) == before
    for change in (("(2)", "(5)"), ("x + LAST", "x - LAST"), ("helpers.inner(x)", "inner(-x)")):
        assert hash_of(*change) != before
    with pytest.raises(ValueError, match="got \\['unknown'\\]"):
        aot_table.sources_hash(["listed", "unknown"], tmp_path)


# Tests compile each kernel for one architecture and one width of the head dims; `make aot` compiles
# all configurations, in minutes. A hash of the sources shows whether the table is current.
WIDTH = 64
KINDS_BY_ARCHITECTURE = {
    "sm_90": ["backward_kv", "states"],
    "sm_80": ["forward"],
    "sm_100": ["recurrence", "scan"],
    "sm_120": ["backward_q"],
    "gfx942": ["carry"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", aot.TARGETS)
@pytest.mark.timeout(600)
def test_each_kernel_passes_its_gates(architecture):
    """The installed Triton compiles each kernel to the figures in the table."""
    kinds = KINDS_BY_ARCHITECTURE[architecture]
    command = [sys.executable, "-m", "tests.tools.aot", "--jobs", "1"]
    command += ["--architecture", architecture, "--kind", *kinds, "--width", str(WIDTH)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [row for row in found if row["wrong"]] or done.stderr[-2000:]
    shipped = [x for x in aot.shipped(architecture) if x.kind in kinds and x.width == WIDTH]
    expected = {(case.precision, case.kind) for case in shipped}
    assert {(row["precision"], row["kind"]) for row in found} == expected
    assert {kind for _, kind in expected} == {*kinds}
    assert {*itertools.chain(*KINDS_BY_ARCHITECTURE.values())} == set(aot.KERNELS)
    if triton.__version__ in SECTIONS:
        kept = [
            row
            for row in SECTIONS[triton.__version__]["rows"]
            if (row["architecture"], row["width"]) == (architecture, WIDTH) and row["kind"] in kinds
        ]
        assert found == [row | {"wrong": []} for row in kept], "run make aot"


@pytest.mark.exhaustive
def test_candidates_compile_to_their_figures():
    """Of each kernel the candidate with most registers, and one that is refused."""
    rows = SECTIONS_OF_CANDIDATES[triton.__version__]["rows"]
    found = [max((x for x in rows if x["kind"] == kind), key=registers) for kind in aot.FLASH]
    script = (
        "import json, sys\n"
        "from seqpar.kernels.flash_attention.configs import Config, from_fields\n"
        "from tests.tools import candidates\n"
        "for row in json.loads(sys.argv[1]):\n"
        "    config = from_fields(row['config'])\n"
        "    print(json.dumps(candidates.compiled((row['width'], row['kind'], [config]))[0]))\n"
        "config = Config(128, 128, 4, 2, tma=True)\n"
        "print(json.dumps(candidates.compiled((128, 'forward', [config]))[0]))"
    )
    command = [sys.executable, "-c", script, json.dumps(found)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [*found, None]


def registers(row):
    return row["registers"]


@pytest.mark.exhaustive
def test_the_gates_notice():
    """A tile too large for its warps, and tiles too large for the shared memory."""
    for config, word in [
        (Config(128, 128, 4, 2, tma=True, cut_resources=(4, 2)), "spilled"),
        (Config(128, 256, 8, 3, tma=True, cut_resources=(8, 2)), "shared memory"),
    ]:
        script = (
            "from tests.tools import aot, aot_table\n"
            "from seqpar.kernels.flash_attention.configs import Config\n"
            f"case = next(aot.cases('sm_90', 'half', 128, 'forward', {config!r}))\n"
            "print(aot_table.broken_gates(aot.report(case)))"
        )
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        assert word in done.stdout


BARRIERS = """
import re, triton
from triton.compiler import ASTSource
from seqpar.kernels.flash_attention.merge_hops import flash_merge_hops as kernel
from seqpar.kernels.flash_attention.configs import padded
from tests.tools import aot

types = {"out": "*bf16", "lse": "*fp32", "partial_out": "*fp32", "partial_lse": "*fp64"}
types |= {f"{x}{i}": types.get(x, "*i32") for x in ("out", "lse", "place") for i in range(8)}
types |= {"out": "*fp32", "lse": "*fp64", "sinks": "*fp32"}
for dim in (64, 128, 256):
    known = {"DV": dim, "BLOCK_DV": padded(dim), "TILE_ROWS": 2048 // dim}
    known |= {"HAS_LSE": True, "HAS_PARTIAL": True, "HAS_SINKS": False, "ONLY_ROWS": False}
    kinds = {x: "constexpr" if x in known else types.get(x, "i32") for x in kernel.arg_names}
    positions = {(kernel.arg_names.index(x),): value for x, value in known.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=positions)
    options = {"num_warps": 4, "num_stages": 1}
    code = triton.compile(source, target=aot.TARGETS["sm_90"], options=options).asm["ptx"]
    fp64 = [x.start() for x in re.finditer(r"ld[.]global[.]b64", code)]
    stored = code.index("st.global.b64")
    print(dim, len(fp64), code.count("bar.sync", max(x for x in fp64 if x < stored), stored))
"""


@pytest.mark.exhaustive
def test_merges_replace_lse_after_all_reads():
    """Several warps read the lse of a row, and one replaces it."""
    command = [sys.executable, "-c", BARRIERS]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    assert len(found) == 3 and all(loads and barriers for _, loads, barriers in found), found


@pytest.mark.exhaustive
def test_merges_of_parts_have_barriers_and_no_spills():
    """No spills in loops."""
    command = [sys.executable, "-c", MERGES]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    spills = [line.split() for line in done.stdout.splitlines()]
    assert len(spills) == 3 * 4 and all(x[2:] == ["True", "0"] for x in spills), spills
