"""The commands of `python -m seqpar`, one file each with `add_arguments` and `run`.

`seqpar/__main__.py` lists the commands and calls them.
"""

import argparse
import math


def seconds(text: str) -> float:
    """Return an argument's seconds, or raise the error that argparse shows."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be seconds, above 0 and at most a day: {text!r}")
    return value
