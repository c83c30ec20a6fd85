"""Checkpoints of a training, which any number of ranks can continue.

`torch.distributed.checkpoint` writes what ranks share once and what they have sharded in parts, in
parallel. With FSDP2, these two functions need no change.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

METADATA = ".metadata"  # torch writes this file last, so a checkpoint without it is incomplete


def save(folder: Path, steps: int, model: nn.Module, optimizer: Optimizer, data: Any) -> None:
    """Write the state after `steps` steps into a folder of its own."""
    checkpoint.save(_states(steps, model, optimizer, data), checkpoint_id=folder / str(steps))


def load(folder: Path, model: nn.Module, optimizer: Optimizer, data: Any) -> int:
    """Continue from the last checkpoint in `folder`. Returns the number of steps until then."""
    states = _states(0, model, optimizer, data)
    checkpoint.load(states, checkpoint_id=folder / str(max(completed(folder))))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    data.load_state_dict(states["data"])
    return states["steps"]


def completed(folder: Path) -> list[int]:
    """Return the number of steps of each complete checkpoint in a folder."""
    return [int(file.parent.name) for file in folder.glob(f"[0-9]*/{METADATA}")]


def _states(steps: int, model: nn.Module, optimizer: Optimizer, data: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {
        "model": of_model,
        "optimizer": of_optimizer,
        "data": data.state_dict(),
        "steps": steps,
    }
