"""All code of seqpar that reads the Python code of transformers and of the user, or changes it.

All other files of this folder only call public functions of transformers or register hooks. The
code that is read or changed here can change with any release of transformers. Each function
therefore says what it assumes about the code, and refuses a model for which the assumption does not
hold.

| code that is read | by | relies on |
|---|---|---|
| transformers' layers | `dispatches` | the name `get_interface` in their code |
| transformers' models | `calls_loss_function` | the name `loss_function` in `forward` |
| files of transformers | `read_elsewhere` | the source of `eager_attention_forward` |
| transformers' models | `changes_of_logits` | the names of logits in `forward` |
| transformers' MLPs, experts and norms | `returns_several` | the source of `forward` |
| recurrent layers of transformers | `Overlay` | functions that the forward names as globals |
| the user's classes | `users_of_labels` | their source |
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from seqpar.integrations.huggingface.model.replaced import Replaced

ATTENTION = re.compile(r"Attention|Attn(?!_)")  # in the names of classes of layers
ROUTER_LOSS = "load_balancing_loss_func"  # global function of models' files
_LOGITS = ("logits", "lm_logits", "prediction_scores")  # names of logits in forwards
_LIBRARIES = ("torch", "transformers", "peft")  # classes of all other packages are the user's
# CPython 3.11 raises a SystemError if two threads make syntax trees simultaneously.
_PARSING = threading.Lock()


def global_of(x: object, name: str) -> Any:
    """Return a global variable of the file that defines an object's class, or None."""
    return getattr(sys.modules[type(x).__module__], name, None)


def takes(x: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(x).forward).parameters


def dispatches(kind: type) -> bool:
    """Return whether a layer's class calls the attention function that its model's config names.

    Layers look up this function in `ALL_ATTENTION_FUNCTIONS`, often by the method `get_interface`.
    No public attribute says so.
    """
    if hasattr(kind, "base_model_prefix"):  # a whole model
        return False
    lookups = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
    return any(lookups.intersection(x.__code__.co_names) for x in _functions(kind))


def calls_loss_function(kind: type) -> bool:
    """Return whether a model computes its loss by transformers' `loss_function`.

    Other models use labels in their own way. Some causal models, for example, do not shift labels.
    """
    forwards = (x for x in _functions(kind) if x.__name__ == "forward")
    return any("loss_function" in x.__code__.co_names for x in forwards)


def read_elsewhere(kind: type) -> set[str]:
    """Return the attributes of a layer that are read by `eager_attention_forward` in the layer's
    file.

    Seqpar's attention replaces this function and would ignore these attributes. An exception is
    `sinks` in a layer that also passes its sinks as the argument `s_aux`, which seqpar accepts.
    This function assumes that the parameter of `eager_attention_forward` for the layer is called
    `module`.
    """
    own = getattr(inspect.getmodule(kind), "eager_attention_forward", None)
    if own is None or own.__module__ != kind.__module__:
        return set()
    read = set(re.findall(r"\bmodule\.(\w+)", _source(own)))
    if any("s_aux=self.sinks" in _source(x) for x in _functions(kind)):
        read.discard("sinks")
    return read


def users_of_labels(model: nn.Module, inner: nn.Module) -> list[str]:
    """Return the names of the user's classes that use labels, in a model or in modules around it.

    An enabled model receives no labels, because its loss is computed after its call. Two kinds of
    classes also work without labels, and are not returned:

    * a class that only passes `labels=labels` on to an inner model or to its base class;
    * a model class that passes labels to `loss_function`, and neither shifts the labels nor changes
      the loss.
    """
    around = [x for x in model.modules() if any(y is inner for y in x.modules())]
    users: list[str] = []
    for x in around:
        kinds = type(x).__mro__[: type(x).__mro__.index(nn.Module)]
        own = [kind for kind in kinds if kind.__module__.split(".")[0] not in _LIBRARIES]
        functions = [f for kind in own for f in vars(kind).values() if isinstance(f, FunctionType)]
        of_a_family = any(kind.__module__.startswith("transformers.models.") for kind in kinds)
        uses = _makes_another_loss if x is inner and not of_a_family else _uses_labels
        if any(uses(f, x, around) for f in functions):
            users.append(type(x).__name__)
    return users


def changes_of_logits(kind: type) -> list[ast.expr]:
    """Return the expressions in which a model's forward calculates with its logits.

    Relies on `_LOGITS`, the names of the logits' variable in transformers' files.
    """
    changes: list[ast.expr] = []
    forward: Any = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    for x in _syntax(forward):
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) in _LOGITS:
            value = x.value
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                if value.func.attr not in ("contiguous", "float", "to"):
                    break
                value = value.func.value
            if isinstance(value, ast.BinOp) or "tanh" in ast.unparse(value):
                changes.append(value)
    return changes


def returns_several(kind: type) -> bool:
    """Return whether a module's forward returns a tuple, or has no source that can be read."""
    forward: Any = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    returns = [x.value for x in _syntax(forward) if isinstance(x, ast.Return)]
    return not returns or any(isinstance(x, ast.Tuple) for x in returns)


def _uses_labels(function: FunctionType, owner: nn.Module, models: list[nn.Module]) -> bool:
    nodes = _syntax(function)
    if not nodes[1:]:
        return "labels" in function.__code__.co_varnames
    calls = [x for x in nodes if isinstance(x, ast.Call) and _calls(x.func, owner, models)]
    passed = [x.value for call in calls for x in call.keywords if x.arg == "labels"]
    names = [x for x in nodes if isinstance(x, ast.Name) and x.id == "labels" and x not in passed]
    return bool(names) or any(isinstance(x, ast.Constant) and x.value == "labels" for x in nodes)


