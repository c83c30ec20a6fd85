"""Follow q through a call of Ring, and compare the files with the architecture page."""

import re
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

from seqpar import Layout
from tests.support.cases import module
from tests.support.steady import SilentComm

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/internals/architecture.md"
MAX_FILES_ON_STACK = 9


def holds(value, storage):
    """Whether a tensor, or a collection of tensors, has this storage."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr() == storage
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(holds(x, storage) for x in value)


def steps_of(frame):
    """The files and functions of seqpar on the stack of a frame, outermost first."""
    steps = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "seqpar"):
            name = path.relative_to(ROOT / "seqpar").as_posix()
            steps.append((name, frame.f_code.co_name))
        frame = frame.f_back
    return steps[::-1]


@pytest.fixture(scope="module")
def calls():
    """The stack of each function of seqpar that is given q, in the second call of a layout."""
    attn, layout = module("ring", SilentComm(0, 4)), Layout.zigzag([0, 64], 4)
    q, k, v = (torch.randn(16, 2, 16, requires_grad=True) for _ in range(3))
    attn(q, k, v, layout, causal=True)
    storage, stacks = q.untyped_storage().data_ptr(), []

    def observe(frame, event, _):
        ours = Path(frame.f_code.co_filename).is_relative_to(ROOT / "seqpar")
        if event == "call" and ours and any(holds(x, storage) for x in frame.f_locals.values()):
            stacks.append(steps_of(frame))

    sys.setprofile(observe)
    try:
        attn(q, k, v, layout, causal=True)
    finally:
        sys.setprofile(None)
    return stacks


def test_the_page_names_files_that_get_q(calls):
    section = PAGE.read_text().split("## The way of a query")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    given = {stack[-1][0] for stack in calls}
    # Those files hold the strategy, the bound strategy and the keys.
    others = {"strategies/ring.py", "comm/binding.py", "softmax/keys/exchange.py"}
    assert named == given | others | {"comm/messages/exchange.py"}


def test_no_file_hands_q_back(calls):
    for stack in calls:
        names = [name for _, name in stack]
        for inner in {"_attention", "_save_for_backward"} & set(names):
            # What torch does between attention_op and these is one step.
            stack = stack[: names.index("attention_op")] + stack[names.index(inner) :]
        files = [file for file, _ in groupby(stack, key=lambda step: step[0])]
        assert len(files) == len(set(files)), files


def test_few_files_are_on_the_kernels_stack(calls):
    (kernel,) = {tuple(stack) for stack in calls if stack[-1][1] == "_forward"}
    assert kernel[-1][0] == "softmax/backends/aten.py"
    assert len({file for file, _ in kernel}) <= MAX_FILES_ON_STACK
