"""Train on ranks that may die: the survivors form a new group and continue from a checkpoint.

Start with `steps.py`, which a training script calls. `launcher.py` starts the script's processes,
keeps their store and says who forms the next group, and `messages.py` has what they tell each
other. On several hosts torchft's lighthouse says it instead (`lighthouse.py`).
"""

from seqpar.elastic.steps import steps

__all__ = ["steps"]
