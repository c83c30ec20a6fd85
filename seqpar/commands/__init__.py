"""The commands of `python -m seqpar`, a file each: `add_arguments` and `run`."""
