"""What seqpar does with private names of torch."""

import gc
import weakref

import pytest
import torch

from seqpar.core import torch_private


def test_functions_are_marked_as_torch_marks_them():
    def ours(): ...
    def theirs(): ...

    torch_private.mark_disabled(ours, "because")
    torch_private.mark_constant(ours)
    marked = torch.compiler.disable(torch.compiler.assume_constant_result(theirs), reason="because")
    assert {name: getattr(marked, name) for name in vars(ours)} == vars(ours)
    assert vars(ours)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing the compiler
def test_compiled_modules_are_known():
    module = torch.nn.Linear(1, 1)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module))
    module.compile()
    assert torch_private.is_compiled(module)


def test_a_value_of_a_thread_lives_as_long_as_it_is_set():
    """torch 2.11 does not count its reference."""

    class Value:
        pass

    value, ended = Value(), []
    weakref.finalize(value, ended.append, True)
    torch_private.set_inherited("seqpar test", value)
    for _ in range(3):
        assert torch_private.inherited("seqpar test", None) is value
    del value
    gc.collect()
    assert not ended and isinstance(torch_private.inherited("seqpar test", None), Value)
    torch_private.set_inherited("seqpar test", "another value")
    gc.collect()
    assert ended and torch_private.inherited("seqpar test", None) == "another value"
