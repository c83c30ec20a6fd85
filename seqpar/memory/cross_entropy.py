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
from seqpar.comm.agreement import check_on_all_ranks
from seqpar.comm.averaging import sum_of_ranks
from seqpar.comm.dtensor import is_dtensor
from seqpar.comm.messages.comm import Comm, Group
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
    logit_scale: float = 1.0,
    group: Group | None = None,
) -> Tensor:
    """Return the sum of the tokens' cross-entropies, and never hold tokens × vocabulary.

    This equals `torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")`. The
    logits, the losses and the sums of gradients are fp32, or fp64 for fp64. Labels are not shifted:
    `labels[i]` belongs to `hidden[i]`. Divide the sum by the number of labels of the whole batch.

    Backward recomputes each chunk's logits: with C channels and V words, a token takes 8·C·V FLOPs
    instead of 6·C·V. Between the passes, `hidden` and a few numbers per token are kept. Both passes
    hold at most four copies of one chunk's logits, 4·chunk·V bytes each. Backward also holds the
    weight's gradient in fp32.

    With `group`, the vocabulary is sharded by tensor parallelism: each rank of the group passes its
    rows of the weight, and all ranks pass the same `hidden` and `labels`. Every rank returns the
    whole loss. Backward sums the gradient of `hidden` over the ranks, with the same bits on every
    rank. Ranks first compare their arguments. Then each of P ranks sends 20·(P − 1) bytes per token
    in forward, and 8·C·(P − 1)/P bytes per token in backward. With fp64, it sends twice as many.

    Args:
        hidden: (..., C), fp64, fp32, bf16 or fp16; under autocast it is cast like arguments of
            `torch.nn.functional.linear`.
        weight: (V, C), the head's weight, in hidden's dtype. It may be tied to the embedding. With
            `group`, the rows of this rank's words: ranks hold the words in rank order, and may hold
            different numbers of words.
        labels: (...), int32 or int64, from 0 to V − 1, or `ignore_index`. A label out of this range
            raises an error on a CPU. On a GPU it makes the loss NaN, because an error would have to
            wait for the GPU.
        chunk: the number of tokens whose logits are held at a time.
        bias: (V,), added to the logits. With `group`, the bias of this rank's words.
        ignore_index: the label of tokens that are left out of the loss.
        token_weights: (...), the factor of each token's loss; it may have a gradient.
        softcap: a logit x becomes softcap·tanh(x/softcap), as in Gemma 2; 0 means none.
        label_smoothing: the fraction of the target that is spread evenly over all words, 0 to 1, as
            in `torch.nn.functional.cross_entropy`.
        z_loss: the factor of (log Σ exp(logits))², which is added to each token's loss, as in PaLM
            (Chowdhery et al., 2022, section 5).
        logit_scale: the factor of the logits, bias included, before the softcap.
        group: the ranks that share the vocabulary, a process group or a mesh; None: this rank has
            all words.

    Returns:
        A tensor of shape (), fp32, or fp64 for fp64. Gradients flow to `hidden`, `weight`, `bias`
        and `token_weights`; a second derivative raises a RuntimeError.

    Raises:
        ValueError: a shape, dtype, label or number does not fit, or a tensor is a DTensor. The
            message names the argument. With `group`, also if the arguments differ between ranks;
            all ranks then raise the same error. Labels that differ between ranks raise the error on
            a CPU, and make the loss NaN on a GPU.
    """
    smoothing, z_factor = as_float("label_smoothing", label_smoothing), as_float("z_loss", z_loss)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    head = _Head(hidden, weight, bias, labels, as_int("ignore_index", ignore_index))
    wanted = _Wanted.of(chunk, softcap, logit_scale, sums=smoothing > 0)
    found, words = _statistics(head, wanted, group, token_weights)
    losses = found.log_sum_exp - found.label_logit
    if smoothing:
        from_uniform = found.log_sum_exp - found.logit_sum / words
        losses = torch.lerp(losses, from_uniform, smoothing)
    if z_factor:
        losses = losses + z_factor * found.log_sum_exp.square()
    losses = torch.where(head.counted, losses, 0.0)
    if token_weights is not None:
        losses = losses * torch.where(head.counted, token_weights, 0)
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
    logit_scale: float = 1.0,
    group: Group | None = None,
) -> LogProbabilities:
    """Return each label's log-probability and each token's entropy, as losses of RL need them.

    Arguments, memory, gradients, messages and errors are those of `chunked_cross_entropy`. Both
    results are 0 for tokens whose label is `ignore_index`.
    """
    head = _Head(hidden, weight, bias, labels, as_int("ignore_index", ignore_index))
    wanted = _Wanted.of(chunk, softcap, logit_scale, expected=True)
    found, _ = _statistics(head, wanted, group)
    log_probability = found.label_logit - found.log_sum_exp
    entropy = found.log_sum_exp - found.expected_logit
    return LogProbabilities(
        torch.where(head.counted, log_probability, 0.0), torch.where(head.counted, entropy, 0.0)
    )


