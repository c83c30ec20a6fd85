"""The options of a sweep: what they measure, and which are refused."""

import pytest

from seqpar.bench.workloads import contenders
from seqpar.bench.workloads.workloads import PRESETS, Workload, heads_of
from seqpar.comm.launch import LaunchedProcess
from seqpar.strategies.registry import SOFTMAX
from tests.support.sweeps import options

EIGHT = LaunchedProcess(0, 8, 0, "host", 1, True)


def test_lengths_are_per_batch_or_per_rank():
    tokens = {}
    for scaling in ("strong", "weak", "both"):
        made = options(lengths=["64", "128"], ranks=["1", "2"], scaling=scaling).workloads()
        tokens[scaling] = [(workload.ranks, workload.tokens) for workload in made]
    assert tokens["strong"] == [(1, 64), (1, 128), (2, 64), (2, 128)]
    assert tokens["weak"] == [(1, 64), (1, 128), (2, 128), (2, 256)]
    assert set(tokens["both"]) == {*tokens["strong"], *tokens["weak"]}
    assert len(set(tokens["both"])) == len(tokens["both"])


def test_defaults_are_all_strategies_and_installed_libraries():
    made = options(EIGHT, strategies=None, peers=None, ranks=None)
    here = [name for name in contenders.PEERS if contenders.lacking(name) is None]
    assert made.contenders == (*SOFTMAX, *here) and "all-to-all-by-hand" in here
    assert made.ranks == (1, 2, 4, 8)
    six = LaunchedProcess(0, 6, 0, "host", 1, True)
    assert options(six, ranks=None).ranks == (1, 2, 4, 6)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_as_published(name):
    made = options(EIGHT, preset=name, heads=None, lengths=None, ranks=["8"])
    workloads = made.workloads()
    assert {(x.heads, x.kv_heads, x.head_dim) for x in workloads} == {(64, 8, 128)}
    assert {x.tokens for x in workloads} == {8 * 8192} and {x.dtype for x in workloads} == {"bf16"}
    assert {x.passes for x in workloads} == {"forward", "forward+backward"}
    assert {"full", "causal", "window"} <= {x.mask for x in workloads}
    assert options(EIGHT, preset=name, heads=None, lengths=["64"]).lengths == (64,)


def test_auto_is_measured_on_request():
    assert options(strategies=["auto"]).contenders == ("auto",)
    assert "auto" not in options(strategies=None).contenders


def test_heads():
    assert heads_of("64:8x128") == (64, 8, 128) and heads_of("4x16") == (4, 4, 16)


def test_flops_are_products_of_what_sees_each_other():
    work = Workload(1, 64, 4, 2, 8, "causal", "fp32", "forward")
    assert work.flops(100) == 100 * 4 * (2 * 8 + 2 * 8)
    both = Workload(1, 64, 4, 2, 8, "causal", "fp32", "forward+backward")
    assert both.flops(100) == 3.5 * work.flops(100)


@pytest.mark.parametrize(("changes", "wrong"), [
    ({"strategies": ["rign"]}, "strategies must be among .*'rign'"),
    ({"strategies": [""]}, "strategies must not be empty"),
    ({"strategies": ["ring", "ring"]}, "strategies must be different"),
    ({"peers": ["mine"]}, "peers must be among"),
    ({"peers": ["ring-flash-attn"]}, "peers: ring-flash-attn needs ring_flash_attn"),
    ({"peers": ["none", "all-to-all-by-hand"]}, "peers must be among"),
    ({"lengths": ["0"]}, "lengths must be at least 1"),
    ({"lengths": ["4g"]}, "lengths must be numbers of tokens such as 4096, 512K, 1M .*, got '4g'"),
    ({"lengths": ["8x2"]}, r"lengths must be different from each other, got \[8, 8\]"),
    ({"lengths": ["9" * 30]}, "lengths must be at most"),
    ({"lengths": ["1"], "ranks": ["2"]}, "lengths must give batches of 2 tokens, one"),
    ({"lengths": ["2147483647"], "ranks": ["2"], "scaling": "weak"}, "lengths must give batches"),
    ({"heads": ["8"]}, "heads must be as in 64:8x128"),
    ({"heads": ["8:3x64"]}, "query heads a multiple of KV heads"),
    ({"heads": ["0x64"]}, "heads must be above 0"),
    ({"heads": ["8:x64"]}, "heads must be as in"),
    ({"masks": ["diagonal"]}, "masks must be among"),
    ({"dtype": "fp64"}, "dtype must be among"),
    ({"passes": ["backward"]}, "passes must be among"),
    ({"ranks": ["0"]}, "ranks must be at least 1"),
    ({"ranks": ["9"], "where": EIGHT}, "ranks must be at most the 8 processes"),
    ({"rounds": 0}, "rounds must be at least 1"),
    ({"preset": "longca"}, "heads are those of the preset longca"),
    ({"preset": "magi", "heads": None, "masks": ["full"]}, "masks are those of the preset magi"),
    ({"preset": "longca", "heads": None, "dtype": "fp32"}, "dtype are those of the preset"),
])  # fmt: skip
def test_options_that_are_wrong_are_named(changes, wrong):
    with pytest.raises(ValueError, match=wrong):
        options(**changes)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match='device must be "cpu" on a machine without a GPU'):
        options(device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert options(device=None, ranks=None, heads=None).ranks == (1, 2, 4)
    with pytest.raises(ValueError, match="ranks must be at most the 4 GPUs, got 8"):
        options(device="cuda", ranks=["8"])
