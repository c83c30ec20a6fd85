"""Checkpoints around a model's blocks, and tiling of modules that compute each token separately."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from seqpar.core.compiling import is_traced
from seqpar.integrations.huggingface.attention.call import EnabledModel, current
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.huggingface_private import CHECKPOINTED
from seqpar.integrations.huggingface.model.code import returns_several
from seqpar.integrations.huggingface.model.replaced import Removable, Replaced
from seqpar.memory.checkpointing import checkpoint
from seqpar.memory.offload import offload
from seqpar.memory.saved_bytes import counting_saved_bytes
from seqpar.memory.tiling import tiled

CHUNK = 4096  # tokens
_AHEAD = 4  # a block keeps its input, out and lse
_NORM = re.compile(r"Norm")
_MIXES = re.compile(r"Conv|BatchNorm|Pool|Embedding|Attention|Attn")


class Checkpoints:
    """Checkpoints around blocks, which keep the input of each block and the results of attention.

    Attributes:
        handles: objects whose `remove` undoes the changes of the model.
        kept: what the last call has kept in host memory.
    """

    def __init__(self, session: EnabledModel, blocks: list[nn.Module], on_host: bool) -> None:
        self._session, self._on_host = session, on_host
        self._saved: dict[nn.Module, int] = {}
        self.kept: offload | None = None
        self._call: Any = None
        self.handles: list[Removable] = []
        self._functions = {x: partial(self._run, x) for x in blocks}
        for x, run in self._functions.items():
            self.handles += [
                Replaced(x, "gradient_checkpointing", True),
                Replaced(x, "_gradient_checkpointing_func", run),
            ]

    def begin_call(self) -> None:
        """Set the blocks' checkpoint function again.

        transformers' `gradient_checkpointing_enable` replaces this function. Trainers call that
        method at the start, and TRL calls it again after each generation.
        """
        for x, run in self._functions.items():
            object.__setattr__(x, "_gradient_checkpointing_func", run)

    @property
    def saved_bytes(self) -> int:
        """The bytes that the device did not hold between forward and backward of the last call."""
        return sum(self._saved.values())

    @property
    def copied_bytes(self) -> int:
        return 0 if self.kept is None else self.kept.copied_bytes

    def _run(self, block: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        if is_traced() or not torch.is_grad_enabled():
            return checkpoint(function, *args)
        call = current.call
        if call is None or call is not self._call:
            self._call, self.kept = call, offload(float(self._on_host), ahead=_AHEAD)
        is_first = True

        def counted(*args: Any) -> Any:
            nonlocal is_first
            if not is_first:  # backward computes the block again
                if vars(self._session.inner).get(KEY) is not self._session:
                    reason = 'memory\'s "checkpoints" compute blocks again in backward'
                    raise ValueError(
                        f"sp.disable() must not come between forward and backward: {reason}; "
                        "call it after backward"
                    )
                before = current.set(call)
                try:
                    return function(*args)
                finally:
                    current.set(before)
            is_first = False
            with counting_saved_bytes() as saved:
                out = function(*args)
            saved.leave_out(args)
            layers = (x for module, x in self._session.layers.items() if module in inside)
            self._saved[block] = max(0, saved.total - sum(x.kept_bytes for x in layers))
            return out

        inside = set(block.modules())
        assert self.kept is not None
        if not self._on_host:
            return checkpoint(counted, *args)
        with self.kept:
            return checkpoint(counted, *args)


def blocks_with_checkpoints(session: EnabledModel) -> list[nn.Module]:
    """Return the blocks that transformers can checkpoint, from lists that contain attention layers.

    Raises a ValueError if transformers already checkpoints one of these blocks.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    all_blocks = (x for of_list in session.blocks if any(of_list.values()) for x in of_list)
    blocks: list[nn.Module] = [x for x in all_blocks if isinstance(x, GradientCheckpointingLayer)]
    if any(CHECKPOINTED.read(x, "gradient_checkpointing") for x in blocks):
        how = "call model.gradient_checkpointing_disable() first"
        reason = "the model checkpoints its blocks already"
        raise ValueError(f'memory must not include "checkpoints": {reason}; {how}')
    return blocks


class Tiles:
    """Modules that compute one chunk of tokens at a time.

    Attributes:
        handles: objects whose `remove` undoes the changes of the model.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [tiled(x, CHUNK) for x in modules]
        self.handles: list[Removable] = [_Untiled(x) for x in modules]

    @property
    def saved_bytes(self) -> int:
        """The bytes that these modules did not keep between forward and backward of the last
        call.
        """
        return sum(vars(x)["forward"].saved_bytes for x in self.modules if "forward" in vars(x))


class _Untiled(Replaced):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "forward", vars(module)["forward"])

    def remove(self) -> None:
        vars(self._module).pop("forward", None)


def modules_to_tile(session: EnabledModel) -> list[nn.Module]:
    """Return the MLPs, experts and norms of the blocks, and the norms beside lists of blocks."""
    found: dict[nn.Module, None] = {}
    lists = [list(x) for x in session.blocks if any(x.values())]
    for block in (block for blocks in lists for block in blocks):
        for x in block.children():
            found.update(dict.fromkeys(_in(x, session)))
    for module in session.inner.modules():
        beside = list(module.children())
        if any(isinstance(x, nn.ModuleList) and list(x) in lists for x in beside):
            norms = (x for x in beside if _NORM.search(type(x).__name__) and _by_token(x))
            found.update(dict.fromkeys(norms))
    return list(found)


def _in(module: nn.Module, session: EnabledModel) -> Iterator[nn.Module]:
    if module in session.layers:
        return
    if any(x in session.layers for x in module.modules()):
        for x in module.children():
            yield from _in(x, session)
    # Modules inside a module that is not tiled are skipped: an expert, for example, can receive its
    # rows in a different order.
    elif _by_token(module):
        yield module


def _by_token(module: nn.Module) -> bool:
    """Return whether a module maps one tensor to one tensor, and computes each token separately."""
    kind = type(module)
    files = {type(x).__module__.partition(".")[0] for x in module.modules()}
    library = files <= {"torch", "transformers"}
    is_norm = bool(_NORM.search(kind.__name__))
    is_mlp = next(module.children(), None) is not None and not isinstance(
        module, nn.ModuleList | nn.ModuleDict
    )
    if not library or not (is_norm or is_mlp) or "forward" in vars(module):
        return False
    names = [type(x).__name__ for x in module.modules()]
    if any(_MIXES.search(x) for x in names) or next(module.parameters(), None) is None:
        return False
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    needed = [x for x in parameters if x.default is x.empty and x.kind < x.VAR_POSITIONAL]
    return len(needed) == 1 == len(parameters) and not returns_several(kind)
