"""Real text as packed batches of bytes."""

import itertools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


def documents(text: Path) -> list[bytes]:
    """Return the contents of the files to train on: a folder's, in order of name, or one file's."""
    if not text.exists():
        raise SystemExit(f"--text: there is no {text}")
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
        raise SystemExit(f"--text: {text} holds no text")
    return contents


def standard_library() -> Path:
    """Return the folder of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def batches(contents: list[bytes], tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield packed batches without end: (tokens,) bytes, and their cu_seqlens.

    The part of a document that does not fit begins the next batch.
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
    """What a rank has of a step."""

    micro_batches: list[dict[str, Any]]
    tokens: int  # of all ranks
    figures: dict[str, float]  # what to print of it


class Packed:
    """Steps without end, of one packed batch each."""

    def __init__(
        self, contents: list[bytes], tokens: int, shard: Callable[..., dict[str, Any]]
    ) -> None:
        self._batches, self._tokens, self._shard = batches(contents, tokens), tokens, shard
        self._steps = 0

    def __iter__(self) -> Iterator[Step]:
        for batch in self._batches:
            self._steps += 1  # the state is behind the step that is yielded
            yield Step([self._shard(*batch)], self._tokens, {})

    def state_dict(self) -> dict[str, int]:
        """Return the state: how many steps there were, of how many tokens."""
        return {"steps": self._steps, "tokens": self._tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the steps of a state."""
        if state.get("tokens") != self._tokens:
            raise SystemExit(f"--seq-len must be {state.get('tokens')}, as of the run that saved")
        for _ in itertools.islice(self, state["steps"]):
            pass
