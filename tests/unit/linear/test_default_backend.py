"""Which backend computes linear and recurrent attention where users force none: aten on CPUs, on
CUDA fla or our Triton kernels. Meta tensors pass for CUDA's."""

import warnings

import pytest
import torch
import triton

from seqpar import LASP2Attention, Layout, RecurrentAttention, use_backend
from seqpar.linear import linear_strategy
from seqpar.linear.kinds import KINDS, kind
from seqpar.linear.maps.backends import fla
from tests.support.steady import SilentComm

LAYOUT = Layout.zigzag([0, 160, 640], 2)
CONSTANT = {x.name for x in KINDS.values() if x.constant_transition}
ROWS = LAYOUT.tokens_on(0)


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)


@pytest.fixture
def has_fla(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(fla, "_broken", lambda: None)


@pytest.fixture(autouse=True)
def no_fla(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    linear_strategy._warn.cache_clear()


def backend_of(name, device="meta", dtype=torch.bfloat16, dim=64):
    """The backend of a call of a kind, or of "lasp2"."""
    comm, heads = SilentComm(0, 2), (ROWS, 2)
    gates = {}
    q = torch.zeros(*heads, dim, dtype=dtype, device=device)
    if name == "lasp2":
        attn = LASP2Attention(comm)
    else:
        attn, this = RecurrentAttention(comm, name), kind(name)
        shapes = {"constant": (2,), "head": heads, "key": (*heads, dim)}
        if this.decay:
            gates["log_decay"] = torch.zeros(shapes[this.decay], device=device)
        if this.uses_beta:
            gates["beta"] = torch.zeros(heads, device=device)
    return attn._resolve(q, q, q, LAYOUT, **gates).options.backend


@pytest.mark.parametrize("name", ["lasp2", *KINDS])
def test_cpus_use_aten(name):
    assert backend_of(name, "cpu") == "aten"


@pytest.mark.parametrize("name", sorted(KINDS.keys() - CONSTANT))
def test_fla_is_the_cuda_default_where_installed(cuda, has_fla, name):
    assert backend_of(name) == "fla"


@pytest.mark.parametrize("name", ["lasp2", *sorted(CONSTANT)])
def test_our_kernels_compute_constant_decays(cuda, has_fla, name):
    assert backend_of(name) == "triton"


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [("gated_delta", torch.bfloat16, "fla-core"), ("lasp2", torch.float64, "bf16, fp16 or fp32")],
)
def test_aten_on_cuda_warns_once(cuda, name, dtype, reason):
    with pytest.warns(UserWarning, match=f"plain PyTorch on CUDA: .*{reason}"):
        assert backend_of(name, dtype=dtype) == "aten"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_of(name, dtype=dtype) == "aten"


@pytest.mark.parametrize("name", ["aten", "reference"])
def test_users_force_another_backend(cuda, has_fla, name):
    with use_backend(name):
        assert backend_of("gated_delta") == backend_of("lasp2") == name
