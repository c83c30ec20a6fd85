"""Record the steps of a function, and replay them without the function's Python code.

A step is an operator of torch, or a function that was called through `seqpar.kernels.steps`, such
as the launch of a kernel or an exchange of messages. A `Recorder` notes each step while a function
runs. The resulting `Recording` is a flat list of steps, which read and write numbered places:

    places[7] = empty((32, 8, 16)) # an operator
    places[8] = as_strided(places[7], …) # a view
    places[9] = post(places[0], places[8]) # a function that was called through `step`

The steps of a replay are those of the recorded function, on tensors of equal shapes, strides and
dtypes, so the results have the same bits. A place is emptied after the last step that reads the
place. A replay therefore frees memory at the same step as the recorded function, or earlier.

Operators that make views are not recorded. If a step reads a view, the recording has one
`as_strided`, which makes the view directly from a tensor that an earlier step returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from seqpar.core.torch_private import dispatch_mode, memory_of, written_arguments
from seqpar.kernels.steps import OBSERVER

T = TypeVar("T")


class _Step(NamedTuple):
    function: Callable[..., Any]
    reads: tuple[int, ...]  # the places of the arguments
    writes: int | slice  # the place of the result, or the places of several results


class Recording:
    """The steps of a function. A step reads and writes numbered places, which hold the function's
    values.
    """

    def __init__(self, places: Sequence[Any], steps: Sequence[_Step], results: list[int]) -> None:
        """Keep the steps, the initial values of the places, and the places of the results.

        `places` does not contain the inputs of the function. Their places come before all others.
        """
        self._places, self._results = places, results
        last = {place: number for number, x in enumerate(steps) for place in (*_written(x), *x[1])}
        dead: list[list[int]] = [[] for _ in steps]
        for place, number in last.items():
            if place not in results:
                dead[number].append(place)
        self._steps = [
            (x.function, _reader(x.reads), x.writes, y) for x, y in zip(steps, dead, strict=True)
        ]

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the steps for new inputs, and return the results."""
        places = [*inputs, *self._places]
        del inputs
        for function, arguments, writes, dead in self._steps:
            places[writes] = function(*arguments(places))
            for place in dead:
                places[place] = None
        return [places[place] for place in self._results]