class _Head(NamedTuple):
    """The tensors of a head, as the user gave them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    ignore_index: int

    @property
    def counted(self) -> Tensor:
        return self.labels != self.ignore_index

    def check(self, words: int, token_weights: Tensor | None) -> None:
        """Raise a ValueError unless the tensors fit together and to a vocabulary of `words`."""
        hidden, weight, bias, labels, _ = self
        others = {"weight": weight, "labels": labels, "bias": bias, "token_weights": token_weights}
        _check_tensors(hidden, **others)
        if hidden.dtype not in DTYPES:
            raise ValueError(f"hidden must be fp64, fp32, bf16 or fp16, got {hidden.dtype}")
        if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            channels = hidden.shape[-1:].numel()
            raise ValueError(f"weight must be (V, {channels}), got {tuple(weight.shape)}")
        if weight.shape[0] == 0:
            raise ValueError("weight must have a row for at least one word, got none")
        if bias is not None:
            _check_shape("bias", bias, (weight.shape[0],), "one number per word")
        for name, x in (("weight", weight), ("bias", bias)):
            if x is not None and x.dtype != hidden.dtype:
                raise ValueError(f"{name} must have hidden's dtype, {hidden.dtype}, got {x.dtype}")
        _check_shape("labels", labels, tuple(hidden.shape[:-1]), "one label per row of hidden")
        if labels.dtype not in _INTEGERS:
            raise ValueError(f"labels must be int32 or int64, got {labels.dtype}")
        if token_weights is not None:
            shape = tuple(labels.shape)
            _check_shape("token_weights", token_weights, shape, "one number per label")
        known = self.known(words)
        if labels.device.type == "cpu" and not known.all():
            wrong = labels[~known].flatten()[0].item()
            raise ValueError(f"labels must be from 0 to {words - 1} or ignore_index, got {wrong}")

    def known(self, words: int) -> Tensor:
        """Return for each label whether it is a word or is ignored."""
        return ~self.counted | ((self.labels >= 0) & (self.labels < words))

    def in_dtype_of_autocast(self) -> _Head:
        if not isinstance(self.hidden, Tensor):
            return self
        device = self.hidden.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if not autocast or self.hidden.dtype == torch.float64:
            return self
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) else x

        hidden, weight, bias = map(cast, (self.hidden, self.weight, self.bias))
        return self._replace(hidden=hidden, weight=weight, bias=bias)


class _Statistics(NamedTuple):
    """Numbers of each token's logits z, with the labels' shape."""

    log_sum_exp: Tensor
    label_logit: Tensor
    logit_sum: Tensor  # Σ z; zeros unless it is wanted
    expected_logit: Tensor  # Σ softmax(z)·z; zeros unless it is wanted

    def over_ranks(self, labels: Tensor, comm: Comm) -> _Statistics:
        """Return the statistics of all ranks' words, from those of this rank's words.

        They are NaN for a label that differs between ranks.
        """
        own = torch.stack([*self, labels.to(self.log_sum_exp.dtype)])
        ranks = torch.stack(comm.all_gather(own.to(comm.device), label="vocabulary"))
        parts, label_logits, sums, expected, named = ranks.to(own.device).unbind(1)
        log_sum_exp = parts.logsumexp(0)
        likely = (parts - log_sum_exp).exp()
        equal = (named == named[0]).all(0)
        if labels.device.type == "cpu" and not equal.all():
            raise ValueError("labels must be the same on all ranks of group, got different ones")
        return _Statistics(
            torch.where(equal, log_sum_exp, torch.nan),
            label_logits.sum(0),
            sums.sum(0),
            torch.where(likely > 0, likely * expected, 0).sum(0),
        )


class _Wanted(NamedTuple):
    """Which statistics are computed, and how."""

    chunk: int  # tokens
    softcap: float
    scale: float
    sums: bool
    expected: bool

    @classmethod
    def of(
        cls, chunk: int, softcap: float, scale: float, sums: bool = False, expected: bool = False
    ) -> _Wanted:
        cap, factor = as_float("softcap", softcap), as_float("logit_scale", scale)
        if not 0 <= cap < torch.inf:
            raise ValueError(f"softcap must be 0 or more, and finite, got {softcap}")
        if not abs(factor) < torch.inf:
            raise ValueError(f"logit_scale must be finite, got {scale}")
        return cls(as_int("chunk", chunk, 1), cap, factor, sums, expected)


def _statistics(
    head: _Head, wanted: _Wanted, group: Group | None, token_weights: Tensor | None = None
) -> tuple[_Statistics, int]:
    """Check the arguments; return the statistics of all tokens' logits, and the number of words."""
    head = head.in_dtype_of_autocast()
    comm = None if group is None else Comm.of(group)
    first, words = _first_word(head.weight, comm)

    def check() -> None:
        head.check(words, token_weights)

    def described(_: bool) -> dict[str, object]:
        known = isinstance(head.hidden, Tensor)
        shape = (list(head.hidden.shape), str(head.hidden.dtype)) if known else None
        gradient = known and torch.is_grad_enabled() and head.hidden.requires_grad
        return {
            "hidden": shape,
            "hidden.requires_grad": gradient,  # if so, its gradients are sent in backward
            "ignore_index": head.ignore_index,
            "options": list(wanted),
        }

    if comm is None:
        check()
    else:
        check_on_all_ranks(comm.call(), "chunked cross-entropy", check, described)
    hidden, weight, bias, labels, _ = head
    known = head.known(words)
    of_rank = labels.long() - first
    owned = head.counted & (of_rank >= 0) & (of_rank < weight.shape[0])
    results = _LogitStatistics.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        (torch.where(owned, of_rank, 0).reshape(-1), owned.reshape(-1), labels.reshape(-1)),
        wanted,
        comm,
    )
    found = _Statistics(*(x.view(labels.shape) for x in results))
    label_logit = torch.where(known, found.label_logit, torch.nan)
    return found._replace(label_logit=label_logit), words


