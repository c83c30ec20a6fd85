"""The memory of a training step, by module and tensor, without computing the step.

The step runs on the meta device, where tensors have shapes but no data. `_Watch` observes each
operator, and records when the memory of its results is allocated and freed. The profile lists the
tensors that are held at the peak, the moment at which the step holds the most bytes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.arguments import as_path
from seqpar.core.torch_private import dispatch_mode, memory_of

_ROWS = 24  # of the table
_KINDS = ("parameters", "buffers", "gradients", "activations", "temporary")
_GIB = 2**30


@dataclass(frozen=True)
class Holding:
    """Tensors with the same module, operator and shape that a step holds at its peak.

    Attributes:
        module: the name of the module that made the tensors, or that has the parameter.
        tensor: a parameter's name; or the operator that made the tensors, and the shape of the
            tensors.
        kind: "parameters", "buffers", "gradients" (of parameters), "activations" (made in forward)
            or "temporary" (made in backward).
        bytes: the bytes of all these tensors together.
        count: the number of tensors.
        grows: whether the tensors grow with the number of tokens.
    """

    module: str
    tensor: str
    kind: str
    bytes: int
    count: int
    grows: bool


@dataclass(frozen=True)
class MemoryProfile:
    """The memory of a training step. `str(profile)` is a table, and `save` draws a picture.

    Attributes:
        tokens: the number of tokens of the batch.
        peak_bytes: the most bytes that the step holds at once, parameters included.
        held: the tensors that the step holds at the peak, the largest first.
        timeline: the bytes that are held after each operator.
        backward_begins: the index in `timeline` at which backward begins.
    """

    tokens: int
    peak_bytes: int
    held: tuple[Holding, ...]
    timeline: tuple[int, ...]
    backward_begins: int

    @property
    def bytes_per_token(self) -> float:
        """The bytes of held tensors that grow with the batch, divided by the number of tokens."""
        return sum(x.bytes for x in self.held if x.grows) / max(1, self.tokens)

    def by_kind(self) -> dict[str, int]:
        """Return the bytes at the peak of each kind of tensor."""
        return {kind: sum(x.bytes for x in self.held if x.kind == kind) for kind in _KINDS}

    def by_module(self) -> dict[str, int]:
        """Return the bytes at the peak of each module, the largest first."""
        sums: dict[str, int] = {}
        for x in self.held:
            sums[x.module] = sums.get(x.module, 0) + x.bytes
        return dict(sorted(sums.items(), key=lambda x: -x[1]))

    def __str__(self) -> str:
        head = (
            f"peak {self.peak_bytes:,} bytes for {self.tokens:,} tokens, "
            f"{self.bytes_per_token:,.0f} bytes per token"
        )
        kinds = ", ".join(f"{kind} {size:,}" for kind, size in self.by_kind().items() if size)
        rows = [(x.module, x.tensor, x.kind, f"{x.bytes:,}") for x in self.held[:_ROWS]]
        if rest := self.held[_ROWS:]:
            size = sum(x.bytes for x in rest)
            rows.append((f"{len(rest)} more", "", "", f"{size:,}"))
        table = [("module", "tensor", "kind", "bytes"), *rows]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        lines = [
            f"{a:{widths[0]}} {b:{widths[1]}} {c:{widths[2]}} {d:>{widths[3]}}"
            for a, b, c, d in table
        ]
        return "\n".join([head, kinds, *lines])

    def save(self, path: str | Path) -> None:
        """Draw a picture of the bytes that the step holds over time, and of the largest modules at
        the peak.

        The suffix of the path chooses the format, such as .png or .svg. Drawing needs the extra
        `bench`.
        """
        path = as_path("path", path)
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            how = "pip install 'seqpar[bench]'"
            raise ImportError(f"MemoryProfile.save needs matplotlib: {how}") from error
        figure = Figure(figsize=(10, 4), layout="constrained")
        over_time, modules = figure.subplots(1, 2)
        over_time.plot([x / _GIB for x in self.timeline])
        over_time.axvline(self.backward_begins, linestyle=":", color="gray")
        over_time.set(
            xlabel="operator (dotted: backward begins)", ylabel="GiB held", title="One step"
        )
        largest = list(self.by_module().items())[:12][::-1]
        modules.barh([name for name, _ in largest], [size / _GIB for _, size in largest])
        modules.set(xlabel="GiB at the peak", title="Largest modules")
        figure.savefig(path)


def profile(model: nn.Module, batch: Mapping[str, Any]) -> MemoryProfile:
    """Return the modules and tensors that hold memory at the peak of a training step.

    The step is `model(**batch)` and, if the model returns a loss, the loss's backward. The loss is
    the entry "loss" of a mapping, the first element of a tuple, or the returned tensor itself. The
    step runs on the meta device, in the mode (training or evaluation) that the model has. On the
    meta device, tensors take no memory, so a model that is too large for any device can be
    profiled. The model's parameters can be on the meta device. The model is unchanged afterwards.

    A model of `seqpar.integrations.huggingface.enable` must be enabled on a group of one rank; pass
    the batch that `sp.shard` returned. Each of its attention calls counts as one operator, whose
    temporary tensors are not counted. Also not counted are the state of an optimizer and
    fragmentation of the allocator. Tensors that `seqpar.offload` copies to the host count as freed.

    Args:
        model: the module, in the dtype of the step.
        batch: the model's keyword arguments. The elements of its first integer tensor are the
            tokens.

    Raises:
        ValueError: if the batch has no integer tensor, or if an operator needs the numbers in a
            tensor, as some experts do; the message names the operator's module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a mapping, got {type(batch).__name__}")
    ids = next((x for x in batch.values() if _is_integer(x)), None)
    if ids is None:
        raise ValueError("batch must have a tensor of integers, such as input_ids")
    inputs = {name: x if _is_integer(x) else _on_meta(x) for name, x in batch.items()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        # Models of transformers would otherwise make positions and read their numbers, which is
        # impossible on the meta device.
        inputs.setdefault("position_ids", torch.arange(ids.shape[-1])[None])
    sizes = {ids.numel(), *([ids.shape[1]] if ids.dim() == 2 else [])}
    with _parameters_on_meta(model):
        watch = _Watch(model)
        try:
            with watch.following(model), watch:
                outputs = model(**inputs)
                watch.begin_backward()
                loss = _loss_in(outputs)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.sum().backward()
        except (NotImplementedError, RuntimeError) as error:
            where = watch.stack[-1]
            raise ValueError(
                f"model must run on the meta device, but {where} needs the numbers in a tensor: "
                f"{error}"
            ) from error
        finally:
            for x in model.parameters():
                watch.note_gradient(x)
        return watch.profile(ids.numel(), sizes)


def _loss_in(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, tuple | list):
        losses = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad and not x.dim()]
        return next(iter(losses), None)
    return outputs