def _makes_another_loss(function: FunctionType, owner: nn.Module, models: list[nn.Module]) -> bool:
    """Return whether a function of the user's own model computes a loss other than `loss_function`.

    These uses of labels are allowed: passing them to `loss_function`, comparing them with None and
    moving them to a device. If the function's file has transformers' router loss, the function can
    also add `aux_loss` to the loss.
    """
    nodes, allowed = _syntax(function), set[ast.AST]()
    if not nodes[1:]:
        return "labels" in function.__code__.co_varnames
    for x in nodes:
        if isinstance(x, ast.Call):
            if ast.unparse(x.func) == "self.loss_function":
                allowed.update(x.args)
            elif not _calls(x.func, owner, models):
                continue
            allowed.update(y.value for y in x.keywords if y.arg == "labels")
        elif isinstance(x, ast.Compare) and isinstance(x.ops[0], ast.Is | ast.IsNot):
            allowed.add(x.left)
        elif isinstance(x, ast.Attribute) and x.attr == "to":
            allowed.add(x.value)
        elif isinstance(x, ast.Assign):
            allowed.update(x.targets)
    used = (x for x in nodes if x not in allowed)
    if any(getattr(x, "id", getattr(x, "value", None)) == "labels" for x in used):
        return True
    routers = global_of(owner, ROUTER_LOSS) is not None
    changes = (ast.unparse(x) for x in nodes if _calculates(x))
    return any("loss" in x and not (routers and "aux_loss" in x) for x in changes)


def _calculates(x: ast.AST) -> bool:
    if isinstance(x, ast.BinOp) and isinstance(x.left, ast.Tuple):
        return False
    return isinstance(x, ast.BinOp | ast.AugAssign) and not isinstance(x.op, ast.BitOr)


def _calls(function: ast.expr, owner: nn.Module, models: list[nn.Module]) -> bool:
    """Return whether an expression in a method of the class `owner` stands for one of the modules
    `models`, or is a call of super().
    """
    called = ast.unparse(function).removesuffix(".forward")
    this, _, path = called.partition(".")
    try:
        return called == "super()" or (this == "self" and attrgetter(path)(owner) in models)
    except AttributeError:
        return False


def _functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of a class and of its bases, without decorators. Classes of torch are
    skipped.
    """
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            for x in vars(base).values():
                function = inspect.unwrap(x) if callable(x) else None
                if isinstance(function, FunctionType):
                    yield function


@cache
def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _syntax(function: FunctionType) -> list[ast.AST]:
    """Return the nodes of a function's syntax tree, or an empty list if it has no source."""
    try:
        with _PARSING:
            return list(ast.walk(ast.parse(textwrap.dedent(_source(function)))))
    except SyntaxError:  # the source of a lambda can be only a part of a statement
        return []


class Overlay(Replaced):
    """Replaces some of the global functions that a module's forward calls, until `remove` is
    called.

    The module gets a copy of its forward, with the same code, closures and decorators. Only in this
    copy, the global functions are replaced. The module's class and its file do not change. If
    `around` is given, a call of the module calls `around(own, module, …)`; `own` is the copied
    forward.
    """

    def __init__(
        self,
        module: nn.Module,
        functions: Mapping[str, Any],
        around: Callable[..., Any] | None = None,
    ) -> None:
        forward = type(module).forward
        assert isinstance(forward, FunctionType)
        own = with_globals(forward, functions)

        def within(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            assert around is not None
            return around(own, module, *args, **kwargs)

        within.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        made = own if around is None else within
        super().__init__(module, "forward", MethodType(made, module))

    def remove(self) -> None:
        """Restore the previous forward, unless something else has replaced the forward since."""
        if vars(self._module).get("forward") is self._value:
            super().remove()


def check_forward(module: nn.Module, names: Iterable[str]) -> None:
    found = type(module).__name__
    if "forward" in vars(module):
        raise ValueError(
            f"model must have the forwards of its classes, but that of a {found} was replaced"
        )
    if missing := sorted(set(names) - named_in(module)):
        reason = f"a {found} does not call {', '.join(missing)}"
        raise ValueError(f"model must be of a release of transformers that seqpar knows: {reason}")
    if not _holds_what_it_decorates(type(module).forward):
        reason = f"a decorator of a {found}'s forward does not hold the forward in a closure"
        raise ValueError(f"model must have forwards that can be copied: {reason}")


def named_in(module: nn.Module) -> set[str]:
    """Return the names of the global variables that the forward of a module reads. Global variables
    that only decorators read are left out.
    """
    function = inspect.unwrap(type(module).forward)
    return set(function.__code__.co_names) if isinstance(function, FunctionType) else set()


def with_globals(function: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function in which `replaced` takes the place of globals.

    Decorators of the function are copied too, and call the copied function.
    """
    inner = getattr(function, "__wrapped__", None)
    cells, names = function.__closure__, function.__globals__
    if inner is None:
        # If there were a `__name__`, torch.compile would look up globals in the module of that
        # name.
        names = {name: x for name, x in names.items() if name != "__name__"} | dict(replaced)
    else:
        made = with_globals(inner, replaced)
        cells = tuple(CellType(made) if _has(cell, inner) else cell for cell in cells or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function))
    if inner is not None:
        copy.__dict__["__wrapped__"] = made
    return copy


def _holds_what_it_decorates(function: object) -> bool:
    """Return whether every decorator of a function keeps the function in a closure cell."""
    if not isinstance(function, FunctionType):
        return False
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return True
    held = any(_has(cell, inner) for cell in function.__closure__ or ())
    return held and _holds_what_it_decorates(inner)


def _has(cell: CellType, content: object) -> bool:
    try:
        return cell.cell_contents is content
    except ValueError:  # the cell is empty
        return False
