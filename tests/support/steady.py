"""Find operations in which the host would wait for a device.

Calls run on meta tensors: their operators are recorded, and no device is needed.
"""

import itertools
from collections import Counter
from contextlib import ExitStack

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpar import Layout
from seqpar.comm.messages.comm import Comm, Pending

RANKS = 4
DOCUMENTS = [0, 160, 161, 161, 375, 576, 640]

_ops = torch.ops.aten
_READ = (_ops._local_scalar_dense, _ops.nonzero)
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


def layouts(stripe):
    """Return layouts of the documents: even ones, and one in which a rank holds no tokens."""
    return {
        "contiguous": Layout.contiguous(DOCUMENTS, RANKS),
        "zigzag": Layout.zigzag(DOCUMENTS, RANKS),
        "striped": Layout.striped(DOCUMENTS, RANKS, stripe=stripe),
        "uneven": Layout.from_spans(
            [
                [(0, 0, 160), (3, 0, 9), (3, 60, 214), (4, 3, 17)],
                [(1, 0, 1), (3, 9, 60), (4, 100, 201)],
                [],
                [(4, 0, 3), (4, 17, 100), (5, 0, 64)],
            ],
            DOCUMENTS,
        ),
    }


class HostWaits:
    """Within this context, counts by name the operations in which a host would wait for a device.

    There are three kinds: an operator with tensors on the CPU and on the meta device, such as a
    copy or an index; an operator that reads elements; and a function that copies Python numbers to
    the meta device.
    """

    def __init__(self):
        self.found = Counter()

    def __enter__(self):
        self._modes = ExitStack()
        self._modes.enter_context(_Functions(self.found))
        self._modes.enter_context(_Operators(self.found))
        return self

    def __exit__(self, *_):
        self._modes.close()


class _Operators(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors}
        if len(devices) > 1 or ("meta" in devices and function.overloadpacket in _READ):
            self._found[str(function)] += 1
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in _OF_NUMBERS and result.is_meta:
            self._found[function.__name__] += 1
        return result


class SilentComm(Comm):
    """One of many ranks. It sends nothing, and every message counts as received at once."""

    _names = itertools.count()

    def __init__(self, rank, size):
        super().__init__(f"silent{next(self._names)}", rank, size)

    def start(self, sends, recvs, exchange):
        return Pending([], [])
