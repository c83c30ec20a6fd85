"""The commands of `python -m seqpar`, a file each: `add_arguments` and `run`."""

import argparse
import math


def seconds(text: str) -> float:
    """Return a time that an argument says, or raise the error that argparse shows."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"it must be seconds, above 0 and at most a day: {text!r}")
    return value
