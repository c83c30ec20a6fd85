"""Compare two recordings, and list what differs by more than rounding, in order of execution.

The first recording is the reference. Each token of the reference has one summary. In the second
recording, several ranks can hold copies of a token, and each copy is compared with the reference.
The comparison of one thing, such as the output of a module or the gradient of a parameter, is a
`Finding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seqpar.core.arguments import Ints, check_function
from seqpar.parity.bounds import REPEATED_MARGIN, rounding_bound, unit_roundoff, update_bound
from seqpar.parity.diagnosis import diagnose
from seqpar.parity.evidence import Evidence, Finding
from seqpar.parity.files import require_safetensors
from seqpar.parity.joining import (
    MISSING,
    Floats,
    Key,
    Part,
    Progress,
    Recording,
    pack_rows,
    packs_rows,
    place_tokens,
    read,
    separate_whole_rows,
)
from seqpar.parity.report import Report

_SAME = 1e-12  # relative; fp64 sums of the same numbers in different orders differ by less


def compare(
    first: str | Path,
    second: str | Path,
    again: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare two recordings, and find the first place where they differ beyond rounding.

    Args:
        first: the folder of the reference, such as the recording of a run on one rank.
        second: the folder of the run that may be wrong.
        again: the folder of a second recording of the first run, in which sums have a different
            order, for example because of a different number of threads, kernel or padding. A
            difference between `first` and `second` then counts if it exceeds two bounds: 4 times
            the difference between `first` and `again`, and the rounding error of one operation.
            Without `again`, the bound is computed from dtype and depth.
        progress: a function that is called with a line of text for each file that is read and for
            each output that is compared.

    Returns:
        The report. `report.first` is None if the runs agree, and otherwise the first difference.
        `report.diagnosis` names the fault, and `str(report)` is a table.

    Raises:
        ValueError: if the recordings are of different models, batches, steps or dtypes, or if a
            folder has no complete recording.
        ImportError: if safetensors is not installed.
    """
    require_safetensors()
    if progress is not None:
        check_function("progress", progress)
    say = progress or (lambda _: None)
    evidence = compared(first, second, say)
    if again is not None:
        measured = compared(first, again, say)
        _use_measured_bounds(evidence, measured)
    return Report(evidence, diagnose(evidence))


def compared(first: str | Path, second: str | Path, say: Progress) -> Evidence:
    a, b = read(first, say), read(second, say)
    _check_same_run(a, b)
    _place_both(a, b)
    _check_same_batch(a, b)
    ignored = (a.padding | b.padding).ravel()
    evidence = Evidence(a, b, ignored=ignored, notes=[*a.notes, *b.notes])
    _note_what_was_not_seen(evidence)
    say("comparing weights")
    evidence.add(_of_parameters(evidence, "weights.before", "weight before"))
    evidence.add(_of_positions(evidence))
    depths = _Depths(evidence)
    evidence.coarsest = depths.coarsest
    for key in depths.order:
        say(f"comparing {key[1]}")
        evidence.add([_of_tokens(evidence, key, "summary", depths)])
    evidence.add(_of_labels(evidence))
    evidence.add(_of_loss(evidence, depths))
    evidence.scale = _scale_of_losses(evidence, depths)
    for key in reversed(depths.order):
        evidence.add([_of_tokens(evidence, key, "gradient", depths)])
    evidence.add(_of_parameters(evidence, "gradients", "gradient", depths))
    evidence.add(_of_learning_rates(evidence))
    evidence.add(_of_updates(evidence, depths))
    return evidence


def _place_both(a: Recording, b: Recording) -> None:
    """Find the position of every token of both recordings in the whole batch.

    If each group of ranks in one recording packed several rows of the batch into one row, the rows
    of the second recording are packed too.
    """
    known = [x for x in (a, b) if len(x.ranks) == 1 or x.content["order"] != "unknown"]
    first = min(known, key=lambda x: len(x.groups), default=a)
    second = b if first is a else a
    place_tokens(first, None)
    separate_whole_rows(second, first)
    if packs_rows(second, first):
        pack_rows(first)
    place_tokens(second, first)
    if first.shape[0] == 1 < second.shape[0]:
        pack_rows(second)


