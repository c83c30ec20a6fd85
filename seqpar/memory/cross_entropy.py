"""Losses and log-probabilities of a language model's head that never hold tokens × vocabulary.

The logits of a million tokens over 152,000 words take 637 GB in fp32. Here they exist for one chunk
of tokens at a time, in forward and again in backward. A loss needs four numbers of a token's logits
z: log Σ exp(z), the label's logit, Σ z, and Σ softmax(z)·z. `_LogitStatistics` computes these
numbers and their derivatives. Every loss is plain arithmetic on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.attention.operators import without_autocast
from seqpar.comm.dtensor import is_dtensor
from seqpar.core.arguments import as_float, as_int, check_tensor
from seqpar.core.dtypes import DTYPES, accumulator_dtype

_INTEGERS = (torch.int32, torch.int64)
_HALF = (torch.bfloat16, torch.float16)


class LogProbabilities(NamedTuple):
    """What the head's distribution over words says about each token, in fp32, or fp64 for fp64."""

    log_probability: Tensor  # the label's log-probability, with the labels' shape
    entropy: Tensor  # the entropy of the distribution in nats, with the labels' shape


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int = 4096,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    token_weights: Tensor | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the sum of the tokens' cross-entropies, and never hold tokens × vocabulary.

    This equals `torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")`. The
    logits, the losses and the sums of gradients are fp32, or fp64 for fp64. Labels are not shifted:
    `labels[i]` belongs to `hidden[i]`. Divide the sum by the number of labels of the whole batch.

    Backward recomputes each chunk's logits: with C channels and V words, a token takes 8·C·V FLOPs
    instead of 6·C·V. Between the passes, `hidden` and two numbers per token are kept. Both passes
    hold at most four copies of one chunk's logits, 4·chunk·V bytes each. Backward also holds the
    weight's gradient in fp32.

    Args:
        hidden: (..., C), fp64, fp32, bf16 or fp16; under autocast it is cast like arguments of
            `torch.nn.functional.linear`.
        weight: (V, C), the head's weight, in hidden's dtype. It may be tied to the embedding.
        labels: (...), int32 or int64, from 0 to V − 1, or `ignore_index`. A label out of this range
            raises an error on a CPU. On a GPU it makes the loss NaN, because an error would have to
            wait for the GPU.
        chunk: the number of tokens whose logits are held at a time.
        bias: (V,), added to the logits.
        ignore_index: the label of tokens that are left out of the loss.
        token_weights: (...), the factor of each token's loss; it may have a gradient.
        softcap: a logit x becomes softcap·tanh(x/softcap), as in Gemma 2; 0 means none.
        label_smoothing: the fraction of the target that is spread evenly over all words, 0 to 1, as
            in `torch.nn.functional.cross_entropy`.
        z_loss: the factor of (log Σ exp(logits))², which is added to each token's loss, as in PaLM
            (Chowdhery et al., 2022, section 5).

    Returns:
        A tensor of shape (), fp32, or fp64 for fp64. Gradients flow to `hidden`, `weight`, `bias`
        and `token_weights`; a second derivative raises a RuntimeError.

    Raises:
        ValueError: a shape, dtype, label or number does not fit, or a tensor is a DTensor. The
            message names the argument.
    """
    smoothing, z_factor = as_float("label_smoothing", label_smoothing), as_float("z_loss", z_loss)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    others = {"weight": weight, "labels": labels, "bias": bias, "token_weights": token_weights}
    _check_tensors(hidden, **others)
    counted = labels != as_int("ignore_index", ignore_index)
    wanted = _Wanted(chunk, softcap, sums=smoothing > 0)
    found = _statistics(hidden, weight, labels, counted, bias, wanted)
    losses = found.log_sum_exp - found.label_logit
    if smoothing:
        from_uniform = found.log_sum_exp - found.logit_sum / weight.shape[0]
        losses = torch.lerp(losses, from_uniform, smoothing)
    if z_factor:
        losses = losses + z_factor * found.log_sum_exp.square()
    losses = torch.where(counted, losses, 0.0)
    if token_weights is not None:
        _check_shape("token_weights", token_weights, tuple(labels.shape), "one number per label")
        losses = losses * torch.where(counted, token_weights, 0)
    return losses.sum()


def chunked_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int = 4096,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> LogProbabilities:
    """Return each label's log-probability and each token's entropy, as losses of RL need them.

    Arguments, memory, gradients and errors are those of `chunked_cross_entropy`. Both results are 0
    for tokens whose label is `ignore_index`.
    """
    _check_tensors(hidden, weight=weight, labels=labels, bias=bias)
    counted = labels != as_int("ignore_index", ignore_index)
    wanted = _Wanted(chunk, softcap, expected=True)
    found = _statistics(hidden, weight, labels, counted, bias, wanted)
    log_probability = found.label_logit - found.log_sum_exp
    entropy = found.log_sum_exp - found.expected_logit
    return LogProbabilities(
        torch.where(counted, log_probability, 0.0), torch.where(counted, entropy, 0.0)
    )


class _Statistics(NamedTuple):
    """Numbers of each token's logits z, with the labels' shape."""

    log_sum_exp: Tensor
    label_logit: Tensor
    logit_sum: Tensor  # Σ z; zeros unless it is wanted
    expected_logit: Tensor  # Σ softmax(z)·z; zeros unless it is wanted


class _Wanted(NamedTuple):
    """Which statistics are computed, and how."""

    chunk: int  # tokens
    softcap: float
    sums: bool = False
    expected: bool = False


def _statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    counted: Tensor,
    bias: Tensor | None,
    wanted: _Wanted,
) -> _Statistics:
    """Check the arguments, and return the statistics of all tokens' logits."""
    cap = as_float("softcap", wanted.softcap)
    if not cap >= 0:
        raise ValueError(f"softcap must be 0 or more, got {wanted.softcap}")
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if hidden.dtype not in DTYPES:
        raise ValueError(f"hidden must be fp64, fp32, bf16 or fp16, got {hidden.dtype}")
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        channels = hidden.shape[-1:].numel()
        raise ValueError(f"weight must be (V, {channels}), got {tuple(weight.shape)}")
    words = weight.shape[0]
    if bias is not None:
        _check_shape("bias", bias, (words,), "one number per word")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            raise ValueError(f"{name} must have hidden's dtype, {hidden.dtype}, got {x.dtype}")
    _check_shape("labels", labels, tuple(hidden.shape[:-1]), "one label per row of hidden")
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"labels must be int32 or int64, got {labels.dtype}")
    known = ~counted | ((labels >= 0) & (labels < words))
    if device == "cpu" and not known.all():
        wrong = labels[~known].flatten()[0].item()
        raise ValueError(f"labels must be from 0 to {words - 1} or ignore_index, got {wrong}")
    valid = torch.where(counted & known, labels, 0).long()
    results = _LogitStatistics.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        valid.reshape(-1),
        wanted._replace(chunk=as_int("chunk", wanted.chunk, 1), softcap=cap),
    )
    found = _Statistics(*(x.view(labels.shape) for x in results))
    return found._replace(label_logit=torch.where(known, found.label_logit, torch.nan))


