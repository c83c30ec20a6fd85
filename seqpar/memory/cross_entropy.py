"""Losses and log-probabilities of a language model's head, computed for one chunk of tokens at a
time.

The logits of a million tokens over 152,000 words would take 637 GB in fp32. Here, only the logits
of one chunk exist at a time, in forward and again in backward. A loss needs four numbers for each
token's logits z: log Σ exp(z), the label's logit, Σ z, and Σ softmax(z)·z. `_LogitStatistics`
computes these numbers and their derivatives. Every loss is computed from these four numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.attention.operators import without_autocast
from seqpar.comm.agreement import attempt, compare_calls
from seqpar.comm.averaging import sum_of_ranks
from seqpar.comm.dtensor import is_dtensor
from seqpar.comm.messages.comm import Comm, Group
from seqpar.core.arguments import as_float, as_int, check_tensor
from seqpar.core.dtypes import DTYPES, accumulator_dtype

_INTEGERS = (torch.int32, torch.int64)
_HALF = (torch.bfloat16, torch.float16)


class LogProbabilities(NamedTuple):
    """The log-probability of each token's label, and the entropy of each token. The dtype is fp32,
    or fp64 if `hidden` is fp64.
    """

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
    """Return the sum of the tokens' cross-entropies, without holding the logits of all tokens.

    This equals `torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")`.
    Logits, losses and sums of gradients are fp32, or fp64 if `hidden` is fp64. Labels are not
    shifted: `labels[i]` belongs to `hidden[i]`. For a mean, divide the sum by the number of labels
    of the whole batch.

    Backward recomputes each chunk's logits. With C channels and V words, both passes together then
    take 8·C·V FLOPs per token, instead of 6·C·V. Between the passes, `hidden` and a few numbers per
    token are kept. Each pass holds at most four copies of one chunk's logits, each of 4·chunk·V
    bytes. Backward also holds the gradient of the weight in fp32, and the gradient from one chunk,
    which is added to it.

    With `group`, the vocabulary is sharded by tensor parallelism. Each rank of the group passes its
    rows of the weight, and all ranks pass the same `hidden`, `labels` and `token_weights`. Every
    rank returns the whole loss. Backward sums the gradient of `hidden` over the ranks, with the
    same bits on every rank.

    With `group`, ranks first compare their arguments. Then each of the P ranks sends 20·(P − 1)
    bytes per token in forward, or 24·(P − 1) bytes with `token_weights`. In backward, it sends
    8·C·(P − 1)/P bytes per token. If `hidden` is fp64, all these numbers are twice as large.

    Args:
        hidden: (..., C), fp64, fp32, bf16 or fp16. Autocast casts it as it casts the arguments of
            `torch.nn.functional.linear`.
        weight: (V, C), in hidden's dtype. The head's weight, which can be tied to the embedding.
            With `group`, the rows of this rank's words. The words are divided in rank order, and
            ranks can have different numbers of words.
        labels: (...), int32 or int64, from 0 to V − 1, or `ignore_index`. A label outside this
            range raises an error on a CPU. On a GPU, it makes the loss NaN, because checking for an
            error would have to wait for the GPU.
        chunk: the number of tokens whose logits are held at a time.
        bias: (V,), added to the logits. With `group`, the bias of this rank's words.
        ignore_index: the label of tokens that are left out of the loss.
        token_weights: (...), the factor of each token's loss. Gradients are computed if it requires
            them.
        softcap: if above 0, a logit x becomes softcap·tanh(x/softcap), as in Gemma 2.
        label_smoothing: the fraction of the target that is spread evenly over all words, 0 to 1, as
            in `torch.nn.functional.cross_entropy`.
        z_loss: the factor of (log Σ exp(logits))², which is added to each token's loss, as in PaLM
            (Chowdhery et al., 2022, section 5).
        logit_scale: the factor of the logits, bias included, before the softcap.
        group: the ranks among which the vocabulary is divided, as a process group or a mesh. None
            if this rank has all words.

    Returns:
        A tensor of shape () in fp32 (fp64 for fp64). Gradients flow to `hidden`, `weight`, `bias`
        and `token_weights`. A second derivative raises a RuntimeError.

    Raises:
        ValueError: if a shape, dtype, label or number is wrong, or a tensor is a DTensor. The
            message names the argument. With `group`, also if arguments differ between ranks; all
            ranks then raise the same error. If the contents of `labels` or `token_weights` differ
            between ranks, this raises the error on a CPU, and makes the loss NaN on a GPU. The
            contents of `hidden` are not compared.
    """
    head = _Head(hidden, weight, bias, labels, token_weights)
    given = _Options(ignore_index, chunk, softcap, logit_scale, label_smoothing, z_loss)
    found, options, words = _statistics(head, given, group)
    counted = labels != options.ignore_index
    losses = found.log_sum_exp - found.label_logit
    if options.label_smoothing:
        from_uniform = found.log_sum_exp - found.logit_sum / words
        losses = torch.lerp(losses, from_uniform, options.label_smoothing)
    if options.z_loss:
        losses = losses + options.z_loss * found.log_sum_exp.square()
    losses = torch.where(counted, losses, 0.0)
    if token_weights is not None:
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
    logit_scale: float = 1.0,
    group: Group | None = None,
) -> LogProbabilities:
    """Return each label's log-probability and each token's entropy, for losses of reinforcement
    learning.

    Arguments, memory, gradients, messages and errors are those of `chunked_cross_entropy`. Both
    results are 0 for tokens whose label is `ignore_index`.
    """
    given = _Options(ignore_index, chunk, softcap, logit_scale, entropy=True)
    found, options, _ = _statistics(_Head(hidden, weight, bias, labels), given, group)
    counted = labels != options.ignore_index
    log_probability = found.label_logit - found.log_sum_exp
    entropy = found.log_sum_exp - found.expected_logit
    return LogProbabilities(
        torch.where(counted, log_probability, 0.0), torch.where(counted, entropy, 0.0)
    )


class _Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    token_weights: Tensor | None = None

    def check(self, words: int, ignore_index: int) -> None:
        """Raise a ValueError unless the tensors fit each other and a vocabulary of `words`
        words.
        """
        hidden, weight, bias, labels, token_weights = self
        others = {"weight": weight, "labels": labels, "bias": bias, "token_weights": token_weights}
        _check_tensors(hidden, **others)
        if hidden.dtype not in DTYPES:
            raise ValueError(f"hidden must be fp64, fp32, bf16 or fp16, got {hidden.dtype}")
        if hidden.dim() < 1:
            raise ValueError("hidden must be (..., C), got ()")
        if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            raise ValueError(f"weight must be (V, {hidden.shape[-1]}), got {tuple(weight.shape)}")
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
        known = self.known(words, ignore_index)
        if labels.device.type == "cpu" and not known.all():
            wrong = labels[~known].flatten()[0].item()
            raise ValueError(f"labels must be from 0 to {words - 1} or ignore_index, got {wrong}")

    def known(self, words: int, ignore_index: int) -> Tensor:
        """Return, for each label, whether the label is either one of the `words` words or
        `ignore_index`.
        """
        is_word = (self.labels >= 0) & (self.labels < words)
        return is_word | (self.labels == ignore_index)

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

    def over_ranks(self, shared: dict[str, Tensor], comm: Comm) -> _Statistics:
        """Return the statistics over the words of all ranks. The object itself has the statistics
        over the words of this rank.

        `shared` maps names to tensors that must be equal on all ranks. If a tensor differs between
        ranks for a token, the token's statistics are NaN.
        """
        dtype = self.log_sum_exp.dtype
        own = torch.stack([*self, *(x.to(dtype) for x in shared.values())])
        ranks = torch.stack(comm.all_gather(own.to(comm.device), label="vocabulary"))
        parts, label_logits, sums, expected, *compared = ranks.to(own.device).unbind(1)
        log_sum_exp = parts.logsumexp(0)
        likely = (parts - log_sum_exp).exp()
        for name, x in zip(shared, compared, strict=True):
            equal = x.isclose(x[:1], rtol=0, atol=0, equal_nan=True).all(0)
            if x.device.type == "cpu" and not equal.all():
                raise ValueError(
                    f"{name} must be the same on all ranks of group, got different values"
                )
            log_sum_exp = torch.where(equal, log_sum_exp, torch.nan)
        return _Statistics(
            log_sum_exp,
            label_logits.sum(0),
            sums.sum(0),
            torch.where(likely > 0, likely * expected, 0).sum(0),
        )


class _Options(NamedTuple):
    """The numbers among a call's arguments, and whether the call needs the entropy."""

    ignore_index: int
    chunk: int  # tokens
    softcap: float
    logit_scale: float
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy: bool = False

    def checked(self) -> _Options:
        """Return the options as numbers, or raise a ValueError that names a wrong option."""
        options = self._replace(
            ignore_index=as_int("ignore_index", self.ignore_index),
            chunk=as_int("chunk", self.chunk, 1),
            softcap=as_float("softcap", self.softcap),
            logit_scale=as_float("logit_scale", self.logit_scale),
            label_smoothing=as_float("label_smoothing", self.label_smoothing),
            z_loss=as_float("z_loss", self.z_loss),
        )
        if not 0 <= options.softcap < torch.inf:
            raise ValueError(f"softcap must be 0 or more, and finite, got {self.softcap}")
        for name in ("logit_scale", "z_loss"):
            if not abs(getattr(options, name)) < torch.inf:
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if not 0 <= options.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {self.label_smoothing}")
        return options


