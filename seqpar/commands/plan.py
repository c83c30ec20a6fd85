"""Recommend how to train a model on a cluster, by simulation."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import numpy as np

from seqpar.core.arguments import as_int
from seqpar.core.options import LENGTH_FORMS, read_lengths
from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Torus
from seqpar.costs.flops import step_flops
from seqpar.costs.model import Model
from seqpar.simulate.recommendations.recommendation import (
    NOT_SIMULATED,
    Recommendation,
    Recommendations,
    as_gb,
)
from seqpar.simulate.recommendations.recommending import recommend

_SHOWN = (  # attributes of a recommendation
    *("name", "strategy", "options", "layout_name", "checkpointing", "offload", "longest"),
    *("bytes", "limit", "why_not", "excluded"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "seqpar.balance.plan is something else: it assigns documents to ranks, for a strategy that "
        "you have chosen. To try other hardware, save a cluster with --save-cluster, edit its "
        "figures, and pass the file as --cluster. To try another model, edit a config.json and "
        "pass it as --model."
    )
    parser.add_argument(
        "--model", required=True, help="a preset such as llama-8b, or a config.json of transformers"
    )
    parser.add_argument(
        "--cluster",
        required=True,
        help='a preset such as 4x8-h100, a file that Cluster.to_json wrote, or "here"',
    )
    parser.add_argument(
        "--lengths",
        required=True,
        help=f"tokens of each document, or a file of them: {LENGTH_FORMS}",
    )
    parser.add_argument(
        "--parallelism",
        choices=["all", "context"],
        help="all: devices may also be data, pipeline and tensor ranks (the default, except on "
        "cores and on a torus)",
    )
    parser.add_argument("--save-cluster", metavar="FILE", help="also write the cluster to FILE")
    parser.add_argument(
        "--all", action="store_true", help="also simulate ways that a lower bound excludes"
    )
    parser.add_argument(
        "--rows", type=int, default=10, help="ways to train that the table shows; 0: all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the recommendations. Returns 1 if no way to train fits, and 130 after an interrupt."""
    rows = as_int("rows", arguments.rows, 0)
    model, cluster = _model(arguments.model), _cluster(arguments.cluster)
    lengths = _lengths(arguments.lengths)
    if arguments.save_cluster is not None:
        try:
            cluster.to_json(arguments.save_cluster)
        except OSError as error:
            reason = f"{arguments.save_cluster} cannot be written: {error.strerror}"
            raise ValueError(f"save-cluster: {reason}") from None
    recommendations = recommend(
        model,
        cluster,
        lengths,
        parallelism=arguments.parallelism or _parallelism(cluster),
        simulate_all=arguments.all,
    )
    fits = bool(recommendations[0].seconds < np.inf)
    use = _Use(model, cluster, lengths)
    if arguments.json:
        print(json.dumps(_as_dicts(recommendations, use), indent=1))
    else:
        print(recommendations.as_text(rows or None))
        if any(x.why_not != NOT_SIMULATED for x in recommendations[rows or len(recommendations) :]):
            print(f"These are the first {rows}; --rows 0 shows all.")
        if fits:
            print(f"\n{recommendations[0].code}")
        print(_choice(recommendations[0], use))
    if recommendations.partial:
        return 128 + signal.SIGINT
    return 0 if fits else 1


class _Use:
    """How well a way to train uses the devices of a cluster.

    MFU (model FLOPs utilisation) is the FLOP/s of the training, divided by the devices' peak FLOP/s
    of matrix products.
    """

    def __init__(self, model: Model, cluster: Cluster, lengths: list[int]) -> None:
        self.cluster, self.tokens = cluster, sum(lengths)
        self._flops = step_flops(model, np.array(lengths))

    def tokens_per_second(self, x: Recommendation) -> float:
        """Return the tokens per second of each device."""
        return self.tokens / x.seconds / self.cluster.ranks

    def mfu(self, x: Recommendation) -> float:
        return self._flops / x.seconds / self.cluster.ranks / self.cluster.device.matmul_rate


def _choice(x: Recommendation, use: _Use) -> str:
    """Describe in words the best configuration for training. If no configuration fits into memory,
    say how much memory is missing.
    """
    if x.seconds == np.inf:
        return f"\nchoice: none. The closest is {x.name}: {x.why_not}"
    device = "GPU" if x.device == "cuda" else "core"
    return (
        f"choice: {x.name}\n"
        f"  {x.seconds:.4g} s ±{x.error:.0%} for a step of {use.tokens:,} tokens, "
        f"{use.tokens_per_second(x):,.0f} tokens/s per {device}, MFU {use.mfu(x):.0%}\n"
        f"  {as_gb(x.memory)} of {as_gb(use.cluster.device.memory)} GB on the fullest {device}, "
        f"activations: {x.keeping}"
    )


def _parallelism(cluster: Cluster) -> str:
    return "all" if cluster.overlaps and not isinstance(cluster.fabric, Torus) else "context"


def _model(name: str) -> Model:
    path = Path(name)
    if path.suffix != ".json":
        return Model.preset(name)
    try:
        return Model.from_config(json.loads(_read("model", path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"model: {path} is not JSON: {error}") from None


def _cluster(name: str) -> Cluster:
    path = Path(name)
    if name == "here":
        return Cluster.here()
    if path.suffix != ".json":
        return Cluster.preset(name)
    _read("cluster", path)
    return Cluster.from_json(path)


def _lengths(text: str) -> list[int]:
    """Return the lengths in a list or in a file."""
    try:
        return read_lengths("lengths", text)
    except ValueError as error:
        is_path = "/" in text or os.path.exists(text)
        if not is_path:
            raise ValueError(f"{error}; there is no file with this name either") from None
    return read_lengths(f"lengths: {text}", _read("lengths", Path(text)))


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is not text: {error}") from None


def _as_dicts(recommendations: Recommendations, use: _Use) -> list[dict[str, object]]:
    """Return the figures of each recommendation, with None in place of infinity and NaN."""
    rows: list[dict[str, object]] = []
    for x in recommendations:
        figures = {"seconds": x.seconds, "error": x.error, "memory": x.memory}
        has_speed = x.seconds < np.inf and not x.excluded
        figures["tokens_per_second"] = use.tokens_per_second(x) if has_speed else np.nan
        figures["mfu"] = use.mfu(x) if has_speed else np.nan
        finite = {name: v if np.isfinite(v) else None for name, v in figures.items()}
        divided = {"parallelism": x.parallelism._asdict(), "batches": x.batches}
        rows.append(divided | {name: getattr(x, name) for name in _SHOWN} | finite)
    return rows
