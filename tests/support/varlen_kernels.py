"""Replacements for varlen kernels of ATen and of packages, in plain PyTorch.

They have the signatures of the kernels.
"""

import itertools
import types
from typing import NamedTuple

import torch

WITHOUT_LIMIT = 2**30  # the side of a window that has no limit


class Segments(NamedTuple):
    """The arguments of a call that say which pairs it has, and how the pairs are scored.

    A segment is the queries and keys of one document. `no_right` replaces an unlimited right side
    of the window if the left side is limited.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int
    window: tuple[int, int]  # −1 is unlimited
    scale: float
    softcap: float = 0.0
    no_right: int = WITHOUT_LIMIT

    @classmethod
    def of_version_2(cls, cu_q, cu_k, longest_q, longest_k, window, *scoring):
        """Read the arguments as FlashAttention-2 and ATen do."""
        window = tuple(-1 if side >= longest_k else side for side in window)
        return cls(cu_q, cu_k, longest_q, longest_k, window, *scoring, no_right=longest_k)

    def check(self, q, k, v, *others):
        """Refuse arguments that kernels would misread, or on which they would crash."""
        assert q.dtype in (torch.bfloat16, torch.float16)
        for x in (q, k, v, *others):
            assert x.dtype == q.dtype and x.shape[-1] == q.shape[-1] and x.shape[-1] % 8 == 0
            assert x.dim() == 3 and x.stride(-1) == 1
            assert not x.storage_offset() % 8 and not any(step % 8 for step in x.stride()[:-1])
        assert not q.shape[1] % k.shape[1]
        for cu, longest, x in ((self.cu_q, self.longest_q, q), (self.cu_k, self.longest_k, k)):
            lengths = cu.diff()
            assert cu.dtype == torch.int32 and cu.is_contiguous() and cu[0] == 0
            assert cu[-1] == len(x) and lengths.min() > 0 and lengths.max() <= longest
        assert self.scale > 0 and min(self.window) >= -1

    def each(self):
        """Yield the rows, the keys and the mask (n, m) of each segment: whether it has the pair."""
        left, right = (WITHOUT_LIMIT if x < 0 else x for x in self.window)
        right = self.no_right if self.window[0] >= 0 > self.window[1] else right
        for q, k in zip(*(itertools.pairwise(x.tolist()) for x in self[:2]), strict=True):
            rows, keys = torch.arange(q[1] - q[0])[:, None], torch.arange(k[1] - k[0])
            distance = keys - rows - (len(keys) - len(rows))
            mask = (-left <= distance) & (distance <= right)
            assert mask.any(1).all(), "kernels differ in the lse of a row without keys"
            yield slice(*q), slice(*k), mask

    def scores(self, q, k, mask):
        """Return scores (H, n, m) in fp64, −∞ for masked pairs, and their derivative by scale ·
        q·k."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * self.scale
        slope = torch.ones_like(scores)
        if self.softcap:
            slope = 1 - torch.tanh(scores / self.softcap) ** 2
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores.masked_fill(~mask, -torch.inf), slope


def attention(q, k, v, segments):
    """Return out (n, H, Dv) in q's dtype, and lse (H, n) in fp32."""
    out = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan)
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    for rows, keys, mask in segments.each():
        scores, _ = segments.scores(q[rows], k[keys], mask)
        values = v[keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1).float()
    return out, lse


def gradients(operands, lse, dlse, segments):
    """Return dq, dk and dv in the dtype of the operands (dout, q, k, v, out); see `attention`."""
    dout, q, k, v, out = operands
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    heads = lambda x: x.unflatten(1, (k.shape[1], -1)).sum(2)  # noqa: E731
    delta = (dout.double() * out.double()).sum(-1).T
    delta = delta if dlse is None else delta - dlse.double()
    for rows, keys, mask in segments.each():
        scores, slope = segments.scores(q[rows], k[keys], mask)
        p = torch.exp(scores - lse[:, rows, None].double())
        d, x = dout[rows].double(), q[rows].double()
        y, values = (
            z[keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1) for z in (k, v)
        )
        ds = p * (torch.einsum("nhd,mhd->hnm", d, values) - delta[:, rows, None])
        ds = ds * slope * segments.scale
        dv[keys] += heads(torch.einsum("hnm,nhd->mhd", p, d))
        dq[rows] += torch.einsum("hnm,mhd->nhd", ds, y)
        dk[keys] += heads(torch.einsum("hnm,nhd->mhd", ds, x))
    return tuple(x.to(q.dtype) for x in (dq, dk, dv))