def _is_integer(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()


def _on_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) else x


def _is_meta(x: object) -> bool:
    if isinstance(x, list | tuple):
        return any(map(_is_meta, x))
    return isinstance(x, Tensor) and x.is_meta


def _all_on_meta(x: Any) -> Any:
    return type(x)(map(_on_meta, x)) if isinstance(x, list | tuple) else _on_meta(x)


@contextmanager
def _parameters_on_meta(model: nn.Module) -> Iterator[None]:
    """Within this context, a model's parameters and buffers are on the meta device."""
    made: dict[Tensor, Tensor] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []

    def on_meta(x: Tensor) -> Tensor:
        if x not in made:
            copy = x.detach().to("meta")
            is_parameter = isinstance(x, nn.Parameter)
            made[x] = nn.Parameter(copy, x.requires_grad) if is_parameter else copy
        return made[x]

    for module in model.modules():
        of_module = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, x in of_module:
            if x.is_floating_point() or x.is_complex():
                replaced.append((module, name, x))
                setattr(module, name, on_meta(x))
    try:
        yield
    finally:
        for module, name, x in replaced:
            setattr(module, name, x)


@dataclass
class _Memory:
    """The memory of a tensor: its size, what made it, and when it was allocated and freed."""

    size: int
    shape: tuple[int, ...]
    module: str
    tensor: str
    kind: str
    begin: int
    end: int | None = None


