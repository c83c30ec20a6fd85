"""Real text as packed batches of bytes."""

import itertools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


def documents(text: Path) -> list[bytes]:
    """Return the contents of one file, or of all files in a folder, sorted by name."""
    if not text.exists():
        raise SystemExit(f"--text: {text} does not exist")
    files = (
        [text]
        if text.is_file()
        else sorted(text.rglob("*.py" if text == standard_library() else "*"))
    )
    contents = [
        file.read_bytes()
        for file in files
        if file.is_file() and not {"site-packages", "test"} & set(file.parts)
    ]
    contents = [content for content in contents if content]
    if not contents:
        raise SystemExit(f"--text: {text} contains no text")
    return contents


def standard_library() -> Path:
    """Return the folder of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def batches(contents: list[bytes], tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield packed batches forever: (tokens,) bytes, and their cu_seqlens.

    If a document does not fit, its remaining part begins the next batch.
    """
    pieces = [memoryview(content) for content in contents]
    order = itertools.cycle(
        torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    )
    rest = pieces[next(order)]
    while True:
        batch, boundaries = bytearray(), [0]
        while len(batch) < tokens:
            taken, rest = rest[: tokens - len(batch)], rest[tokens - len(batch) :]
            batch += taken
            boundaries.append(len(batch))
            rest = rest if len(rest) else pieces[next(order)]
        yield torch.tensor(list(batch)), torch.tensor(boundaries)


class Step(NamedTuple):
    """One step, with the tokens of this rank."""

    micro_batches: list[dict[str, Any]]
    tokens: int  # on all ranks together
    figures: dict[str, float]  # to print


class Packed:
    """Endless steps of one packed batch each."""

    def __init__(
        self, contents: list[bytes], tokens: int, shard: Callable[..., dict[str, Any]]
    ) -> None:
        self._batches, self._tokens, self._shard = batches(contents, tokens), tokens, shard
        self._steps = 0

    def __iter__(self) -> Iterator[Step]:
        for batch in self._batches:
            self._steps += 1  # first, so that a saved state includes the step that is yielded
            yield Step([self._shard(*batch)], self._tokens, {})

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps so far, and the tokens of each."""
        return {"steps": self._steps, "tokens": self._tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the steps of a saved state."""
        if state.get("tokens") != self._tokens:
            raise SystemExit(f"--seq-len must be {state.get('tokens')}, as in the saved run")
        for _ in itertools.islice(self, state["steps"]):
            pass
