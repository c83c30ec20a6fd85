"""Keep a fraction of the tensors that autograd saves in host memory, and copy during computation.

As in ByteScale (2025), the activations of a long document then fit on fewer devices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from seqpar.core.arguments import as_bool, as_float, as_int
from seqpar.core.torch_private import base_of

Pack = Callable[[Tensor], object]
Unpack = Callable[[object], Tensor]


class offload:
    """Keep a fraction of the tensors that autograd saves in this context in host memory.

    ```python
    with seqpar.offload(0.5) as kept:
        loss = model(x)
    loss.backward()
    ```

    Gradients have the same bits as without `offload`. Parameters, integers, sparse tensors, small
    tensors and tensors on the host are not copied. On a GPU, copies use pinned memory and separate
    streams. Tensors are copied to the host while forward computes. In backward, tensors are copied
    back to the device before they are needed. As with `torch.autograd.graph.save_on_cpu`, saved
    tensors must not be changed in place. If `seqpar.checkpoint` is called in this context, the
    tensors that the checkpoint keeps are also copied.

    Args:
        ratio: the fraction of saved bytes to copy, from 0 to 1. When autograd saves a tensor, the
            tensor is copied if the copied bytes then are at most this fraction of all bytes saved
            so far.
        least: the size in bytes of the smallest tensor that is copied.
        ahead: the number of tensors that are copied back before backward needs them.
        simulate: whether to copy tensors on the host too, to try offloading without a GPU.

    Attributes:
        saved_bytes: the bytes of all saved tensors that could be copied.
        copied_bytes: the bytes of the saved tensors that were copied to host memory.
    """

    def __init__(
        self, ratio: float, *, least: int = 2**20, ahead: int = 2, simulate: bool = False
    ) -> None:
        self._ratio = as_float("ratio", ratio)
        if not 0 <= self._ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1, got {ratio}")
        self._least, self._ahead = as_int("least", least, 0), as_int("ahead", ahead, 0)
        self._simulate = as_bool("simulate", simulate)
        self.saved_bytes = self.copied_bytes = 0
        self._order: list[
            weakref.ref[_Copied]
        ] = []  # in the order of saving; backward needs the reverse order
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> offload:
        self._hooks.__enter__()
        _contexts.entered.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _contexts.entered.pop()
        self._hooks.__exit__(*error)

    def _pack(self, x: Tensor) -> Tensor | _Copied:
        on_host = x.device.type == "cpu" and not self._simulate
        # Only strided tensors have a storage that can be copied.
        numbers = x.layout == torch.strided and (x.is_floating_point() or x.is_complex())
        if on_host or not numbers or x.nbytes < self._least or _is_parameter(x):
            return x
        self.saved_bytes += x.nbytes
        if self.copied_bytes + x.nbytes > self._ratio * self.saved_bytes:
            return x
        self.copied_bytes += x.nbytes
        copied = _Copied(x, len(self._order))
        self._order.append(weakref.ref(copied))
        return copied

    def _unpack(self, packed: object) -> Tensor:
        """Return a saved tensor, and start to copy back the tensors that were saved just before
        it.
        """
        if not isinstance(packed, _Copied):
            assert isinstance(packed, Tensor)
            return packed
        packed.come_back()
        waiting = self._ahead
        for number in range(packed.number - 1, -1, -1):
            if waiting == 0:
                break
            before = self._order[number]()
            if before is not None and not before.was_used:
                before.come_back()
                waiting -= 1
        return packed.wait()


class _Copied:
    """A saved tensor that is in host memory, or is being copied to or from host memory."""

    def __init__(self, x: Tensor, number: int) -> None:
        self.number, self._device, self.was_used = number, x.device, False
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if x.is_meta:  # a simulation of memory: the tensor's bytes on the device count as free
            self._host = torch.empty(0, device="meta")
            self._like = tuple(x.shape), x.stride(), x.dtype
            return
        self._host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        if x.is_cuda:
            stream = _stream("out", x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                self._host.copy_(x, non_blocking=True)
            x.record_stream(stream)
        else:
            self._host.copy_(x)

    def come_back(self) -> None:
        if self._back is not None:
            return
        if self._device.type == "meta":
            shape, stride, dtype = self._like
            self._back = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return
        if self._device.type != "cuda":
            self._back = self._host.to(self._device)
            return
        stream = _stream("back", self._device)
        stream.wait_stream(_stream("out", self._device))
        with torch.cuda.stream(stream):
            self._back = self._host.to(self._device, non_blocking=True)
            self._arrived = stream.record_event()

    def wait(self) -> Tensor:
        """Return the tensor on its device, ready for the current stream."""
        assert self._back is not None
        # Not kept, so a second backward copies the tensor again.
        back, self._back = self._back, None
        self.was_used = True
        if self._arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._arrived)
            back.record_stream(current)
        return back


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.entered: list[offload] = []


_contexts = _Contexts()


def hooks_of_context() -> tuple[Pack, Unpack] | None:
    """Return the pack and unpack hooks of the innermost `offload` context, or None."""
    if not _contexts.entered:
        return None
    innermost = _contexts.entered[-1]
    return innermost._pack, innermost._unpack


def _is_parameter(x: Tensor) -> bool:
    """Return whether `x` is a parameter, a view of one, or an autograd function's alias of one."""
    base = base_of(x)
    owner = x if base is None else base
    if isinstance(owner, nn.Parameter):
        return True
    if type(owner) is not Tensor or owner.grad_fn is None:  # a subclass can have no address
        return False
    # An autograd function can return an alias of a parameter that torch does not mark as a view.
    leaves = [getattr(node, "variable", None) for node, _ in owner.grad_fn.next_functions]
    plain = [x for x in leaves if type(x) is nn.Parameter and x.layout == torch.strided]
    return any(x.data_ptr() == owner.data_ptr() for x in plain)


@cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