def _check_same_run(a: Recording, b: Recording) -> None:
    def refuse(what: str, in_a: object, in_b: object) -> None:
        raise ValueError(
            f"recordings of different {what}: {a.name} has {in_a}, {b.name} has {in_b}"
        )

    listed = [{x["name"]: x for r in run.ranks for x in r.content["parameters"]} for run in (a, b)]
    for name in sorted(listed[0].keys() ^ listed[1].keys()):
        has = ["the parameter " + name if name in x else "not" for x in listed]
        refuse("models", *has)
    for name, x in listed[0].items():
        y = listed[1][name]
        if len(x["shape"]) != len(y["shape"]) or not _may_be_parts(x["shape"], y["shape"]):
            refuse("models", f"{name} of shape {x['shape']}", y["shape"])
        if x["dtype"] != y["dtype"]:
            refuse("dtypes", f"{name} in {x['dtype']}", y["dtype"])
    for entry, what in (("forwards", "numbers of calls"), ("training", "modes (training)")):
        if a.content[entry] != b.content[entry]:
            refuse(what, a.content[entry], b.content[entry])
    evaluated = [set(x.content["evaluated"]) for x in (a, b)]
    for name in sorted((evaluated[0] ^ evaluated[1]) & a.modules & b.modules):
        refuse(f"modes (training) of {name}", *(name not in x for x in evaluated))
    steps = [x.content["optimizer"].get("steps") for x in (a, b)]
    if None not in steps and steps[0] != steps[1]:
        refuse("steps", *(f"an optimizer after {x:.0f} steps" for x in steps))
    both = [key for key in a.outputs if key in b.outputs]
    if a.outputs and not both:
        refuse("models", f"a module {next(iter(a.outputs))[1]}", "none of that name and call")
    for key in both:
        in_a, in_b = a.outputs[key]["dtype"], b.outputs[key]["dtype"]
        if in_a != in_b:
            refuse("dtypes", f"the output of {key[1]} in {in_a}", in_b)


def _may_be_parts(x: Sequence[int], y: Sequence[int]) -> bool:
    """Return whether the shapes `x` and `y` are equal, or differ in a single dimension and one of
    the two sizes is a multiple of the second.
    """
    unequal = [(m, n) for m, n in zip(x, y, strict=True) if m != n]
    return len(unequal) <= 1 and all(n and m and (m % n == 0 or n % m == 0) for m, n in unequal)


def _check_same_batch(a: Recording, b: Recording) -> None:
    what = "recordings of different batches, or with a wrong layout=:"
    if a.shape != b.shape:
        raise ValueError(f"{what} {a.name} has (rows, tokens) {a.shape}, {b.name} has {b.shape}")
    x, y = a.joined_ids, b.joined_ids
    if x is not None and y is not None:
        other = (x != y) & (x != MISSING) & (y != MISSING)
        if other.any():
            row, at = np.argwhere(other)[0]
            found = int(x[row, at]), int(y[row, at])
            where = f"token {at} of row {row}"
            raise ValueError(f"{what} {where} is {found[0]} in {a.name} and {found[1]} in {b.name}")
        return
    names = a.content["inputs"][0] if a.content["inputs"] else []
    for name in names:  # a model without token ids can get rows of features
        old, new = a.joined_rows(name), b.joined_rows(name)
        if old is None or new is None:
            continue
        other = distances(old, new) > _SAME * np.nanmax(np.abs(old), initial=0)
        if other.any():
            at = int(np.argmax(other)) % a.shape[1]
            raise ValueError(f"{what} {name} differs at token {at}")


