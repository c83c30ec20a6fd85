"""Cut a batch's tensors to one rank's tokens, and put them together again."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.batch.documents import BatchDocuments
from seqpar.layout.layout import Layout

KEY = "seqpar"  # the key of a batch's Sharding, and the attribute of modules and tensors
_MIN_COPY_TOKENS = 16  # shorter tensors cannot be recognised as copies of the tokens

_recent: deque[Tensor] = deque(maxlen=4)  # ids of the batches that were sharded last


@dataclass(frozen=True, eq=False)
class Side:
    """The tokens of an encoder or a decoder, and which of them this rank holds."""

    documents: BatchDocuments
    layout: Layout
    index: Tensor  # (T_local,) places among the B·S tokens of all rows; −1: the layout's padding
    position_ids: Tensor | None
    last_position: int  # the greatest position on any rank
    padding: int = 0  # how many of this rank's tokens, the last ones, the layout adds
    _chunked: dict[int, Layout] = field(default_factory=dict, repr=False)

    def in_chunks(self, size: int) -> Layout:
        if size not in self._chunked:
            self._chunked[size] = self.layout.chunked(size)
        return self._chunked[size]

    @property
    def tokens(self) -> int:
        """T_local, the number of tokens on this rank."""
        return self.index.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S), the first two dimensions of the whole batch."""
        return self.documents.rows, self.documents.columns

    def take(self, x: Tensor, value: float | None = None, dim: int = 0) -> Tensor:
        """Return this rank's tokens, (…, B, S, …) -> (…, 1, T_local, …), with B along `dim`.

        Padding gets `value`, or a copy of the first token, since models divide by embeddings'
        sizes.
        """
        index = self.index.to(x.device)
        first = int(self.documents.kept[0])
        padding = index < 0
        held = x.flatten(dim, dim + 1).index_select(dim, index.masked_fill(padding, first))
        if value is not None:
            padding = padding.reshape(-1, *[1] * (held.dim() - 1 - dim))
            held = held.masked_fill(padding, value)
        return held.unsqueeze(dim)

    def put_back(self, x: Tensor, comm: Comm) -> Tensor:
        """Return all ranks' tokens in their rows, (1, T_local, …) -> (B, S, …); padding gets 0."""
        packed = self.layout.unshard(x[0], comm)[: self.documents.kept.size]
        kept = torch.from_numpy(self.documents.kept).to(x.device)
        rows, columns = self.shape
        empty = packed.new_zeros((rows * columns, *packed.shape[1:]))
        return empty.index_copy(0, kept, packed).unflatten(0, (rows, columns))


@dataclass(frozen=True)
class Origin:
    """The models for which a batch was sharded."""

    comm: Comm
    family: str  # the Python module of their class, which decides how tokens are numbered
    shifts: bool | None  # whether labels are next tokens


@dataclass(frozen=True, eq=False)
class Sharding:
    """The division of a batch among ranks."""

    main: Side  # the tokens that have logits: the decoder's, if there is an encoder too
    encoder: Side | None = None
    labels: int | None = None  # how many labels count on all ranks together; None without labels
    whole: bool = False  # whether the model gets all tokens, and cuts them after its images
    origin: Origin | None = None  # the models for which the batch was sharded

    def __copy__(self) -> Sharding:
        return self

    def __deepcopy__(self, memo: object) -> Sharding:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        way_out = "call shard in the process that calls the model, not in a DataLoader's worker"
        raise ValueError(f"a sharded batch cannot be pickled: {way_out}")

    def digest(self) -> str:
        """Return a text that is the same on ranks that hold parts of the same batch."""
        parts = [str(self.labels)]
        for side in (self.main, self.encoder):
            if side is not None:
                parts += [str(side.layout.tokens_per_rank), str(side.documents.cu_seqlens.tolist())]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()


def side_of(
    documents: BatchDocuments, layout: Layout, rank: int, position_ids: Tensor, device: torch.device
) -> Side:
    """Return a rank's part of tokens whose positions are (B, S), or planes of that."""
    kept = torch.from_numpy(documents.kept).to(device)
    index = layout.shard(kept, rank, value=-1)
    rows, columns = documents.rows, documents.columns
    dim = position_ids.dim() - 2
    whole = position_ids.expand(*position_ids.shape[:dim], rows, columns)
    last = int(whole.max())  # padding included: models that scale by it include padding
    padding = int(layout.padding(rank).sum())
    side = Side(documents, layout, index, None, last, padding)
    return replace(side, position_ids=side.take(whole, dim=dim))


def note_tokens(x: Tensor, side: Side) -> None:
    """Note on a tensor, and on its storage, that it holds one rank's tokens."""
    setattr(x, KEY, side)
    setattr(x.untyped_storage(), KEY, side)


def keep_ids(ids: Tensor) -> None:
    _recent.append(ids)


def has_noted_tokens(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    if getattr(x, KEY, None) is not None:
        return True
    return type(x) is Tensor and getattr(x.untyped_storage(), KEY, None) is not None


def has_kept_ids(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.numel() < _MIN_COPY_TOKENS:
        return False
    return any(ids.shape == x.shape and torch.equal(ids.to(x), x) for ids in tuple(_recent))


def digest_of(x: Any) -> str | None:
    """Return a hash of a tensor's bytes; None for other objects."""
    if not isinstance(x, Tensor):
        return None
    data = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
