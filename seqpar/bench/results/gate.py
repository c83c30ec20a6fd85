"""Thresholds for the figures of a sweep: read a file of rules, and list broken rules.

A *point* is a contender on a workload, and a *figure* is a number that belongs to a point, such as
its seconds (`sweep_report.figures`). A file of rules is the JSON object {"rules": [rule, ...]}. A
rule has these keys:

* "figure" is the name of the figure.
* "at_least" and "at_most" are the limits of the figure. A rule has at least one limit.
* "contender" and the fields of a workload select the points to which the rule applies. By default,
  these are the points of all strategies of seqpar.
* "relative_to" is the name of a contender. If it is given, the figure is divided by the figure of
  this contender on the same workload.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from seqpar.bench.results.results_file import Row
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import SweepOptions, Workload
from seqpar.core.arguments import shown
from seqpar.strategies.registry import attention_modules

FIGURES = (
    *("seconds", "tokens_per_second", "tflops_per_device", "of_ideal", "exposed_seconds"),
    *("exposed_share", "exposed", "bytes", "memory", "error", "of_one_device"),
)
LIMITS = ("at_least", "at_most")
_SELECTORS = (*(field.name for field in fields(Workload)), "contender")
Rule = dict[str, Any]


def read(path: Path, options: SweepOptions) -> list[Rule]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"threshold: {path} cannot be read: {error}") from None
    rules = content.get("rules") if isinstance(content, dict) else None
    if not isinstance(rules, list) or not rules or set(content) != {"rules"}:
        raise ValueError(f'threshold: {path} must have {{"rules": [...]}} and nothing else')
    for i, rule in enumerate(rules):
        try:
            _check(rule, options)
        except ValueError as error:
            raise ValueError(f"threshold: {path}: rules[{i}] {error}") from None
    return rules


def _check(rule: Rule, options: SweepOptions) -> None:
    if not isinstance(rule, dict):
        raise ValueError(f"must be an object, got {shown(rule)}")
    known = {"figure", "relative_to", *LIMITS, *_SELECTORS}
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
    points = itertools.product(options.workloads(), (*options.contenders, ONE))
    if not any(_chooses(rule, workload.as_dict(), name) for workload, name in points):
        raise ValueError("selects none of the points that these options measure")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _chooses(rule: Rule, workload: Mapping[str, object], contender: str) -> bool:
    conditions = {name: rule[name] for name in _SELECTORS if name in rule}
    if "contender" not in conditions and contender not in attention_modules():
        return False
    point = {**workload, "contender": contender}
    return all(point[name] == value for name, value in conditions.items())


def broken(rules: list[Rule], rows: list[Row]) -> list[str]:
    """Return a message for each point that breaks a rule. A point without the rule's figure breaks
    the rule.
    """
    messages = []
    by_point = {(Workload(**row["workload"]), row["contender"]): row for row in rows}
    for rule in rules:
        for (workload, name), row in by_point.items():
            if not _chooses(rule, row["workload"], name):
                continue
            value, reason = _value(row, rule["figure"])
            figure = rule["figure"]
            if value is not None and "relative_to" in rule:
                figure += f" over that of {rule['relative_to']}"
                other, reason = _value(by_point[workload, rule["relative_to"]], rule["figure"])
                value = value / other if other else None
            limits = " and ".join(f"{limit} {rule[limit]:g}" for limit in LIMITS if limit in rule)
            required = f"{name}, {workload}: {figure} must be {limits}"
            low, high = (rule.get(limit) for limit in LIMITS)
            if value is None:
                messages.append(f"{required}, and is not known: {reason}")
            elif (low is not None and value < low) or (high is not None and value > high):
                messages.append(f"{required}, and is {value:.4g}")
    return messages


def _value(row: Row, figure: str) -> tuple[float | None, str]:
    """Return the figure of a point, or None and the reason why the figure is missing."""
    figures = row["figures"]
    if figures is None:
        return None, row["failed"] or "it was not measured"
    return figures[figure], "it was not measured for this contender"
