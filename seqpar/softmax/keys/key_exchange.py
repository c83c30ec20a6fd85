"""Send keys and values in steps, and send gradients back to the ranks that hold the keys.

A *row* is the key and the value of one token. k and v of a row are sent together, in messages (n,
B, Hkv, D + Dv), with n rows, batch B, Hkv KV heads, and the head dims D of k and Dv of v. Gradients
return in messages of the same shape, with dk in place of k and dv in place of v.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Message
from seqpar.softmax.compute.partial import PackedGradients
from seqpar.softmax.keys.key_plan import KeyStep
from seqpar.softmax.result_dtypes import ResultDtypes
from seqpar.softmax.wire.message_buffers import MessageBuffers
from seqpar.softmax.wire.message_dtypes import decode_rows, encode_rows, encoded_width
from seqpar.softmax.wire.row_messages import Rows


def travelling_keys(
    comm: Comm,
    steps: Sequence[KeyStep],
    own: tuple[Tensor, Tensor],
    label: str,
    ahead: int,
    message_dtype: torch.dtype | None = None,
    buffers: MessageBuffers | None = None,
) -> Generator[Sequence[Tensor], None, None]:
    """Yield this rank's k and v, and after that the k and v that arrive in each step.

    While the caller computes with the k and v of one step, the messages of the next `ahead` steps
    are sent. The caller may read the k and v of a step until it requests the next k and v.

    Args:
        comm: the ranks that exchange keys.
        steps: the steps of this rank's plan. Steps without rows may be left out.
        own: this rank's k (B, Tkv_local, Hkv, D) and v (B, Tkv_local, Hkv, Dv).
        label: the name of the messages in errors and traces.
        ahead: the number of steps whose messages are sent while the caller computes.
        message_dtype: the dtype of 8-bit messages (`wire/message_dtypes.py`), or None for the dtype
            of the keys.
        buffers: the memory for messages. If heads are sent in groups, the caller passes the same
            buffers for every group.
    """
    k, v = own
    dims, code = [k.shape[3], v.shape[3]], message_dtype
    row_shape = k.shape[0], k.shape[2], encoded_width(dims) if code else sum(dims)
    by_row = k.transpose(0, 1), v.transpose(0, 1)
    if buffers is None:
        buffers = key_buffers(steps, ahead, k.shape[0] * k.shape[2], dims, code)
    dtype = torch.int8 if code else k.dtype
    # Kept, because consecutive receivers often need the same rows.
    packed: tuple[Rows, Tensor] | None = None
    under_way: deque[tuple[Tensor | None, Pending]] = deque()
    no_rows: Sequence[Tensor] = ()  # k and v without rows, for steps in which nothing arrives

    def post(step: KeyStep, following: KeyStep | None) -> None:
        nonlocal packed
        # This rank has no messages of its own, but may relay messages of other ranks.
        if not step.travels:
            under_way.append((None, comm.exchange([], [], label=label, step=step.number)))
            return
        sends = []
        for peer, rows in step.to:
            if packed is None or packed[0] is not rows:
                packed = None  # freed before other rows are packed
                packed = rows, encode_rows(by_row, rows, code) if code else rows.pack(*by_row)
            sends.append((peer, packed[1]))
        if following is None or not following.sends_last_rows_of(step):
            packed = None
        block = buffers.take((step.rows, *row_shape), dtype, k.device)
        recvs = _messages(step.source, block, step.counts)
        under_way.append((block, comm.exchange(sends, recvs, label=label, step=step.number)))

    posted = 0

    # Backward alternates between exchanges of keys and exchanges of gradients, and two ranks must
    # post the exchanges between them in the same order. All ranks use the same numbers of steps.
    def post_until(number: int) -> None:
        nonlocal posted
        while posted < len(steps) and steps[posted].number <= number:
            following = steps[posted + 1] if posted + 1 < len(steps) else None
            post(steps[posted], following)
            posted += 1

    post_until(ahead)
    yield k, v
    for step in steps:
        post_until(max(step.number - 1 + ahead, step.number))
        block, pending = under_way.popleft()
        pending.wait()
        del pending
        post_until(step.number + ahead)
        if block is None:
            no_rows = no_rows or (k[:, :0], v[:, :0])
            yield no_rows
        elif code:
            parts, block = decode_rows(block, dims, code, k.dtype), None
            yield [x.transpose(0, 1) for x in parts]
            del parts
        else:
            yield block.transpose(0, 1).split_with_sizes(dims, -1)
        del block


class PassBuffers(NamedTuple):
    keys: MessageBuffers
    gradients: MessageBuffers


def key_buffers(
    steps: Sequence[KeyStep],
    ahead: int,
    rows: int,
    dims: Sequence[int],
    message_dtype: torch.dtype | None,
    groups: int = 1,
) -> MessageBuffers:
    """Return the buffers for the keys that arrive at a rank in one forward or in one backward.

    Args:
        steps: the steps of this rank's plan.
        ahead: the number of steps whose messages are sent while a rank computes.
        rows: the batch size times the number of KV heads in the largest group of heads.
        dims: the head dims D of k and Dv of v.
        message_dtype: the dtype of 8-bit messages, or None for the dtype of the keys.
        groups: the number of groups in which heads are sent.
    """
    width = rows * (encoded_width(dims) if message_dtype else sum(dims))
    sizes = [x.rows * width for x in steps if x.travels]
    return MessageBuffers(min(ahead + 1, len(sizes)), sizes * groups)


def gradient_buffer(
    steps: Sequence[KeyStep], width: int, groups: int, dtypes: ResultDtypes
) -> MessageBuffers:
    """Return the buffer in which other ranks' gradients of this rank's keys arrive.

    All steps share one buffer. A caller must therefore add the gradients of one step before it
    posts the exchange of the next step's gradients.

    Args:
        steps: the steps of this rank's plan.
        width: the number of elements per token, in the largest group of heads.
        groups: the number of groups in which heads are sent.
        dtypes: the dtypes of gradients. They may differ between steps.
    """
    unit, sizes = dtypes.of_one_call, list[int]()
    for step in steps:
        if step.travels:
            larger = dtypes.of(step.return_of_one_call).itemsize // unit.itemsize
            sizes.append(step.sent_rows * width * larger)
    return MessageBuffers(1, sizes * groups, unit=unit)


class GradientReturn:
    """The exchange that returns the gradients of the keys that were sent in one step.

    A rank sends the gradients of the keys that it received in the step, and receives the gradients
    of the keys that it sent in the step.
    """

    def __init__(
        self,
        comm: Comm,
        label: str,
        step: KeyStep,
        block: Tensor | None,
        dtype: torch.dtype,
        buffers: MessageBuffers | None = None,
    ) -> None:
        """Post the exchange of the gradients of one step.

        Args:
            comm: the ranks that exchange gradients.
            label: the name of the messages in errors and traces.
            step: the step in which the keys were sent.
            block: dk and dv of the keys that arrived in the step, packed in one tensor. None if
                this rank neither sent nor received keys in the step.
            dtype: the dtype in which gradients of this rank's keys arrive.
            buffers: the memory for arriving gradients, or None for a new tensor.
        """
        sends, recvs = list[Message](), list[Message]()
        if block is not None:
            shape = step.sent_rows, *block.shape[1:]
            if buffers is None:
                arriving = block.new_empty(shape, dtype=dtype)
            else:
                arriving = buffers.take(shape, dtype, block.device)
            sends = _messages(step.source, block, step.counts)
            recvs = _messages([peer for peer, _ in step.to], arriving, step.sent_counts)
        self._pending = comm.exchange(sends, recvs, label=label, step=step.number)
        self._arriving, self._step = recvs, step

    def add_to(self, total: PackedGradients) -> None:
        self._pending.wait()
        arrived, self._arriving = self._arriving, []
        for (_, rows), (_, part) in zip(self._step.to, arrived, strict=True):
            rows.add(part, total.packed)


def _messages(peers: list[int], block: Tensor, counts: list[int]) -> list[Message]:
    if len(peers) == 1:
        return [(peers[0], block)]
    return list(zip(peers, block.split_with_sizes(counts), strict=True)) if peers else []