def _reader(reads: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    keys: list[Any] = list(reads)
    if len(keys) < 2:  # With a single place, `itemgetter` would return no tuple.
        keys = [slice(keys[0], keys[0] + 1) if keys else slice(0)]
    return itemgetter(*keys)


def _written(x: _Step) -> Sequence[int]:
    return [x.writes] if isinstance(x.writes, int) else range(x.writes.start, x.writes.stop)


_aten = torch.ops.aten
# Functions that call an operator in a third of the time that the operator itself takes.
_BINDINGS: dict[object, Callable[..., Any]] = {
    _aten.add_.Tensor: Tensor.add_,
    _aten.cat.default: torch.cat,
    _aten.copy_.default: Tensor.copy_,
    _aten.empty.memory_format: torch.empty,
    _aten.index_select.default: torch.index_select,
    _aten.index_select.out: torch.index_select,
}
# Operators with one of these tags read values of tensors, and return them or shapes.
_KINDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# The types of arguments that may be constants of a recording.
_OF_TORCH = torch.dtype, torch.device, torch.layout, torch.memory_format
_CONSTANTS = (NoneType, bool, int, float, str, tuple, list, *_OF_TORCH)
# The shape, the strides and the offset of a view.
_Form = tuple[tuple[int, ...], tuple[int, ...], int]


class Recorder(dispatch_mode()):  # type: ignore[misc]
    """Records the steps of a function that this thread calls within the context. A step is an
    operator of torch, a launch of a kernel or an exchange of messages.

    A function cannot be recorded if its steps depend on values of tensors, or if it writes to a
    tensor that is neither an input nor made by a step. For such a function, `recording` returns
    None.
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        """Prepare to record a function of these inputs. The function must be called with
        `self.inputs`.
        """
        super().__init__()
        # Aliases: if two inputs are the same tensor, the steps show which of the two they read.
        self.inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        self._places: list[Any] = []  # the values of constants, and None for inputs and results
        self._steps: list[_Step] = []
        # For each tensor, the place of the result of a step, of which it is a view.
        self._roots = WeakIdKeyDictionary()
        self._forms: dict[int, tuple[_Form, torch.dtype]] = {}  # of the tensors in places
        self._views: dict[tuple[int, _Form], int] = {}  # the places of views
        self._objects: dict[int, tuple[object, int]] = {}  # places of other results, by id
        self._constants: set[int] = set()
        self._in_step = self._fails = False
        for x in self.inputs:
            self._define(x)

    def __enter__(self) -> Recorder:
        OBSERVER.step = self.step
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        OBSERVER.step = None
        super().__exit__(*fault)

    def recording(self, results: Sequence[Tensor]) -> Recording | None:
        """Return the recording of the function, which has returned these results, or None if the
        function cannot be recorded.
        """
        found = [self._place_of(x) for x in results]
        if self._fails:
            return None
        return Recording(self._places[len(self.inputs) :], self._steps, found)

    def step(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`, and record the call as one step.

        If the call is made while a different step runs, it is not recorded separately.
        """
        if self._in_step:
            return function(*arguments)
        reads = [self._place_of(x) for x in arguments]
        self._in_step = True
        try:
            result = function(*arguments)
        finally:
            self._in_step = False
        self._append(function, reads, result)
        return result

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self._in_step:
            return result
        written = written_arguments(function)
        results = result if isinstance(result, tuple | list) else [result]
        if not written and args and all(_is_view(x, args[0]) for x in results):
            root = self._root_of(args[0])
            for x in results:
                self._roots[x] = root
            return result
        self._fails |= not _KINDS.isdisjoint(function.tags) or not isinstance(results[0], Tensor)
        for i, name in written:
            target = args[i] if i < len(args) else kwargs[name]
            self._fails |= isinstance(target, Tensor) and self._root_of(target) in self._constants
        names = [name for name, x in kwargs.items() if isinstance(x, Tensor)]
        others = {name: x for name, x in kwargs.items() if name not in names}
        run = _BINDINGS.get(function, function)
        if others:
            run = partial(run, **others)
        if names:
            run = partial(_with_named, run, names)
        reads = [self._place_of(x) for x in (*args, *(kwargs[name] for name in names))]
        self._append(run, reads, result)
        return result

    def _append(self, function: Callable[..., Any], reads: list[int], result: object) -> None:
        if isinstance(result, tuple | list):
            first = len(self._places)
            for x in result:
                self._fails |= isinstance(x, tuple | list)  # its tensors would have no places
                self._define(x)
            self._steps.append(_Step(function, tuple(reads), slice(first, len(self._places))))
        else:
            self._steps.append(_Step(function, tuple(reads), self._define(result)))

    def _define(self, x: object) -> int:
        """Return the number of a new place, the storage to which a step writes its result `x`."""
        place = len(self._places)
        self._places.append(None)
        if not isinstance(x, Tensor):
            self._objects[id(x)] = x, place
        elif x not in self._roots:  # otherwise a step has changed x in place
            self._roots[x] = place
            self._forms[place] = _form(x), x.dtype
        return place

    def _constant(self, x: object) -> int:
        place = self._define(x)
        self._places[place] = x
        self._constants.add(place)
        return place

    def _root_of(self, x: Tensor) -> int:
        root: int | None = self._roots.get(x)
        return self._constant(x) if root is None else root

    def _place_of(self, x: object) -> int:
        """Return the number of the place from which a step reads an argument. If the argument is a
        view or a list, first add a step that makes it.
        """
        if isinstance(x, Tensor):
            root, form = self._root_of(x), _form(x)
            if self._forms[root] == (form, x.dtype):
                return root
            if (root, form) not in self._views:
                place = len(self._places)
                self._places.append(None)
                reads = root, *map(self._constant_of, form)
                self._steps.append(_Step(Tensor.as_strided, reads, place))
                self._views[root, form] = place
            return self._views[root, form]
        if isinstance(x, tuple | list) and any(isinstance(y, Tensor | tuple | list) for y in x):
            place = len(self._places)
            self._places.append(None)
            make = type(x) if hasattr(x, "_make") else _collected
            self._steps.append(_Step(make, tuple([self._place_of(y) for y in x]), place))
            return place
        return self._constant_of(x)

    def _constant_of(self, x: object) -> int:
        if id(x) in self._objects:
            return self._objects[id(x)][1]
        self._fails |= not isinstance(x, _CONSTANTS)
        return self._constant(x)


def _form(x: Tensor) -> _Form:
    return tuple(x.shape), x.stride(), int(x.storage_offset())


def _is_view(x: object, of: object) -> bool:
    if not isinstance(x, Tensor) or not isinstance(of, Tensor):
        return False
    return x.dtype == of.dtype and memory_of(x) == memory_of(of)


def _collected(*items: Any) -> list[Any]:
    return list(items)


def _with_named(function: Callable[..., Any], names: Sequence[str], *arguments: Any) -> Any:
    """Call a function with the last arguments passed by the names in `names`."""
    count = len(arguments) - len(names)
    return function(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))
