"""Thresholds that figures of a sweep must keep: a file of rules, and which of them are broken.

A file has {"rules": [rule, ...]}. A rule has "figure" and "at_least", "at_most" or both; all other
names choose points: fields of a workload, "contender", and none for all strategies of ours. With
"relative_to" the figure is divided by that of another contender on the same workload.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from seqpar.bench.results.report import Row
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import Options, Workload
from seqpar.core.arguments import shown
from seqpar.strategies.registry import attention_modules

FIGURES = (
    *("seconds", "tokens_per_second", "tflops_per_device", "of_ideal", "exposed_seconds"),
    *("exposed_share", "exposed", "bytes", "memory", "error", "of_one_device"),
)
LIMITS = ("at_least", "at_most")
_CHOOSING = (*(field.name for field in fields(Workload)), "contender")
Rule = dict[str, Any]


def read(path: Path, options: Options) -> list[Rule]:
    """Return a file's rules; raise a ValueError if it is none, or does not fit these options."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"threshold: {path} cannot be read: {error}") from None
    rules = found.get("rules") if isinstance(found, dict) else None
    if not isinstance(rules, list) or not rules or set(found) != {"rules"}:
        raise ValueError(f'threshold: {path} must have {{"rules": [...]}} and nothing else')
    for i, rule in enumerate(rules):
        try:
            _check(rule, options)
        except ValueError as error:
            raise ValueError(f"threshold: {path}: rules[{i}] {error}") from None
    return rules


def _check(rule: Rule, options: Options) -> None:
    if not isinstance(rule, dict):
        raise ValueError(f"must be an object, got {shown(rule)}")
    known = {"figure", "relative_to", *LIMITS, *_CHOOSING}
    if unknown := sorted(set(rule) - known):
        raise ValueError(f"has {unknown}, and may have {sorted(known)}")
    if rule.get("figure") not in FIGURES:
        raise ValueError(f"figure must be one of {list(FIGURES)}, got {shown(rule.get('figure'))}")
    limits = [rule[name] for name in LIMITS if name in rule]
    if not limits or not all(_is_number(x) for x in limits):
        raise ValueError(f"must have at_least or at_most, numbers, got {shown(limits)}")
    if len(limits) == 2 and limits[0] > limits[1]:
        raise ValueError(f"at_least must not be above at_most, got {limits[0]} and {limits[1]}")
    for name in ("contender", "relative_to"):
        if name in rule and rule[name] not in (*options.contenders, ONE):
            measured = [*options.contenders, ONE]
            raise ValueError(f"{name} must be measured: one of {measured}, got {shown(rule[name])}")
    rows = [
        {"workload": workload.as_dict(), "contender": name}
        for workload in options.workloads()
        for name in (*options.contenders, ONE)
    ]
    if not any(_chooses(rule, row) for row in rows):
        raise ValueError("chooses none of the points that these options measure")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _chooses(rule: Rule, row: Row) -> bool:
    chosen = {name: rule[name] for name in _CHOOSING if name in rule}
    if "contender" not in chosen and row["contender"] not in attention_modules():
        return False
    of_row = row["workload"] | {"contender": row["contender"]}
    return all(of_row[name] == value for name, value in chosen.items())


def broken(rules: list[Rule], rows: list[Row]) -> list[str]:
    """Return what each point that breaks a rule has; a point without the figure breaks it."""
    found = []
    by_point = {(Workload(**row["workload"]), row["contender"]): row for row in rows}
    for rule in rules:
        for (workload, name), row in by_point.items():
            if not _chooses(rule, row):
                continue
            value, why = _value(row, rule["figure"])
            what = rule["figure"]
            if value is not None and "relative_to" in rule:
                what += f" over that of {rule['relative_to']}"
                other, why = _value(by_point[workload, rule["relative_to"]], rule["figure"])
                value = value / other if other else None
            limits = " and ".join(f"{x} {rule[x]:g}" for x in LIMITS if x in rule)
            low, high = (rule.get(x) for x in LIMITS)
            if value is None:
                found.append(
                    f"{name}, {workload}: {what} must be {limits}, and is not known: {why}"
                )
            elif (low is not None and value < low) or (high is not None and value > high):
                found.append(f"{name}, {workload}: {what} must be {limits}, and is {value:.4g}")
    return found


def _value(row: Row, figure: str) -> tuple[float | None, str]:
    """Return a figure of a point, and why it has none."""
    if row["figures"] is None:
        return None, row["failed"] or "it was not measured"
    return row["figures"][figure], "it was not measured of this contender"
