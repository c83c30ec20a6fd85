"""What torch's function transforms and forward-mode derivatives are told: that there are none."""

import pytest
import torch
from torch.autograd import forward_ad

from seqpar import LASP2Attention, Layout, RingAttention
from seqpar.comm.messages.comm import Comm
from tests.support.calls import local
from tests.support.ranks import virtual

# torch's own, the first time that it makes a forward-mode derivative
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
LAYOUT = Layout.zigzag(16, 1)
TRANSFORMS = {
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "vmap": lambda f, q: torch.func.vmap(f)(q[None]),
}
MODULES = pytest.mark.parametrize("module", [RingAttention, LASP2Attention])


@MODULES
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(module, transform):
    def refused(comm):
        attn = module(comm)
        q, k, v = (x.detach() for x in local(LAYOUT, 0))
        error, text = NotImplementedError, "seqpar attention cannot be called within torch.func's"
        if transform == "jvp":
            error, text = ValueError, "seqpar attention has no forward-mode derivative"
        with pytest.raises(error, match=text):
            TRANSFORMS[transform](lambda q: attn(q, k, v, LAYOUT, causal=True), q)

    virtual(1, refused)


@MODULES
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tangents_are_refused_before_anything_is_sent(module, requires_grad):
    comm = Comm("silent", 0, 2)  # whose exchange would fail: it has no group
    attn, layout = module(comm), Layout.zigzag(16, 2)
    tensors = dict(zip("qkv", (x.detach() for x in local(layout, 0)), strict=True))
    if module is RingAttention:
        tensors |= {"sinks": torch.zeros(2), "softmax_scale": torch.tensor(0.3)}
        tensors["softcap"] = torch.tensor(2.0)
    else:
        tensors["log_decay"] = -torch.ones(1)
        tensors["initial_state"] = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    for name, x in tensors.items():
        with forward_ad.dual_level():
            x = x.clone().requires_grad_(requires_grad and name not in ("log_decay", "softcap"))
            call = tensors | {name: forward_ad.make_dual(x, torch.ones_like(x))}
            with pytest.raises(ValueError, match=f"{name} must not have a tangent"):
                attn(**call, layout=layout, causal=True)
            assert attn.unsupported(**call, layout=layout, causal=True) is not None


def test_where_nothing_is_differentiated_forward_they_are_called():
    def called(comm):
        q, k, v = local(LAYOUT, 0)
        with forward_ad.dual_level():
            return RingAttention(comm)(q, k, v, LAYOUT, causal=True).sum().backward()

    assert virtual(1, called) == [None]
