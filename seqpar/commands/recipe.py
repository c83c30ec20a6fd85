"""Print a training script for a published model on many GPUs."""

from __future__ import annotations

import argparse
import math

from seqpar.core.options import LENGTH_FORMS, read_lengths
from seqpar.recipes.recipe import MODELS, TRAINERS, make_recipe
from seqpar.recipes.scripts import script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The output is the script: redirect it into train.py. Its docstring has the command that "
        "starts it, and the predicted seconds and memory by part. No GPU has run these scripts "
        "yet. Tests run scripts of five model families with tiny models on two CPU processes."
    )
    parser.add_argument("model", choices=sorted(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument(
        "--gpus", required=True, help="such as 8xh100, or 4x8-h200 for 4 nodes of 8 GPUs"
    )
    parser.add_argument(
        "--tokens",
        default="1M",
        help=f"tokens of each document of a step, all packed into one batch: {LENGTH_FORMS}",
    )
    parser.add_argument(
        "--trainer",
        choices=TRAINERS,
        default="plain",
        help="plain: a training loop with FSDP2; trl: TRL's SFTTrainer",
    )
    parser.add_argument(
        "--memory", type=gigabytes, metavar="GB", help="GB to use on each GPU (default: 90%% of it)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script of the fastest recipe that fits."""
    recipe = make_recipe(
        arguments.model,
        arguments.gpus,
        read_lengths("tokens", arguments.tokens),
        memory_gb=arguments.memory,
    )
    print(script(recipe, arguments.trainer), end="")
    return 0


def gigabytes(text: str) -> float:
    """Parse an argument in GB, or raise the error that argparse shows."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of GB above 0, got {text!r}")
    return value