def _statistics(
    head: _Head, given: _Options, group: Group | None
) -> tuple[_Statistics, _Options, int]:
    """Check the arguments, and return the statistics of all logits, the options and the number of
    words.
    """
    head = head.in_dtype_of_autocast()
    comm = None if group is None else Comm.of(group)
    first, words = _first_word(head.weight, comm)

    def resolve() -> _Options:
        options = given.checked()
        head.check(words, options.ignore_index)
        return options

    if comm is None:
        options = resolve()
    else:
        options, fault = attempt(resolve)
        described = _described(head, options)
        compare_calls(comm.call(), "chunked cross-entropy", fault, lambda _: described)
    hidden, weight, bias, labels, token_weights = head
    known = head.known(words, options.ignore_index)
    counted = labels != options.ignore_index
    of_rank = labels.long() - first
    owned = counted & (of_rank >= 0) & (of_rank < weight.shape[0])
    shared: dict[str, Tensor] = {}
    if comm is not None:
        shared["labels"] = labels.reshape(-1)
        if token_weights is not None:
            counted_weights = torch.where(counted, token_weights.detach(), 0)
            shared["token_weights"] = counted_weights.reshape(-1)
    results = _LogitStatistics.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        (torch.where(owned, of_rank, 0).reshape(-1), owned.reshape(-1), shared),
        options,
        comm,
    )
    found = _Statistics(*(x.view(labels.shape) for x in results))
    label_logit = torch.where(known, found.label_logit, torch.nan)
    return found._replace(label_logit=label_logit), options, words


