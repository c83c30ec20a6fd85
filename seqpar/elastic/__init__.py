"""Train on ranks that can die. The surviving ranks form a new group and continue from a checkpoint.

A process's *place* is its rank in a group (`Place`). A *spare* is a process that waits for a place.
Start with `steps.py`, which a training script calls. `launcher.py` starts the processes of the
script, keeps their store and chooses the members of the next group. `messages.py` defines the
messages between launcher and processes. On several hosts, torchft's lighthouse chooses the members
instead (`lighthouse.py`).
"""

from seqpar.elastic.steps import steps

__all__ = ["steps"]