class _Watch(dispatch_mode()):  # type: ignore[misc]
    """Records the memory of the results of all operators in its context."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._root = type(model).__name__
        self.stack = [self._root]  # the names of modules whose forward runs
        self._behind = self._root  # the module whose backward began last
        self._alive: dict[int, _Memory] = {}
        self._all: list[_Memory] = []
        self._time, self._backward_begins = 0, 0
        self._kind = "activations"
        for named, kind in (
            (model.named_parameters(), "parameters"),
            (model.named_buffers(), "buffers"),
        ):
            for name, x in named:
                module, _, last = name.rpartition(".")
                self._note(x, module or self._root, last, kind)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Within this context, keep track of the module that is running."""
        handles: list[Any] = []
        for name, x in model.named_modules():
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            handles.append(x.register_forward_pre_hook(enter, prepend=True))
            handles.append(x.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self.stack.append(name or self._root)

    def _leave(self, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
        first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if isinstance(first, Tensor) and first.requires_grad and torch.is_grad_enabled():
            first.register_hook(partial(self._enter_backward, name or self._root))

    def _enter_backward(self, name: str, _: Tensor) -> None:
        self._behind = name

    def begin_backward(self) -> None:
        self._kind, self._backward_begins = "temporary", self._time

    def note_gradient(self, x: Tensor) -> None:
        """Record that `x.grad` is the gradient of the parameter `x`."""
        if x.grad is None:
            return
        gradient, parameter = (self._alive.get(memory_of(y)) for y in (x.grad, x))
        if gradient is not None and parameter is not None:
            gradient.kind, gradient.module = "gradients", parameter.module
            gradient.tensor = f"{parameter.tensor}.grad"
            gradient.shape = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Needed because some operators refuse integers on a different device.
        if any(_is_meta(x) for x in args):
            args = tuple(map(_all_on_meta, args))
        results = func(*args, **(kwargs or {}))
        self._time += 1
        in_backward = self._kind == "temporary" and len(self.stack) == 1
        module = self._behind if in_backward else self.stack[-1]
        for x in results if isinstance(results, tuple | list) else [results]:
            if isinstance(x, Tensor) and x.is_meta:
                self._note(x, module, func.overloadpacket.__name__, self._kind)
        return results

    def _note(self, x: Tensor, module: str, tensor: str, kind: str) -> None:
        storage, key = x.untyped_storage(), memory_of(x)
        if key in self._alive:
            return
        shape = tuple(x.shape)
        made = _Memory(storage.nbytes(), shape, module, tensor, kind, self._time)
        self._alive[key] = made
        self._all.append(made)
        weakref.finalize(storage, self._free, key, made)

    def _free(self, key: int, made: _Memory) -> None:
        made.end = self._time
        if self._alive.get(key) is made:
            del self._alive[key]

    def profile(self, tokens: int, sizes: set[int]) -> MemoryProfile:
        changes = [0] * (self._time + 2)
        for x in self._all:
            changes[x.begin] += x.size
            if x.end is not None:
                changes[x.end + 1] -= x.size
        timeline: list[int] = []
        for change in changes[:-1]:
            timeline.append(change + (timeline[-1] if timeline else 0))
        peak = max(range(len(timeline)), key=timeline.__getitem__)
        groups: dict[tuple[str, str, str, bool], list[int]] = {}
        for x in self._all:
            if x.begin <= peak and (x.end is None or x.end >= peak):
                grows = x.kind in _KINDS[3:] and any(size in sizes for size in x.shape)
                shape = f" {x.shape}" if x.kind in _KINDS[3:] else ""
                key = x.module, f"{x.tensor}{shape}", x.kind, grows
                groups.setdefault(key, []).append(x.size)
        held = [
            Holding(module, tensor, kind, sum(found), len(found), grows)
            for (module, tensor, kind, grows), found in groups.items()
        ]
        held.sort(key=lambda x: -x.bytes)
        begins = self._backward_begins
        return MemoryProfile(tokens, timeline[peak], tuple(held), tuple(timeline), begins)
