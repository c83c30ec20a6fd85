"""Turn the parts of `enable(..., memory=...)` on and report what they saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from seqpar.core.arguments import shown
from seqpar.integrations.huggingface.attention.call import EnabledModel, ModelCall
from seqpar.integrations.huggingface.memory.blocks import (
    Checkpoints,
    Tiles,
    blocks_with_checkpoints,
    modules_to_tile,
)
from seqpar.integrations.huggingface.memory.head import ChunkedHead, find_head
from seqpar.integrations.huggingface.model.layers import configs_of
from seqpar.integrations.huggingface.model.replaced import Removable

PARTS = ("loss", "tiles", "checkpoints", "offload")
_NO_ROUTERS = "output_router_logits must not be set"


@dataclass(frozen=True)
class MemoryReport:
    """How many bytes one option of `enable(memory=...)` saved in the model's last step.

    Attributes:
        part: the option: "loss", "tiles", "checkpoints" or "offload".
        modules: the number of modules that the option changes.
        saved_bytes: the bytes that this rank's device did not hold.
    """

    part: str
    modules: int
    saved_bytes: int


class LeanMemory:
    """The parts of `memory` that are on for an enabled model."""

    def __init__(self, session: EnabledModel, memory: str | Collection[str] | None) -> None:
        chosen = _chosen(memory)
        all_parts = memory == "lean"
        head = find_head(session) if "loss" in chosen else None
        modules = modules_to_tile(session) if "tiles" in chosen else []
        blocks = blocks_with_checkpoints(session) if "checkpoints" in chosen else []
        missing = {"loss": head is None, "tiles": not modules, "checkpoints": not blocks}
        name = type(session.inner).__name__
        for part in chosen:
            if missing.get(part, False) and not all_parts:
                reasons = {
                    "loss": "has no head of words",
                    "tiles": "has no module that takes and returns one tensor of tokens",
                    "checkpoints": "has no blocks that transformers can checkpoint",
                }
                raise ValueError(f"memory must not include {part!r}: {name} {reasons[part]}")
        on_host = "offload" in chosen
        if modules:
            _check_routers(session.inner, False)
        # Nothing above changes the model or sends a message. If an error is raised, nothing must be
        # undone.
        self._session, self._found = session, (head, modules, blocks)
        self._checkpoints: Checkpoints | None = None
        self._tiles: Tiles | None = None
        self._head: ChunkedHead | None = None
        self._on_host, self._model = on_host, session.inner

    @property
    def is_on(self) -> bool:
        return any(x is not None for x in (self._checkpoints, self._tiles, self._head))

    def check(self, wants_routers: bool, expected: str = _NO_ROUTERS) -> None:
        """Raise a ValueError if a call asks for router logits, but a tiled module would not return
        them. The message begins with `expected`.
        """
        if self._tiles is not None:
            _check_routers(self._model, wants_routers, expected)

    def begin_call(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.begin_call()

    def turn_on(self) -> list[Removable]:
        head, modules, blocks = self._found
        self._checkpoints = Checkpoints(self._session, blocks, self._on_host) if blocks else None
        self._tiles = Tiles(modules) if modules else None
        self._head = None if head is None else ChunkedHead(self._session, head)
        found: list[Removable] = []
        for x in (self._checkpoints, self._tiles):
            found += [] if x is None else x.handles
        return found + ([] if self._head is None else [self._head.handle])

    def loss(self, call: ModelCall, logits: Tensor) -> Tensor | None:
        return None if self._head is None else self._head.loss(call, logits)

    @contextmanager
    def keeping_logits(self) -> Iterator[None]:
        """Within this context, calls with labels return logits and compute the loss from them."""
        if self._head is None:
            yield
            return
        self._head.keeps_logits, before = True, self._head.keeps_logits
        try:
            yield
        finally:
            self._head.keeps_logits = before

    def report(self) -> tuple[MemoryReport, ...]:
        found = []
        if self._head is not None:
            found.append(MemoryReport("loss", 1, self._head.saved_bytes))
        if (tiles := self._tiles) is not None:
            found.append(MemoryReport("tiles", len(tiles.modules), tiles.saved_bytes))
        if (blocks := self._checkpoints) is not None:
            count = len(blocks.handles) // 2
            found.append(MemoryReport("checkpoints", count, blocks.saved_bytes))
            if self._on_host:
                found.append(MemoryReport("offload", count, blocks.copied_bytes))
        return tuple(found)


def _check_routers(model: nn.Module, wanted: bool, expected: str = _NO_ROUTERS) -> None:
    if wanted or any(getattr(x, "output_router_logits", False) for x in configs_of(model)):
        reason = "experts in tiles return the router logits of single chunks"
        raise ValueError(
            f'{expected} with memory\'s "tiles": {reason}; choose other parts, such as '
            'memory=["loss", "checkpoints", "offload"]'
        )


def _chosen(memory: str | Collection[str] | None) -> tuple[str, ...]:
    if memory is None:
        return ()
    if isinstance(memory, str):
        if memory != "lean":
            raise ValueError(_expected(memory))
        return PARTS
    if not isinstance(memory, Collection) or not all(x in PARTS for x in memory):
        raise ValueError(_expected(memory))
    if "offload" in memory and "checkpoints" not in memory:
        reason = "it keeps the inputs of checkpointed blocks in host memory"
        raise ValueError(f'memory must include "checkpoints" with "offload": {reason}')
    return tuple(x for x in PARTS if x in memory)


def _expected(memory: object) -> str:
    parts = ", ".join(map(repr, PARTS))
    return f"memory must be None, 'lean' or a list of parts among {parts}, got {shown(memory)}"