def _first_word(weight: Tensor, comm: Comm | None) -> tuple[int, int]:
    """Return the number of this rank's first word, and the number of words of all ranks."""
    words = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 0
    if comm is None:
        return 0, words
    own = torch.tensor([words], device=comm.device)
    all_words = [int(x) for x in comm.all_gather(own, label="vocabulary")]
    return sum(all_words[: comm.rank]), sum(all_words)


class _LogitStatistics(torch.autograd.Function):
    """The statistics of the logits z = cap(hidden @ weight.T + bias), a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: tuple[Tensor, Tensor, Tensor],
        wanted: _Wanted,
        comm: Comm | None,
    ) -> tuple[Tensor, ...]:
        # Rows of the weight, whether the rank has them, and the labels as the user gave them
        own_labels, owned, given = labels
        tokens, dtype = len(hidden), accumulator_dtype(hidden.dtype)
        found = _Statistics(*(hidden.new_zeros(tokens, dtype=dtype) for _ in range(4)))
        wide = _for_products(weight)
        for rows in _chunks(tokens, wanted.chunk):
            z = _logits(hidden[rows], wide, bias, wanted)
            log_sum_exp = z.logsumexp(1)
            found.log_sum_exp[rows] = log_sum_exp
            picked = z.gather(1, own_labels[rows, None])[:, 0]
            found.label_logit[rows] = torch.where(owned[rows], picked, 0)
            if wanted.sums:
                found.logit_sum[rows] = z.sum(1)
            if wanted.expected:
                found.expected_logit[rows] = _expected(z, (z - log_sum_exp[:, None]).exp_())
        if comm is not None:
            found = found.over_ranks(given, comm)
        kept = found.log_sum_exp, found.expected_logit
        ctx.save_for_backward(hidden, weight, bias, own_labels, owned, *kept)
        ctx.wanted, ctx.comm = wanted, comm
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, owned, log_sum_exp, expected_logit = ctx.saved_tensors
        wanted, comm = ctx.wanted, ctx.comm
        wide, dtype = _for_products(weight), log_sum_exp.dtype
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in _chunks(len(hidden), wanted.chunk):
            d_lse, d_label, d_sum, d_expected = (x[rows, None] for x in gradients)
            z = _logits(hidden[rows], wide, bias, wanted)
            # The derivative of log Σ exp(z) by z is softmax(z), that of the label's logit is 1 at
            # the label, that of Σ z is 1, and that of E = Σ softmax(z)·z is
            # softmax(z)·(1 + z − E).
            reads_z = wanted.expected or wanted.softcap
            dz = (
                z - log_sum_exp[rows, None] if reads_z else z.sub_(log_sum_exp[rows, None])
            ).exp_()
            if wanted.expected:
                from_mean = torch.where(dz > 0, z - expected_logit[rows, None], 0)
                dz *= d_lse + d_expected * (1 + from_mean)
            else:
                dz *= d_lse
            if wanted.sums:
                dz += d_sum
            at_label = torch.where(owned[rows], d_label[:, 0], 0)
            dz[torch.arange(len(dz), device=dz.device), labels[rows]] += at_label
            if wanted.softcap:
                dz *= 1 - (z / wanted.softcap).square_()
            if wanted.scale != 1:
                dz *= wanted.scale
            narrow = dz.to(wide.dtype)
            if d_hidden is not None:
                d_rows = _product(narrow, wide)
                if comm is not None:
                    d_rows = _over_ranks(d_rows, comm)
                d_hidden[rows] = d_rows.to(hidden.dtype)
            if d_weight is not None:
                d_weight += _product(narrow.T, hidden[rows].to(wide.dtype))
            if d_bias is not None:
                d_bias += dz.sum(0)
            del z, dz, narrow  # before the next chunk's logits
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def _for_products(weight: Tensor) -> Tensor:
    """Return the weight in the dtype in which `_product` multiplies."""
    return weight if weight.is_cuda else weight.to(accumulator_dtype(weight.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, or fp64 for fp64. On a CPU, the operands are not bf16 or fp16."""
    with without_autocast(a):
        return torch.mm(a, b, out_dtype=torch.float32) if a.dtype in _HALF else a @ b


def _over_ranks(x: Tensor, comm: Comm) -> Tensor:
    return sum_of_ranks(x.reshape(-1).to(comm.device), comm).to(x.device).view(x.shape)


def _logits(hidden: Tensor, wide: Tensor, bias: Tensor | None, wanted: _Wanted) -> Tensor:
    z = _product(hidden.to(wide.dtype), wide.T)
    if bias is not None:
        z += bias
    if wanted.scale != 1:
        z *= wanted.scale
    return torch.tanh(z / wanted.softcap).mul_(wanted.softcap) if wanted.softcap else z


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
