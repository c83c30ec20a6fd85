"""Count the FLOPs, bytes and memory of torch operators on tensors without data."""

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
        self._pending = Operators(0, 0)  # since the last flush
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
        result = operator(*args, **kwargs)
        if not self._counts:
            return result
        results = list(_tensors(result))
        inputs = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        if inputs and not any(x.is_meta for x in inputs):
            return result  # on host tensors, whose results are often kept for later calls
        self._hold(results, inputs)
        # Below autograd, a cast is a "view" operator that may or may not copy.
        if not operator.is_view or not {*map(memory_of, results)} <= {
            memory_of(x) for x in inputs if x.is_meta
        }:
            self._count(operator, args, kwargs, result)
        return result

    def flush(self) -> None:
        """Pass on the sums of the operators since the last flush."""
        if self._pending != Operators(0, 0):
            self._add(Compute(self._pending))
            self._pending = Operators(0, 0)

    def _sum_up(self, nbytes: int = 0, new_bytes: int = 0, calls: int = 0) -> None:
        total = self._pending
        self._pending = Operators(
            0, total.bytes + nbytes, total.new_bytes + new_bytes, total.calls + calls
        )

    def _count(
        self, operator: Any, args: Arguments, kwargs: dict[str, object], result: object
    ) -> None:
        packet = operator.overloadpacket
        results = list(_tensors(result))
        nbytes = 0
        self._sum_up(calls=1)
        if (formula := _flop_formulas().get(packet)) is not None:
            self.flush()
            flops = formula(*args, **kwargs, out_val=result)
            self._add(Compute(Operators(flops, 0)))
        elif packet in _GATHER:
            nbytes = 2 * sum(x.nbytes for x in results)
        elif packet in _SCATTER:
            nbytes = 3 * sum(x.nbytes for x in _tensors(args[1:]) if x.is_floating_point())
        elif packet in _FILL:
            nbytes = sum(_nbytes(x) for x in results)
        elif packet is _aten.copy_:
            nbytes = 2 * sum(_nbytes(x) for x in results)
        elif packet not in _UNTOUCHED:
            nbytes = sum(_nbytes(x) for x in (*_tensors((args, kwargs)), *results))
        self._sum_up(nbytes)

    def _hold(self, results: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Track the memory of results, except views of the inputs."""
        for x in results:
            storage = x.untyped_storage()
            key = memory_of(x)
            if key in self._known or any(y.is_meta and memory_of(y) == key for y in inputs):
                continue
            size = storage.nbytes()

            def freed(_: object, key: int = key, size: int = size) -> None:
                del self._known[key]
                self._held -= size

            self._known[key] = weakref.ref(storage, freed)
            self._held += size
            self._sum_up(new_bytes=size)
            self.peak = max(self.peak, self._held)


def _tensors(nested: object) -> Iterable[Tensor]:
    return (x for x in leaves_of(nested) if isinstance(x, Tensor) and x.is_meta)


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
