"""Exchange key rows step by step, as planned, and return their gradients to their owners.

Keys and values of a row travel together, in messages (n, B, Hkv, D + Dv): n rows, B batch, Hkv KV
heads, head dims D of k and Dv of v. k and v are views of a message. Gradients return in messages of
the same form, and dk and dv are views of these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Arriving, Comm
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
    """Yield this rank's `own` k (B, Tkv_local, Hkv, D) and v, then k and v of each of these steps.

    While the caller computes with them, the exchanges of the next `ahead` steps are under way. Rows
    travel in their own dtype, or in 8 bits (`wire/message_dtypes.py`).

    A step's k and v may be read until the next ones are requested. A pass of several groups of
    heads calls this once per group, with the same `buffers`.

    Steps without rows may be left out, but they count: each exchange is posted at the same point
    between the numbered steps on all ranks. In backward the exchanges of keys and of gradients
    alternate, and two ranks must post the exchanges between them in the same order.
    """
    k, v = own
    dims, code = [k.shape[3], v.shape[3]], message_dtype
    row_shape = k.shape[0], k.shape[2], encoded_width(dims) if code else sum(dims)
    by_row = k.transpose(0, 1), v.transpose(0, 1)
    if buffers is None:
        buffers = key_buffers(steps, ahead, k.shape[0] * k.shape[2], dims, code)
    packed: tuple[Rows, Tensor] | None = None  # kept: consecutive receivers often get equal rows
    under_way: deque[Arriving] = deque()
    no_rows: Sequence[Tensor] = ()  # yielded for a step in which no rows arrive

    def post(step: KeyStep, following: KeyStep | None) -> None:
        nonlocal packed
        if not step.travels:  # this rank may still relay messages of other ranks
            idle = comm.exchange([], [], label=label, step=step.number)
            under_way.append(Arriving([], idle))
            return
        sends = []
        for peer, rows in step.to:
            if packed is None or packed[0] is not rows:
                packed = None  # freed before other rows are packed
                packed = rows, encode_rows(by_row, rows, code) if code else rows.pack(*by_row)
            sends.append((peer, packed[1]))
        if following is None or not following.sends_last_rows_of(step):
            packed = None
        elements, dtype = step.rows * math.prod(row_shape), torch.int8 if code else k.dtype
        block = buffers.take(elements, dtype, k.device).view(step.rows, *row_shape)
        recvs = _messages(step.source, block, step.counts)
        pending = comm.exchange(sends, recvs, label=label, step=step.number)
        under_way.append(Arriving([block], pending))

    posted = 0

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
        arrived = under_way.popleft().wait()
        post_until(step.number + ahead)
        if arrived and code:
            yield [x.transpose(0, 1) for x in decode_rows(arrived.pop(), dims, code, k.dtype)]
        elif arrived:
            yield arrived[0].transpose(0, 1).split_with_sizes(dims, -1)
        else:
            no_rows = no_rows or (k[:, :0], v[:, :0])
            yield no_rows


class PassBuffers(NamedTuple):
    """The buffers into which a pass receives keys and, in backward, gradients."""

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
    """Return the buffers for the keys of a pass in which `groups` groups of heads travel.

    In the largest group, a token has `rows` rows, one per batch entry and KV head. `dims` are D and
    Dv, the elements of a row of k and of v. While a step's block is read, the blocks of the next
    `ahead` steps are under way.
    """
    width = rows * (encoded_width(dims) if message_dtype else sum(dims))
    sizes = [x.rows * width for x in steps if x.travels]
    return MessageBuffers(min(ahead + 1, len(sizes)), sizes * groups)


def gradient_buffer(
    steps: Sequence[KeyStep], width: int, groups: int, dtypes: ResultDtypes
) -> MessageBuffers:
    """Return the buffer for gradients that return, of `width` elements per token.

    Each step's gradients must be added before those of the next step are posted. The gradients of
    some steps may have a larger dtype than those of others.
    """
    unit, sizes = dtypes.of_one_call, list[int]()
    for step in steps:
        if step.travels:
            larger = dtypes.of(step.return_of_one_call).itemsize // unit.itemsize
            sizes.append(step.sent_rows * width * larger)
    return MessageBuffers(1, sizes * groups, unit=unit)


class GradientReturn:
    """A step's exchange of gradients: they return to the owners of the rows that travelled."""

    def __init__(
        self,
        comm: Comm,
        label: str,
        step: KeyStep,
        block: Tensor | None,
        dtype: torch.dtype,
        buffers: MessageBuffers | None = None,
    ) -> None:
        """Post the exchange.

        `block` is dk and dv, packed, of the rows that arrived in the step, or None if no rows
        travelled. The ranks that received this rank's rows send back the gradients of these rows,
        in this dtype. They arrive in one of the `buffers`, or in new memory if `buffers` is None.
        """
        sends, recvs = list[Message](), list[Message]()
        if block is not None:
            shape = step.sent_rows, *block.shape[1:]
            if buffers is None:
                arriving = block.new_empty(shape, dtype=dtype)
            else:
                arriving = buffers.take(math.prod(shape), dtype, block.device).view(shape)
            sends = _messages(step.source, block, step.counts)
            recvs = _messages([peer for peer, _ in step.to], arriving, step.sent_counts)
        pending = comm.exchange(sends, recvs, label=label, step=step.number)
        self._rows = [rows for _, rows in step.to]
        self._arriving = Arriving([x for _, x in recvs], pending)

    def add_to(self, total: PackedGradients) -> None:
        """Wait for the gradients of own rows, and add them to this rank's dk and dv."""
        for rows, part in zip(self._rows, self._arriving.wait(), strict=True):
            rows.add(part, total.packed)


def _messages(peers: list[int], block: Tensor, counts: list[int]) -> list[Message]:
    """Split a block into one message per peer, of `counts` rows each."""
    if len(peers) == 1:
        return [(peers[0], block)]
    return list(zip(peers, block.split_with_sizes(counts), strict=True)) if peers else []
