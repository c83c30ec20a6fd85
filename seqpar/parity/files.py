"""The files of a recording: `rank-00000.json` and `rank-00000.safetensors` for each rank.

The JSON file lists what was recorded and names the tensors. Both kinds can be read without seqpar.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

FORMAT = 1
FIELDS = (  # fields that a rank's JSON file must have
    "rank", "group", "torch", "order", "batch", "training", "evaluated", "forwards", "inputs",
    "outputs", "unseen", "cross_entropy", "backwards", "model_loss", "stated_loss", "parameters",
    "optimizer", "random", "notes",
)  # fmt: skip
_AGAIN = "record the run again with this version of seqpar"
_NAME = re.compile(r"rank-(\d+)\.(json|safetensors)")
_BEGAN = time.time()  # start of this process; older files belong to an earlier run


def require_safetensors() -> ModuleType:
    """Return safetensors' module for torch, or raise an ImportError with the pip command."""
    try:
        import safetensors.torch
    except ImportError as error:
        reason = "recordings of seqpar.parity need safetensors"
        raise ImportError(f"{reason}: pip install 'seqpar[hf]'") from error
    return safetensors.torch


def check_new(folder: Path, rank: int) -> None:
    """Raise a ValueError if the folder exists, unless other ranks of this run have just made it."""
    if not folder.exists():
        return
    way_out = "choose a different folder, or remove this one"
    entries = list(folder.iterdir()) if folder.is_dir() else []
    for entry in entries:
        found = _NAME.fullmatch(entry.name)
        if found is None or int(found[1]) == rank or entry.stat().st_mtime < _BEGAN:
            raise ValueError(f"folder {folder} exists: {way_out}")
    if not entries:
        raise ValueError(f"folder {folder} exists: {way_out}")


def write_rank(
    folder: Path, rank: int, content: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"rank-{rank:05d}"
    require_safetensors().save_file(tensors, name.with_suffix(".safetensors"))
    text = json.dumps({"format": FORMAT, **content})  # without indentation, with which json is slow
    name.with_suffix(".json").write_text(text, encoding="utf-8")


def read_rank(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a rank's JSON and tensors, or raise a ValueError that says what is wrong."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        tensors = require_safetensors().load_file(file.with_suffix(".safetensors"))
    except ImportError:
        raise
    except Exception as error:  # safetensors raises its own type of error
        raise ValueError(f"{file}: not a rank of a recording: {error}; {_AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{file}: must be of format {FORMAT}, got {found}; {_AGAIN}")
    if missing := [x for x in FIELDS if x not in content]:
        raise ValueError(f"{file}: not a rank of a recording: it lacks {missing[0]}; {_AGAIN}")
    named = {x for output in content["outputs"] for x in output["tensors"].values()}
    if lacking := sorted(named - tensors.keys()):
        reason = f"its tensor {lacking[0]} is missing"
        raise ValueError(f"{file}: not a rank of a recording: {reason}; {_AGAIN}")
    return content, tensors


def rank_files(folder: Path) -> list[Path]:
    """Return the JSON files of all ranks, or raise a ValueError if there are none."""
    files = sorted(folder.glob("rank-*.json")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{folder} has no recording; seqpar.parity.record makes one")
    return files
