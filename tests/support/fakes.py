"""Replacements for many ranks, for much memory and for threads.

They are a fake process group, a count of the bytes that are held, and an executor without threads.
"""

import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Counts the bytes of all living storages that operators have made, and the peak of this
    sum."""

    def __init__(self, *inputs):
        super().__init__()
        self.now, self.peak, self._known = 0, 0, {}
        for x in inputs:
            self._note(x.untyped_storage(), 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                self._note(x.untyped_storage(), x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage, size):
        def freed(_, key=storage._cdata):
            del self._known[key]
            self.now -= size

        self._known[storage._cdata] = weakref.ref(storage, freed)
        self.now += size


@contextmanager
def fake_group(rank, ranks):
    """Within this context, be one rank of a process group whose messages are not sent."""
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class AtOnce:
    """Replaces an executor of threads: it runs each function immediately, in the calling thread.

    A dispatch mode would not see the operators of other threads.
    """

    def submit(self, function):
        function()
        return self

    def result(self):
        pass
