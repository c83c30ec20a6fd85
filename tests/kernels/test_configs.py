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
