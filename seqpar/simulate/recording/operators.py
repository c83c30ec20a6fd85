"""Count the FLOPs, bytes and memory of torch operators on tensors without data."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.operators import IMPLEMENTATIONS
from seqpar.core.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    dispatch_mode,
    is_any_true,
    memory_of,
    unsafe_view,
)
from seqpar.simulate.recording.program import Compute, Operators
from seqpar.softmax.backends.aten import backward_buffer_bytes, forward_buffer_bytes

Arguments = tuple[object, ...]
_aten = torch.ops.aten
# The operators that select. A gather reads and writes the selected bytes. A scatter reads values,
# and reads and writes its target at the selected indices.
_GATHER = {_aten.index_select, _aten.index, _aten.gather, _aten.embedding}
_SCATTER = {_aten.index_add_, _aten.index_copy_, _aten.index_put_, _aten.scatter_add_}
# The operators that fill. They write their result, and do not read the tensor whose shape they
# copy.
_FILL = {
    *(_aten.zeros, _aten.new_zeros, _aten.zeros_like, _aten.zero_, _aten.ones, _aten.new_ones),
    *(_aten.ones_like, _aten.full, _aten.new_full, _aten.full_like, _aten.fill_),
}
_UNTOUCHED = {
    *(_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided),
    *(_aten.new_empty_strided, unsafe_view()),
}


class Operations(dispatch_mode()):  # type: ignore[misc]
    """A context that passes the costs of torch operators to the function `add`.

    The costs of consecutive operators are added up until `flush` is called.

    Attributes:
        peak: the most bytes held at once by tensors created in this context.
    """

    def __init__(self, add: Callable[[Compute], None], counts: bool, on_cpu: bool = False) -> None:
        """Make a context for the operators that one rank's code calls.

        Args:
            add: the function that receives the costs.
            counts: whether to pass costs to `add`. With False, the context has a single effect:
                seqpar's operators run their code on meta tensors, so that calls of torch within
                this code are recorded.
            on_cpu: whether the meta device stands for a CPU. On a CPU, `peak` includes the memory
                that an operator uses only while it runs.
        """
        super().__init__()
        self._add = add
        self._counts = counts
        self._on_cpu = on_cpu
        self._costs = counts  # whether the cost of operators is counted in addition to memory
        self._thread = threading.get_ident()
        self.peak = 0
        self._held = 0
        self._bytes = self._new_bytes = self._calls = 0  # since the last flush
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # live storages by address

    def __torch_dispatch__(
        self,
        operator: Any,  # an OpOverload, whose attributes torch does not type
        types: object,
        args: Arguments = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        implementation = IMPLEMENTATIONS.get(operator)
        if implementation is not None:  # run the operator's code instead of its fake rule
            with self, torch.no_grad():
                return implementation(*args, **kwargs)
        if torch.is_anomaly_check_nan_enabled():  # autograd checks whether a gradient has a NaN
            if operator is _aten.isnan.default and isinstance(args[0], Tensor):
                return torch.empty_like(args[0], dtype=torch.bool)
            if operator.overloadpacket is is_any_true():
                return torch.zeros((), dtype=torch.bool, device="cpu")  # a meta tensor has no data
        tensors: list[Tensor] = []
        form = operator, _form(args, tensors), _form(kwargs, tensors)
        known = _known.get(form)
        if known is None:
            return self._run(operator, args, kwargs, tensors, form)
        returned, cost, temporary = known
        if isinstance(returned, int):
            result: object = tensors[returned]
        elif returned is None:
            result = operator(*args, **kwargs)
        else:
            shape, stride, dtype = returned
            result = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if self._counts:
                self._hold((result,), ())
        self._need(temporary)
        self._count(cost)
        return result

    def _run(
        self,
        operator: Any,
        args: Arguments,
        kwargs: dict[str, object],
        tensors: list[Tensor],
        form: object,
    ) -> object:
        """Run an operator, count its cost, and return its result. The cost is cached for later
        arguments with the same shapes, strides and dtypes, which `form` describes.
        """
        result = operator(*args, **kwargs)
        inputs = [x for x in tensors if x.is_meta]
        if tensors and not inputs:
            # Operators on host tensors are not counted, because later calls often reuse their
            # results.
            return result
        results = [x for x in _tensors(result) if x.is_meta]
        memory = {memory_of(x) for x in inputs}
        # Below autograd, a cast is marked as a view operator although it can copy.
        views = operator.is_view and memory.issuperset(map(memory_of, results))
        cost = None if views else operator_cost(operator, args, kwargs, result, inputs, results)
        temporary = 0 if views else temporary_bytes(operator, args, results)
        if self._counts:
            self._hold(results, memory)
        self._need(temporary)
        self._count(cost)
        returned = None if views else _result_of(result, tensors)
        again: list[Tensor] = []
        # The form of the arguments changes if the operator resizes its `out`.
        same = form == (operator, _form(args, again), _form(kwargs, again))
        if same and len(inputs) == len(tensors) and (views or returned is not None):
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[form] = returned, cost, temporary
        return result

    @contextmanager
    def memory_only(self) -> Iterator[None]:
        """Count the memory of the operators in this context, but not their cost."""
        if threading.get_ident() != self._thread:
            yield  # operators in other threads are not counted at all
            return
        self._costs, before = False, self._costs
        try:
            yield
        finally:
            self._costs = before

    def flush(self) -> None:
        """Pass the summed costs of the operators since the last `flush` to `add`."""
        if self._bytes or self._new_bytes or self._calls:
            self._add(Compute(Operators(0, self._bytes, self._new_bytes, self._calls)))
            self._bytes = self._new_bytes = self._calls = 0

    def _count(self, cost: Operators | None) -> None:
        if cost is None or not self._costs:
            return
        self._calls += 1
        if cost.flops:
            self.flush()
            self._add(Compute(Operators(cost.flops, 0)))
        self._bytes += cost.bytes

    def _need(self, temporary: int) -> None:
        """Count memory that an operator on a CPU uses only while it runs."""
        if self._on_cpu and self._counts:
            self.peak = max(self.peak, self._held + temporary)

    def _hold(self, results: Iterable[Tensor], input_memory: Collection[int]) -> None:
        """Count the memory of results that are not views of inputs, until it is freed."""
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
            self._new_bytes += size if self._costs else 0
            self.peak = max(self.peak, self._held)


# For many operators on meta tensors, torch computes the result in Python, which takes 0.1 to 1 ms.
# A recording often calls the same operators with arguments of the same form, so results and costs
# are cached by operator and form of the arguments. A cached result is the form of a new tensor, the
# index of the input that is returned, or None for a view of an input, whose cost is None too. The
# third cached value is the result of `temporary_bytes`.
_NewTensor = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[object, tuple[_NewTensor | int | None, Operators | None, int]] = {}
_MAX_KNOWN = 2**14


def _form(x: object, tensors: list[Tensor]) -> object:
    """Return an argument in which each tensor is replaced by its form, and append these tensors to
    `tensors`.

    The form of a tensor is its device, shape, stride and dtype. If the tensor is in `tensors`
    already, it is replaced by its index in `tensors`.
    """
    if isinstance(x, Tensor):
        number = next((i for i, other in enumerate(tensors) if other is x), None)
        tensors.append(x)
        return (x.device, x.shape, x.stride(), x.dtype) if number is None else (Tensor, number)
    if isinstance(x, (list, tuple)):
        return tuple([y if type(y) is int else _form(y, tensors) for y in x])
    if isinstance(x, dict):
        return tuple([(name, _form(y, tensors)) for name, y in x.items()])
    return type(x), x  # includes the type, because 1 == 1.0


def operator_cost(
    operator: Any,
    args: Arguments,
    kwargs: dict[str, object],
    result: object,
    inputs: list[Tensor],
    results: list[Tensor],
) -> Operators:
    """Return the operator's bytes, or its FLOPs if it is a matrix product."""
    packet = operator.overloadpacket
    if (formula := _flop_formulas().get(packet)) is not None:
        return Operators(formula(*args, **kwargs, out_val=result), 0)
    if packet in _GATHER:
        return Operators(0, 2 * sum(x.nbytes for x in results))
    if packet in _SCATTER:
        values = (x for x in _tensors(args[1:]) if x.is_meta and x.is_floating_point())
        return Operators(0, 3 * sum(x.nbytes for x in values))
    if packet in _FILL:
        return Operators(0, sum(map(_nbytes, results)))
    if packet is _aten.copy_:  # a copy does not read the tensor that it overwrites
        return Operators(0, sum(map(_nbytes, inputs[1:])) + sum(map(_nbytes, results)))
    return Operators(0, 0 if packet in _UNTOUCHED else sum(map(_nbytes, (*inputs, *results))))


