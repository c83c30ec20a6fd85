"""Let Triton's interpreter repeat less work, which takes most of the time of the kernels' tests.

- The interpreter patches its language again in every call of a device function, although the
  language is already patched. This takes a quarter of the time.
- It checks every sum, difference and product of integers for overflow. Without `debug` it asserts
  nothing, so the checks have no effect. This takes a third of the time.
- For every value, it builds a table of dtypes, and the type, name and size of a shape. This takes a
  third of the remaining time. Here they are computed once for each shape, or when they are read.
- For every operator, it compares shapes and promotes types. Here operands of equal shapes stay as
  they are, and promotions are computed once for each pair of types.
"""

import dataclasses
import math

from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_find_dtype = interpreter._get_np_dtype
_type_of_values = core._type_for_tuple_values
_make_block_type = core.block_type.__init__
_equal_dtypes = core.dtype.__eq__
_unwrap = core._unwrap_if_constexpr
_promote = semantic.TritonSemantic.computation_type_impl
_broadcast = semantic.TritonSemantic.broadcast_impl_value
_equal_tuples = core.tuple.__eq__
_dtypes, _block_types, _shapes, _promotions = {}, {}, {}, {}


def _patch_once(function):
    modules = function.__globals__.values()
    languages = [x for x in modules if x is language or x is language.core]
    if languages and not any(language.core.is_builtin(x.load) for x in languages):
        return interpreter._LangPatchScope()
    return _patch(function)


def _get_np_dtype(triton_type):
    name = triton_type.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _find_dtype(triton_type)
    return _dtypes[name]


class _TypeToCompute:
    def __init__(self, values, fields=None):
        self.arguments = values, fields


def _type_of_tuple(self):
    if isinstance(self._type, _TypeToCompute):
        self._type = _type_of_values(*self._type.arguments)
    return self._type


def _set_type_of_tuple(self, value):
    self._type = value


def _init_block_type(self, element_ty, shape):
    key = (element_ty.name, *shape)
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        if not all(type(x) is int for x in shape):
            return
        _block_types[key] = dict(vars(self))
    vars(self).update(_block_types[key])


def _init_tensor(self, handle, type):
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _shapes:
        sizes = core.tuple([core.constexpr(n) for n in shape])
        _shapes[shape] = core.constexpr(math.prod(shape)), sizes
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shapes[shape]


def _unwrap_if_constexpr(value):
    kind = type(value)
    if kind is int or kind is core.tensor:
        return value
    return value.value if kind is core.constexpr else _unwrap(value)


def _equal(self, other):
    return self is other or _equal_dtypes(self, other)


def _equal_shapes(self, other):
    values = other.values if type(other) is core.tuple else other
    if type(values) is list and all(type(x) is int for x in values):
        return core.constexpr(self.values == values)
    return _equal_tuples(self, other)


def _promote_once(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
    key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
    if key not in _promotions:
        _promotions[key] = _promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
    return _promotions[key]


def _broadcast_unequal(self, lhs, rhs):
    a, b = lhs.type, rhs.type
    if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


builder = interpreter.interpreter_builder
assert not builder.options.debug  # with debug, the checks matter
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _get_np_dtype
core._type_for_tuple_values = _TypeToCompute
core.tuple.type = property(_type_of_tuple, _set_type_of_tuple)
core.block_type.__init__ = _init_block_type
core.tensor.__init__ = _init_tensor
core._unwrap_if_constexpr = _unwrap_if_constexpr
core.dtype.__eq__ = _equal
core.tuple.__eq__ = _equal_shapes
semantic.TritonSemantic.computation_type_impl = _promote_once
semantic.TritonSemantic.broadcast_impl_value = _broadcast_unequal
