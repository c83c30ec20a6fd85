"""Count what torch's operators do with tensors that have no data: products, bytes, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operators import IMPLEMENTATIONS
from seqpar.core.torch_private import dispatch_mode, leaves_of, memory_of, unsafe_view
from seqpar.simulate.recording.program import Compute, Operators

_aten = torch.ops.aten
# These touch as many bytes of what they select from as they return, and those as they are given.
_GATHER = {_aten.index_select, _aten.index, _aten.gather, _aten.embedding}
_SCATTER = {_aten.index_add_, _aten.index_copy_, _aten.index_put_, _aten.scatter_add_}
# These touch what they return alone, and not what they take the shape of.
_FILL = {
    *(_aten.zeros, _aten.new_zeros, _aten.zeros_like, _aten.zero_, _aten.ones, _aten.new_ones),
    *(_aten.ones_like, _aten.full, _aten.new_full, _aten.full_like, _aten.fill_),
}
_UNTOUCHED = {
    *(_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided),
    *(_aten.new_empty_strided, unsafe_view()),
}


class Operations(dispatch_mode()):  # type: ignore[misc]
    """Within this context, what operators do is told in turn, by `add`.

    Bytes of operators that come one after another are summed, until `flush`.

    Attributes:
        peak: the most bytes that tensors held at once which were made in it.
    """

    def __init__(self, add: Callable[[Compute], None], counts: bool) -> None:
        """With `counts` operators are told; otherwise seqpar's alone are replaced by their code."""
        super().__init__()
        self.peak, self._counts = 0, counts
        self._add, self._held = add, 0
        self._bytes = self._new_bytes = self._calls = 0  # since the last flush
        self._known: dict[int, weakref.ref[Any]] = {}  # storages, by their addresses

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        implementation = IMPLEMENTATIONS.get(operator)
        if implementation is not None:  # the operator's own code, and not its fake rule
            with self if self._counts else nullcontext(), torch.no_grad():
                return implementation(*args, **kwargs)
        result = operator(*args, **kwargs)
        if not self._counts:
            return result
        made = list(_tensors(result))
        given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        if given and not any(x.is_meta for x in given):
            return result  # of the host's tensors: what it makes of them is often kept for later
        self._hold(made, given)
        # below autograd a cast comes as an operator that may return what it is given
        if not operator.is_view or not {*map(memory_of, made)} <= {
            memory_of(x) for x in given if x.is_meta
        }:
            self._count(operator, args, kwargs, result, made)
        return result

    def flush(self) -> None:
        """Tell what has been summed."""
        if self._bytes or self._new_bytes or self._calls:
            self._add(Compute(Operators(0, self._bytes, self._new_bytes, self._calls)))
            self._bytes = self._new_bytes = self._calls = 0

    def _count(
        self, operator: Any, args: tuple[Any, ...], kwargs: Any, result: Any, made: list[Tensor]
    ) -> None:
        packet = operator.overloadpacket
        self._calls += 1
        if (formula := _flop_formulas().get(packet)) is not None:
            self.flush()
            flops = formula(*args, **kwargs, out_val=result)
            self._add(Compute(Operators(flops, 0)))
        elif packet in _GATHER:
            self._bytes += 2 * sum(x.nbytes for x in made)
        elif packet in _SCATTER:
            self._bytes += 3 * sum(x.nbytes for x in _tensors(args[1:]) if x.is_floating_point())
        elif packet in _FILL:
            self._bytes += sum(_nbytes(x) for x in made)
        elif packet is _aten.copy_:
            self._bytes += 2 * sum(_nbytes(x) for x in made)
        elif packet not in _UNTOUCHED:
            self._bytes += sum(_nbytes(x) for x in (*_tensors((args, kwargs)), *made))

    def _hold(self, made: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Count what is held of results; those that lie in what was given are not new."""
        for x in made:
            storage = x.untyped_storage()
            key = memory_of(x)
            if key in self._known or any(y.is_meta and memory_of(y) == key for y in given):
                continue
            size = storage.nbytes()

            def freed(_: Any, key: int = key, size: int = size) -> None:
                del self._known[key]
                self._held -= size

            self._known[key] = weakref.ref(storage, freed)
            self._held += size
            self._new_bytes += size
            self.peak = max(self.peak, self._held)


def _tensors(nested: Any) -> Iterable[Tensor]:
    return (x for x in leaves_of(nested) if isinstance(x, Tensor) and x.is_meta)


def _nbytes(x: Tensor) -> int:
    """Return the bytes of memory behind a tensor; dimensions that are expanded share theirs."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


@cache
def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return how many FLOPs matrix products take, by operator."""
    from torch.utils.flop_counter import flop_registry

    return {packet: x for packet, x in flop_registry.items() if packet not in IMPLEMENTATIONS}
