"""Which configuration a kernel is compiled in, on a Hopper GPU."""

import dataclasses

import pytest
import torch
from seqpar.kernels.flash_attention import configs


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    configs.forget()
    yield
    configs.forget()


def operands(*dims):
    return [torch.zeros(1, 4, 1, dim, dtype=torch.bfloat16) for dim in dims]


def test_a_variant_is_chosen_in_its_block_alone():
    q, v = operands(128, 128)
    shipped = configs.choose("backward_kv", q, v)
    with configs.variant("host descriptors"):
        assert configs.choose("backward_kv", q, v) == dataclasses.replace(shipped, host=True)
    assert configs.choose("backward_kv", q, v) == shipped


@pytest.mark.parametrize(
    ("dims", "described"), [((128, 128), True), ((120, 64), True), ((128, 100), False)]
)
def test_operands_without_descriptors_have_configurations_of_their_own(dims, described):
    name = "sm_90" if described else f"sm_90{configs.NO_DESCRIPTORS}"
    for kind, config in configs.TABLE[name, "half", 128]._asdict().items():
        assert configs.choose(kind, *operands(*dims)) == config


@pytest.mark.parametrize(
    ("dim", "pieces", "width"),
    [
        (1, (16, 0), 64),
        (48, (32, 16), 64),
        (49, (64, 0), 64),
        (80, (64, 32), 96),
        (97, (128, 0), 128),
        (160, (128, 64), 192),
        (192, (128, 64), 192),
        (193, (256, 0), 256),
    ],
)
def test_tiles_have_one_piece_or_two(dim, pieces, width):
    assert configs.pieces(dim) == pieces
    assert configs.width_of(dim, 1) == configs.width_of(1, dim) == width


def test_each_width_has_configurations_on_each_gpu():
    names = {(name, precision) for name, precision, _ in configs.TABLE}
    for name, precision in names:
        assert all((name, precision, width) in configs.TABLE for width in configs.WIDTHS)
