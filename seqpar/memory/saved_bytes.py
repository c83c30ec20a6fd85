"""Count the bytes that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from seqpar.core.torch_private import memory_of, saving_hooks


class SavedBytes:
    """The bytes of the tensors that autograd saved in a context. Shared memory is counted once."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def add(self, x: Tensor) -> None:
        if not isinstance(x, nn.Parameter) and type(x) is Tensor:
            self._sizes[memory_of(x)] = x.untyped_storage().nbytes()

    def leave_out(self, tensors: Iterable[object]) -> None:
        """Do not count the memory of these tensors."""
        for x in tensors:
            if type(x) is Tensor:
                self._sizes.pop(memory_of(x), None)

    @property
    def total(self) -> int:
        return sum(self._sizes.values())


@contextmanager
def counting_saved_bytes() -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves in this context. Hooks for saved tensors that were set
    outside of the context still run.
    """
    counted, around = SavedBytes(), saving_hooks()
    pack: Callable[[Tensor], Any] = (lambda x: x) if around is None else around[0]
    unpack: Callable[[Any], Tensor] = (lambda x: x) if around is None else around[1]

    def counting_pack(x: Tensor) -> Any:
        counted.add(x)
        return pack(x)

    with saved_tensors_hooks(counting_pack, unpack):
        yield counted
