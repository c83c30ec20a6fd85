"""The command-line options of the trainings."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from checkpoints import completed
from data import standard_library
from faults import Faults

import seqpar

LAYOUTS = {
    "contiguous": seqpar.Layout.contiguous,
    "zigzag": seqpar.Layout.zigzag,
    "striped": seqpar.Layout.striped,
}
STRATEGIES = ["ring", "all_gather", "token_ring", "ulysses", "disaggregated"]
# This variant keeps less memory for backward, and sends more bytes in backward: compare the longest
# contexts.
VARIANTS = {"ulysses-tokens": ("ulysses", {"keep": "tokens"})}


def arguments(
    description: str | None, faults: Faults, attention: str | None, attention_help: str
) -> argparse.ArgumentParser:
    """Return a parser for the options that all trainings share.

    `passed_on` names the options that --compare passes on to each of its runs.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    passed_on = ["layout", "seq_len", "steps", "text", "balance", "capacity", "cluster"]
    parser.set_defaults(faults=faults, passed_on=passed_on)
    parser.add_argument(
        "--attention",
        choices=[*STRATEGIES, *VARIANTS, "mesh", "usp", "sdpa"],
        default=attention,
        help=attention_help,
    )
    parser.add_argument(
        "--layout", choices=sorted(LAYOUTS), default="zigzag", help="which tokens each rank holds"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per packed batch")
    parser.add_argument(
        "--steps", type=int, default=None, help="training steps (default: 60; 10 with a fault)"
    )
    parser.add_argument(
        "--text", type=Path, default=standard_library(), help="a folder or file to train on"
    )
    parser.add_argument(
        "--balance",
        choices=["zeppelin", "bytescale", "auto"],
        help="train on documents of uneven length, balanced over the ranks by this method",
    )
    parser.add_argument(
        "--capacity",
        type=int,
        help="with --balance: the most tokens on a rank (default: 1.25 times the mean over ranks)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        help="with --balance: a file that Cluster.to_json wrote, with the ranks' devices and links "
        "(default: this machine, which is measured the first time, in 15 seconds)",
    )
    parser.add_argument(
        "--save", type=Path, help="a folder for checkpoints of torch.distributed.checkpoint"
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=100,
        help="with --save: steps from one checkpoint to the next; the last step is saved too",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        help="continue from the last checkpoint in a folder of --save, on any number of ranks",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument(
        "--compare", action="store_true", help="train on several processes and on one, and compare"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="with --compare: the number of processes for the strategies",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="with --compare: the folder for the loss curves",
    )
    parser.add_argument(
        "--inject-fault",
        choices=sorted(faults),
        help="inject a fault into the strategies; --compare must fail",
    )
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser, positive: Sequence[str] = ()) -> argparse.Namespace:
    """Return the options, or exit if a count is below 1. `positive` names additional counts."""
    options = parser.parse_args()
    for name in ("seq_len", "steps", "threads", "processes", "capacity", "save_every", *positive):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("cluster", "resume"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: {path} does not exist")
    if options.resume and not completed(options.resume):
        parser.error(f"--resume: {options.resume} has no checkpoint, as --save writes them")
    if options.save and options.save != options.resume and completed(options.save):
        parser.error(f"--save: {options.save} has checkpoints of another run")
    options.steps = options.steps or (10 if options.inject_fault else 60)
    return options
