"""Name the fault that explains a first difference, by one small rule for each known fault.

A rule looks at which tokens, ranks or parameters differ. It returns a sentence, or None if the
differences have a different pattern. `RULES` lists the rules. Each rule has a list of stages
(`Finding.stage`), and can explain a first difference in one of these stages. `diagnose` tries the
rules in the order of the list. Rules with direct evidence, such as unequal weights, come before
rules that judge by the tokens that differ. The first recording is assumed to be right.

The docstring of a rule describes the pattern that the rule recognises. A *rank border* is a
position in a row whose token is on a different rank than the previous token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.parity.evidence import Bools, Evidence, Finding
from seqpar.parity.joining import Floats
from seqpar.parity.losses import IGNORED

# Fraction of the affected tokens that must differ; rounding can hide some differences.
_NEARLY_ALL = 0.9


def diagnose(evidence: Evidence) -> str | None:
    """Return the sentence of the first rule that explains the first difference, or None."""
    first = evidence.first
    if first is None:
        return None
    found = (rule(evidence, first) for rule, stages in RULES if first.stage in stages)
    return next((text for text in found if text is not None), None)


def weights_at_the_start(evidence: Evidence, first: Finding) -> str | None:
    differing = [x for x in evidence.of_stage("weight before") if x.is_real]
    who = evidence.b.name
    holders = evidence.b.parameters("weights.before")[first.name]
    expected = evidence.a.parameters("weights.before")[first.name][0][1]
    others = [rank for rank, x in holders if not np.allclose(x, expected, rtol=1e-12)]
    if len(others) < len(holders):
        who = f"rank {others[0]} of {who}"
    return (
        f"Different weights at the start: {first.name} is the first of {len(differing)} in {who}."
    )


def positions(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if the `position_ids` differ, or if each rank has computed its tokens as
    if they were the first tokens of the sequence.
    """
    assert first.first_token is not None
    token = first.first_token % evidence.shape[1]
    where = "at" if _from_a_border(evidence, first.differing) is None else "from a rank border on"
    if first.stage == "input":
        x, y = (run.joined_input("position_ids") for run in (evidence.a, evidence.b))
        assert x is not None and y is not None
        old, new = x.ravel()[first.first_token], y.ravel()[first.first_token]
        found = f"has position {new} in {evidence.b.name} and {old} in {evidence.a.name}"
    elif _restarts(evidence, first):
        found = f"gets from {first.name} what the start of the sequence gets in {evidence.a.name}"
    else:
        return None
    return f"Positions differ {where}: token {token}, on rank {first.first_rank}, {found}."


def _restarts(evidence: Evidence, first: Finding) -> bool:
    """Return whether the output of every rank equals the output of the reference for the first
    tokens of the sequence.
    """
    assert first.key is not None
    reference = evidence.a.joined(evidence.a.parts(first.key))
    tokens, found = evidence.shape[1], False
    for part in evidence.b.parts(first.key):
        rows = part.places // tokens
        _, starts, numbers = np.unique(rows, return_index=True, return_inverse=True)
        local = np.arange(rows.size) - starts[numbers]  # a rank stores its rows one after another
        at_start = reference[rows * tokens + local]
        length = np.sqrt(np.mean(np.square(part.values - at_start)[:, 2:], 1))
        if not (length <= first.bound * np.abs(at_start[:, 0]).max(initial=0)).all():
            return False
        found |= bool(first.differing[part.places].any())
    return found


