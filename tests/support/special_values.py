"""NaN and infinities in calls of softmax attention, and the results of one device for them."""

import math

import torch

from seqpar import use_backend
from seqpar.comm.messages.comm import Comm
from tests.support.cases import module

VALUES = {"NaN": math.nan, "+inf": math.inf, "-inf": -math.inf}
NAMES = ("out", "lse", "dq", "dk", "dv")
OPTIONS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": (3, 0)},
    "softcap": {"causal": True, "softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25])},
    "negative scale": {"causal": True, "softmax_scale": -0.3},
}
# How strictly a result is compared, by its name: see `assert_alike`.
EQUAL, NOT_FINITE, KEPT = "the same", "finite in the same places", "not finite there at least"


def inputs(tokens, place, value, dtype=torch.float32, whole=True, dim=8):
    """Return q, k, v (tokens, 2, dim) and sinks; one row, or one element, has the special value."""
    generator = torch.Generator().manual_seed(tokens)
    tensors = {x: torch.randn(tokens, 2, dim, generator=generator).to(dtype) for x in "qkv"}
    tensors["sinks"] = torch.randn(2, generator=generator)
    if place == "sinks":
        tensors["sinks"][0] = value
    else:
        head, element = (slice(None), slice(None)) if whole else (0, 3)
        tensors[place][tokens // 2, head, element] = value
    return tensors


def attention(group, strategy, layout, tensors, backend, options, with_sinks, **of_module):
    """Return out, lse, dq, dk and dv of the whole pack; the loss is the sum of out."""
    comm = Comm.of(group)
    leaves = {x: layout.shard(tensors[x], comm.rank).requires_grad_() for x in "qkv"}
    if with_sinks:
        leaves["sinks"] = tensors["sinks"].clone().requires_grad_()
    with use_backend(backend):
        attn = module(strategy, group, **of_module)
        out, lse = attn(**leaves, layout=layout, return_lse=True, **options)
        out.sum().backward()
    results = [out.detach(), lse.detach(), *(leaves[x].grad for x in "qkv")]
    return [layout.unshard(x.contiguous(), comm) for x in results]


def expected(tensors, options, with_sinks):
    """Return the results of `attention` in fp64, pair by pair.

    A pair in which the query does not see the key adds nothing, even if its values are NaN or
    infinite.
    """
    q, k, v, sinks = (tensors[x].double() for x in ("q", "k", "v", "sinks"))
    position = torch.arange(len(q))
    distance = position[:, None] - position
    visible = (distance >= 0) | torch.tensor(not options["causal"])
    if (left := options.get("window_size", (-1, 0))[0]) >= 0:
        visible &= distance <= left
    q, k, v, visible = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), visible[None]
    scale, cap = options.get("softmax_scale", q.shape[-1] ** -0.5), options.get("softcap")
    scores = (q[:, :, None] * k[:, None]).sum(-1) * scale
    slope = torch.ones_like(scores)
    if cap:
        tanh = torch.tanh(scores / cap)
        scores, slope = cap * tanh, 1 - tanh**2
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    total = torch.logaddexp(lse, sinks[:, None]) if with_sinks else lse
    weights = torch.exp(scores - total.masked_fill(total.isneginf(), 0)[..., None])

    def over(dim, x):
        return torch.where(visible[..., None], x, 0).sum(dim).transpose(0, 1)

    out = over(2, weights[..., None] * v[:, None])
    delta = out.sum(-1).transpose(0, 1)[..., None]
    dscores = (weights * (v.sum(-1)[:, None] - delta) * slope * scale)[..., None]
    dv = over(1, weights[..., None].expand(*weights.shape, v.shape[-1]))
    gradients = over(2, dscores * k[:, None]), over(1, dscores * q[:, :, None]), dv
    return out, lse.transpose(0, 1), *gradients


def assert_alike(results, right, dtype, rules):
    """Compare results with the oracle's results; `rules` says by name how strictly.

    Numbers that are finite in both results must be close.
    """
    for name, x, y in zip(NAMES, results, right, strict=False):
        found, wanted, rule = kinds(x), kinds(y), rules.get(name, KEPT)
        if rule == EQUAL:
            assert torch.equal(found, wanted), (name, found, wanted)
        elif rule == NOT_FINITE:
            assert torch.equal(found > 0, wanted > 0), (name, found, wanted)
        else:
            assert not ((wanted > 0) & (found == 0)).any(), (name, found, wanted)
        both = (found == 0) & (wanted == 0)
        close = {"rtol": 0, "atol": 1e-11 if dtype == torch.float64 else 1e-4}
        if dtype == torch.bfloat16:
            close = {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(x.double()[both], y[both], **close)


def kinds(x):
    """Return 0 for finite numbers, 1 for NaN, 2 for +∞ and 3 for −∞."""
    return x.isnan().int() + 2 * x.isposinf().int() + 3 * x.isneginf().int()
