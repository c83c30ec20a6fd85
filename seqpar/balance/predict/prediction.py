"""Predict the seconds, tokens and bytes of ranks that hold pieces of documents.

Work that pieces add to a rank is summed. Messages are those of `RingAttention`, which sends a rank
the keys that its queries see, straight from their owner, and hides them under the work on the same
document: what is left of them is added. With linear layers, each rank of a cut document sends its
state to the others, which nothing hides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from seqpar.balance.predict.batch import WAYS, DocumentBatch, Pieces
from seqpar.balance.predict.remapping import remapping
from seqpar.core.arguments import Ints
from seqpar.core.ranges import sort_keys
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats, as_amounts
from seqpar.costs.spans import causal_pairs

GRADIENT_ITEMSIZE = 4  # gradients of keys and values travel in fp32


class DocumentShares(NamedTuple):
    """What a rank has of a document, as (n,) arrays.

    Attributes:
        ranks: whose it is.
        sizes: how many ranks have some of the document.
        beside: how many of these are in the rank's node.
        tokens: how many it has.
        seen: how many keys of other ranks its queries see; and in a window layer, by its window.
        sent: how many keys it sends, each as often as it is sent; likewise.
        work: (2, n) seconds of attention, forward and backward.
    """

    ranks: Ints
    sizes: Ints
    beside: Ints
    tokens: Ints
    seen: dict[int | None, Floats]
    sent: dict[int | None, Floats]
    work: Floats


def summed(index: Ints, values: Floats | Ints, count: int) -> Floats:
    """Return (count,) sums of the values of each index."""
    return np.bincount(index, values, count).astype(np.float64)


class Prediction(NamedTuple):
    """(ranks,) arrays: seconds of a step, tokens, bytes sent, and the ratio that is offloaded."""

    seconds: Floats
    tokens: Ints
    bytes: Floats
    offload: Floats


def predict(batch: DocumentBatch, pieces: Pieces) -> Prediction:
    """Predict a step of pieces, which are spans of the batch's documents."""
    length = pieces.stops - pieces.starts
    tokens = np.bincount(pieces.ranks, length, batch.ranks).astype(np.int64)
    whole = pieces.whole(batch)
    documents, ranks = pieces.documents[whole], pieces.ranks[whole]
    local = [summed(ranks, alone[documents], batch.ranks) for alone in batch.attention]
    cut = Pieces(*(column[~whole] for column in pieces))
    return seconds_of(batch, shares_of(batch, cut), tokens, np.stack(local))


def work_of(batch: DocumentBatch, pieces: Pieces) -> Floats:
    """Return (2, n) seconds of attention on each piece, forward and backward.

    Where all layers see all keys, that is no less than the piece's share of its whole document's:
    the nodes of a grid make some spans seem to cost less than that.
    """
    costs, starts, stops = batch.costs, pieces.starts, pieces.stops
    alone = np.stack([costs.span_work(starts, stops, way) for way in WAYS])
    if any(layer.kind != "softmax" for layer in costs.model.counts):
        return alone
    length = batch.lengths[pieces.documents]
    share = causal_pairs(starts, stops) / causal_pairs(np.zeros_like(length), length)
    return np.maximum(alone, share * batch.attention[:, pieces.documents])


def shares_of(batch: DocumentBatch, pieces: Pieces) -> DocumentShares:
    """Sum pieces to what each rank has of each document; count the keys that it sees and sends."""
    key = pieces.documents * batch.ranks + pieces.ranks
    found, share = np.unique(key, return_inverse=True)
    documents, ranks = np.divmod(found, batch.ranks)

    def total(values: Floats | Ints) -> Floats:
        return summed(share, values, found.size)

    length = pieces.stops - pieces.starts
    tokens, last = total(length), np.zeros(found.size, np.int64)
    np.maximum.at(last, share, pieces.stops)
    sizes = np.bincount(documents, minlength=batch.lengths.size)[documents]
    node = found // batch.costs.cluster.devices_per_node  # ascending, and so one after another
    first = np.flatnonzero(np.diff(node, prepend=-1))
    count = np.diff(first, append=found.size)
    beside = np.repeat(count, count)
    # A piece goes to each other rank whose last query is behind it. No two ranks' last ones are.
    ends = np.sort(sort_keys(documents, last))
    behind = np.searchsorted(ends, sort_keys(pieces.documents, np.full_like(length, 2**31)))
    readers = behind - np.searchsorted(ends, sort_keys(pieces.documents, pieces.stops)) - 1
    seen: dict[int | None, Floats] = {None: last - tokens}
    sent: dict[int | None, Floats] = {None: total(length * readers)}
    for window in batch.windows:
        before = total(np.minimum(pieces.starts, window - 1))
        seen[window] = np.minimum(before, last - tokens)
        reached = np.minimum(length, window - 1) * (readers > 0)
        sent[window] = np.minimum(total(reached), sent[None])
    work = np.stack([total(x) for x in work_of(batch, pieces)])
    return DocumentShares(ranks, sizes, beside, tokens.astype(np.int64), seen, sent, work)


def seconds_of(
    batch: DocumentBatch, shares: DocumentShares, tokens: Ints, local: Floats | None = None
) -> Prediction:
    """Predict ranks that have the shares, (ranks,) tokens in all, and `local` seconds beside.

    These are (2, ranks), forward and backward.
    """
    costs, ranks, cut = batch.costs, tokens.size, shares.sizes > 1
    local = np.zeros((2, ranks)) if local is None else local
    seconds, sent, steps = np.zeros(ranks), np.zeros(ranks), np.sign(tokens)
    offload, copying, linear = np.zeros(ranks), np.zeros(ranks), tokens
    if batch.remap:
        linear = np.full(ranks, -(-int(tokens.sum()) // ranks))
        remapped, moved = remapping(costs, tokens)
        seconds, sent = seconds + 2 * remapped, sent + 2 * moved  # backward moves gradients
    if batch.offloading is not None:
        offload = batch.offloading.needed(tokens)
        copying = offload * tokens * batch.offloading.copy_seconds
    np.maximum.at(steps, shares.ranks, shares.sizes)
    # The last step's work has no message left to hide.
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
    """Return (n,) bytes that each share sends, and seconds of messages that work hides and others.

    These are (ranks,). Nothing hides states.
    """
    row, itemsize = float(costs.kv_bytes(1)), costs.itemsize
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
        if backward:  # the gradients go the other way
            returned = GRADIENT_ITEMSIZE / itemsize
            out, incoming = out + returned * incoming, incoming + returned * out
        moved += count * out
        if costs.cluster.overlaps:
            keys += count * _on_links(costs, shares, np.maximum(out, incoming))
        else:
            unhidden += count * _on_links(costs, shares, out + incoming)
    return moved, keys, unhidden


def _on_links(costs: Costs, shares: DocumentShares, sent: ArrayLike) -> Floats:
    """Return (ranks,) seconds of so many bytes between each share's rank and the others.

    A rank sends one message to each other rank, for all of its documents.
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
