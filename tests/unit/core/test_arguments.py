"""What counts as an integer, a number, a bool and an array, and what errors call the rest."""

import sys

import numpy as np
import pytest
import torch

from seqpar.core import arguments

HUGE = 10**5000  # which Python refuses to print

WRONG = {
    arguments.as_bool: [1, 0, None, "yes", np.ones(2, bool), torch.tensor(True)],
    arguments.as_float: [None, "1", b"1", True, [1.0], 1j, HUGE, np.ones(2), torch.ones(2)],
    arguments.as_int_array: [
        *(None, 3, "abc", [0.5], [[0, 1], [2]], [[0, 1]], [0, HUGE], {0, 1}, [None], [True]),
        *(np.array([2**63], np.uint64), np.array([0, "a"], object), np.array(0)),
        *(torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.bfloat16)),
        torch.eye(2).to_sparse(),
    ],
    arguments.as_int_tensor: [
        *(torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.zeros((), dtype=torch.int64)),
        *(torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.int64, device="meta")),
        *(torch.eye(2).long().to_sparse(), [[0], [1, 2]]),
    ],
    arguments.as_path: [None, 3, b"x", ["a"]],
    arguments.check_function: [None, 3, "x"],
    arguments.check_tensor: [None, 3, [1.0], np.zeros(3), torch.eye(2).to_sparse()],
}


@pytest.mark.parametrize("convert", WRONG, ids=lambda convert: convert.__name__)
def test_errors_name_the_argument(convert):
    for value in WRONG[convert]:
        with pytest.raises(ValueError, match=r"^knob must (be|hold)"):
            convert("knob", value)


@pytest.mark.parametrize(
    "value",
    [0, -HUGE, 8, HUGE, 1.0, True, "3", None, [3], torch.zeros(1, device="meta").long()],
    ids=lambda value: type(value).__name__,
)
def test_integers_have_a_type_and_limits(value):
    with pytest.raises(ValueError, match=r"^knob must be (an integer|at (least 1|most 7)), got"):
        arguments.as_int("knob", value, 1, 7)


@pytest.mark.parametrize("kind", [int, np.int8, np.uint64, np.int64, torch.tensor])
def test_integers_of_numpy_and_torch_count_as_ints(kind):
    assert type(arguments.as_int("knob", kind(3), 0)) is int
    if kind is not torch.tensor:
        assert arguments.parse_cu_seqlens(kind(3)).tolist() == [0, 3]


def test_numbers_and_bools_of_numpy_count():
    assert arguments.as_bool("knob", np.bool_(True)) is True
    for value in (2, 2.0, np.float16(2), np.int32(2), torch.tensor(2.0)):
        assert arguments.as_float("knob", value) == 2.0


def test_values_are_shown_cut_short():
    assert len(arguments.shown([0] * 10**6)) < 300
    assert arguments.shown(HUGE) == "a int that cannot be shown"


def test_a_tensor_of_integers_is_copied():
    """So that memory shared with numpy does not change what backward sees."""
    values = np.array([1, 2])
    copied = arguments.as_int_tensor("knob", torch.from_numpy(values))
    values[0] = 5
    assert copied.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**31, "must be at most 2147483647, got 2147483648"),
        ([0, 2**31], "must have documents of fewer than 2\\*\\*31 tokens, got 2147483648"),
        ([0, 2**62], "must have documents of fewer than 2\\*\\*31 tokens"),
        (10**30, "must be at most"),
        (-1, "must be at least 0, got -1"),
        (True, "must be a 1-D sequence of integers, got shape \\(\\) of bool"),
        ([], "must start at 0, got \\[\\]"),
        ([1, 2], "must start at 0, got \\[1\\]"),
        ([0, 5, 3], "must not decrease, got 5 and then 3 at index 2"),
        ([0, sys.maxsize, -sys.maxsize - 1], "must not decrease"),
    ],
)
def test_cu_seqlens_are_checked(value, message):
    with pytest.raises(ValueError, match=f"cu_seqlens:? {message}"):
        arguments.parse_cu_seqlens(value)
