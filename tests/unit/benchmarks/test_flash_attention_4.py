"""The tool that compiles FlashAttention-4's kernels, with a stand-in of the package."""

import itertools
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.kernels.memory_traffic import Case
from tests.tools import flash_attention_4


@pytest.fixture(scope="module")
def calls():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention_4, "cases", lambda: [(Case("ring", 1), {"causal": True})])
        patch.setattr(flash_attention_4, "SIZES", [{"TOKENS": 64, "HEADS": 4, "KV_HEADS": 2}])
        return flash_attention_4.recorded()


def install(monkeypatch, key):
    """Make a package importable that compiles a variant for each key of a call's arguments."""

    def function(q, **named):
        assert isinstance(q, FakeTensor) and q.is_cuda and q.dtype == torch.bfloat16
        function.compile_cache.cache[key(named)] = None

    function.compile_cache = types.SimpleNamespace(cache={})
    package = types.ModuleType(flash_attention_4.MODULE)
    vars(package).update(dict.fromkeys(flash_attention_4.FUNCTIONS, function))
    monkeypatch.setitem(sys.modules, package.__name__, package)


def test_the_package_gets_each_distinct_call_once(monkeypatch, calls):
    install(monkeypatch, lambda named: ("dout" in named, named["causal"]))
    found = flash_attention_4.compiled(calls)
    assert sum(x["calls"] for x in found.values()) == len(calls) == len(set(calls))
    assert {name.split(",")[0] for name in found} == {"forward", "backward"}
    assert {name.split(", ")[1] for name in found} == {"full", "causal"}
    assert all("documents, 2 query heads per KV head" in name for name in found)
    assert {x["variants"] for x in found.values()} == {1}


def test_several_variants_of_a_kind_are_counted(monkeypatch, calls):
    numbers = itertools.count()
    install(monkeypatch, lambda named: next(numbers))
    found = flash_attention_4.compiled(calls)
    assert all(x["variants"] == x["calls"] for x in found.values())
    assert max(x["variants"] for x in found.values()) > 1
