"""Run a module that computes each token separately on one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from seqpar.core.arguments import as_int
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.torch_private import never_compiled, version_of
from seqpar.memory.saved_bytes import counting_saved_bytes

M = TypeVar("M", bound=nn.Module)
Autocast = tuple[str, torch.dtype, bool]  # type of device, dtype, whether autocast is enabled
Versions = dict[str, tuple[Tensor, int | None]]  # name -> (tensor, its version counter)


def tiled(module: M, chunk: int = 4096) -> M:
    """Make a module compute at most `chunk` tokens at a time, in forward and in backward.

    The intermediate tensors of an MLP then take the memory of one chunk. Backward recomputes each
    chunk's forward. The gradients of parameters are summed over the chunks in fp32, or in fp64 if
    they are fp64, and are rounded once. Results and gradients equal those of the unchanged module
    up to rounding. Dropout draws different random numbers than in the unchanged module. Backward
    draws the same numbers as forward, from torch's default generators.

    The module must compute each token separately. Examples are MLPs, norms, and experts without a
    limit of tokens. The module must take one tensor (..., T, C) as its only tensor argument, return
    one tensor (..., T, C′), and change nothing in place. Hooks of parameters, DDP and FSDP2 see
    each parameter's gradient once, as without chunks.

    Args:
        module: the module, whose `forward` is replaced. Its parameters keep their names.
        chunk: the number of tokens, along the dimension before the last, that are computed at a
            time. The number of tokens need not be a multiple of `chunk`.

    Returns:
        The same module.

    Raises:
        ValueError: if `module` is not a module, if its forward was already replaced, or if `chunk`
            is below 1. Calls of the module raise a ValueError if the input is not a single
            floating-point tensor with at least two dimensions, if the result is not a single tensor
            with as many tokens, or if the module changes its input, a parameter or a buffer in
            place.
        RuntimeError: in backward, if the module computes with a tensor that requires a gradient and
            is not one of its parameters, because the gradient of this tensor would be lost.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if "forward" in vars(module):
        tiled_already = isinstance(module.forward, _TiledForward)
        reason = "is tiled already" if tiled_already else "has a forward of its own: tile it first"
        raise ValueError(f"module must have the forward of its class, got one that {reason}")
    module.forward = _TiledForward(module, as_int("chunk", chunk, 1))
    return module


