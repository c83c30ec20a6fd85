"""Options that several commands have."""

import re

import pytest
import torch

from seqpar.core.options import DTYPES, dtype_name, read_lengths


@pytest.mark.parametrize(("text", "lengths"), [
    ("4096", [4096]), ("7, 8,9 10\n11", [7, 8, 9, 10, 11]), ("512K", [512 * 1024]),
    ("1m,2k", [1024**2, 2048]), ("16384x3", [16384] * 3), ("1Kx2 5", [1024, 1024, 5]),
])  # fmt: skip
def test_lengths_are_read(text, lengths):
    assert read_lengths("lengths", text) == lengths


FORMS = "must be numbers of tokens such as 4096, 512K, 1M or 4096x3 "


@pytest.mark.parametrize(("text", "wrong"), [
    *((text, FORMS) for text in ("a", "-3", "4x", "x4", "4xx4", "1.5K", "4G", "4K5", "\u0663")),
    ("", FORMS), (",", FORMS), ("5x0", FORMS), ("9" * 5000, "must be at most 2147483647"),
    ("2048M", "must be at most 2147483647, got 2147483648"),
    ("1x1000001", "must have at most 1,000,000 documents"),
    ("1x" + "9" * 5000, "must have at most 1,000,000 documents"),
], ids=lambda x: x[:20])  # fmt: skip
def test_wrong_lengths_name_the_option_and_the_forms(text, wrong):
    with pytest.raises(ValueError, match=rf"^documents {re.escape(wrong)}"):
        read_lengths("documents", text)


def test_a_dtype_has_one_name():
    for name, dtype in DTYPES.items():
        assert dtype_name(name) == dtype_name(str(dtype).removeprefix("torch.")) == name
    assert torch.bfloat16 in DTYPES.values() and dtype_name("int8") == "int8"