def _described(head: _Head, options: _Options | None) -> dict[str, object]:
    """Return the properties of a call that must be equal on all ranks. If an option is wrong,
    `options` is None.
    """
    hidden, known = head.hidden, isinstance(head.hidden, Tensor)
    described: dict[str, object] = {} if options is None else options._asdict()
    described["hidden"] = (list(hidden.shape), str(hidden.dtype)) if known else None
    # Ranks must agree on this, because gradients of `hidden` are sent in backward.
    described["hidden.requires_grad"] = known and torch.is_grad_enabled() and hidden.requires_grad
    for name in ("bias", "token_weights"):
        described[name] = None if getattr(head, name) is None else "given"
    return described


def _first_word(weight: Tensor, comm: Comm | None) -> tuple[int, int]:
    words = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 0
    if comm is None:
        return 0, words
    own = torch.tensor([words], device=comm.device)
    all_words = [int(x) for x in comm.all_gather(own, label="vocabulary")]
    return sum(all_words[: comm.rank]), sum(all_words)


class _LogitStatistics(torch.autograd.Function):
    """The statistics of the logits z = cap(hidden @ weight.T + bias), computed one chunk at a
    time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: tuple[Tensor, Tensor, dict[str, Tensor]],
        options: _Options,
        comm: Comm | None,
    ) -> tuple[Tensor, ...]:
        # The labels as rows of this rank's weight, whether this rank has these rows, and the
        # tensors that must be equal on all ranks.
        own_labels, owned, shared = labels
        tokens, dtype = len(hidden), accumulator_dtype(hidden.dtype)
        found = _Statistics(*(hidden.new_zeros(tokens, dtype=dtype) for _ in range(4)))
        wide = _for_products(weight)
        for rows in _chunks(tokens, options.chunk):
            z = _logits(hidden[rows], wide, bias, options)
            log_sum_exp = z.logsumexp(1)
            found.log_sum_exp[rows] = log_sum_exp
            picked = z.gather(1, own_labels[rows, None])[:, 0]
            found.label_logit[rows] = torch.where(owned[rows], picked, 0)
            if options.label_smoothing:
                found.logit_sum[rows] = z.sum(1)
            if options.entropy:
                found.expected_logit[rows] = _expected(z, (z - log_sum_exp[:, None]).exp_())
        if comm is not None:
            found = found.over_ranks(shared, comm)
        kept = found.log_sum_exp, found.expected_logit
        ctx.save_for_backward(hidden, weight, bias, own_labels, owned, *kept)
        ctx.options, ctx.comm = options, comm
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, owned, log_sum_exp, expected_logit = ctx.saved_tensors
        options, comm = ctx.options, ctx.comm
        wide, dtype = _for_products(weight), log_sum_exp.dtype
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in _chunks(len(hidden), options.chunk):
            d_lse, d_label, d_sum, d_expected = (x[rows, None] for x in gradients)
            z = _logits(hidden[rows], wide, bias, options)
            # Derivatives by z: softmax(z) for log Σ exp(z); 1 at the label for the label's logit; 1
            # for Σ z; and softmax(z)·(1 + z − E) for E = Σ softmax(z)·z.
            reads_z = options.entropy or options.softcap
            dz = (
                z - log_sum_exp[rows, None] if reads_z else z.sub_(log_sum_exp[rows, None])
            ).exp_()
            if options.entropy:
                from_mean = torch.where(dz > 0, z - expected_logit[rows, None], 0)
                dz *= d_lse + d_expected * (1 + from_mean)
            else:
                dz *= d_lse
            if options.label_smoothing:
                dz += d_sum
            at_label = torch.where(owned[rows], d_label[:, 0], 0)
            dz[torch.arange(len(dz), device=dz.device), labels[rows]] += at_label
            if options.softcap:
                dz *= 1 - (z / options.softcap).square_()
            if options.logit_scale != 1:
                dz *= options.logit_scale
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
            del z, dz, narrow  # frees memory before the next chunk's logits are computed
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def _for_products(weight: Tensor) -> Tensor:
    return weight if weight.is_cuda else weight.to(accumulator_dtype(weight.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32 (fp64 for fp64). On a CPU, the operands must not be bf16 or fp16."""
    with without_autocast(a):
        return torch.mm(a, b, out_dtype=torch.float32) if a.dtype in _HALF else a @ b


def _over_ranks(x: Tensor, comm: Comm) -> Tensor:
    return sum_of_ranks(x.reshape(-1).to(comm.device), comm).to(x.device).view(x.shape)


def _logits(hidden: Tensor, wide: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    z = _product(hidden.to(wide.dtype), wide.T)
    if bias is not None:
        z += bias
    if options.logit_scale != 1:
        z *= options.logit_scale
    return torch.tanh(z / options.softcap).mul_(options.softcap) if options.softcap else z


def _expected(z: Tensor, probabilities: Tensor) -> Tensor:
    """Return Σ p·z. Words with the logit −inf, whose probability is 0, contribute 0."""
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