class _TiledForward:
    """A module's `forward`, which calls the forward of the module's class on chunks."""

    def __init__(self, module: nn.Module, chunk: int) -> None:
        self._module, self._chunk = module, chunk
        self.saved_bytes = 0  # bytes that were not held between forward and backward

    def __call__(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            what = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            expected = "one tensor (..., T, C) of floats as its first argument"
            raise ValueError(f"a tiled module takes {expected}, got {what}")
        if _holds_tensor([args, kwargs]):
            raise ValueError(
                "a tiled module must be called with one tensor, its first argument: got further "
                "tensors"
            )

        def call(part: Tensor) -> Tensor:
            out = type(module).forward(module, part, *args, **kwargs)
            if not isinstance(out, Tensor) or out.shape[:-1] != part.shape[:-1]:
                what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                expected = f"one tensor {(*part.shape[:-1], 'any')}"
                raise ValueError(f"a tiled module must return {expected}, got {what}")
            return out

        if x.shape[-2] <= self._chunk:
            return call(x)
        names = _names_of_parameters(module)
        if not torch.is_grad_enabled() or not (x.requires_grad or names):
            return torch.cat([call(part) for part in x.split(self._chunk, -2)], -2)
        work = _Work(self, module, call, self._chunk, list(names.values()))
        return _Tiled.apply(work, x, *names)


class _Work(NamedTuple):
    tiled: _TiledForward
    module: nn.Module
    call: Callable[[Tensor], Tensor]
    chunk: int  # tokens
    names: list[list[str]]  # all names of each parameter that requires a gradient


class _Tiled(torch.autograd.Function):
    """Calls a module on chunks of its input. Backward repeats the call of each chunk."""

    @staticmethod
    def forward(ctx: Any, work: _Work, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.work, ctx.autocast = work, None
        if torch.amp.is_autocast_available(kind := x.device.type):
            enabled = torch.is_autocast_enabled(kind)
            ctx.autocast = kind, torch.get_autocast_dtype(kind), enabled
        versions, random = _versions(work.module, x), _random_states(x)
        out = torch.cat([work.call(part) for part in x.split(work.chunk, -2)], -2)
        _refuse_changes(versions, _versions(work.module, x))
        after = _random_states(x)
        drew = not all(map(torch.equal, random, after))
        ctx.random = random if drew else None
        ctx.save_for_backward(x, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        work: _Work = ctx.work
        d_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        # A parameter's hooks must run once, with the whole gradient. Chunks are therefore computed
        # with copies of the parameters.
        leaves: list[Tensor] = [nn.Parameter(p.detach()) for p in parameters]
        sums: list[Tensor | None] = [None] * len(parameters)
        start = 0
        replaced = {
            f"module.{name}": leaf
            for names, leaf in zip(work.names, leaves, strict=True)
            for name in names
        }
        caller = _Caller(work)
        with _drawing_again(ctx.random, x):
            for part, d_out in zip(
                x.split(work.chunk, -2), gradient.split(work.chunk, -2), strict=True
            ):
                part = part.detach().requires_grad_(d_x is not None)
                with (
                    torch.enable_grad(),
                    _autocast(ctx.autocast),
                    counting_saved_bytes() as saved,
                ):
                    out = functional_call(caller, replaced, (part,))
                if start == 0:
                    saved.leave_out([x])
                    work.tiled.saved_bytes = saved.total * x.shape[-2] // part.shape[-2]
                inputs = [*([part] if d_x is not None else []), *leaves]
                if start == 0:
                    _refuse_lost_gradients(out, inputs)
                found: list[Tensor | None] = [None] * len(inputs)
                if out.requires_grad:
                    found = list(torch.autograd.grad(out, inputs, d_out, allow_unused=True))
                if d_x is not None:
                    d_part = found.pop(0)
                    rows = slice(start, start + part.shape[-2])
                    d_x[..., rows, :] = 0 if d_part is None else d_part
                for i, (own, total) in enumerate(zip(found, sums, strict=True)):
                    if own is not None:
                        # The first gradient is copied, because it can be a view of the result's
                        # gradient.
                        kind = accumulator_dtype(own.dtype)
                        sums[i] = own.to(kind, copy=True) if total is None else total.add_(own)
                start += part.shape[-2]
        d_parameters = [
            None if total is None else total.to(p.dtype)
            for p, total in zip(parameters, sums, strict=True)
        ]
        return None, d_x, *d_parameters


def _holds_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


@never_compiled
def _names_of_parameters(module: nn.Module) -> dict[Tensor, list[str]]:
    """Return the parameters that require a gradient, each with all of its names."""
    names: dict[Tensor, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            names.setdefault(p, []).append(name)
    return names


class _Caller(nn.Module):
    """A module whose forward calls a function, for `torch.func.functional_call`."""

    def __init__(self, work: _Work) -> None:
        super().__init__()
        self.module, self.call = work.module, work.call

    def forward(self, part: Tensor) -> Tensor:
        return self.call(part)


@never_compiled
def _versions(module: nn.Module, x: Tensor) -> Versions:
    """Return a module's input, parameters and buffers, each with its version counter."""
    named = {"its input": x, **dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (y, None if y.is_inference() else version_of(y)) for name, y in named.items()}


@never_compiled
def _refuse_changes(before: Versions, after: Versions) -> None:
    for name, (x, version) in after.items():
        old, old_version = before.get(name, (None, None))
        if old is not x or old_version != version:
            raise ValueError(
                "a tiled module must change no tensor in place, but its forward has "
                f"changed or replaced {name}"
            )


@never_compiled
def _random_states(x: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *get_device_states(x)[1]]


@contextmanager
def _drawing_again(states: list[Tensor] | None, x: Tensor) -> Iterator[None]:
    """Within this context, torch's generators start from the given states, so that they draw the
    same random numbers again. If `states` is None, nothing is changed.
    """
    if states is None:
        yield
        return
    devices, _ = get_device_states(x)
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[0])
        set_device_states(devices, states[1:], device_type=x.device.type)
        yield


def _autocast(settings: Autocast | None) -> AbstractContextManager[object]:
    return nullcontext() if settings is None else torch.autocast(*settings)


@never_compiled
def _refuse_lost_gradients(out: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise a RuntimeError if a result depends on a leaf that is not one of the inputs."""
    pending, seen = [out.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not x for x in inputs):
            raise RuntimeError(
                f"a tiled module computes with a tensor {tuple(leaf.shape)} that is none of its "
                "parameters, so the gradient of the tensor would be lost: register the tensor as a "
                "parameter, and shard the tiled module itself by FSDP2, not a module inside"
            )
        pending += [x for x, _ in node.next_functions]
