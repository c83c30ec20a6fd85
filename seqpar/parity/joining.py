"""Read a recording, and put the tokens of its ranks into one sequence.

The whole batch of a run is (rows, tokens). The *place* of a token is its index in the flattened
batch, and −1 is the place of padding. Each rank has recorded only its local tokens, so
`place_tokens` finds their places: from the argument `layout` or `tokens` of `record`, or by
comparing token ids. A *group* is the ranks among which each sequence is divided, so that each of
these ranks holds some tokens of the sequence. A *part* is what one rank recorded of one output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints, as_path
from seqpar.parity.files import rank_files, read_rank
from seqpar.parity.sharding import ORDERS, found_order, positions_of
from seqpar.parity.summaries import COLUMNS

Floats = NDArray[np.float64]
Key = tuple[int, str, int, str]  # an output's forward, module, call, and key in the result
MISSING = np.iinfo(np.int64).min  # the value of integer inputs for a token that no rank has
Progress = Callable[[str], None]


class Part(NamedTuple):
    rank: int
    places: Ints
    values: Floats


@dataclass
class Rank:
    """What one rank recorded. `places` (rows, tokens) are the places of its local tokens."""

    content: dict[str, Any]
    tensors: dict[str, NDArray[Any]]
    places: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    @property
    def number(self) -> int:
        return int(self.content["rank"])

    @cached_property
    def outputs(self) -> dict[Key, dict[str, Any]]:
        """What the rank recorded of each output, in the order of execution."""
        named = self.content["outputs"]
        return {(x["forward"], x["name"], x["call"], x["output"]): x for x in named}

    def input(self, name: str, forward: int = 0) -> NDArray[Any] | None:
        return self.tensors.get(f"input.{forward}.{name}")

    def rows_of(self, name: str, forward: int = 0) -> Ints | None:
        """Return an integer input as (rows, tokens), or None if it has no value for each token."""
        x, batch = self.input(name, forward), self.content["batch"]
        if x is None or batch is None or x.dtype != np.int64:
            return None
        x = np.atleast_2d(x)
        fits = x.ndim == 2 and x.shape[1] == batch[1] and x.shape[0] in (1, batch[0])
        return np.broadcast_to(x, tuple(batch)) if fits else None

    @property
    def ids(self) -> Ints | None:
        """The rank's token ids, which are its first integer input with a value for each token."""
        names = self.content["inputs"][0] if self.content["inputs"] else []
        first = [x for x in ("input_ids", "tokens", "ids", "input", "x") if x in names]
        others = ("position_ids", "attention_mask", "labels")
        for name in [*first, *(x for x in names if x not in others)]:
            if (found := self.rows_of(name)) is not None:
                return found
        return None


