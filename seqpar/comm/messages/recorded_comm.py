"""Record exchanges of messages as steps of a recording (`seqpar.core.recording`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from operator import methodcaller

from torch import Tensor

from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Message
from seqpar.kernels.steps import step as as_step

_wait = methodcaller("wait")


def recorded(comm: Comm) -> Comm:
    """Return a Comm that records two steps for each exchange: posting its messages, and waiting for
    them.

    `comm` must be an input of the recording. A replay posts the messages through the Comm that the
    replay receives for this input.
    """
    recording = copy(comm)
    recording.exchange = partial(_exchange, comm)  # type: ignore[method-assign]
    return recording


class _RecordedPending(Pending):
    def __init__(self, pending: Pending) -> None:
        super().__init__([], [])
        self._pending = pending

    def wait(self) -> None:
        as_step(_wait, self._pending)


def _exchange(
    comm: Comm,
    sends: Iterable[Message],
    recvs: Iterable[Message],
    *,
    label: str,
    step: int = 0,
) -> Pending:
    sends, recvs = list(sends), list(recvs)
    peers = [peer for peer, _ in sends], [peer for peer, _ in recvs]
    tensors = [x for _, x in (*sends, *recvs)]
    return _RecordedPending(as_step(partial(_post, *peers, label, step), comm, *tensors))


def _post(
    to: Sequence[int], source: Sequence[int], label: str, number: int, comm: Comm, *tensors: Tensor
) -> Pending:
    sends = list(zip(to, tensors, strict=False))
    recvs = list(zip(source, tensors[len(to) :], strict=True))
    return comm.exchange(sends, recvs, label=label, step=number)
