"""Recommend how to train a model on a cluster, by simulation."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path

import numpy as np

from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Torus
from seqpar.costs.model import Model
from seqpar.simulate.recommendations.recommendation import Recommendations
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
        "--lengths", required=True, help="tokens of each document: 4096,512, or a file of numbers"
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
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the recommendations; return 1 if no way to train fits, and 130 if interrupted."""
    model, cluster = _model(arguments.model), _cluster(arguments.cluster)
    if arguments.save_cluster is not None:
        try:
            cluster.to_json(arguments.save_cluster)
        except OSError as error:
            reason = f"{arguments.save_cluster}: {error.strerror}"
            raise ValueError(f"save-cluster must be a file that can be written, {reason}") from None
    recommendations = recommend(
        model,
        cluster,
        _lengths(arguments.lengths),
        parallelism=arguments.parallelism or _parallelism(cluster),
        simulate_all=arguments.all,
    )
    fits = bool(recommendations[0].seconds < np.inf)
    if arguments.json:
        print(json.dumps(_as_dicts(recommendations), indent=1))
    else:
        print(recommendations)
        if fits:
            print(f"\n{recommendations[0].code}", end="")
    if recommendations.partial:
        return 128 + signal.SIGINT
    return 0 if fits else 1


def _parallelism(cluster: Cluster) -> str:
    """Return "all" where `recommend` supports it."""
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
    """Return the numbers in a list or a file, separated by commas or white space."""
    if not text.replace(",", "").replace(" ", "").isdigit():
        text = _read("lengths", Path(text))
    try:
        return [int(x) for x in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"lengths must be integers: {error}") from None


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is not text: {error}") from None


def _as_dicts(recommendations: Recommendations) -> list[dict[str, object]]:
    """Return the figures of each recommendation; infinity and NaN become None."""
    rows: list[dict[str, object]] = []
    for x in recommendations:
        figures = {"seconds": x.seconds, "error": x.error, "memory": x.memory}
        finite = {name: v if np.isfinite(v) else None for name, v in figures.items()}
        divided = {"parallelism": x.parallelism._asdict(), "batches": x.batches}
        rows.append(divided | {name: getattr(x, name) for name in _SHOWN} | finite)
    return rows