def temporary_bytes(operator: Any, args: Arguments, results: list[Tensor]) -> int:
    """Return the bytes that an operator on a CPU allocates and frees, in addition to its results.

    These are the buffers of ATen's attention kernels, and the copies of operands and results of
    pointwise operators that have a different dtype than the computation.
    """
    tensors = [x for x in _tensors(args) if x.is_meta]
    packet = operator.overloadpacket
    if packet is cpu_attention():
        return forward_buffer_bytes(tensors[0], tensors[1])
    if packet is cpu_attention_backward():
        return backward_buffer_bytes(tensors[0], tensors[1], tensors[2])
    if torch.Tag.pointwise not in operator.tags:
        return 0
    converted = [x for x in (*tensors, *results) if x.is_floating_point() and x.dim()]
    dtypes = {x.dtype for x in converted}
    if len(dtypes) < 2:
        return 0
    common = reduce(torch.promote_types, dtypes)
    return sum(x.numel() for x in converted if x.dtype != common) * common.itemsize


def _result_of(result: object, tensors: list[Tensor]) -> _NewTensor | int | None:
    """Return how to make the result of an operator again: the form of a new tensor, or the index of
    the input that is returned. Return None if the result is neither.
    """
    if type(result) is not Tensor or not result.is_meta:
        return None
    for number, x in enumerate(tensors):
        if x is result:
            return number
    if memory_of(result) in map(memory_of, tensors):
        return None
    shape, stride, dtype = result.shape, result.stride(), result.dtype
    again = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    alike = result.untyped_storage().nbytes() == again.untyped_storage().nbytes()
    return (shape, stride, dtype) if alike and not result.storage_offset() else None


def _tensors(x: object) -> list[Tensor]:
    tensors: list[Tensor] = []
    _form(x, tensors)
    return tensors


def _nbytes(x: Tensor) -> int:
    """Return the bytes of memory that a tensor covers. Expanded dimensions do not count."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


@cache
def _flop_formulas() -> dict[object, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    return {packet: x for packet, x in flop_registry.items() if packet not in IMPLEMENTATIONS}
