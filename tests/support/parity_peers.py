"""The model of `parity_stacks` with attention by ring-flash-attn and yunchang, on a CPU.

These packages call private functions of flash-attn, which needs a GPU. Functions in plain torch
with the same arguments replace them. They add in fp32 and round once, as flash-attn does.
"""

import contextlib
import importlib
import sys
import types

import torch
import torch.distributed as dist

from tests.support.parity_stacks import sharded


def _scores(q, k, scale, causal):
    """Return (B, H, S, S) for q and k of (B, S, H, D)."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q.float(), k.float()) * scale
    if causal:
        assert q.shape[1] == k.shape[1]
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    return scores


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    assert (window_size_left, window_size_right, softcap or 0.0) == (-1, -1, 0.0)
    scores = _scores(q, k, softmax_scale, causal)
    out = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v.float())
    return out.to(q.dtype), scores.logsumexp(-1), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # fmt: skip
    weights = (_scores(q, k, softmax_scale, causal) - softmax_lse[..., None]).exp()
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    dv.copy_(torch.einsum("bhnm,bnhd->bmhd", weights, dout))
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    dscores = weights * (torch.einsum("bnhd,bmhd->bhnm", dout, v) - delta) * softmax_scale
    dq.copy_(torch.einsum("bhnm,bmhd->bnhd", dscores, k))
    dk.copy_(torch.einsum("bhnm,bnhd->bmhd", dscores, q))


@contextlib.contextmanager
def stand_ins():
    """Within this context, the two packages can be imported.

    Without it, flash-attn is missing, and so may be a function of transformers that they import.
    """

    def unused(*_):
        raise NotImplementedError

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = (
        _flash_attn_forward,
        _flash_attn_backward,
    )
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = unused
    package, adapters = types.ModuleType("flash_attn"), types.ModuleType("ring_flash_attn.adapters")
    package.__version__, package.flash_attn_func = "2.8.3", unused
    package.flash_attn_interface = interface
    # ring-flash-attn 0.1.8 imports a name that transformers 5 no longer has.
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = unused
    modules = {x.__name__: x for x in (package, interface, adapters)}
    before = set(sys.modules)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("flash_attn", "ring_flash_attn", "yunchang"):
                del sys.modules[name]


def _by_tokens(function, **options):
    def attend(q, k, v, _):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return function(q, k, v, causal=True, **options).transpose(1, 2)

    return attend


def by_ring_flash_attn(group, folder, order, name, documents=(), dtype=torch.bfloat16):
    with stand_ins():
        function = getattr(importlib.import_module("ring_flash_attn"), name)
        sharded(group, folder, order, _by_tokens(function, group=group), documents, dtype)


def by_yunchang(group, folder, order, ring, ulysses):
    """Compute with `LongContextAttention` on ulysses × ring ranks, which are all processes."""
    with stand_ins():
        package = importlib.import_module("yunchang")
        ranks = dist.get_world_size(group)
        package.set_seq_parallel_pg(ulysses, ranks // ulysses, dist.get_rank(), ranks)
        attention = package.LongContextAttention(
            ring_impl_type=ring, attn_type=package.kernels.AttnType.FA
        )
        sharded(group, folder, order, _by_tokens(attention), dtype=torch.bfloat16)
