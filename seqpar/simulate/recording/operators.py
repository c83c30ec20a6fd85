"""Count the FLOPs, bytes and memory of torch operators on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.operators import IMPLEMENTATIONS
from seqpar.core.torch_private import dispatch_mode, memory_of, unsafe_view
from seqpar.simulate.recording.program import Compute, Operators

Arguments = tuple[object, ...]
_aten = torch.ops.aten
# A gather reads and writes the selected bytes. A scatter reads values, and reads and writes
# targets.
_GATHER = {_aten.index_select, _aten.index, _aten.gather, _aten.embedding}
_SCATTER = {_aten.index_add_, _aten.index_copy_, _aten.index_put_, _aten.scatter_add_}
# Fills write only their result; they do not read the tensor whose shape they copy.
_FILL = {
    *(_aten.zeros, _aten.new_zeros, _aten.zeros_like, _aten.zero_, _aten.ones, _aten.new_ones),
    *(_aten.ones_like, _aten.full, _aten.new_full, _aten.full_like, _aten.fill_),
}
_UNTOUCHED = {
    *(_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided),
    *(_aten.new_empty_strided, unsafe_view()),
}


class Operations(dispatch_mode()):  # type: ignore[misc]
    """Passes the cost of each operator run in this context to `add`.

    The bytes of consecutive operators are summed until `flush`.

    Attributes:
        peak: the most bytes held at once by tensors created in this context.
    """

    def __init__(self, add: Callable[[Compute], None], counts: bool) -> None:
        """Without `counts`, this context only replaces seqpar's operators by their code."""
        super().__init__()
        self._add = add
        self._counts = counts
        self.peak = 0
        self._held = 0
        self._bytes = self._new_bytes = self._calls = 0  # since the last flush
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address

    def __torch_dispatch__(
        self,
        operator: Any,  # an OpOverload, whose attributes torch does not type
        types: object,
        args: Arguments = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        implementation = IMPLEMENTATIONS.get(operator)
        if implementation is not None:  # run the operator's own code, not its fake rule
            with self if self._counts else nullcontext(), torch.no_grad():
                return implementation(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        result = _result_of(operator, args, kwargs, tensors)
        if not self._counts:
            return result
        inputs = [x for x in tensors if x.is_meta]
        if tensors and not inputs:
            return result  # on host tensors, whose results are often kept for later calls
        results = [x for x in _tensors((result,)) if x.is_meta]
        input_memory = {memory_of(x) for x in inputs}
        self._hold(results, input_memory)
        # Below autograd, a cast is a "view" operator that may or may not copy.
        if not operator.is_view or not input_memory.issuperset(map(memory_of, results)):
            self._calls += 1
            self._count(operator, args, kwargs, result, inputs, results)
        return result

    def flush(self) -> None:
        """Pass on the sums of the operators since the last flush."""
        if self._bytes or self._new_bytes or self._calls:
            self._add(Compute(Operators(0, self._bytes, self._new_bytes, self._calls)))
            self._bytes = self._new_bytes = self._calls = 0

    def _count(
        self,
        operator: Any,
        args: Arguments,
        kwargs: dict[str, object],
        result: object,
        inputs: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Add the operator's bytes, or its FLOPs if it is a matrix product."""
        packet = operator.overloadpacket
        if (formula := _flop_formulas().get(packet)) is not None:
            self.flush()
            flops = formula(*args, **kwargs, out_val=result)
            self._add(Compute(Operators(flops, 0)))
        elif packet in _GATHER:
            self._bytes += 2 * sum(x.nbytes for x in results)
        elif packet in _SCATTER:
            values = (x for x in _tensors(args[1:]) if x.is_meta and x.is_floating_point())
            self._bytes += 3 * sum(x.nbytes for x in values)
        elif packet in _FILL:
            self._bytes += sum(map(_nbytes, results))
        elif packet is _aten.copy_:
            self._bytes += 2 * sum(map(_nbytes, results))
        elif packet not in _UNTOUCHED:
            self._bytes += sum(map(_nbytes, (*inputs, *results)))

    def _hold(self, results: Iterable[Tensor], input_memory: set[int]) -> None:
        """Track the memory of results, except views of the inputs."""
        for x in results:
            key = memory_of(x)
            if key in self._known or key in input_memory:
                continue
            storage = x.untyped_storage()
            size = storage.nbytes()

            def freed(_: object, key: int = key, size: int = size) -> None:
                del self._known[key]
                self._held -= size

            self._known[key] = weakref.ref(storage, freed)
            self._held += size
            self._new_bytes += size
            self.peak = max(self.peak, self._held)


class _NewTensor(NamedTuple):
    """The form of an operator's result that has its own memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


# Torch derives the result of many operators on meta tensors in Python, in 0.1 to 1 ms. A recording
# calls few operators with different arguments, so the form of their results is kept, by operator
# and arguments: a new tensor, or the number of the input that is returned.
_results: dict[object, _NewTensor | int] = {}
_MAX_RESULTS = 2**14


def _result_of(
    operator: Any, args: Arguments, kwargs: dict[str, object], tensors: list[Tensor]
) -> object:
    """Return `operator(*args, **kwargs)`; `tensors` are the tensors among its arguments."""
    key = (operator, _described(args), *_described(tuple(kwargs.items())))
    if not all(x.is_meta for x in tensors):
        return operator(*args, **kwargs)
    try:
        known = _results.get(key)
    except TypeError:  # an argument cannot be hashed
        return operator(*args, **kwargs)
    if isinstance(known, int):
        return tensors[known]
    if known is not None:
        shape, stride, dtype = known
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    result = operator(*args, **kwargs)
    form = _form_of(result, tensors)
    if form is not None and key == (operator, _described(args), *_described(tuple(kwargs.items()))):
        if len(_results) >= _MAX_RESULTS:
            _results.clear()
        _results[key] = form
    return result


def _described(values: Sequence[object]) -> tuple[object, ...]:
    """Return an operator's arguments with the form of each tensor instead of the tensor."""
    return tuple(
        _NewTensor(x.shape, x.stride(), x.dtype)
        if isinstance(x, Tensor)
        else _described(x)
        if isinstance(x, (list, tuple))
        else (type(x), x)
        for x in values
    )


def _form_of(result: object, tensors: list[Tensor]) -> _NewTensor | int | None:
    """Return the form of a result; None if it is a view of an input, or not one meta tensor."""
    if type(result) is not Tensor or not result.is_meta:
        return None
    for number, x in enumerate(tensors):
        if x is result:
            return number
    if memory_of(result) in map(memory_of, tensors):
        return None
    form = _NewTensor(result.shape, result.stride(), result.dtype)
    again = torch.empty_strided(*form[:2], dtype=form.dtype, device="meta")
    alike = result.untyped_storage().nbytes() == again.untyped_storage().nbytes()
    return form if alike and not result.storage_offset() else None


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """Return the tensors among an operator's values, also inside lists, tuples and dicts."""
    tensors: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += _tensors(x)
        elif isinstance(x, dict):
            tensors += _tensors(x.values())
    return tensors


def _nbytes(x: Tensor) -> int:
    """Return the bytes of memory that a tensor covers; an expanded dimension counts once."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


@cache
def _flop_formulas() -> dict[object, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    return {packet: x for packet, x in flop_registry.items() if packet not in IMPLEMENTATIONS}
