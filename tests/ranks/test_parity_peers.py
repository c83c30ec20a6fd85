"""ring-flash-attn and yunchang, on stand-ins for the functions of flash-attn, which need a GPU."""

import importlib.util

import pytest
import torch

from seqpar import parity
from tests.support.parity_peers import by_ring_flash_attn, by_yunchang
from tests.support.parity_stacks import in_documents, one_rank

VERSIONS = {"ring_flash_attn": "ring-flash-attn==0.1.8", "yunchang": "yunchang==0.6.4"}


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"pip install {VERSIONS[package]}")


@needs("ring_flash_attn")
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("ring_flash_attn_func", "contiguous"),
        ("zigzag_ring_flash_attn_func", "head_tail"),
        ("stripe_flash_attn_func", "striped"),
    ],
)
def test_ring_flash_attn_agrees_with_one_rank(pool, tmp_path, name, order):
    one_rank(tmp_path / "one", dtype=torch.bfloat16)
    pool(2, by_ring_flash_attn, tmp_path / "many", order, name)
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert report.first is None, str(report)


@needs("ring_flash_attn")
def test_backward_of_ring_flash_attn_in_fp32_is_where_gradients_begin_to_differ(pool, tmp_path):
    """It adds gradients into the buffer that the next block overwrites, unless a cast copies."""
    one_rank(tmp_path / "one")
    arguments = "contiguous", "ring_flash_attn_func", (), torch.float32
    pool(2, by_ring_flash_attn, tmp_path / "many", *arguments)
    first = parity.compare(tmp_path / "one", tmp_path / "many").first
    assert (first.stage, first.name) == ("gradient of output", "blocks.1.qkv")


@needs("ring_flash_attn")
def test_documents_that_ring_flash_attn_does_not_separate_are_named(pool, tmp_path):
    """This function has no argument for borders (axolotl#3867)."""
    documents = (5, 19)
    one_rank(tmp_path / "one", in_documents, documents, torch.bfloat16)
    name = "zigzag_ring_flash_attn_func"
    pool(2, by_ring_flash_attn, tmp_path / "many", "head_tail", name, documents)
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    expected = "Documents leak into each other: in blocks.0.out"
    assert report.diagnosis is not None and report.diagnosis.startswith(expected), str(report)


@needs("yunchang")
@pytest.mark.parametrize(
    ("ring", "order", "ulysses"),
    [("basic", "contiguous", 1), ("zigzag", "head_tail", 1), ("basic", "contiguous", 2)],
)  # the package makes groups on all processes
def test_yunchang_agrees_with_one_rank(pool, tmp_path, ring, order, ulysses):
    one_rank(tmp_path / "one", dtype=torch.bfloat16)
    pool(4, by_yunchang, tmp_path / "many", order, ring, ulysses)
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert report.first is None, str(report)