@dataclass
class Recording:
    """All ranks of a recording, with their tokens in order.

    A group is the ranks among which each sequence is divided. A place is the index of a token in
    the whole batch.

    Attributes:
        shape: (rows, tokens) of the whole batch.
        copies: whether several groups hold the same rows, or all ranks of a group hold the same
            tokens.
        row_starts: the places of the first tokens of rows, if `pack_rows` put the rows into one.
    """

    folder: Path
    ranks: list[Rank]
    notes: list[str] = field(default_factory=list)
    shape: tuple[int, int] = (0, 0)
    copies: bool = False
    row_starts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    _parameters: dict[str, dict[str, list[tuple[int, Floats]]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def groups(self) -> list[list[Rank]]:
        found: dict[tuple[int, ...], list[Rank]] = {}
        for rank in self.ranks:
            found.setdefault(tuple(rank.content["group"]), []).append(rank)
        return list(found.values())

    @property
    def content(self) -> dict[str, Any]:
        """What the first rank recorded of the whole model."""
        return self.ranks[0].content

    @property
    def modules(self) -> set[str]:
        """The names of all modules that were observed on the first rank."""
        return {x["name"] for x in self.content["outputs"]} | set(self.content["unseen"])

    @property
    def tokens(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def outputs(self) -> dict[Key, dict[str, Any]]:
        """The outputs of all ranks, in the order of execution."""
        return {key: x for rank in self.ranks for key, x in rank.outputs.items()}

    def parts(self, key: Key, kind: str = "summary") -> list[Part]:
        """Return what each rank recorded of one output, or an empty list if the rows of the output
        are not tokens.

        `kind` is "summary", "gradient" for summaries of the output's gradient, or "full" for all
        features.
        """
        found = []
        for rank in self.ranks:
            x = rank.outputs.get(key)
            if x is None or not x["by_token"] or kind not in x["tensors"]:
                continue
            values = rank.tensors[x["tensors"][kind]]
            places = rank.places[: values.shape[0]]
            if places.shape == values.shape[:2]:
                flat = values.reshape(-1, values.shape[-1])
                found.append(Part(rank.number, places.ravel(), flat))
        return [_without_padding(part) for part in found]

    def joined(self, parts: list[Part]) -> Floats:
        """Return (rows · tokens, columns): the values of each token of the whole batch. `parts`
        contains what each rank recorded of one output.

        The values are NaN for a token that no rank has. If several ranks have a token, the values
        are those of the first of these ranks.
        """
        width = parts[0].values.shape[1] if parts else COLUMNS
        whole = np.full((self.tokens, width), np.nan)
        for part in reversed(parts):  # the first rank's copy of a token remains
            whole[part.places] = part.values
        return whole

    def joined_input(self, name: str) -> Ints | None:
        """Return an integer input of the first forward as (rows, tokens), or None without it."""
        whole, seen = np.full(self.tokens, MISSING), False
        for rank in reversed(self.ranks):
            x = rank.rows_of(name, 0)
            if x is not None:
                seen, places = True, rank.places.ravel()
                whole[places[places >= 0]] = x.ravel()[places >= 0]
        return whole.reshape(self.shape) if seen else None

    def joined_rows(self, name: str) -> Floats | None:
        """Return (rows · tokens, columns): the summary of each token of the input `name`. Return
        None if there is no such input, or if it has no features.
        """
        parts = []
        for rank in self.ranks:
            x = rank.input(name, 0)
            if x is None or x.dtype != np.float64 or x.shape[:2] != rank.places.shape:
                return None
            parts.append(Part(rank.number, rank.places.ravel(), x.reshape(-1, x.shape[-1])))
        return self.joined([_without_padding(part) for part in parts])

    @property
    def joined_ids(self) -> Ints | None:
        whole = np.full(self.tokens, MISSING)
        for rank in reversed(self.ranks):
            if rank.ids is None:
                return None
            places = rank.places.ravel()
            whole[places[places >= 0]] = rank.ids.ravel()[places >= 0]
        return whole.reshape(self.shape)

    @property
    def rank_of(self) -> Ints:
        """(rows, tokens): the number of the first rank that holds each token, or −1."""
        whole = np.full(self.tokens, -1)
        for rank in reversed(self.ranks):
            whole[rank.places[rank.places >= 0]] = rank.number
        return whole.reshape(self.shape)

    def parameters(self, tensor: str) -> dict[str, list[tuple[int, Floats]]]:
        """Return the summaries of each parameter, one for each copy of the whole parameter.

        `tensor` is "gradients", "gradient sizes", "weights.before" or "weights.after". Each summary
        comes with the number of a rank that holds the copy. If several ranks hold blocks of one
        copy, the summary of the copy is the sum of the blocks' summaries.
        """
        if tensor in self._parameters:
            return self._parameters[tensor]
        blocks: dict[str, dict[tuple[int, ...], list[tuple[int, Floats]]]] = {}
        for rank in self.ranks:
            listed = rank.content["parameters"]
            for x, summary in zip(listed, rank.tensors[tensor], strict=True):
                if x["offsets"] is not None:
                    of_name = blocks.setdefault(x["name"], {})
                    of_name.setdefault(tuple(x["offsets"]), []).append((rank.number, summary))
        self._parameters[tensor] = {
            name: [
                (holders[0][0], np.sum([x for _, x in holders], 0))
                for holders in zip(*of_name.values(), strict=False)
            ]
            for name, of_name in blocks.items()
        }
        return self._parameters[tensor]

    @property
    def copies_of_tokens(self) -> float:
        """The number of ranks that hold a token, on average."""
        return sum(int((rank.places >= 0).sum()) for rank in self.ranks) / max(1, self.tokens)

    @property
    def padding(self) -> NDArray[np.bool_]:
        """(rows, tokens): whether the attention mask or `tokens=` leaves a token out."""
        mask = self.joined_input("attention_mask")
        masked = np.zeros(self.shape, bool) if mask is None else mask == 0
        found: NDArray[np.bool_] = masked | (self.rank_of < 0)
        return found

    def labels(self) -> list[Part]:
        """Return, for each rank, the labels and the losses of its tokens, as the two columns of a
        `Part`.

        A rank is left out unless it called `cross_entropy` exactly once with its local tokens.
        """
        found = []
        for rank in self.ranks:
            names = [x for x in rank.tensors if x.startswith("labels.")]
            if len(names) == 1 and rank.tensors[names[0]].shape[:2] == rank.places.shape:
                values = rank.tensors[names[0]].reshape(-1, 2)
                found.append(_without_padding(Part(rank.number, rank.places.ravel(), values)))
        return found


def _without_padding(part: Part) -> Part:
    held = part.places >= 0
    return Part(part.rank, part.places[held], part.values[held])


def read(folder: str | Path, progress: Progress) -> Recording:
    """Read the files of all ranks. The position of each token in the batch is found later, by
    `place_tokens`.
    """
    path = as_path("folder", folder)
    ranks = []
    files = rank_files(path)
    for i, file in enumerate(files):
        progress(f"reading {file.parent.name}: rank {i + 1} of {len(files)}")
        content, tensors = read_rank(file)
        arrays = {k: x.numpy() for k, x in tensors.items() if not k.startswith("full")}
        routers = [x["tensors"]["full"] for x in content["outputs"] if x["router"]]
        arrays |= {k: tensors[k].double().numpy() for k in routers}
        ranks.append(Rank(content, arrays))
    expected = {x for rank in ranks for x in rank.content["group"]}
    if missing := sorted(expected - {rank.number for rank in ranks}):
        raise ValueError(
            f"{path}: the files of rank {missing[0]} are missing; put the files of all ranks there"
        )
    return Recording(path, ranks)


def place_tokens(recording: Recording, reference: Recording | None) -> None:
    """Find the position in the whole batch of each token of all ranks. The positions of the tokens
    of `reference` must be known.

    A group is the ranks among which each sequence is divided. Groups with different tokens hold
    different rows of the batch (data parallelism). The token ids of `reference` show which rows a
    group holds. Groups with the same tokens hold copies of the same rows (tensor parallelism). If
    the rows of `reference` were packed into one row, each group may hold several of these rows.
    """
    ids = None if reference is None else reference.joined_ids
    sequences = [_place_in_group(recording, group, ids) for group in recording.groups]
    if len(sequences) > 1 and reference is not None and reference.row_starts.size:
        _place_in_packed_row(recording, sequences, reference)
        return
    tokens = sequences[0].tokens
    if len({x.tokens for x in sequences}) > 1:
        found = sorted({x.tokens for x in sequences})
        raise ValueError(
            f"{recording.name}: all groups of ranks must have equally long sequences, got {found} "
            "tokens"
        )
    rows: list[Ints | None] = []
    if ids is not None and any(x.has_row_of(ids) for x in sequences):
        rows = list(ids)
    used: set[int] = set()
    for group, x in zip(recording.groups, sequences, strict=True):
        numbers = _numbers_of_rows(x, rows, used)
        recording.copies |= bool(used & set(numbers))
        used |= set(numbers)
        for rank in group:
            row, position = np.divmod(rank.places, tokens)
            moved = np.asarray(numbers, np.int64)[row] * tokens + position
            rank.places = np.where(rank.places < 0, -1, moved)
    _refuse_missing_rows(recording, len(rows), used)
    recording.shape = len(rows), tokens


def packs_rows(recording: Recording, reference: Recording) -> bool:
    """Return whether each group of ranks packed rows of the reference into a single row."""
    rows = [(group[0].content["batch"] or [1])[0] for group in recording.groups]
    if reference.shape[0] == 1 or set(rows) != {1}:
        return False
    ids = reference.joined_ids
    if len(rows) == 1 or ids is None:
        return len(rows) == 1
    groups = [_place_in_group(recording, group, ids) for group in recording.groups]
    return all(x.ids is not None for x in groups) and not all(x.has_row_of(ids) for x in groups)


def _place_in_packed_row(
    recording: Recording, sequences: list[_Sequences], reference: Recording
) -> None:
    """Find the position in the whole batch of each token, if each group of ranks has packed rows of
    the reference into one row.

    The token ids say which rows a group holds.
    """
    whole = reference.joined_ids
    assert whole is not None
    starts = [*reference.row_starts.tolist(), whole.size]
    rows = [np.arange(start, end) for start, end in pairwise(starts) if start < end]
    used: set[int] = set()
    for group, x in zip(recording.groups, sequences, strict=True):
        assert x.ids is not None
        numbers: list[int] = []
        at, own = 0, x.ids[0]
        while at < own.size:
            equal = [
                n
                for n, row in enumerate(rows)
                if n not in numbers and np.array_equal(whole[0, row], own[at : at + row.size])
            ]
            if not equal:
                raise ValueError(
                    f"recordings of different batches, or with a wrong layout=: no row of "
                    f"{reference.name} begins at token {at} of the row that rank "
                    f"{group[0].number} of {recording.name} packed"
                )
            # Of rows that begin alike the longest one is meant, and one that no group holds yet.
            numbers.append(max(equal, key=lambda n: (rows[n].size, n not in used, -n)))
            at += rows[numbers[-1]].size
        recording.copies |= bool(used & set(numbers))
        used |= set(numbers)
        if not numbers:  # this group has no tokens
            continue
        places = np.concatenate([rows[n] for n in numbers])
        for rank in group:
            rank.places = np.where(rank.places < 0, -1, places[rank.places])
    _refuse_missing_rows(recording, len(rows), used)
    recording.shape = reference.shape


def _refuse_missing_rows(recording: Recording, rows: int, used: set[int]) -> None:
    if missing := sorted(set(range(rows)) - used):
        raise ValueError(
            f"{recording.name}: no rank has row {missing[0]} of the other recording; record the "
            "same batch in both runs"
        )


class _Sequences(NamedTuple):
    """The sequences of a group: their number, their length, and their token ids (rows, tokens) or
    None.
    """

    rows: int
    tokens: int
    ids: Ints | None

    def has_row_of(self, ids: Ints) -> bool:
        if self.ids is None or ids.shape[1] != self.tokens:
            return False
        return any(np.array_equal(x, y) for x in self.ids for y in ids)


def separate_whole_rows(recording: Recording, reference: Recording) -> None:
    """Make each rank a separate group, if each rank holds whole rows of the reference that no other
    rank holds.
    """
    ids = reference.joined_ids
    own = [rank.ids for rank in recording.ranks]
    known = [x for x in own if x is not None]
    stated = any(rank.content["order"] != "unknown" for rank in recording.ranks)
    if ids is None or len(own) == 1 or len(known) < len(own) or stated:
        return
    if all(np.array_equal(x, known[0]) for x in known):
        return
    if all(_Sequences(x.shape[0], x.shape[1], x).has_row_of(ids) for x in known):
        for rank in recording.ranks:
            rank.content["group"] = [rank.number]
        recording.notes.append(f"{recording.name}: each rank has whole sequences")


def _place_in_group(recording: Recording, group: list[Rank], ids: Ints | None) -> _Sequences:
    order = {x: i for i, x in enumerate(group[0].content["group"])}
    group.sort(key=lambda rank: order[rank.number])
    positions = _positions(recording, group, ids)
    rows = (group[0].content["batch"] or [1, 1])[0]
    tokens = 1 + max((int(x.max(initial=-1)) for x in positions), default=-1)
    for rank, x in zip(group, positions, strict=True):
        by_row = np.broadcast_to(x, (rows, x.size)) if x.ndim == 1 else x
        flat = np.arange(rows)[:, None] * tokens + by_row
        rank.places = np.where(by_row < 0, -1, flat)
    alone = Recording(recording.folder, group, shape=(rows, tokens))
    return _Sequences(rows, tokens, alone.joined_ids)


def _numbers_of_rows(x: _Sequences, rows: list[Ints | None], used: set[int]) -> list[int]:
    """Return the index in the list `rows` of each row of a group of ranks. A row that is not in the
    list is appended to the list.

    If a row of the group is equal to several entries of the list, an entry that no group holds yet
    is preferred.
    """
    numbers: list[int] = []
    for i in range(x.rows):
        own = None if x.ids is None else x.ids[i]
        equal = [
            n
            for n, row in enumerate(rows)
            if own is not None and row is not None and np.array_equal(row, own) and n not in numbers
        ]
        number = min(equal, key=lambda n: (n in used, n), default=len(rows))
        if number == len(rows):
            rows.append(own)
        numbers.append(number)
    return numbers


def pack_rows(recording: Recording) -> None:
    """Put the tokens of all rows into one row, and leave out padding. Some libraries pack batches
    like this.
    """
    real = ~recording.padding.ravel()
    packed = np.where(real, np.cumsum(real) - 1, -1)
    starts = np.searchsorted(
        np.flatnonzero(real), np.arange(recording.shape[0]) * recording.shape[1]
    )
    for rank in recording.ranks:
        rank.places = np.where(rank.places < 0, -1, packed[rank.places])
    # A row without real tokens has no place of its own.
    starts = np.unique(starts[starts < real.sum()])
    recording.shape, recording.row_starts = (1, int(real.sum())), starts
    recording.notes.append(f"{recording.name}: rows were put into one, without padding")


def _positions(recording: Recording, group: list[Rank], reference: Ints | None) -> list[Ints]:
    counts = [(rank.content["batch"] or [1, 1])[1] for rank in group]
    stated = group[0].content["order"]
    if all("positions" in rank.tensors for rank in group):
        found = []
        for rank, count in zip(group, counts, strict=True):
            x = rank.tensors["positions"]
            found.append(x if x.size == count else x.reshape(-1, count))
        return found
    if len(group) == 1:
        return [np.arange(counts[0])]
    if stated in ORDERS:
        return positions_of(stated, counts)
    ids = [rank.ids for rank in group]
    known = [x for x in ids if x is not None]
    if len(known) < len(ids):
        way_out = "record with group=, the ranks that share a sequence, and layout= or tokens="
        raise ValueError(
            f"{recording.name}: without token ids, the order of tokens is unknown: {way_out}"
        )
    if all(np.array_equal(x, known[0]) for x in known):
        recording.notes.append(f"{recording.name}: all ranks have the same tokens")
        recording.copies = True
        return [np.arange(count) for count in counts]
    order = found_order(known, [rank.rows_of("position_ids") for rank in group], reference)
    if order is None:
        way_out = "record with group=, the ranks that share a sequence, and layout= or tokens="
        raise ValueError(
            f"{recording.name}: the order of the ranks' tokens could not be found: {way_out}"
        )
    recording.notes.append(
        f"{recording.name}: the order of tokens was found from the inputs: {order[0]}"
    )
    return order[1]
