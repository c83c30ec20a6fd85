"""Predict the seconds, tokens and bytes of ranks that hold spans of documents.

The prediction assumes that a rank receives keys directly from the ranks that hold them, as in
`RingAttention`. Messages of a document are sent during the work on this document, so only the time
that exceeds this work is added. Messages with states of linear layers are not hidden by any work,
so their whole time is added.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.balance.predict.batch import WAYS, DocumentBatch, Pieces
from seqpar.balance.predict.token_balance import remapping
from seqpar.core.arguments import Ints
from seqpar.core.ranges import sort_keys
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats, as_amounts, causal_pairs

Bools = NDArray[np.bool_]
KeyCounts = dict[int | None, Floats]  # by window, with None for layers without a window


class DocumentShares(NamedTuple):
    """The parts of documents that ranks hold, as (n,) arrays with one entry for each pair of a
    document and a rank that holds some of it.
    """

    ranks: Ints  # the rank of each share
    sizes: Ints  # number of ranks that have a share of the document
    beside: Ints  # how many of these ranks are in the rank's node, including the rank itself
    seen: KeyCounts  # number of keys on other ranks that the share's queries attend to
    sent: KeyCounts  # number of keys that the rank sends; a key counts once for each receiver
    work: Floats  # (2, n) seconds of attention, forward and backward


class Prediction(NamedTuple):
    """For each rank: the seconds of a step, the tokens, the bytes sent, and the ratio to
    offload.
    """

    seconds: Floats
    tokens: Ints
    bytes: Floats
    offload: Floats


def predict(batch: DocumentBatch, pieces: Pieces) -> Prediction:
    length = pieces.stops - pieces.starts
    tokens = np.bincount(pieces.ranks, length, batch.ranks).astype(np.int64)
    whole = pieces.whole(batch)
    documents, ranks = pieces.documents[whole], pieces.ranks[whole]
    local = [summed(ranks, alone[documents], batch.ranks) for alone in batch.attention]
    cut = Pieces(*(column[~whole] for column in pieces))
    return seconds_of(batch, shares_of(batch, cut), tokens, np.stack(local))


def summed(index: Ints, values: Floats | Ints, count: int) -> Floats:
    return np.bincount(index, values, count).astype(np.float64)


def work_of(batch: DocumentBatch, pieces: Pieces) -> Floats:
    """Return (2, n): the seconds of attention on each piece in forward, and in backward."""
    costs, starts, stops = batch.costs, pieces.starts, pieces.stops
    alone = np.stack([costs.span_work(starts, stops, way) for way in WAYS])
    if any(layer.kind != "softmax" for layer in costs.model.counts):
        return alone
    # For some spans, interpolation in the grid gives too few seconds. A piece with a fraction x of
    # its document's pairs is therefore assumed to take at least the fraction x of the document's
    # seconds.
    length = batch.lengths[pieces.documents]
    share = causal_pairs(starts, stops) / causal_pairs(np.zeros_like(length), length)
    return np.maximum(alone, share * batch.attention[:, pieces.documents])


def shares_of(batch: DocumentBatch, pieces: Pieces) -> DocumentShares:
    """Combine the pieces of one document on one rank into a share, and count the keys that each
    share receives and sends.
    """
    documents, ranks, share = pieces.shares(batch.ranks)
    sizes = np.bincount(documents, minlength=batch.lengths.size)[documents]
    node = documents * batch.costs.cluster.nodes + ranks // batch.costs.cluster.devices_per_node
    first = np.flatnonzero(np.diff(node, prepend=-1))  # `node` ascends, so equal nodes are adjacent
    count = np.diff(first, append=ranks.size)
    beside = np.repeat(count, count)
    # A piece is sent to each other rank whose last query comes after it. No two ranks have the same
    # last query.
    ends = share_ends(share, pieces, ranks.size)
    keys = np.sort(sort_keys(documents, ends))
    behind = np.searchsorted(keys, sort_keys(pieces.documents, np.full_like(share, 2**31)))
    readers = behind - np.searchsorted(keys, sort_keys(pieces.documents, pieces.stops)) - 1
    counted = keys_and_work(batch, pieces, share, ends, readers, readers > 0)
    return DocumentShares(ranks, sizes, beside, *counted)


def keys_and_work(
    batch: DocumentBatch,
    pieces: Pieces,
    share: Ints,
    ends: Ints,
    readers: Ints,
    reached: NDArray[np.bool_],
) -> tuple[KeyCounts, KeyCounts, Floats]:
    """Return three fields of `DocumentShares`: the keys that each share receives, the keys that it
    sends, and its work.

    A share is all pieces of one document that a rank holds, and a piece is one of these spans.
    Piece i belongs to share `share[i]`. The queries of share j end before position `ends[j]`. The
    keys of piece i are sent to `readers[i]` ranks. `reached[i]` says whether a query of a different
    rank has keys of piece i in its window.
    """

    def total(values: Floats | Ints) -> Floats:
        return summed(share, values, ends.size)

    length = pieces.stops - pieces.starts
    seen: KeyCounts = {None: ends - total(length)}
    sent: KeyCounts = {None: total(length * readers)}
    for window in batch.windows:
        seen[window] = np.minimum(total(np.minimum(pieces.starts, window - 1)), seen[None])
        sent[window] = np.minimum(total(np.minimum(length, window - 1) * reached), sent[None])
    return seen, sent, np.stack([total(x) for x in work_of(batch, pieces)])


def share_ends(share: Ints, pieces: Pieces, count: int) -> Ints:
    found = np.zeros(count, np.int64)
    np.maximum.at(found, share, pieces.stops)
    return found


def seconds_of(
    batch: DocumentBatch, shares: DocumentShares, tokens: Ints, local: Floats | None = None
) -> Prediction:
    """Predict the seconds, tokens and bytes of each rank. A share is the part of a document that a
    rank holds.

    `tokens` (ranks,) is the number of all tokens on each rank. `local` (2, ranks) is the seconds of
    attention, forward and backward, of documents that are not in `shares`.
    """
    costs, ranks, cut = batch.costs, tokens.size, shares.sizes > 1
    local = np.zeros((2, ranks)) if local is None else local
    seconds, sent, steps = np.zeros(ranks), np.zeros(ranks), np.sign(tokens)
    offload, copying, linear = np.zeros(ranks), np.zeros(ranks), tokens
    if batch.remap:
        linear = np.full(ranks, -(-int(tokens.sum()) // ranks))
        remapped, moved = remapping(costs, tokens)
        seconds, sent = seconds + 2 * remapped, sent + 2 * moved  # backward moves gradients back
    if batch.offloading is not None:
        offload = batch.offloading.needed(tokens)
        copying = offload * tokens * batch.offloading.copy_seconds
    np.maximum.at(steps, shares.ranks, shares.sizes)
    # In the last step of a ring, there is no message to hide.
    hides = cut * (1 - 1 / shares.sizes)
    for way in WAYS:
        work = local[int(way)] + np.bincount(shares.ranks, shares.work[int(way)], ranks)
        work += costs.tokenwise(linear, way)
        seconds += np.maximum(work, copying) + costs.call_seconds(way) * steps
        if cut.any():
            moved, keys, states = _messages(costs, shares, way)
            sent += np.bincount(shares.ranks, moved, ranks)
            hidden = np.bincount(shares.ranks, shares.work[int(way)] * hides, ranks)
            seconds += np.maximum(keys - hidden, 0.0) + states
    return Prediction(seconds, tokens, sent, offload)


def _messages(
    costs: Costs, shares: DocumentShares, backward: bool
) -> tuple[Floats, Floats, Floats]:
    """Return the bytes that each share sends, and two arrays (ranks,) of seconds. A share is the
    part of a document that one rank holds.

    The first array has the seconds of messages that computation can hide. The second array has the
    seconds of all other messages.
    """
    row = float(costs.kv_bytes(1))
    moved = np.zeros(shares.ranks.size)
    keys, unhidden = np.zeros(costs.cluster.ranks), np.zeros(costs.cluster.ranks)
    for layer, count in costs.model.counts.items():
        if layer.kind == "linear":
            each = (shares.sizes - 1.0) * costs.state_bytes()
            moved += count * each
            unhidden += count * _on_links(costs, shares, each)
            continue
        out = shares.sent[layer.window] * row
        incoming = shares.seen[layer.window] * row
        if backward:  # gradients of received keys are sent back
            # Each rank has one span of a document, or two spans that are mirror images. Without a
            # window, one kernel call computes a rank's queries over the keys of another rank. With
            # a window, several calls can be necessary, and are assumed.
            is_one_call = layer.window is None
            itemsize = costs.key_gradient_itemsize if is_one_call else costs.accumulator_itemsize
            returned = itemsize / costs.itemsize
            out, incoming = out + returned * incoming, incoming + returned * out
        moved += count * out
        if costs.cluster.overlaps:
            keys += count * _on_links(costs, shares, np.maximum(out, incoming))
        else:
            unhidden += count * _on_links(costs, shares, out + incoming)
    return moved, keys, unhidden


def _on_links(costs: Costs, shares: DocumentShares, sent: ArrayLike) -> Floats:
    """Return the seconds of the messages of each share, a rank's part of a document, if the share
    sends `sent` bytes.

    A rank sends the data of all documents in one message to each other rank.
    """
    nbytes, cluster = as_amounts("sent", sent), costs.cluster
    others = np.maximum(shares.sizes - 1, 1)
    near, far = shares.beside - 1, shares.sizes - shares.beside
    crowd = np.maximum(shares.beside / max(cluster.nics, 1), 1.0)
    inside = nbytes * near / others / cluster.inside.rate
    between = nbytes * far / others * crowd / cluster.between.rate
    found = summed(shares.ranks, inside + between, cluster.ranks)
    for count, link in ((near, cluster.inside), (far, cluster.between)):
        messages = np.zeros(cluster.ranks)
        np.maximum.at(messages, shares.ranks, np.where(nbytes > 0, count, 0))
        found += messages * link.latency
    return found