class _LogitStatistics(torch.autograd.Function):
    """The statistics of the logits z = cap(hidden @ weight.T + bias), a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        wanted: _Wanted,
    ) -> tuple[Tensor, ...]:
        tokens, dtype = len(hidden), accumulator_dtype(hidden.dtype)
        found = _Statistics(*(hidden.new_zeros(tokens, dtype=dtype) for _ in range(4)))
        wide = _for_products(weight)
        for rows in _chunks(tokens, wanted.chunk):
            z = _logits(hidden[rows], wide, bias, wanted.softcap)
            log_sum_exp = z.logsumexp(1)
            found.log_sum_exp[rows] = log_sum_exp
            found.label_logit[rows] = z.gather(1, labels[rows, None])[:, 0]
            if wanted.sums:
                found.logit_sum[rows] = z.sum(1)
            if wanted.expected:
                found.expected_logit[rows] = _expected(z, (z - log_sum_exp[:, None]).exp_())
        kept = found.log_sum_exp, found.expected_logit
        ctx.save_for_backward(hidden, weight, bias, labels, *kept)
        ctx.wanted = wanted
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum_exp, expected_logit = ctx.saved_tensors
        wanted = ctx.wanted
        wide, dtype = _for_products(weight), log_sum_exp.dtype
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in _chunks(len(hidden), wanted.chunk):
            d_lse, d_label, d_sum, d_expected = (x[rows, None] for x in gradients)
            z = _logits(hidden[rows], wide, bias, wanted.softcap)
            # The derivative of log Σ exp(z) by z is softmax(z), that of the label's logit is 1 at
            # the label, that of Σ z is 1, and that of E = Σ softmax(z)·z is
            # softmax(z)·(1 + z − E).
            dz = (z - log_sum_exp[rows, None]).exp_()
            if wanted.expected:
                from_mean = torch.where(dz > 0, z - expected_logit[rows, None], 0)
                dz *= d_lse + d_expected * (1 + from_mean)
            else:
                dz *= d_lse
            if wanted.sums:
                dz += d_sum
            dz[torch.arange(len(dz), device=dz.device), labels[rows]] += d_label[:, 0]
            if wanted.softcap:
                dz *= 1 - (z / wanted.softcap).square_()
            narrow = dz.to(wide.dtype)
            if d_hidden is not None:
                d_hidden[rows] = _product(narrow, wide).to(hidden.dtype)
            if d_weight is not None:
                d_weight += _product(narrow.T, hidden[rows].to(wide.dtype))
            if d_bias is not None:
                d_bias += dz.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def _for_products(weight: Tensor) -> Tensor:
    """Return the weight in the dtype in which `_product` multiplies."""
    return weight if weight.is_cuda else weight.to(accumulator_dtype(weight.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, or fp64 for fp64. On a CPU, the operands are not bf16 or fp16."""
    with without_autocast(a):
        return torch.mm(a, b, out_dtype=torch.float32) if a.dtype in _HALF else a @ b


def _logits(hidden: Tensor, wide: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    z = _product(hidden.to(wide.dtype), wide.T)
    if bias is not None:
        z += bias
    return torch.tanh(z / softcap).mul_(softcap) if softcap else z


def _expected(z: Tensor, probabilities: Tensor) -> Tensor:
    """Return Σ p·z, where words of probability 0 may have the logit −inf."""
    return torch.where(probabilities > 0, probabilities * z, 0).sum(1)


def _check_tensors(hidden: Tensor, **others: Tensor | None) -> None:
    """Raise a ValueError that names an argument that is not a plain tensor on hidden's device."""
    for name, x in {"hidden": hidden, **others}.items():
        if x is None and name in ("bias", "token_weights"):
            continue
        check_tensor(name, x)
        assert x is not None
        if is_dtensor(x):
            way_out = "pass its local tensor, or compute the loss where FSDP has gathered it"
            raise ValueError(f"{name} must not be a DTensor: {way_out}")
        if x.device != hidden.device:
            expected = f"hidden's device, {hidden.device}"
            raise ValueError(f"{name} must be on {expected}, got {x.device}")


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {shape}, {what}, got {tuple(x.shape)}")
