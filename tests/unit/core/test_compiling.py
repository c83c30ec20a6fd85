"""Which calls torch.compile or torch.export traces."""

import pytest
import torch

from seqpar.core.compiling import is_traced
from tests.support.compiling import compile_slowly, compiling_elsewhere, export_slowly

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns when it compiles


class Doubles(torch.nn.Module):
    """Doubles a number if it is traced."""

    def forward(self, x):
        return 2 * x if is_traced() else x


def plain(x):
    return Doubles()(x)


def compiled(x):
    return torch.compile(Doubles(), backend="eager")(x)


def after_a_break(x):
    def call():
        torch._dynamo.graph_break()
        return Doubles()(x)

    return torch.compile(call, backend="eager")()


def untraceable(x):
    """A function that runs uncompiled after its trace has failed, as refused calls do."""

    def call():
        if is_traced():
            raise ValueError
        return x

    return torch.compile(call, backend="eager")()


def outside(x):
    call = torch.compiler.disable(plain)
    return torch.compile(lambda: call(x), backend="eager")()


def exported(x, strict=False):
    return torch.export.export(Doubles(), (x,), strict=strict).module()(x)


TRACED = {
    "plain": (plain, False),
    "compiled": (compiled, True),
    "after a break": (after_a_break, True),
    "untraceable": (untraceable, False),
    "outside": (outside, False),
    "exported": (exported, True),
    "exported strictly": (lambda x: exported(x, strict=True), True),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_calls_are_known(name):
    call, traced = TRACED[name]
    assert call(torch.ones(3)).tolist() == [1.0 + traced] * 3


@pytest.mark.parametrize("compile", [compile_slowly, export_slowly])
def test_another_threads_tracing_is_not_this_threads(compile):
    with compiling_elsewhere(compile):
        assert not is_traced()


def test_another_thread_compiles_as_often_as_tests_ask():
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        with compiling_elsewhere():
            pass