def _note_what_was_not_seen(evidence: Evidence) -> None:
    a, b = evidence.a, evidence.b
    for run in (a, b):
        for note in dict.fromkeys(note for rank in run.ranks for note in rank.content["notes"]):
            evidence.notes.append(f"{run.name}: {note}")
        unseen = [
            x for x in run.content["unseen"] if all(x in r.content["unseen"] for r in run.ranks)
        ]
        if unseen:
            evidence.notes.append(f"{run.name}: no output was seen of {_listed(unseen)}")
    states = [{rank.content["random"]["start"] for rank in run.ranks} for run in (a, b)]
    if states[0] != states[1] and any(r.content["random"]["drawn"] for r in (*a.ranks, *b.ranks)):
        evidence.notes.append("the forward draws random numbers, from other states in each run")
    for run, other in ((a, b), (b, a)):
        only = sorted({key[1] for key in run.outputs} - {key[1] for key in other.outputs})
        if only:
            evidence.notes.append(f"only in {run.name}: {_listed(only)}")
    without = [key for key, x in a.outputs.items() if key in b.outputs and not x["by_token"]]
    if without:
        names = list(dict.fromkeys(_named(key) for key in without))
        evidence.notes.append(
            f"not compared, because no dimension has the size of the tokens: {_listed(names)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    return f"{len(names)} modules: {shown}" if len(names) > 1 else shown


class _Depths:
    """The outputs that both runs have, in order of execution, and the bound of each output."""

    def __init__(self, evidence: Evidence) -> None:
        a, b = evidence.a, evidence.b
        self.order: list[Key] = []
        self._coarsest: dict[Key, float] = {}
        names = {x["dtype"] for x in a.content["parameters"]}
        coarsest = max((unit_roundoff(x) for x in names if "float" in x), default=0.0)
        for key, x in a.outputs.items():
            y = b.outputs.get(key)
            if y is None:
                continue
            coarsest = max(coarsest, unit_roundoff(x["dtype"]))
            if not (x["by_token"] and y["by_token"]):
                continue
            if x["features"] != y["features"]:
                evidence.notes.append(
                    f"{key[1]}: not compared: {x['features']} features in {a.name} and "
                    f"{y['features']} in {b.name}, as tensor parallelism divides them"
                )
                continue
            self.order.append(key)
            self._coarsest[key] = coarsest
        self.coarsest = coarsest
        self._tokens = a.shape[1]
        self._features = max((a.outputs[x]["features"] for x in self.order), default=1)
        self._index = {key: i + 1 for i, key in enumerate(self.order)}

    def bound(self, key: Key, kind: str) -> float:
        at, total = self._index[key], len(self.order)
        operation = at if kind == "summary" else 2 * total - at + 1
        coarsest = self._coarsest[key] if kind == "summary" else self.coarsest
        return rounding_bound(operation, coarsest, max(self._tokens, self._features))

    def last_bound(self) -> float:
        operations = 2 * len(self.order) + 1
        return rounding_bound(operations, self.coarsest, max(self._tokens, self._features))


def distances(reference: Floats, values: Floats) -> Floats:
    """Return, for each pair of summaries, the estimated norm of the difference between the two rows
    that were summarised.

    The root mean square of the differences of the projections estimates this norm. The difference
    between the norms of the two rows is a lower bound, so the larger of the two numbers is
    returned.
    """
    difference = values - reference
    with np.errstate(invalid="ignore"):
        projected = np.sqrt(np.mean(np.square(difference[:, 2:]), 1))
        return np.maximum(projected, np.abs(difference[:, 0]))


def _errors(reference: Floats, parts: list[Part]) -> tuple[Floats, Ints]:
    """Return two arrays (tokens,): the relative error of each token, and the rank with this error.
    `parts` contains what each rank recorded of one output.

    An error is relative to the token's norm in the reference, or to the median norm of the tokens
    if the median is larger. If several ranks hold a token, its error is the largest of their
    errors. A token that no rank holds has the error NaN and the rank −1.
    """
    norms = reference[:, 0]
    known = norms[np.isfinite(norms)]
    scale = np.maximum(norms, np.median(known) if known.size else 0.0)
    errors, ranks = np.full(norms.size, np.nan), np.full(norms.size, -1)
    for part in parts:
        old, at = reference[part.places], part.places
        error = distances(old, part.values)
        # The median is 0 if most tokens are 0.
        size = np.where(scale[at] > 0, scale[at], part.values[:, 0])
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.where(error == 0, 0.0, error / size)
        finite = np.isfinite(old[:, 0]), np.isfinite(part.values[:, 0])
        error = np.where(finite[0] & finite[1], error, np.where(finite[0] == finite[1], 0, np.inf))
        error = np.where(np.isnan(old[:, 0]) & ~np.isnan(part.values[:, 0]), np.nan, error)
        larger = np.isnan(errors[at]) | (error > errors[at])
        errors[at], ranks[at] = (
            np.where(larger, error, errors[at]),
            np.where(larger, part.rank, ranks[at]),
        )
    return errors, ranks


def _of_tokens(evidence: Evidence, key: Key, kind: str, depths: _Depths) -> Finding | None:
    a, b = evidence.a, evidence.b
    parts = b.parts(key, kind)
    if not parts or not (known := a.parts(key, kind)):
        return None
    if kind == "gradient":
        parts = [part._replace(values=part.values / evidence.scale) for part in parts]
    errors, ranks = _errors(a.joined(known), parts)
    errors[evidence.ignored] = np.nan
    if np.isnan(errors).all():
        return None
    stage = "output" if kind == "summary" else "gradient of output"
    limit = depths.bound(key, kind)
    largest = float(np.nanmax(errors))
    return Finding(stage, _named(key), largest, limit, errors=errors, ranks=ranks, key=key)


def _scale_of_losses(evidence: Evidence, depths: _Depths) -> float:
    """Return the number by which the second run's output gradients are divided before they are
    compared.

    A run that averages gradients over ranks multiplies each rank's loss by the number of ranks, or
    by the number of ranks that share a sequence. The output gradients of two correct runs can
    therefore differ by the ratio of two such numbers. If the observed ratio is the ratio of two
    such numbers, it is returned, and otherwise 1. The later comparison of the parameters' gradients
    shows whether the ratio is right.
    """
    a, b = evidence.a, evidence.b
    for key in reversed(depths.order):
        known, parts = a.parts(key, "gradient"), b.parts(key, "gradient")
        if known and parts:
            old, new = a.joined(known)[:, 2:], b.joined(parts)[:, 2:]
            both = np.isfinite(old).all(1) & np.isfinite(new).all(1) & ~evidence.ignored
            size = np.sum(np.square(old[both]))
            scale = float(np.sum(old[both] * new[both]) / size) if size else 1.0
            numbers = [(1, len(run.ranks), len(run.groups[0])) for run in (b, a)]
            for expected in {m / n for m in numbers[0] for n in numbers[1]} - {1.0}:
                if abs(scale / expected - 1) <= depths.bound(key, "gradient"):
                    evidence.notes.append(
                        f"the ranks' losses in {b.name} have {expected:g} times the gradient of "
                        f"those in {a.name}; gradients of outputs are divided by that"
                    )
                    return expected
            break
    return 1.0


def _named(key: Key) -> str:
    forward, name, call, output = key
    text = f"{name}[{output}]" if output else name
    text += f", call {call + 1}" if call else ""
    return text + (f", forward {forward + 1}" if forward else "")


def _of_positions(evidence: Evidence) -> list[Finding]:
    x, y = (run.joined_input("position_ids") for run in (evidence.a, evidence.b))
    if x is None or y is None:
        return []
    differs = ((x != y) & (x != MISSING) & (y != MISSING)).ravel() & ~evidence.ignored
    errors = np.where(differs, np.inf, 0.0)
    found = Finding("input", "position_ids", float(errors.max(initial=0)), 0.0, errors=errors)
    found.ranks = evidence.b.rank_of.ravel()
    return [found]


def _of_labels(evidence: Evidence) -> list[Finding]:
    """Compare the labels of all tokens. If the labels of a rank are unknown, compare only the
    numbers of labels.
    """
    a, b = evidence.a, evidence.b
    x, y = a.labels(), b.labels()
    if len(x) == len(a.ranks) and len(y) == len(b.ranks):
        old = a.joined(x)
        errors, ranks = np.zeros(a.tokens), np.full(a.tokens, -1)
        for part in y:
            other = old[part.places, 0] != part.values[:, 0]
            errors[part.places] = np.where(other, np.inf, errors[part.places])
            ranks[part.places] = part.rank
        errors[evidence.ignored] = 0
        return [
            Finding(
                "label", "labels", float(errors.max(initial=0)), 0.0, errors=errors, ranks=ranks
            )
        ]
    old_counts, new_counts = evidence.label_counts(a), evidence.label_counts(b)
    if old_counts is None or new_counts is None:
        return []
    total = sum(old_counts) / a.copies_of_tokens, sum(new_counts) / b.copies_of_tokens
    return [Finding("label", "number of labels", abs(total[0] - total[1]), 0.0, values=total)]


def _of_loss(evidence: Evidence, depths: _Depths) -> list[Finding]:
    """Compare the losses of the batch in two runs, and the numbers by which the runs divided the
    losses.

    A run does not say whether the loss of the batch is the sum or the mean of the ranks' losses.
    The loss of each run therefore has several possible values. If a value of the first run agrees
    with a value of the second run, the closest two values are compared. If no values agree, the
    means of both runs are compared.
    """
    x, y = evidence.losses(evidence.a), evidence.losses(evidence.b)
    if not x or not y:
        return []
    pairs = [(m, n) for m in _totals(x, evidence.a) for n in _totals(y, evidence.b)]
    old, new = min(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    if old != new and abs(new - old) > depths.last_bound() * abs(old):
        old, new = pairs[0]  # the means of both runs
    if np.isnan(old) and np.isnan(new):
        error = 0.0
    else:
        error = abs(new - old) / abs(old) if old else np.inf if new else 0.0
    limit = rounding_bound(len(depths.order), depths.coarsest, evidence.a.shape[1])
    error = error if np.isfinite(error) else np.inf
    found = [Finding("loss", "loss", error, limit, values=(old, new))]
    a, b = evidence.a, evidence.b
    sums = evidence.token_loss_sums(a), evidence.token_loss_sums(b)
    if sums[0] is not None and sums[1] is not None and old and new and np.isfinite(error):
        totals = sum(sums[0]) / a.copies_of_tokens, sum(sums[1]) / b.copies_of_tokens
        divisors = totals[0] / old, totals[1] / new
        other = abs(divisors[1] / divisors[0] - 1) if divisors[0] else 0.0
        other = other if other > 2 * limit else 0.0  # losses are rounded, but a divisor is not
        found.append(Finding("loss", "number that divides it", other, 2 * limit, values=divisors))
    return found


def _totals(losses: list[float], run: Recording) -> list[float]:
    """Return the possible values of the loss of the whole batch, given the losses of the ranks.

    The values are:

    * the mean of the losses;
    * the sum of the losses, divided by the number of ranks that hold the same token;
    * this quotient, divided by the number of groups. Each sequence is divided among the ranks of
      one group.
    """
    mean, total = sum(losses) / len(losses), sum(losses) / run.copies_of_tokens
    return [mean, total, total / len(run.groups)]


def _as_token(summary: Floats) -> Floats:
    """Return the summary of a parameter with a norm in place of the sum of squares, as in the
    summary of a token.
    """
    return np.concatenate([[np.sqrt(summary[0])], summary[1:]])


def _of_parameters(
    evidence: Evidence, tensor: str, stage: str, depths: _Depths | None = None
) -> list[Finding]:
    """Compare each parameter, or its gradient, on all ranks that hold it."""
    x, y = evidence.a.parameters(tensor), evidence.b.parameters(tensor)
    shapes = _shapes(evidence)
    floor = _median_rms(x, shapes[0]) if depths is not None else 0.0
    limit = _SAME if depths is None else depths.last_bound()
    found = []
    for name, holders in x.items():
        if not holders or name not in y or shapes[0][name] != shapes[1][name]:
            continue
        old = holders[0][1]
        scale = max(np.sqrt(old[0]), floor * np.sqrt(np.prod(shapes[0][name])))
        worst, at = 0.0, -1
        for rank, new in y[name]:
            missing = np.isnan(old[0]), np.isnan(new[0])
            if missing[0] or missing[1]:
                error = 0.0 if missing[0] == missing[1] else np.inf
            else:
                length = distances(_as_token(old)[None], _as_token(new)[None])[0]
                error = 0.0 if length == 0 else length / scale if scale else np.inf
            if not error <= worst:
                worst, at = float(error), rank
        found.append(Finding(stage, name, worst, limit, rank=at if worst > limit else None))
    return found


def _shapes(evidence: Evidence) -> list[dict[str, list[int]]]:
    runs = evidence.a, evidence.b
    return [
        {x["name"]: x["shape"] for r in run.ranks for x in r.content["parameters"]} for run in runs
    ]


def _median_rms(
    summaries: dict[str, list[tuple[int, Floats]]], shapes: dict[str, list[int]]
) -> float:
    """Return the median, over all gradients, of the root mean square of a gradient."""
    rms = [
        np.sqrt(found[0][1][0] / max(1, np.prod(shapes[name])))
        for name, found in summaries.items()
        if found
    ]
    known = [x for x in rms if np.isfinite(x)]
    return float(np.median(known)) if known else 0.0


def _of_learning_rates(evidence: Evidence) -> list[Finding]:
    rates = [run.content["optimizer"].get("learning_rates") for run in (evidence.a, evidence.b)]
    if None in rates or not rates[0] or not rates[1]:
        return []
    pair = (rates[0][0], rates[1][0])
    return [
        Finding(
            "optimizer", "learning rate", abs(pair[0] - pair[1]), _SAME * abs(pair[0]), values=pair
        )
    ]


def _of_updates(evidence: Evidence, depths: _Depths) -> list[Finding]:
    """Compare what the optimizer's step added to each weight."""
    runs = evidence.a, evidence.b
    before = [run.parameters("weights.before") for run in runs]
    after = [run.parameters("weights.after") for run in runs]
    shapes, found = _shapes(evidence), []
    gradients, sizes = (evidence.a.parameters(x) for x in ("gradients", "gradient sizes"))
    floor = _median_rms(gradients, shapes[0])
    for name, olds in before[0].items():
        others = before[1].get(name)
        if not olds or not others or shapes[0][name] != shapes[1][name]:
            continue
        step = after[0][name][0][1] - olds[0][1]
        length = np.sqrt(np.mean(np.square(step[2:])))
        worst = 0.0
        for (_, old), (_, new) in zip(others, after[1][name], strict=True):
            other = (new - old)[2:] - step[2:]
            error = np.sqrt(np.mean(np.square(other)))
            worst = max(worst, float(error / length) if length else float(error > 0) * np.inf)
        relative = length / np.sqrt(olds[0][1][0]) if olds[0][1][0] else 0.0
        rms = np.sqrt(gradients[name][0][1][0] / max(1, np.prod(shapes[0][name])))
        noise = depths.last_bound() * np.fmax(rms, floor)
        # NaN for a weight without a gradient, which only decays.
        counted = np.nan_to_num(sizes[name][0][1])
        limit = update_bound(counted, float(noise), depths.coarsest, float(relative))
        found.append(Finding("weight after", name, worst, limit))
    return found


def _use_measured_bounds(evidence: Evidence, measured: Evidence) -> None:
    """Replace the bounds of findings by 4 times the difference between two recordings of the first
    run.

    A bound is the largest difference that rounding explains. It is never smaller than the bound
    after a single operation. Bounds of values without rounding, such as labels, do not change. If
    the two recordings have the same bits, no bound changes.
    """
    errors = {(x.stage, x.name): x.error for x in measured.findings}
    if not any(error > 0 for error in errors.values()):
        note = f"{measured.b.name} has the same bits as {measured.a.name}: it measures no bound"
        evidence.notes.append(note)
        return
    one = rounding_bound(1, measured.coarsest, 1)
    for x in evidence.findings:
        if (x.stage, x.name) in errors and x.bound > _SAME:
            x.bound = max(REPEATED_MARGIN * errors[x.stage, x.name], one)