def documents(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if all tokens of the first document agree and the first token of every
    later document differs.
    """
    starts = evidence.document_starts
    differing = _by_row(evidence, first)
    if starts.sum() == evidence.shape[0]:
        return None
    later = np.cumsum(starts, 1) > 1
    later_starts = starts & later & ~_ignored(evidence)
    if differing[~later].any() or not later_starts.any() or not differing[later_starts].all():
        return None
    token = int(np.argwhere(later_starts)[0][1])
    return (
        f"Documents leak into each other: in {first.name}, every document but the first differs "
        f"from its first token on (token {token} is the first). In one run, it attends to the "
        "documents before it."
    )


def window(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if, in each document, all tokens from the same position on differ, and
    this position is not where the tokens of a different rank begin.
    """
    differing = _by_row(evidence, first)
    position = _positions_in_documents(evidence)
    size = int(position[differing].min())
    reached = (position >= size) & ~_ignored(evidence)
    at_border = _from_a_border(evidence, differing.ravel()) is not None
    if size < 2 or at_border or differing[reached].mean() < _NEARLY_ALL:
        return None
    return (
        f"A window is missing: in {first.name}, the tokens from position {size} of their document "
        f"on differ, and earlier tokens agree. One run attends to the last {size} tokens only."
    )


def attention(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if all tokens except the first token of each document differ."""
    differing = _by_row(evidence, first)
    alone = _positions_in_documents(evidence) == 0
    others = ~alone & ~_ignored(evidence)
    if differing[alone].any() or not others.any() or differing[others].mean() < _NEARLY_ALL:
        return None
    keys = ""
    if _from_a_border(evidence, differing.ravel()) is not None:
        keys = ", or the keys of other ranks do not reach it"
    return (
        f"Attention differs: in {first.name}, all tokens differ but the first of each document, "
        "which attends only to itself. The scores have a different scale, cap or bias, or the "
        f"softmax has a different precision{keys}."
    )


def padding(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if only rows that contain padding differ."""
    differing = _by_row(evidence, first)
    ignored = _ignored(evidence)
    with_padding, with_difference = ignored.any(1), differing.any(1)
    if not with_padding.any() or with_padding.all() or (with_difference & ~with_padding).any():
        return None
    row = int(np.argmax(with_difference))
    return (
        f"Padding is attended to: in {first.name}, only rows with padding differ "
        f"(row {row} has {int(ignored[row].sum())} tokens of padding)."
    )


def not_finite(evidence: Evidence, first: Finding) -> str | None:
    if np.isfinite(first.error):
        return None
    return f"Infinite or NaN values are in one run only: {first.name} is the first with them."


def routing(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if every token that differs has two experts whose scores are equal up to
    rounding.
    """
    assert first.key is not None
    differing = _by_row(evidence, first)
    for key, x in evidence.a.outputs.items():
        parent = key[1].rpartition(".")[0]
        if not x["router"] or key[0] != first.key[0] or not first.key[1].startswith(parent):
            continue
        old, new = (run.joined(run.parts(key, "full")) for run in (evidence.a, evidence.b))
        if old.shape != new.shape or np.isnan(old).all() or np.isnan(new).all():
            continue
        if _tie(old, new)[differing.ravel()].all():
            count = int(differing.sum())
            return (
                f"MoE routing differs from rounding: each of the {count} tokens that differ in "
                f"{first.name} has scores in {key[1]} that tie within rounding, so it chooses "
                "a different expert."
            )
    return None


def _tie(old: Floats, new: Floats) -> Bools:
    """Return (tokens,): whether rounding can have changed the order of a token's best scores."""
    noise = 4 * np.abs(new - old).max(1)
    order = np.argsort(-old, 1)
    gaps = -np.diff(np.take_along_axis(old, order, 1), axis=1)
    swapped = (np.argsort(-new, 1) != order).any(1)
    result: Bools = swapped & (gaps.min(1) <= noise)
    return result


def dropout(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if the module that differs first drops elements or draws random
    numbers.
    """
    assert first.key is not None
    runs = evidence.a, evidence.b
    seen = [[r.outputs[first.key] for r in x.ranks if first.key in r.outputs] for x in runs]
    drops = [max(x["drops"] for x in outputs) for outputs in seen]
    if drops[0] != drops[1]:
        return (
            f"Dropout: {first.name} drops with probability {drops[0]:g} in {evidence.a.name} and "
            f"{drops[1]:g} in {evidence.b.name}."
        )
    if drops[0] > 0:
        return (
            f"Dropout: {first.name} drops different elements in each run; set its probability to "
            "0 to compare."
        )
    if not any(x["draws"] for outputs in seen for x in outputs):
        return None
    return (
        f"Dropout: {first.name}, or the code before it, draws random numbers, which differ between "
        "the runs; turn dropout off to compare."
    )


def one_rank(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if all tokens of one rank differ and the tokens of all other ranks
    agree.
    """
    assert first.errors is not None
    if len(evidence.b.ranks) < 2 or _from_a_border(evidence, first.differing) is not None:
        return None
    compared = np.isfinite(first.errors) | np.isinf(first.errors)
    rank_of = evidence.b.rank_of.ravel()
    rank = first.first_rank
    others = compared & (rank_of != rank)
    own = compared & (rank_of == rank)
    if not own.any() or not others.any() or first.differing[others].any():
        return None
    if first.differing[own].mean() < _NEARLY_ALL:
        return None
    return (
        f"Only one rank differs: all tokens of rank {rank} in {first.name}, and none of the other "
        f"{len(evidence.b.ranks) - 1}. Compare its software, its environment and its device."
    )


def border(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if the tokens before the first rank border agree and each later rank has
    tokens that differ. A rank border is a position whose token is on a different rank than the
    previous token.
    """
    found = _from_a_border(evidence, first.differing)
    if found is None:
        return None
    return (
        f"Tokens differ from a rank border on: {first.name} agrees up to token {found - 1} and "
        f"differs from token {found}, the first of rank {first.first_rank}. The keys of earlier "
        "ranks do not reach it, or positions that are computed inside the module restart."
    )


def label_shift(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if labels differ only at tokens whose next token is on a different rank.
    Labels that were shifted after the batch was cut differ in this way.

    If only the numbers of labels are known, the number of labels that are missing in the second run
    must be at most the number of such tokens.
    """
    if first.errors is None:
        assert first.values is not None
        lost = first.values[0] - first.values[1]
        ends = sum(int(_ends(rank.places).sum()) for rank in evidence.b.ranks)
        if not 0 < lost <= ends:
            return None
        return (
            f"Labels are shifted within shards: {lost:g} labels are missing, and {ends} tokens are "
            "the last of a piece. Shift labels before the batch is cut."
        )
    last = np.zeros(evidence.a.tokens, bool)
    for rank in evidence.b.ranks:
        last[rank.places[_ends(rank.places)]] = True
    differing = first.differing
    if not differing.any() or (differing & ~last).any():
        return None
    token = first.first_token
    assert token is not None
    labels = [run.joined(run.labels())[token, 0] for run in (evidence.a, evidence.b)]
    old, new = ("none" if x == IGNORED else f"{x:.0f}" for x in labels)
    return (
        f"Labels are shifted within shards: token {token % evidence.shape[1]}, the last of a piece "
        f"on rank {first.first_rank}, has label {new} in place of {old}, the next token, which is "
        "on another rank. Shift labels before the batch is cut."
    )


def _ends(places: Ints) -> Bools:
    """Return (rows, tokens): whether a rank's token is the last one of consecutive tokens of the
    sequence.
    """
    ends = np.ones(places.shape, bool)
    ends[:, :-1] = np.diff(places, axis=1) != 1
    return ends & (places >= 0)


def local_divisor(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if each rank has divided the sum of its losses by its own number of
    labels.
    """
    run = evidence.b
    counts, losses = evidence.label_counts(run), evidence.losses(run)
    if not counts or not losses or not sum(counts) or run.copies:
        return None
    labelled = [i for i, n in enumerate(counts) if n]
    limit = max(1e-5, 4 * evidence.coarsest)  # limit of the relative error of a loss
    numbers = [counts[i] for i in labelled]
    if 0 not in counts and max(numbers) / min(numbers) - 1 <= 4 * limit:
        return None
    sums = evidence.token_loss_sums(run)
    if sums is not None:
        factors = [losses[i] * counts[i] / sums[i] for i in labelled if sums[i]]
        alike = bool(factors) and max(factors) - min(factors) <= limit * max(factors)
        if not alike or not _near_count(evidence, factors[0]):
            return None
    else:
        expected = evidence.losses(evidence.a)
        weighted = sum(losses[i] * counts[i] for i in labelled) / sum(counts)
        mean = sum(expected) / len(expected) if expected else np.nan
        if not abs(weighted - mean) <= 1e-3 * abs(mean):
            return None
    shown = ", ".join(f"{x:.0f}" for x in counts[:8]) + (", …" if len(counts) > 8 else "")
    return (
        f"The loss is divided by local tokens: each rank of {run.name} divides by its own number "
        f"of labels ({shown}) instead of by {sum(counts):.0f}."
    )


def scaled_loss(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if the loss is the loss of the first run, multiplied or divided by a
    number of ranks.
    """
    if first.values is None or not first.values[0] or not evidence.agree("output", "label"):
        return None
    old, new = first.values
    found = _number_of_ranks(evidence, new / old, max(4 * first.bound, 1e-6))
    if found is None:
        return None
    divisors = next((x.values for x in evidence.of_stage("loss") if "divides" in x.name), None)
    text = f"The loss is scaled by {found.what}: it is {found.times} times that of"
    text += f" {evidence.a.name}"
    if divisors is not None:
        text += f", because it is divided by {divisors[1]:.0f} instead of by {divisors[0]:.0f}"
    if not evidence.of_stage("gradient"):
        return f"{text}."
    if evidence.agree("gradient"):
        return f"{text}. The gradients agree, so only the reported loss is wrong."
    return f"{text}. Gradients differ as a consequence."


def missing_gradient(evidence: Evidence, first: Finding) -> str | None:
    if np.isfinite(first.error):
        return None
    runs = evidence.a, evidence.b
    without = [x for x in runs if np.isnan(x.parameters("gradients")[first.name][0][1][0])]
    if len(without) != 1:
        return None
    return f"A gradient is missing: {first.name} has none in {without[0].name}."


def tied_weights(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if only the gradients of tied weights differ."""
    differing = [x.name for x in evidence.of_stage("gradient") if x.is_real]
    tied = {x["name"]: x["tied"] for x in evidence.b.content["parameters"] if x["tied"]}
    agree = [x for x in evidence.of_stage("gradient") if not x.is_real]
    if not agree or not set(differing) <= set(tied):
        return None
    name = differing[0]
    factor = _factors(evidence, name)
    return (
        f"A tied weight is counted twice: of all gradients, only that of {name} differs, which "
        f"is also {', '.join(tied[name])}: it is {factor[0]:.3g} times as large."
    )


def own_tokens(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if the ranks have different gradients, and their sum is the right
    gradient, multiplied by 1 or by a ratio of numbers of ranks.
    """
    gradients = evidence.b.parameters("gradients")
    ranks = len(evidence.b.ranks)
    if ranks == 1 or any(len(x) < ranks for x in gradients.values()):
        return None
    expected = evidence.a.parameters("gradients")
    name = first.name
    total = np.sum([x for _, x in gradients[name]], 0)[2:]
    each = [x[2:] for _, x in gradients[name]]
    old = expected[name][0][1][2:]
    factor = float(total @ old / (old @ old)) if old.any() else 0.0
    wrong = np.linalg.norm(total - factor * old) > first.bound * 4 * np.linalg.norm(total)
    alike = max(np.linalg.norm(x - each[0]) for x in each) <= first.bound * np.linalg.norm(total)
    if wrong or alike or not _near_count(evidence, factor):
        return None
    return (
        f"Gradients are those of a rank's tokens only: the gradients of {name} differ between the "
        f"ranks of {evidence.b.name}, and only their sum is right. They are not averaged."
    )


def scaled_gradients(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference if all gradients are the gradients of the first run, multiplied by one
    factor.
    """
    if not evidence.agree("output", "label"):
        return None
    compared = [x for x in evidence.of_stage("gradient") if np.isfinite(x.error)]
    factors = [_factors(evidence, x.name) for x in compared if x.is_real]
    if not factors:
        return None
    factor = float(np.median([x for x, _ in factors]))
    limit = max(4 * compared[0].bound, 1e-6)
    if any(abs(x / factor - 1) > limit or rest > limit for x, rest in factors):
        return None
    found = _number_of_ranks(evidence, factor, limit)
    if found is None:
        return f"Gradients are scaled: all are {factor:.4g} times those of {evidence.a.name}."
    return (
        f"Gradients are scaled by {found.what}: all are {found.times} times those of "
        f"{evidence.a.name}. Sum or average them, or multiply the loss, but once."
    )


class _Factor(NamedTuple):
    """A factor that a number of ranks explains.

    Attributes:
        what: the name of the number, such as "the number of ranks".
        times: the number itself, such as "2", or its inverse, such as "1/2".
    """

    what: str
    times: str


def _number_of_ranks(evidence: Evidence, factor: float, limit: float) -> _Factor | None:
    """Return a number of ranks that equals `factor` or 1 / `factor`, up to the relative error
    `limit`. Return None if there is no such number.
    """
    numbers = {
        "the number of ranks that share a sequence": len(evidence.b.groups[0]),
        "the number of ranks": len(evidence.b.ranks),
    } | _sharing(evidence)
    for what, number in reversed(numbers.items()):
        for times, expected in ((f"{number}", float(number)), (f"1/{number}", 1 / number)):
            if number > 1 and abs(factor / expected - 1) <= limit:
                return _Factor(what, times)
    return None


def _sharing(evidence: Evidence) -> dict[str, int]:
    """Return a dict from a name to the number of ranks that hold a row of the batch. If the number
    differs between rows, the dict is empty.
    """
    rows = evidence.shape[0]
    holders = {tuple(np.unique(evidence.b.rank_of[row])) for row in range(rows)}
    sizes = {len(x) for x in holders}
    return {"the number of ranks that share a sequence": sizes.pop()} if len(sizes) == 1 else {}


def _factors(evidence: Evidence, name: str) -> tuple[float, float]:
    """Return two numbers: the factor by which a parameter's gradient in the first run must be
    multiplied so that it is closest to the gradient in the second run, and the relative error that
    remains.
    """
    old = evidence.a.parameters("gradients")[name][0][1][2:]
    new = evidence.b.parameters("gradients")[name][0][1][2:]
    factor = float(new @ old / (old @ old)) if old.any() else 0.0
    rest = np.linalg.norm(new - factor * old) / max(float(np.linalg.norm(new)), 1e-300)
    return factor, float(rest)


def _near_count(evidence: Evidence, factor: float) -> bool:
    """Return whether a factor is within 1% of m / n, where m and n are 1 or numbers of ranks."""
    counts = {
        1,
        len(evidence.b.ranks),
        *(len(x) for x in evidence.b.groups),
        *_sharing(evidence).values(),
    }
    return any(abs(factor * m / n - 1) < 1e-2 for m in counts for n in counts)


def remote_queries(evidence: Evidence, first: Finding) -> str | None:
    """Explain a difference in backward if only tokens before the last rank border of their row
    differ. A rank border is a position whose token is on a different rank than the previous token.
    """
    if not evidence.agree("output", "label", "loss"):
        return None
    differing = _by_row(evidence, first)
    borders = _borders(evidence)
    if not borders.any():
        return None
    # Whether there is a border at this token or behind it.
    last = np.maximum.accumulate(borders[:, ::-1], 1)[:, ::-1]
    last[:, :-1] = last[:, 1:]
    last[:, -1] = False
    if differing[~last].any() or not differing[last].any():
        return None
    return (
        f"Gradients of a rank's tokens only: backward agrees up to {first.name}, and from there on "
        "the gradients that keys and values get from the queries of other ranks are missing."
    )


def optimizer(evidence: Evidence, first: Finding) -> str | None:
    if first.values is not None:
        return f"The learning rates differ: {first.values[0]:g} and {first.values[1]:g}."
    return (
        "The gradients agree before the optimizer's step and the weights differ after it: the "
        "optimizer has other states or options, or clips by another norm."
    )


def _by_row(evidence: Evidence, first: Finding) -> Bools:
    return first.differing.reshape(evidence.shape)


def _ignored(evidence: Evidence) -> Bools:
    return evidence.ignored.reshape(evidence.shape)


def _borders(evidence: Evidence) -> Bools:
    """Return (rows, tokens): whether a token is on a different rank than the previous token."""
    rank_of = evidence.b.rank_of
    borders = np.zeros(rank_of.shape, bool)
    borders[:, 1:] = (
        (np.diff(rank_of, axis=1) != 0) & (rank_of[:, 1:] >= 0) & (rank_of[:, :-1] >= 0)
    )
    return borders


def _from_a_border(evidence: Evidence, differing: Bools) -> int | None:
    """Return the first rank border if the tokens from this border on differ, or None.

    A rank border is a position whose token is on a different rank than the previous token. The
    token at the border must differ, each later rank must have a token that differs, and all tokens
    before the border must agree.
    """
    borders, by_row = _borders(evidence), differing.reshape(evidence.shape)
    rank_of = evidence.b.rank_of
    first = None
    for row in range(evidence.shape[0]):
        if not by_row[row].any():
            continue
        if not borders[row].any():
            return None
        at = int(np.argmax(borders[row]))
        later = set(rank_of[row, at:][rank_of[row, at:] >= 0]) - {rank_of[row, at - 1]}
        reached = set(rank_of[row, by_row[row]])
        if by_row[row, :at].any() or not by_row[row, at] or not later <= reached:
            return None
        first = at if first is None else min(first, at)
    return first


def _positions_in_documents(evidence: Evidence) -> Ints:
    """Return (rows, tokens): how many tokens of its document come before each token."""
    starts = evidence.document_starts | _ignored(evidence)
    index = np.broadcast_to(np.arange(evidence.shape[1]), evidence.shape)
    after_padding = np.zeros(evidence.shape, bool)
    after_padding[:, 1:] = _ignored(evidence)[:, :-1] & ~_ignored(evidence)[:, 1:]
    begins = np.where(starts | after_padding, index, 0)
    return index - np.maximum.accumulate(begins, 1)


RULES: tuple[tuple[Callable[[Evidence, Finding], str | None], tuple[str, ...]], ...] = (
    (weights_at_the_start, ("weight before",)),
    (dropout, ("output",)),
    (positions, ("input", "output")),
    (not_finite, ("output",)),
    (routing, ("output",)),
    (documents, ("output",)),
    (window, ("output",)),
    (attention, ("output",)),
    (padding, ("output",)),
    (one_rank, ("output",)),
    (border, ("output",)),
    (label_shift, ("label",)),
    (local_divisor, ("loss", "gradient of output")),
    (scaled_loss, ("loss",)),
    (missing_gradient, ("gradient",)),
    (tied_weights, ("gradient",)),
    (own_tokens, ("gradient",)),
    (scaled_gradients, ("loss", "gradient of output", "gradient", "weight after")),
    (remote_queries, ("gradient of output",)),
    (optimizer, ("optimizer", "weight after")),
)