def aten_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):  # fmt: skip # noqa: E501
    """`aten::_flash_attention_forward`."""
    assert not (dropout_p or return_debug_mask) and seqused_k is alibi_slopes is block_table is None
    assert is_causal == (window_size_right == 0)
    window = window_size_left, window_size_right
    segments = Segments.of_version_2(cum_seq_q, cum_seq_k, max_q, max_k, window, scale)
    segments.check(query, key, value)
    return *attention(query, key, value, segments), None, None, None


def aten_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):  # fmt: skip # noqa: E501
    """`aten::_flash_attention_backward`, which refuses some head dims on most GPUs."""
    assert not 192 < query.shape[-1] <= 224
    assert not dropout_p and is_causal == (window_size_right == 0)
    window = window_size_left, window_size_right
    segments = Segments.of_version_2(cum_seq_q, cum_seq_k, max_q, max_k, window, scale)
    segments.check(query, key, value, grad_out, out)
    assert logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
    return gradients((grad_out, query, key, value, out), logsumexp, None, segments)


def packaged(operands, cu_q, cu_k, longest, options, make=Segments):
    """Return the segments of a package's call, whose window may be given as causal."""
    left, right, causal, scale, softcap = options
    window = tuple(-1 if x is None else x for x in (left, right))
    assert causal == (window == (-1, 0))
    segments = make(cu_q, cu_k, *longest, window, scale, softcap)
    segments.check(*operands)
    return segments


def write_to(targets, results):
    for target, x in zip(targets, results, strict=True):
        assert target.shape == x.shape and target.dtype == x.dtype
        target.copy_(x)


def fa2_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False):  # fmt: skip # noqa: E501
    """`_flash_attn_varlen_forward` of flash-attn 2.8.3."""
    assert not (dropout_p or return_softmax or zero_tensors)
    assert alibi_slopes is block_table is leftpad_k is seqused_k is None
    options = window_size_left, window_size_right, causal, softmax_scale, softcap
    longest = max_seqlen_q, max_seqlen_k
    operands, make = (q, k, v), Segments.of_version_2
    segments = packaged(operands, cu_seqlens_q, cu_seqlens_k, longest, options, make)
    return *attention(q, k, v, segments), None, None


def fa2_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False):  # fmt: skip # noqa: E501
    """`_flash_attn_varlen_backward` of flash-attn 2.8.3."""
    assert not dropout_p and not zero_tensors and alibi_slopes is rng_state is None
    options = window_size_left, window_size_right, causal, softmax_scale, softcap
    longest = max_seqlen_q, max_seqlen_k
    operands, make = (q, k, v, dout, out), Segments.of_version_2
    segments = packaged(operands, cu_seqlens_q, cu_seqlens_k, longest, options, make)
    write_to((dq, dk, dv), gradients((dout, q, k, v, out), softmax_lse, None, segments))
    return


def fa3_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):  # fmt: skip # noqa: E501
    """`_flash_attn_forward` of FlashAttention-3, commit 01afd16d."""
    unused = k_new, v_new, qv, out_, cu_seqlens_k_new, seqused_q, seqused_k, page_table
    assert all(x is None for x in unused) and not attention_chunk
    options = window_size_left, window_size_right, causal, softmax_scale, softcap
    longest = max_seqlen_q, max_seqlen_k
    segments = packaged((q, k, v), cu_seqlens_q, cu_seqlens_k, longest, options)
    return *attention(q, k, v, segments), torch.empty(0), torch.empty(0)


def fa3_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):  # fmt: skip # noqa: E501
    """`_flash_attn_backward` of FlashAttention-3, commit 01afd16d."""
    assert sequed_q is sequed_k is None
    options = window_size_left, window_size_right, is_causal, softmax_scale, softcap
    longest = max_seqlen_q, max_seqlen_k
    segments = packaged((q, k, v, dout, out), cu_seqlens_q, cu_seqlens_k, longest, options)
    write_to((dq, dk, dv), gradients((dout, q, k, v, out), softmax_lse, None, segments))
    return torch.empty(0)


def fa4_segments(operands, sides, options):
    """Return the operands (n, H, D) and the segments of a call.

    The operands of a call without `cu_seqlens` are (S, L, H, D).
    """
    if sides[0] is not None:
        return operands, packaged(operands, *sides[:2], sides[2:], options)
    assert all(x is None for x in sides) and all(x.dim() == 4 for x in operands)
    (batch, length_q), length_k = operands[0].shape[:2], operands[1].shape[1]
    cu = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (length_q, length_k))
    operands = [x.flatten(0, 1) for x in operands]
    return operands, packaged(operands, *cu, (length_q, length_k), options)


