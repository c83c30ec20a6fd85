"""Predict a step of Qwen3-8B with 1,048,576 tokens on 8 H100, with one lever after another.

The first levers are in the order of TRL's guide "Training Beyond 1M Tokens". The levers after them
are not in that guide. The last row has the settings that `python -m seqpar recipe qwen3-8b --gpus
8xh100 --memory 40` chooses.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks import harness
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.recipes.memory_account import Keeping
from seqpar.recipes.recipe import Recipe, make_recipe, predicted

CASES = {"one document": (2**20,), "packed": (2**15,) * 32}
GB = 40  # that a GPU may use
RECOMPUTED, KEPT = Keeping(False, 1.0), Keeping(True, 1.0)  # what happens to results of attention
# Measured TFLOP/s of FlashAttention-4, forward and backward, with 16,384 and with 8,192 tokens.
LONG_CALLS, SHORT_CALLS = (742, 672), (706, 595)


def levers(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the predicted seconds and bytes per GPU, with one lever more in each row."""
    recipe = make_recipe("qwen3-8b", "8xh100", lengths, memory_gb=40)
    costs, model = recipe.costs, recipe.costs.model
    tokens = sum(lengths) // costs.cluster.ranks

    def with_keeping(costs: Costs, keeping: Keeping) -> Recipe:
        settings = recipe.lengths, recipe.strategy, recipe.layout
        return predicted(recipe.published, costs, *settings, keeping)

    older = Costs(Cluster.preset("1x8-h100"), model)
    recomputed, kept = with_keeping(older, RECOMPUTED), with_keeping(older, KEPT)
    parts = recomputed.memory.parts
    of_states = "parameters", "gradients", "optimizer", "gathered parameters", "gathered gradients"
    states = sum(parts[x] for x in of_states)
    of_plain, of_recomputed = (
        states + parts["messages"] + tokens * sum(costs.activation_bytes_per_token(x))
        for x in ("none", "full")
    )
    logits = tokens * model.vocabulary * (2 + 4)  # in bf16 and, for the softmax, in fp32
    inputs = tokens * model.hidden * 2 * len(model.layers)
    seconds = recomputed.step_seconds
    rows = [
        ("FSDP2 and sequence parallelism over 8 GPUs", None, of_plain + logits),
        ("loss in chunks", None, of_plain),
        ("layers recomputed in backward", None, of_recomputed),
        ("layer inputs in host memory", seconds, of_recomputed - inputs + parts["layer inputs"]),
        ("MLPs and norms in chunks", seconds, recomputed.memory.total),
        ("results of attention in host memory", kept.step_seconds, kept.memory.total),
        ("FlashAttention-4", recipe.step_seconds, recipe.memory.total),
    ]
    return [{"lever": name, "seconds": s, "bytes": float(b)} for name, s, b in rows]


def prediction(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the predictions of the recipe, with error bars of its seconds.

    The ends differ from the prediction by the error of simulated steps. At the upper end, attention
    also has the rates that FlashAttention-4 reached with 8,192 tokens.
    """
    recipe = make_recipe("qwen3-8b", "8xh100", lengths, memory_gb=GB)
    shares = [1 / rate for rate in (LONG_CALLS[0], LONG_CALLS[1] / 2.5)]  # of time, by direction
    slower = sum(
        share * long / short
        for share, long, short in zip(shares, LONG_CALLS, SHORT_CALLS, strict=True)
    )
    added = recipe.seconds["attention"] * (slower / sum(shares) - 1)
    return {
        "documents": len(lengths),
        "strategy": recipe.strategy,
        "seconds": recipe.step_seconds,
        "seconds_low": recipe.step_seconds * (1 - recipe.error),
        "seconds_high": (recipe.step_seconds + added) * (1 + recipe.error),
        "mfu": recipe.mfu,
        "seconds_by_part": recipe.seconds,
        "bytes": recipe.memory.total,
        "moment": recipe.memory.moment,
        "bytes_by_part": recipe.memory.parts,
        "levers": levers(lengths),
    }


def measure(_: Namespace) -> harness.Results:
    results = {name: prediction(lengths) for name, lengths in CASES.items()}
    for table in tables(results).values():
        print(f"{table}\n")
    return results


def tables(results: harness.Results) -> dict[str, str]:
    """Return the tables of docs/guides/million_tokens.md from the results."""
    one, packed = results["one document"], results["packed"]
    levers_table = [
        [x["lever"], _seconds(x), _gigabytes(x), _seconds(y), _gigabytes(y)]
        for x, y in zip(one["levers"], packed["levers"], strict=True)
    ]
    parts = [[name, f"{x / 1e9:.1f}"] for name, x in one["bytes_by_part"].items()]
    bars = [
        [name, *(f"{x[y]:.0f}" for y in ("seconds_low", "seconds", "seconds_high"))]
        for name, x in (("one document", one), ("packed", packed))
    ]
    return {
        "levers": harness.table(
            [
                "additional lever",
                "seconds, one document",
                "GB, one document",
                "seconds, 32 documents",
                "GB, 32 documents",
            ],
            levers_table,
        ),
        "parts": harness.table(["tensors", "GB"], [*parts, ["all", f"{one['bytes'] / 1e9:.1f}"]]),
        "bars": harness.table(["seconds", "lower end", "predicted", "upper end"], bars),
    }


def _seconds(lever: dict[str, Any]) -> str:
    return "does not fit" if lever["seconds"] is None else f"{lever['seconds']:.0f}"


def _gigabytes(lever: dict[str, Any]) -> str:
    return f"{lever['bytes'] / 1e9:,.0f}"


if __name__ == "__main__":
    harness.run("flagship", __doc__, {}, measure, canary_is="none")