def capped(score_mod):
    """Return the softcap of a function that `create_softcap_scoremod` made, or 0."""
    return 0.0 if score_mod is None else score_mod.softcap


def create_softcap_scoremod(softcap_val):
    """As in the package's module `utils`."""
    return types.SimpleNamespace(softcap=softcap_val)


def create_softcap_scoremod_bwd(softcap_val):
    """As in the package's module `utils`."""
    return types.SimpleNamespace(softcap=softcap_val)


def fa4_forward(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False):  # fmt: skip # noqa: E501
    """`_flash_attn_fwd` of flash-attn-4 4.0.0b36."""
    unused = qv, seqused_q, seqused_k, page_table, learnable_sink, mask_mod, out, lse
    assert return_lse and all(x is None for x in unused) and not softcap
    options = window_size_left, window_size_right, causal, softmax_scale, capped(score_mod)
    sides = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    (q, k, v), segments = fa4_segments((q, k, v), sides, options)
    out, lse = attention(q, k, v, segments)
    if cu_seqlens_q is None:
        batch = len(segments.cu_q) - 1
        out, lse = out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return out, lse.contiguous(), None, None, None


def fa4_backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None):  # fmt: skip # noqa: E501
    """`_flash_attn_bwd` of flash-attn-4 4.0.0b36."""
    unused = seqused_q, seqused_k, dq, dk, dv, mask_mod, learnable_sink
    assert all(x is None for x in unused) and lse.dtype == torch.float32 and not softcap
    assert lse.is_contiguous() and (dlse is None or dlse.shape == lse.shape)
    assert capped(score_mod) == capped(score_mod_bwd)
    options = window_size_left, window_size_right, causal, softmax_scale, capped(score_mod)
    sides, shapes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (q, k, v)
    (q, k, v, dout, out), segments = fa4_segments((q, k, v, dout, out), sides, options)
    if cu_seqlens_q is None:
        lse, dlse = (None if x is None else x.transpose(0, 1).flatten(1) for x in (lse, dlse))
    results = gradients((dout, q, k, v, out), lse, dlse, segments)
    return tuple(x.view(like.shape) for x, like in zip(results, shapes, strict=True))


def cudnn_segments(q, k, v, is_causal, scale, *others):
    """Return rows (n, H, D) of q, k, v and `others` (S, H, L, D), and cuDNN's segments."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, *others)]
    (length_q, length_k), count = (q.shape[2], k.shape[2]), len(q)
    assert not is_causal or length_q == length_k, "cuDNN aligns the mask at the first key"
    cu_q, cu_k = (torch.arange(count + 1, dtype=torch.int32) * n for n in (length_q, length_k))
    window = (-1, 0) if is_causal else (-1, -1)
    segments = Segments(cu_q, cu_k, length_q, length_k, window, scale)
    segments.check(*flat)
    return flat, segments


def cudnn_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # fmt: skip # noqa: E501
    """`aten::_scaled_dot_product_cudnn_attention`."""
    assert attn_bias is None and compute_log_sumexp and not (dropout_p or return_debug_mask)
    flat, segments = cudnn_segments(query, key, value, is_causal, scale)
    out, lse = attention(*flat, segments)
    out = out.unflatten(0, (len(query), -1)).transpose(1, 2)
    lse = lse.unflatten(1, (len(query), -1)).transpose(0, 1)[..., None].contiguous()
    return out, lse, *[None] * 7


def cudnn_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None):  # fmt: skip # noqa: E501
    """`aten::_scaled_dot_product_cudnn_attention_backward`."""
    assert attn_bias is cum_seq_q is cum_seq_k is None and not dropout_p
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    # Torch 2.11 caches plans by the strides of q, k and v only.
    for x in (grad_out, out):
        assert x.transpose(1, 2).is_contiguous()
    assert logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
    others = grad_out, out
    (q, k, v, *others), segments = cudnn_segments(query, key, value, is_causal, scale, *others)
    lse = logsumexp[..., 0].transpose(0, 1).flatten(1)
    results = gradients((others[0], q, k, v, others[1]), lse, None, segments)
    return tuple(x.unflatten(0, (len(query), -1)).transpose(1, 2) for x in results)
